"""Everything that the history and the topics say of one transaction, brought together."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Final

from checker.content import Content, Contents
from checker.disturbances import Disturbances
from checker.history import (
    LIFE,
    AnyEvent,
    Checked,
    End,
    Ended,
    Fault,
    Looked,
    Prepare,
    Prepared,
    Removed,
    Run,
    Said,
    Taken,
    wire_id,
)
from checker.records import AnyRecord, Half, Op, Parked, Real

COMMITTED, ROLLED_BACK = "committed", "rolled_back"
OUTCOMES = (COMMITTED, ROLLED_BACK)
_OK = range(200, 300)
_OUTCOME_OF = {"commit": COMMITTED, "rollback": ROLLED_BACK}
_NOT_WRITABLE = ("topic_unavailable", "not_authorised", "message_too_large")
"""Refusals of an end that its shard's owner has heard, and cannot write."""
CLOCKS_APART_MS: Final = 70_000
"""By how much a clock may be wrong that wrote an outcome: what its age allows is judged no more closely."""
_ON_ITS_WAY_MS = 1_000
_AFTERMATH_MS = 10_000
"""For so long after a fault what was heard may be lost with the one who heard it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Told:
    """A state, or `unknown` (404), that a caller was told; `line` is the history's."""

    line: int
    state: str
    at: int
    sent_at: int

    def __str__(self) -> str:
        return f"line {self.line}: told {self.state}"


@dataclass(frozen=True, kw_only=True, slots=True)
class Heard:
    """A check's answer that halfway is known to have read."""

    line: int
    said: str
    at: int

    def __str__(self) -> str:
        return f"line {self.line}: a check was answered {self.said}"


@dataclass(kw_only=True, slots=True)
class Case:
    """One transaction; `id` is the history's name of it, which distinguishes the uses of an id."""

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
    fetches: bool = False
    """Whether its group fetches its checks."""
    checked: bool = False
    """Whether a check arrived, be it answered or not."""
    heard: list[Heard] = field(default_factory=list)
    asked_at: int | None = None
    removed: frozenset[str] = frozenset()
    """Topics that were deleted after it was prepared: what is not in them may have been."""
    forgotten_from: int | None = None
    """From then on, on the history's clock, its outcome may be forgotten; None: never."""
    commits_ignored: tuple[Heard, ...] = ()
    """Answers that said commit, were read, and have a rollback by policy behind them that no fault explains."""

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
        """What a commit must bring into the topics; None if the history does not show it."""
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
        self._run = Run(seed=0, topics=())
        self._uses: defaultdict[str, dict[Contents, str]] = defaultdict(dict)
        """For ids that are used more than once, the name of each use by its content."""
        self._removed: dict[str, int] = {}
        self._disturbances = Disturbances()

    def of(self, events: Iterable[AnyEvent], records: Iterable[AnyRecord]) -> Evidence:
        for line, event in enumerate(events, 1):
            self._take(line, event)
        strays = list(self._place(records))
        self._link()
        for case in list(self._cases.values()):
            self._finish(case)
        return Evidence(cases=self._cases, strays=strays)

    def _case(self, transaction_id: str) -> Case:
        case = self._cases.get(transaction_id)
        if case is None:
            case = self._cases[transaction_id] = Case(id=transaction_id)
        return case

    def _take(self, line: int, event: AnyEvent) -> None:
        match event:
            case Run():
                self._run = event
            case Prepare():
                self._prepares[event.ref] = event
                if event.id is not None:
                    self._ask(self._case(event.id), event)
            case Prepared():
                self._prepared(line, event)
            case Removed():
                self._removed[event.topic] = event.at
            case Fault():
                self._disturbances.add(event)
            case End() | Ended() | Checked() | Taken() | Looked():
                self._said(line, event, self._case(event.id))
            case _:
                pass

    def _said(self, line: int, event: End | Ended | Checked | Taken | Looked, case: Case) -> None:
        """Take what somebody said of a transaction, or was told."""
        match event:
            case End():
                _give_verdict(case, event.outcome, line)
            case Checked():
                case.checked = True
                _give_verdict(case, event.said, line)
            case Taken():
                case.heard.append(Heard(line=line, said=event.said, at=event.at))
            case Ended() | Looked():
                self._tell(line, event, case)
                if isinstance(event, Ended) and event.by == "check" and event.error_code in _NOT_WRITABLE:
                    case.heard.append(Heard(line=line, said=event.outcome, at=event.at))

    def _ask(self, case: Case, prepare: Prepare) -> None:
        case.asked.append(prepare.contents)
        case.policy_rolls_back |= prepare.group in self._run.policy_rolls_back
        case.fetches |= prepare.group in self._run.fetching
        case.asked_at = prepare.at if case.asked_at is None else min(case.asked_at, prepare.at)
        if LIFE in case.id:
            self._uses[wire_id(case.id)][prepare.contents] = case.id

    def _prepared(self, line: int, event: Prepared) -> None:
        prepare = self._prepares[event.ref]
        if event.id is not None:
            self._named.add(event.ref)
        transaction_id = event.id or prepare.id
        if transaction_id is None:
            return
        case = self._case(transaction_id)
        if prepare.id is None:  # also if the answer names the id under which it may have been stored
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
        of_uses: list[AnyRecord] = []
        for record in records:
            if isinstance(record, Real) and not record.id:
                yield record
            elif record.id in self._uses:
                of_uses.append(record)
            else:
                self._give(record, record.id)
        self._place_uses(of_uses)

    def _give(self, record: AnyRecord, name: str) -> None:
        match record:
            case Real():
                self._case(name).messages.append(record)
            case Half():
                self._case(name).halves.append(record)
            case Op():
                self._case(name).ops.append(record)
            case Parked():
                self._case(name).parked.append(record)

    def _place_uses(self, records: list[AnyRecord]) -> None:
        """Give records of ids that are used more than once to the use that has their content, or is named before."""
        halves = sorted((one for one in records if isinstance(one, Half)), key=lambda record: record.offset)
        ops = sorted((one for one in records if isinstance(one, Op)), key=lambda record: record.offset)
        last: dict[tuple[str, str], str] = {}
        at: dict[tuple[int, int], str] = {}
        for record in [*halves, *ops, *(one for one in records if not isinstance(one, Half | Op))]:
            uses = self._uses[record.id]
            kind = type(record).__name__
            if isinstance(record, Op):
                # What is parked has no half any more: its op belongs to the use that the op before it belongs to.
                name = at.get((record.shard, record.half_offset)) or last.get((kind, record.id), record.id)
            elif isinstance(record, Real):
                name = next((of for contents, of in uses.items() if record.content in contents), record.id)
            elif record.contents is None:
                name = last.get((kind, record.id), record.id)
            else:
                name = uses.get(record.contents, record.id)
            last[kind, record.id] = name
            if isinstance(record, Half):
                at[record.shard, record.offset] = name
            self._give(record, name)

    def _finish(self, case: Case) -> None:
        """Order its records, and note what explains that something is not there."""
        for records in (case.halves, case.ops, case.parked):
            records.sort(key=lambda record: record.offset)
        if case.asked_at is not None:
            case.removed = frozenset(topic for topic, at in self._removed.items() if at > case.asked_at)
        if LIFE in case.id:  # what was said of an id may arrive at its next use
            for outcome, line in self._case(wire_id(case.id)).verdicts.items():
                case.verdicts.setdefault(outcome, line)
        run = self._run
        if run.wall is None or not case.ends:
            return
        if run.horizon_s is not None:
            case.forgotten_from = case.ends[0].at - run.wall + run.at + round(run.horizon_s * 1000) - CLOCKS_APART_MS
        for op in case.ends:
            if op.cause == "policy" and op.outcome == ROLLED_BACK:
                rolled_back_at = op.at - run.wall + run.at
                case.commits_ignored = tuple(
                    heard
                    for heard in case.heard
                    if heard.said == "commit"
                    and heard.at + _ON_ITS_WAY_MS < rolled_back_at
                    and not self._disturbances.between(heard.at - _AFTERMATH_MS, rolled_back_at)
                )

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


def _give_verdict(case: Case, said: Said, line: int) -> None:
    if (outcome := _OUTCOME_OF.get(said)) is not None:
        case.verdicts.setdefault(outcome, line)


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
