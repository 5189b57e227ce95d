"""The history of one transaction: from op, from this instance's journal, and from the real topics."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import msgspec

from halfway.coordinator.fairness import Places
from halfway.coordinator.queries.action_log import DONE
from halfway.coordinator.records import HistoryEvent, HistoryView, MessagePlace
from halfway.coordinator.requests import Moment
from halfway.protocol.entries import Ended, ParkedEntry, Pending
from halfway.protocol.errors import HalfwayError, OutcomeExpiredError, OverloadedError, UnknownTransactionError
from halfway.protocol.principal import Permission, Principal, PrincipalKind
from halfway.protocol.records import Audited, OpKind
from halfway.protocol.transactions import Cause, Outcome, State, parse_server_id

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from halfway.coordinator.ports import Authority, History, LoggedOp
    from halfway.coordinator.queries.action_log import Journal
    from halfway.coordinator.queries.queries import Lookup
    from halfway.coordinator.shards.shard_table import ShardTable
    from halfway.protocol.entries import Entry
    from halfway.protocol.records import AuditEvent, Op


MAX_EVENTS: Final = 500
_MAX_WAITING_OF_ONE_GROUP: Final = 16
_EVENTS: Final = {
    OpKind.COMMITTED: "committed",
    OpKind.ROLLED_BACK: "rolled_back",
    OpKind.VERDICT: "verdict_recorded",
    OpKind.PARKED: "parked",
    OpKind.RESUMED: "resumed",
}
_VERDICTS: Final = {
    OpKind.COMMITTED: Outcome.COMMIT.value,
    OpKind.ROLLED_BACK: Outcome.ROLLBACK.value,
    OpKind.VERDICT: Outcome.COMMIT.value,
}
"""The verdict of a check that led to an op of this kind. Such a check has no op of its own."""
_FIELDS_OF_ANSWER: Final = frozenset({"outcome", "nonce", "remark"})
_NEAR_MS: Final = 60_000
_LATE_NOTE_MS: Final = 5_000
"""How long after an end an instance may record its caller."""
_EVENTS_OF_ACTION: Final = {
    Audited.RESUME.value: ("resumed",),
    Audited.END_BY_HAND.value: ("committed", "rolled_back"),
}
"""The events that an action of the audit trail may have caused."""


class Histories:
    """Assembles the histories of transactions. It changes nothing."""

    def __init__(
        self, authority: Authority, shards: ShardTable, lookup: Lookup, history: History, journal: Journal
    ) -> None:
        self._authority = authority
        self._shards = shards
        self._lookup = lookup
        self._history = history
        self._journal = journal
        self._group_places = Places(1)

    async def get(self, transaction_id: str, *, deadline: float, principal: Principal) -> HistoryView:
        """Return the history of a transaction. If its outcome is forgotten, op may still have it.

        Histories for callers with groups' keys are read one at a time, the groups in turn: only few are read at once,
        and operators need a place.

        Raises:
            UnknownTransactionError, OutcomeExpiredError: op does not have it either.
            OverloadedError: too many histories are being read.
            KafkaUnavailableError: op could not be read in time.

        """
        if principal.group is None:
            return await self._get(transaction_id, deadline, principal)
        waiting = self._group_places.waiting_of(principal.group)
        if waiting >= _MAX_WAITING_OF_ONE_GROUP:
            raise OverloadedError(f"{waiting} histories wait to be read for this group: try again later")
        try:
            await self._group_places.enter(principal.group, until=deadline)
        except TimeoutError:
            raise OverloadedError("other histories are being read for groups: try again later") from None
        try:
            return await self._get(transaction_id, deadline, principal)
        finally:
            self._group_places.leave()

    async def _get(self, transaction_id: str, deadline: float, principal: Principal) -> HistoryView:
        entry: Entry | None = None
        unknown: HalfwayError | None = None
        try:
            _, entry = await self._lookup.locate(transaction_id, Permission.GET, principal=principal, deadline=deadline)
        except (UnknownTransactionError, OutcomeExpiredError) as error:
            unknown = error
        number = self._shards.number_of(transaction_id)
        read = await self._history.ops(number, transaction_id, starts=_starts(entry, transaction_id), deadline=deadline)
        ops = _last_life(read.ops, entry)
        if entry is None and (not ops or principal.group not in (None, ops[-1].op.group)):
            raise unknown or UnknownTransactionError(transaction_id)
        group = ops[-1].op.group if entry is None else entry.group
        shown = self._assemble(transaction_id, entry, ops, complete=read.complete)
        shown = await self._with_actors(shown, deadline)
        may_read = self._authority.may(principal, Permission.READ_PAYLOADS, group)
        if principal.group is not None or not may_read:
            events = tuple(
                event
                if event.excerpt is None or (may_read and _answers_a_check(event.excerpt))
                else msgspec.structs.replace(event, excerpt=None)
                for event in shown.events
            )
            shown = msgspec.structs.replace(shown, events=events)
        commit = next((logged for logged in reversed(ops) if logged.op.kind is OpKind.COMMITTED), None)
        return shown if commit is None else await self._with_places(shown, commit, deadline)

    async def _with_actors(self, shown: HistoryView, deadline: float) -> HistoryView:
        """Add the callers of manual events that this instance has not seen, from the audit trail."""
        without_actor = [event for event in shown.events if event.cause == Cause.OPERATOR and event.by is None]
        if not without_actor:
            return shown
        acts = await self._history.acts(shown.id, since_ms=without_actor[0].at - _NEAR_MS, deadline=deadline)
        audited = [
            HistoryEvent(at=Moment(act.at), event=event, by=_actor_name(act))
            for act in acts
            for event in _EVENTS_OF_ACTION.get(act.action, ())
            if act.result == DONE
        ]
        events = tuple(
            msgspec.structs.replace(event, by=_actor_of(event.event, event.at, audited))
            if event in without_actor
            else event
            for event in shown.events
        )
        return msgspec.structs.replace(shown, events=events)

    async def _with_places(self, shown: HistoryView, commit: LoggedOp, deadline: float) -> HistoryView:
        """Add the partitions and offsets of the messages in their topics."""
        topics = [message.topic for message in shown.messages]
        read = await self._history.places(shown.id, topics, at_ms=commit.timestamp, deadline=deadline)
        messages = tuple(
            msgspec.structs.replace(message, partition=place[0], offset=place[1]) if place is not None else message
            for message, place in ((message, read.places.get(message.message)) for message in shown.messages)
        )
        return msgspec.structs.replace(shown, messages=messages, messages_detail=read.detail)

    def _assemble(
        self, transaction_id: str, entry: Entry | None, ops: Sequence[LoggedOp], *, complete: bool
    ) -> HistoryView:
        last = ops[-1].op if ops else None
        seen = self._journal.events_of(transaction_id)
        prepared_at = entry.prepared_at if entry is not None else last.prepared_at if last is not None else 0
        # If the transaction is forgotten, another group may use its id: events after its end belong to another one.
        until = float("inf") if entry is not None or last is None else last.at + _LATE_NOTE_MS
        seen = tuple(event for event in seen if prepared_at <= event.at <= until)
        events = [HistoryEvent(at=Moment(prepared_at), event="prepared")]
        events += [event for event in seen if event.event in ("check", "reanchored")]
        events += _events_of_ops(ops, seen)
        events += _events_of_entry(entry, {event.event for event in events})
        events.sort(key=lambda event: (event.at, event.event != "prepared"))
        messages = _messages(entry, last)
        state = entry.state if entry is not None else _state_of(last)
        detail = None if state is State.COMMITTED else "messages are in their topics after the commit"
        missing = list(self._missing(entry, last, events, complete=complete))
        if len(events) > MAX_EVENTS:
            missing.append(f"the first {len(events) - MAX_EVENTS} of {len(events)} events are left out")
        return HistoryView(
            id=transaction_id,
            group=entry.group if entry is not None else "" if last is None else last.group,
            state=state,
            prepared_at=Moment(prepared_at),
            events=tuple(events[-MAX_EVENTS:]),
            missing=tuple(missing),
            messages=messages,
            messages_detail=detail,
        )

    def _missing(
        self, entry: Entry | None, last: Op | None, events: Sequence[HistoryEvent], *, complete: bool
    ) -> Iterator[str]:
        if not complete:
            yield "op has more records of that time than are read for one answer: some of these may be missing"
        counted = max(0 if entry is None else entry.checks, 0 if last is None else last.checks)
        shown = len({event.attempt for event in events if event.event == "check"})
        if counted > shown:
            yield f"{counted - shown} of {counted} checks are only counted: compaction has removed their records"
        if any(event.event == "check" and event.host is None for event in events):
            yield "the answer to a check is known only to the instance that sent it, until it stops or forgets it"


def _answers_a_check(excerpt: str) -> bool:
    """Return whether a body has the fields of an answer to a check, and no others.

    A group chooses which URLs are called. If it could read what any of them answers, it could read internal services
    through halfway.
    """
    try:
        answer = msgspec.json.decode(excerpt)
    except (msgspec.DecodeError, RecursionError):
        return False
    return isinstance(answer, dict) and "outcome" in answer and answer.keys() <= _FIELDS_OF_ANSWER


def _starts(entry: Entry | None, transaction_id: str) -> list[int]:
    """Return the times from which op is searched for its records, in order; none to search from the end back."""
    if entry is None:
        made = parse_server_id(transaction_id)
        return [] if made is None else [made[1]]
    times = {entry.prepared_at}
    if isinstance(entry, Ended):
        times.add(entry.at)
    elif isinstance(entry, ParkedEntry):
        times.add(entry.parked_at)
    elif isinstance(entry, Pending):
        times.update(at for at in (entry.since, entry.checked_at) if at is not None)
    return sorted(times)


def _last_life(ops: Sequence[LoggedOp], entry: Entry | None) -> Sequence[LoggedOp]:
    """Return the ops without those of earlier transactions with the same id."""
    if not ops:
        return ops
    prepared_at = ops[-1].op.prepared_at if entry is None else entry.prepared_at
    return [logged for logged in ops if logged.op.at >= prepared_at]


def _events_of_ops(ops: Sequence[LoggedOp], seen: Sequence[HistoryEvent]) -> Iterator[HistoryEvent]:
    seen_checks = {event.at for event in seen if event.event == "check"}
    checks = seen_checks | {logged.op.checked_at for logged in ops if logged.op.kind is OpKind.CHECKED}
    previous_remark: str | None = None
    for logged in ops:
        op = logged.op
        # A marker without a remark of its own repeats the previous one.
        remark = op.remark if op.kind.final or op.remark != previous_remark else None
        previous_remark = op.remark
        if op.kind is OpKind.CHECKED and op.cause is not Cause.CHECK:
            yield HistoryEvent(at=Moment(op.at), event="unknown", cause=op.cause.value, remark=remark)
        elif op.kind is not OpKind.CHECKED:
            if op.cause is Cause.CHECK and op.checked_at is not None and op.checked_at not in checks:
                checks.add(op.checked_at)
                yield HistoryEvent(
                    at=Moment(op.checked_at),
                    event="check",
                    attempt=op.checks,
                    sent=True,
                    verdict=_VERDICTS.get(op.kind),
                )
            parked = op.kind is OpKind.PARKED
            yield HistoryEvent(
                at=Moment(op.at),
                event=_EVENTS[op.kind],
                cause=op.cause.value,
                by=_actor_of(_EVENTS[op.kind], op.at, seen),
                detail=op.remark if parked else None,
                remark=None if parked else remark,
            )
        elif op.checked_at not in seen_checks:
            yield HistoryEvent(at=Moment(op.at), event="check", attempt=op.checks, sent=True, remark=remark)


def _actor_name(act: AuditEvent) -> str:
    return str(Principal(kind=PrincipalKind(act.actor_kind), name=act.actor, key_id=act.key_id))


def _actor_of(event: str, at: int, candidates: Sequence[HistoryEvent]) -> str | None:
    """Return the caller of a manual event: that of the nearest candidate, None if none is near."""
    near = [
        candidate
        for candidate in candidates
        if candidate.event == event and candidate.by is not None and abs(candidate.at - at) < _NEAR_MS
    ]
    return min(near, key=lambda candidate: abs(candidate.at - at)).by if near else None


def _events_of_entry(entry: Entry | None, known: set[str]) -> Iterator[HistoryEvent]:
    """Yield the last event by the entry, if no record of op has it."""
    if isinstance(entry, ParkedEntry) and "parked" not in known:
        yield HistoryEvent(at=Moment(entry.parked_at), event="parked", detail=entry.reason)
    if isinstance(entry, Ended) and entry.state.value not in known:
        yield HistoryEvent(at=Moment(entry.at), event=entry.state.value, cause=entry.cause.value, remark=entry.remark)


def _messages(entry: Entry | None, last: Op | None) -> tuple[MessagePlace, ...]:
    if last is not None and last.messages:
        return tuple(
            MessagePlace(message=number, topic=digest.topic, size=digest.size)
            for number, digest in enumerate(last.messages, 1)
        )
    if entry is None:
        return ()
    return tuple(MessagePlace(message=number, topic=topic) for number, (topic, _) in enumerate(entry.index, 1))


def _state_of(last: Op | None) -> State:
    if last is not None and last.kind is OpKind.COMMITTED:
        return State.COMMITTED
    if last is not None and last.kind is OpKind.ROLLED_BACK:
        return State.ROLLED_BACK
    return State.PARKED if last is not None and last.kind is OpKind.PARKED else State.PREPARED
