"""The history of one transaction: its records in op, and the places of its messages in their topics."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final

import msgspec

from halfway.coordinator.fairness import Places
from halfway.coordinator.ports import History, LoggedOp
from halfway.coordinator.records import HistoryEvent, HistoryView, MessagePlace
from halfway.coordinator.requests import Moment, TransactionView
from halfway.coordinator.shards.shard_table import ShardTable
from halfway.protocol.errors import OverloadedError
from halfway.protocol.ids import birth_of
from halfway.protocol.principal import Principal
from halfway.protocol.records import Op, OpKind
from halfway.protocol.transactions import Cause, Outcome, State

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
_STATES: Final = {
    OpKind.COMMITTED: State.COMMITTED,
    OpKind.ROLLED_BACK: State.ROLLED_BACK,
    OpKind.PARKED: State.PARKED,
}


class Histories:
    """Reads the histories of transactions. It changes nothing."""

    def __init__(self, shards: ShardTable, history: History) -> None:
        """Store the parts."""
        self._shards = shards
        self._history = history
        self._group_places = Places(1)

    async def read(
        self, transaction_id: str, known: TransactionView | None, *, deadline: float, principal: Principal
    ) -> HistoryView | None:
        """Return the history of a transaction: of one that is known, or what op still has of one that is forgotten.

        None if op has nothing either that the caller may read. Histories for callers with groups' keys are read one at
        a time, the groups in turn: only few are read at once, and operators need a place.

        Raises:
            OverloadedError: too many histories are being read.
            KafkaUnavailableError: op could not be read in time.

        """
        if principal.group is None:
            return await self._read(transaction_id, known, deadline, None)
        waiting = self._group_places.waiting_of(principal.group)
        if waiting >= _MAX_WAITING_OF_ONE_GROUP:
            raise OverloadedError(f"{waiting} histories wait to be read for this group: try again later")
        try:
            await self._group_places.enter(principal.group, until=deadline)
        except TimeoutError:
            raise OverloadedError("other histories are being read for groups: try again later") from None
        try:
            return await self._read(transaction_id, known, deadline, principal.group)
        finally:
            self._group_places.leave()

    async def _read(
        self, transaction_id: str, known: TransactionView | None, deadline: float, of_group: str | None
    ) -> HistoryView | None:
        number = self._shards.number_of(transaction_id)
        read = await self._history.ops(number, transaction_id, starts=_starts(known, transaction_id), deadline=deadline)
        ops = _last_life(read.ops, known)
        if known is None and (not ops or of_group not in (None, ops[-1].op.group)):
            return None
        shown = _assemble(transaction_id, known, ops, complete=read.complete)
        commit = next((logged for logged in reversed(ops) if logged.op.kind is OpKind.COMMITTED), None)
        if commit is None:
            return shown
        topics = [message.topic for message in shown.messages]
        found = await self._history.places(transaction_id, topics, at_ms=commit.timestamp, deadline=deadline)
        messages = tuple(
            msgspec.structs.replace(message, partition=place[0], offset=place[1]) if place is not None else message
            for message, place in ((message, found.places.get(message.message)) for message in shown.messages)
        )
        return msgspec.structs.replace(shown, messages=messages, messages_detail=found.detail)


def _assemble(
    transaction_id: str, known: TransactionView | None, ops: Sequence[LoggedOp], *, complete: bool
) -> HistoryView:
    last = ops[-1].op if ops else None
    prepared_at = known.prepared_at if known is not None else last.prepared_at if last is not None else 0
    state = known.state if known is not None else _STATES.get(ops[-1].op.kind, State.PREPARED)
    events = [HistoryEvent(at=Moment(prepared_at), event="prepared"), *_events_of_ops(ops)]
    events += _last_event(known, {event.event for event in events})
    events.sort(key=lambda event: (event.at, event.event != "prepared"))
    missing = []
    if not complete:
        missing.append("op has more records of that time than are read for one answer: some of these may be missing")
    counted = max(0 if known is None else known.checks, 0 if last is None else last.checks)
    shown = len({event.attempt for event in events if event.event == "check"})
    if counted > shown:
        missing.append(f"{counted - shown} of {counted} checks are only counted: compaction has removed their records")
    if len(events) > MAX_EVENTS:
        missing.append(f"the first {len(events) - MAX_EVENTS} of {len(events)} events are left out")
    return HistoryView(
        id=transaction_id,
        group=known.group if known is not None else ops[-1].op.group,
        state=state,
        prepared_at=Moment(prepared_at),
        complete=not missing,
        missing=tuple(missing),
        events=tuple(events[-MAX_EVENTS:]),
        messages=_messages(known, last),
        messages_detail=None if state is State.COMMITTED else "messages are in their topics after the commit",
    )


def _starts(known: TransactionView | None, transaction_id: str) -> list[int]:
    """Return the times from which op is searched for its records, in order; none to search from the end back."""
    if known is None:
        born = birth_of(transaction_id)
        return [] if born is None else [born]
    times = (known.prepared_at, known.last_check_at, known.parked_at, known.ended_at)
    return sorted({int(at) for at in times if at is not None})


def _last_life(ops: Sequence[LoggedOp], known: TransactionView | None) -> Sequence[LoggedOp]:
    """Return the ops without those of earlier transactions with the same id."""
    if not ops:
        return ops
    prepared_at = ops[-1].op.prepared_at if known is None else known.prepared_at
    return [logged for logged in ops if logged.op.at >= prepared_at]


def _events_of_ops(ops: Sequence[LoggedOp]) -> Iterator[HistoryEvent]:
    checks = {logged.op.checked_at for logged in ops if logged.op.kind is OpKind.CHECKED}
    verdicts = {one.op.checked_at: _VERDICTS.get(one.op.kind) for one in ops if one.op.cause is Cause.CHECK}
    previous_remark: str | None = None
    for logged in ops:
        op = logged.op
        # A marker without a remark of its own repeats the previous one.
        remark = op.remark if op.kind.final or op.remark != previous_remark else None
        previous_remark = op.remark
        if op.kind is OpKind.CHECKED:
            if op.cause is Cause.CHECK:
                verdict = verdicts[op.checked_at]
                yield HistoryEvent(at=Moment(op.at), event="check", attempt=op.checks, verdict=verdict, remark=remark)
            else:
                yield HistoryEvent(at=Moment(op.at), event="unknown", cause=op.cause.value, remark=remark)
            continue
        if op.cause is Cause.CHECK and op.checked_at is not None and op.checked_at not in checks:
            checks.add(op.checked_at)
            verdict = _VERDICTS.get(op.kind)
            yield HistoryEvent(at=Moment(op.checked_at), event="check", attempt=op.checks, verdict=verdict)
        is_parked = op.kind is OpKind.PARKED
        yield HistoryEvent(
            at=Moment(op.at),
            event=_EVENTS[op.kind],
            cause=op.cause.value,
            detail=op.remark if is_parked else None,
            remark=None if is_parked else remark,
        )


def _last_event(known: TransactionView | None, events: set[str]) -> Iterator[HistoryEvent]:
    """Yield the last event by the state, if no record of op has it."""
    if known is None or known.state.value in events:
        return
    if known.parked_at is not None:
        yield HistoryEvent(at=known.parked_at, event="parked", detail=known.reason)
    if known.ended_at is not None:
        cause = None if known.cause is None else known.cause.value
        yield HistoryEvent(at=known.ended_at, event=known.state.value, cause=cause, remark=known.remark)


def _messages(known: TransactionView | None, last: Op | None) -> tuple[MessagePlace, ...]:
    if last is not None and last.messages:
        return tuple(
            MessagePlace(message=number, topic=digest.topic, size=digest.size)
            for number, digest in enumerate(last.messages, 1)
        )
    topics = () if known is None else known.topics
    return tuple(MessagePlace(message=number, topic=topic) for number, topic in enumerate(topics, 1))
