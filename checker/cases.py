"""Collects all evidence about one transaction from the history and the topics."""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import chain
from typing import Final

from checker.content import Content, Contents
from checker.disturbances import Disturbances
from checker.history import (
    AnyEvent,
    Checked,
    End,
    Ended,
    Fault,
    LogLost,
    Looked,
    LostInMemory,
    Prepare,
    Prepared,
    Removed,
    Run,
    Said,
    Serving,
    Taken,
)
from checker.partitions import partition_of
from checker.records import AnyRecord, Half, Op, Parked, Real

COMMITTED, ROLLED_BACK = "committed", "rolled_back"
OUTCOMES = (COMMITTED, ROLLED_BACK)
_OK = range(200, 300)
_ACCEPTED: Final = 202
_UNAVAILABLE: Final = 503
_OUTCOME_OF = {"commit": COMMITTED, "rollback": ROLLED_BACK}
_NOT_WRITABLE = ("topic_unavailable", "not_authorised", "message_too_large")
"""Refusals of an end that promise that the log holds the refused commit."""
_UNKNOWN: Final = ("unknown_transaction", "outcome_expired")
_TAKEN: Final = ("end_unconfirmed", None)
"""The codes of an end that its owner has probably received, and remembers unless it dies; None: no answer, or a 202."""
CLOCKS_APART_MS: Final = 70_000
"""How wrong the clock of an outcome's writer may be; rules about the age of an outcome allow this much."""
_IN_FLIGHT_MS = 1_000
_AFTERMATH_MS = 10_000
"""For how long after a fault an answer may be lost with the instance that read it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class AnsweredState:
    """A state, or `unknown` (404, 410), that a caller got as an answer; `line` is that of the history."""

    line: int
    state: str
    at: int
    sent_at: int

    def __str__(self) -> str:
        return f"line {self.line}: answered {self.state}"


@dataclass(frozen=True, kw_only=True, slots=True)
class SaidCommit:
    """A commit that halfway has received, by the answer to a check or by an end; `line` is that of the history."""

    line: int
    at: int
    by: str
    answer: str
    """What its caller got."""
    unanswered: bool = False
    """True if no answer came: any fault may have lost it on its way."""

    def __str__(self) -> str:
        return f"line {self.line}: commit by {self.by}, {self.answer}"


@dataclass(kw_only=True, slots=True)
class Case:
    """One transaction."""

    id: str
    requested: list[Contents] = field(default_factory=list)
    """The contents of the prepares that were sent with this id."""
    acknowledged: dict[Contents, int] = field(default_factory=dict)
    """The acknowledged contents, each with the line of the first acknowledgement."""
    acknowledged_at: int | None = None
    verdicts: dict[str, int] = field(default_factory=dict)
    """The outcomes that an authorised caller has decided, each with the line of the first decision."""
    decided_at: int | None = None
    """When an authorised caller decided first."""
    answered_states: list[AnsweredState] = field(default_factory=list)
    halves: list[Half] = field(default_factory=list)
    ops: list[Op] = field(default_factory=list)
    parked: list[Parked] = field(default_factory=list)
    messages: list[Real] = field(default_factory=list)
    policy_rolls_back: bool = False
    fetches: bool = False
    """Whether its group fetches its checks."""
    checked: bool = False
    """Whether a check arrived, answered or not."""
    commits_taken: list[SaidCommit] = field(default_factory=list)
    """Commits that the owner of the shard remembers, unless it dies."""
    commits_recorded: list[SaidCommit] = field(default_factory=list)
    """Commits whose refusal promises that the log holds them."""
    asked_at: int | None = None
    removed: frozenset[str] = frozenset()
    """Topics that were deleted after the prepare: messages that are missing there may have been deleted."""
    forgotten_from: int | None = None
    """When its outcome may be forgotten, on the history's clock; None: never. Its id is not accepted again."""
    commits_ignored: tuple[SaidCommit, ...] = ()
    """Commits that were said before a rollback by policy, and that no fault explains."""

    ended_in_doubt: bool = False
    """Whether op was deleted while the transaction may have been about to end, and no caller had an outcome."""

    cut_before_an_answer: bool = False
    """Whether half was cut after its prepare was sent, and nobody was told that it is stored: it may be lost."""
    half_is_lost: bool = False
    """Whether its last half has been lost with the end of half: it is not in the log any more."""
    lost_in_memory: bool = False
    """Whether Kafka and the owner of its shard have lost it at once: what is known of it proves nothing."""

    @property
    def answered_outcomes(self) -> dict[str, AnsweredState]:
        """Each outcome that a caller got as an answer, the first time."""
        first: dict[str, AnsweredState] = {}
        for answer in self.answered_states:
            if answer.state in OUTCOMES:
                first.setdefault(answer.state, answer)
        return first

    @property
    def ends(self) -> list[Op]:
        """The op markers of outcomes."""
        return [op for op in self.ops if op.outcome is not None]

    @property
    def outcomes(self) -> set[str]:
        """Every outcome in an op marker or an answer."""
        return {op.outcome for op in self.ops if op.outcome is not None} | set(self.answered_outcomes)

    @property
    def expected(self) -> Contents | None:
        """The messages that a commit must write; None if the history does not contain them."""
        if self.acknowledged:
            return next(iter(self.acknowledged))
        marked = {op.messages for op in self.ends if op.outcome == COMMITTED and op.messages}
        for contents in self.requested:  # nobody knows which of several counts, but the marker
            if marks_of(contents) in marked:
                return contents
        stored = next((half.contents for half in self.halves if half.contents is not None), None)
        return stored or (self.requested[0] if len(set(self.requested)) == 1 else None)


@dataclass(kw_only=True)
class Evidence:
    """All cases, and the messages in real topics that belong to no case."""

    cases: dict[str, Case]
    strays: list[Real]


def gather(events: Iterable[AnyEvent], records: Iterable[AnyRecord]) -> Evidence:
    """Collect the evidence about each transaction."""
    return _Collector().collect(events, records)


class _Collector:
    def __init__(self) -> None:
        self._cases: dict[str, Case] = {}
        self._prepares: dict[str, Prepare] = {}
        self._with_known_id: set[str] = set()
        """Refs of prepares whose answer contained the id."""
        self._run = Run(seed=0, topics=())
        self._removed: dict[str, int] = {}
        self._logs_lost: list[LogLost] = []
        self._lost_in_memory: list[LostInMemory] = []
        self._disturbances = Disturbances()

    def collect(self, events: Iterable[AnyEvent], records: Iterable[AnyRecord]) -> Evidence:
        for line, event in enumerate(events, 1):
            self._record_event(line, event)
        strays = list(self._assign_all(records))
        self._match_lost_answers()
        for case in list(self._cases.values()):
            self._finish(case)
        return Evidence(cases=self._cases, strays=strays)

    def _case(self, transaction_id: str) -> Case:
        case = self._cases.get(transaction_id)
        if case is None:
            case = self._cases[transaction_id] = Case(id=transaction_id)
        return case

    def _record_event(self, line: int, event: AnyEvent) -> None:
        match event:
            case Run():
                self._run = event
            case Prepare():
                self._prepares[event.ref] = event
                if event.id is not None:
                    self._add_prepare(self._case(event.id), event)
            case Prepared():
                self._prepared(line, event)
            case Removed():
                self._removed[event.topic] = event.at
            case LogLost():
                self._logs_lost.append(event)
            case LostInMemory():
                self._lost_in_memory.append(event)
            case Fault() | Serving():
                self._disturbances.add(event)
            case End() | Ended() | Checked() | Taken() | Looked():
                self._record_call(line, event, self._case(event.id))
            case _:
                pass

    def _record_call(self, line: int, event: End | Ended | Checked | Taken | Looked, case: Case) -> None:
        """Handle a request or an answer about a transaction."""
        match event:
            case End():
                _add_verdict(case, event.outcome, line, event.at)
            case Checked():
                case.checked = True
                _add_verdict(case, event.said, line, event.at)
            case Taken():
                if event.said == "commit":
                    read = SaidCommit(line=line, at=event.at, by="the answer to a check", answer="which was read")
                    case.commits_taken.append(read)
            case Ended() | Looked():
                self._record_state(line, event, case)
                if isinstance(event, Ended) and event.outcome == "commit":
                    _add_unwritten_commit(case, event, line)

    def _add_prepare(self, case: Case, prepare: Prepare) -> None:
        case.requested.append(prepare.contents)
        case.policy_rolls_back |= prepare.group in self._run.policy_rolls_back
        case.fetches |= prepare.group in self._run.fetching
        case.asked_at = prepare.at if case.asked_at is None else min(case.asked_at, prepare.at)

    def _prepared(self, line: int, event: Prepared) -> None:
        prepare = self._prepares[event.ref]
        if event.id is not None:
            self._with_known_id.add(event.ref)
        transaction_id = event.id or prepare.id
        if transaction_id is None:
            return
        case = self._case(transaction_id)
        if prepare.id is None:  # also if the answer contains the id under which it may have been stored
            self._add_prepare(case, prepare)
        if event.status in _OK:
            case.acknowledged.setdefault(prepare.contents, line)
            if case.acknowledged_at is None:
                case.acknowledged_at = event.at
        self._record_state(line, event, case)

    def _record_state(self, line: int, event: Prepared | Ended | Looked, case: Case) -> None:
        if event.state is not None and (event.status in _OK or event.error_code == "already_ended"):
            state = event.state
        elif event.error_code in _UNKNOWN:
            state = "unknown"
        else:
            return
        case.answered_states.append(AnsweredState(line=line, state=state, at=event.at, sent_at=event.sent_at))

    def _assign_all(self, records: Iterable[AnyRecord]) -> Iterator[Real]:
        """Assign each record to its case, and yield the messages without a transaction id."""
        for record in records:
            if isinstance(record, Real) and not record.id:
                yield record
            else:
                self._assign(record)

    def _assign(self, record: AnyRecord) -> None:
        case = self._case(record.id)
        match record:
            case Real():
                case.messages.append(record)
            case Half():
                case.halves.append(record)
            case Op():
                case.ops.append(record)
            case Parked():
                case.parked.append(record)

    def _finish(self, case: Case) -> None:
        """Sort the records of a case, and record what explains missing ones."""
        for records in (case.halves, case.ops, case.parked):
            records.sort(key=lambda record: record.order)
        if case.asked_at is not None:
            case.removed = frozenset(topic for topic, at in self._removed.items() if at > case.asked_at)
        case.ended_in_doubt = any(loss.kind == "op" and _in_doubt(case, loss) for loss in self._logs_lost)
        ends_of_half = [loss.ends for loss in self._logs_lost if loss.kind == "half" and loss.ends]
        case.half_is_lost = bool(case.halves) and any(
            case.halves[-1].offset >= ends.get(case.halves[-1].shard, sys.maxsize)
            for ends in ends_of_half[case.halves[-1].life :]
        )
        shards = {record.shard for record in chain(case.halves, case.ops, case.parked)}
        if not shards and self._run.shards is not None:
            shards = {partition_of(case.id.encode(), self._run.shards)}
        case.lost_in_memory = any(
            case.asked_at is not None
            and case.asked_at < loss.at
            and not shards.isdisjoint(loss.shards)
            and not _is_before(case, loss.ends)
            for loss in self._lost_in_memory
        )
        case.cut_before_an_answer = case.acknowledged_at is None and any(
            loss.kind == "half" and case.asked_at is not None and case.asked_at < loss.since for loss in self._logs_lost
        )
        run = self._run
        if run.wall is None or not case.ends:
            return
        if run.horizon_s is not None:
            case.forgotten_from = case.ends[0].at - run.wall + run.at + round(run.horizon_s * 1000) - CLOCKS_APART_MS
        for op in case.ends:
            if op.cause == "policy" and op.outcome == ROLLED_BACK:
                rolled_back_at = op.at - run.wall + run.at
                case.commits_ignored = tuple(
                    said
                    for said in case.commits_taken
                    if said.at + _IN_FLIGHT_MS < rolled_back_at
                    and not self._disturbances.between(
                        said.at - _AFTERMATH_MS, rolled_back_at, of_shards=not said.unanswered
                    )
                    and not self._disturbances.unserved_between(shards, said.at - _AFTERMATH_MS, rolled_back_at)
                )

    def _match_lost_answers(self) -> None:
        """Find the prepares whose answer, and so the server's id, was lost, by their content."""
        nameless: defaultdict[tuple[str, str | None, str | None], list[Prepare]] = defaultdict(list)
        for prepare in self._prepares.values():
            if prepare.id is None and prepare.ref not in self._with_known_id:
                nameless[_message_key(prepare.contents[0])].append(prepare)
        for case in self._cases.values():
            if not case.requested:
                for prepare in nameless.get(_first_message(case), ()):
                    self._add_prepare(case, prepare)


def marks_of(contents: Contents) -> tuple[tuple[str, str | None, str | None], ...]:
    """Return what the marker of an outcome holds of these messages."""
    return tuple(_message_key(content) for content in contents)


def _add_verdict(case: Case, said: Said, line: int, at: int) -> None:
    if (outcome := _OUTCOME_OF.get(said)) is not None:
        case.verdicts.setdefault(outcome, line)
        case.decided_at = at if case.decided_at is None else min(case.decided_at, at)


def _in_doubt(case: Case, loss: LogLost) -> bool:
    """Return whether an end of a transaction may have been on its way when op lost records.

    Then Kafka may have committed the messages, and lost the marker: nobody can know it.
    """
    begun_at = case.asked_at if case.policy_rolls_back else case.decided_at
    if begun_at is None or begun_at > loss.at:
        return False
    return not any(answer.state in OUTCOMES and answer.at < loss.since for answer in case.answered_states)


def _is_before(case: Case, lost: Mapping[str, Mapping[int, int]]) -> bool:
    """Return whether a transaction had ended, and everything about it is before the ends that were lost."""
    if not lost or not case.ends or not case.halves or case.halves[-1].contents is not None:
        return False
    records: Mapping[str, list[Half] | list[Op]] = {"half": case.halves, "op": case.ops}
    return all(
        record.offset < ends.get(record.shard, sys.maxsize) for kind, ends in lost.items() for record in records[kind]
    )


def _add_unwritten_commit(case: Case, event: Ended, line: int) -> None:
    """Add a commit that was refused, or whose result its caller does not know."""
    if event.error_code in _NOT_WRITABLE:
        refused = SaidCommit(line=line, at=event.at, by=event.by, answer=f"answered {event.error_code}")
        case.commits_recorded.append(refused)
    elif event.error_code in _TAKEN and event.status in (0, _ACCEPTED, _UNAVAILABLE):
        answer = f"answered {event.status}" if event.status else "not answered"
        taken = SaidCommit(line=line, at=event.at, by=event.by, answer=answer, unanswered=not event.status)
        case.commits_taken.append(taken)


def _message_key(content: Content) -> tuple[str, str | None, str | None]:
    return content.topic, content.key, content.value


def _first_message(case: Case) -> tuple[str, str | None, str | None]:
    """Return the first message of a transaction, from any record that contains it."""
    for half in case.halves:
        if half.contents:
            return _message_key(half.contents[0])
    for op in case.ops:
        if op.messages:
            return op.messages[0]
    first = min(case.messages, key=lambda message: message.number, default=None)
    return ("", None, None) if first is None else _message_key(first.content)
