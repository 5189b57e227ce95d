"""Everything that the history and the topics say of one transaction, brought together."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from checker.content import Content, Contents
from checker.history import AnyEvent, Checked, End, Ended, Looked, Prepare, Prepared, Run
from checker.records import AnyRecord, Half, Op, Parked, Real

COMMITTED, ROLLED_BACK = "committed", "rolled_back"
OUTCOMES = (COMMITTED, ROLLED_BACK)
_OK = range(200, 300)
_OUTCOME_OF = {"commit": COMMITTED, "rollback": ROLLED_BACK}


@dataclass(frozen=True, kw_only=True, slots=True)
class Told:
    """A state, or `unknown` (404), that a caller was told; `line` is the history's."""

    line: int
    state: str
    at: int
    sent_at: int

    def __str__(self) -> str:
        return f"line {self.line}: told {self.state}"


@dataclass(kw_only=True, slots=True)
class Case:
    """One transaction."""

    id: str
    asked: list[Contents] = field(default_factory=list)
    """What was asked to be prepared under this id."""
    acknowledged: dict[Contents, int] = field(default_factory=dict)
    """What was answered as prepared, and in which line first."""
    acknowledged_at: int | None = None
    verdicts: dict[str, int] = field(default_factory=dict)
    """The outcomes that somebody entitled to it has given, and the line of the first time."""
    told: list[Told] = field(default_factory=list)
    halves: list[Half] = field(default_factory=list)
    ops: list[Op] = field(default_factory=list)
    parked: list[Parked] = field(default_factory=list)
    messages: list[Real] = field(default_factory=list)
    policy_rolls_back: bool = False

    @property
    def told_outcomes(self) -> dict[str, Told]:
        """Each outcome that a caller was told, the first time."""
        found: dict[str, Told] = {}
        for told in self.told:
            if told.state in OUTCOMES:
                found.setdefault(told.state, told)
        return found

    @property
    def ends(self) -> list[Op]:
        """The op markers that are outcomes."""
        return [op for op in self.ops if op.outcome is not None]

    @property
    def decided_as(self) -> set[str]:
        """Every outcome that an op marker or an answer claims."""
        return {op.outcome for op in self.ops if op.outcome is not None} | set(self.told_outcomes)

    @property
    def wanted(self) -> Contents | None:
        """What a commit must bring into the topics; None where nothing tells."""
        if self.acknowledged:
            return next(iter(self.acknowledged))
        kept = next((half.contents for half in self.halves if half.contents is not None), None)
        return kept or (self.asked[0] if len(set(self.asked)) == 1 else None)


@dataclass(kw_only=True)
class Evidence:
    """All cases, and the messages in real topics that belong to none."""

    cases: dict[str, Case]
    strays: list[Real]


def gather(events: Iterable[AnyEvent], records: Iterable[AnyRecord]) -> Evidence:
    """Bring together what is said of each transaction."""
    return _Gathering().of(events, records)


class _Gathering:
    def __init__(self) -> None:
        self._cases: dict[str, Case] = {}
        self._prepares: dict[str, Prepare] = {}
        self._named: set[str] = set()
        """Refs of prepares whose answer told the id."""
        self._rolls_back: frozenset[str] = frozenset()

    def of(self, events: Iterable[AnyEvent], records: Iterable[AnyRecord]) -> Evidence:
        for line, event in enumerate(events, 1):
            self._take(line, event)
        strays = list(self._place(records))
        self._link()
        for case in self._cases.values():
            case.halves.sort(key=lambda record: record.offset)
            case.ops.sort(key=lambda record: record.offset)
            case.parked.sort(key=lambda record: record.offset)
        return Evidence(cases=self._cases, strays=strays)

    def _case(self, transaction_id: str) -> Case:
        case = self._cases.get(transaction_id)
        if case is None:
            case = self._cases[transaction_id] = Case(id=transaction_id)
        return case

    def _take(self, line: int, event: AnyEvent) -> None:
        match event:
            case Run():
                self._rolls_back = frozenset(event.policy_rolls_back)
            case Prepare():
                self._prepares[event.ref] = event
                if event.id is not None:
                    self._ask(self._case(event.id), event)
            case Prepared():
                self._prepared(line, event)
            case End() if event.outcome in _OUTCOME_OF:
                self._case(event.id).verdicts.setdefault(_OUTCOME_OF[event.outcome], line)
            case Checked() if event.said in _OUTCOME_OF:
                self._case(event.id).verdicts.setdefault(_OUTCOME_OF[event.said], line)
            case Ended() | Looked():
                self._tell(line, event, self._case(event.id))
            case _:
                pass

    def _ask(self, case: Case, prepare: Prepare) -> None:
        case.asked.append(prepare.contents)
        case.policy_rolls_back |= prepare.group in self._rolls_back

    def _prepared(self, line: int, event: Prepared) -> None:
        prepare = self._prepares[event.ref]
        if event.id is not None:
            self._named.add(event.ref)
        transaction_id = event.id or prepare.id
        if transaction_id is None:
            return
        case = self._case(transaction_id)
        if prepare.id is None:  # also where it is told under which id it may have been stored
            self._ask(case, prepare)
        if event.status in _OK:
            case.acknowledged.setdefault(prepare.contents, line)
            if case.acknowledged_at is None:
                case.acknowledged_at = event.at
        self._tell(line, event, case)

    def _tell(self, line: int, event: Prepared | Ended | Looked, case: Case) -> None:
        if event.state is not None and (event.status in _OK or event.error_code == "already_ended"):
            state = event.state
        elif event.error_code == "unknown_transaction":
            state = "unknown"
        else:
            return
        case.told.append(Told(line=line, state=state, at=event.at, sent_at=event.sent_at))

    def _place(self, records: Iterable[AnyRecord]) -> Iterator[Real]:
        """Give each record to its case, and return the messages that name no transaction."""
        for record in records:
            match record:
                case Real() if not record.id:
                    yield record
                case Real():
                    self._case(record.id).messages.append(record)
                case Half():
                    self._case(record.id).halves.append(record)
                case Op():
                    self._case(record.id).ops.append(record)
                case Parked():
                    self._case(record.id).parked.append(record)

    def _link(self) -> None:
        """Find by their content the prepares whose answer, and with it the id that the server chose, was lost."""
        nameless: defaultdict[tuple[str, str | None, str | None], list[Prepare]] = defaultdict(list)
        for prepare in self._prepares.values():
            if prepare.id is None and prepare.ref not in self._named:
                nameless[_mark(prepare.contents[0])].append(prepare)
        for case in self._cases.values():
            if not case.asked:
                for prepare in nameless.get(_trace(case), ()):
                    self._ask(case, prepare)


def _mark(content: Content) -> tuple[str, str | None, str | None]:
    return content.topic, content.key, content.value


def _trace(case: Case) -> tuple[str, str | None, str | None]:
    """Return the first message of a transaction by whatever record has it."""
    for half in case.halves:
        if half.contents:
            return _mark(half.contents[0])
    for op in case.ops:
        if op.messages:
            return op.messages[0]
    first = min(case.messages, key=lambda message: message.number, default=None)
    return ("", None, None) if first is None else _mark(first.content)
