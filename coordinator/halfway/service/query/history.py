"""The history of one transaction: from op, from what this instance saw, and from the real topics."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Final

import msgspec

from halfway.domain.audit_trail import Audited
from halfway.domain.errors import HalfwayError, OutcomeExpiredError, OverloadedError, UnknownTransactionError
from halfway.domain.ids import server_made
from halfway.domain.principal import Permission, Principal, PrincipalKind
from halfway.domain.records import OpKind
from halfway.domain.shard import Ended, ParkedEntry, Pending
from halfway.domain.transaction import Cause, Outcome, State
from halfway.service.audit_trail import DONE
from halfway.service.journal_records import HistoryEvent
from halfway.service.peer_calls import HistoryView, MessagePlace
from halfway.service.ports import OpsRead, PlacesRead

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from halfway.domain.audit_trail import AuditEvent
    from halfway.domain.records import Op
    from halfway.domain.shard import Entry
    from halfway.service.journal import Journal
    from halfway.service.ports import Authority, History, LoggedOp
    from halfway.service.query.lookup import Lookup
    from halfway.service.shards.shard_table import ShardTable

MOST_EVENTS: Final = 500
_WAITING_OF_GROUPS: Final = 16
_EVENTS: Final = {
    OpKind.COMMITTED: "committed",
    OpKind.ROLLED_BACK: "rolled_back",
    OpKind.VERDICT: "verdict_recorded",
    OpKind.PARKED: "parked",
    OpKind.RESUMED: "resumed",
}
_DECIDED: Final = {
    OpKind.COMMITTED: Outcome.COMMIT.value,
    OpKind.ROLLED_BACK: Outcome.ROLLBACK.value,
    OpKind.VERDICT: Outcome.COMMIT.value,
}
"""What a check said that led to an op; it has no op of its own."""
_NEAR_MS: Final = 60_000
_TOLD_LATE_MS: Final = 5_000
"""How long after an end an instance may note who did it."""
_AUDITED: Final = {
    Audited.RESUME.value: ("resumed",),
    Audited.END_BY_HAND.value: ("committed", "rolled_back"),
}
"""What an action of the audit trail may have come to."""


class NoHistory:
    """The port `History` of an instance that does not read the log back."""

    async def ops(self, shard: int, transaction_id: str, *, starts: Sequence[int], deadline: float) -> OpsRead:  # noqa: ARG002 - the port's
        """Find nothing."""
        return OpsRead(ops=(), complete=False)

    async def places(
        self,
        transaction_id: str,  # noqa: ARG002
        topics: Sequence[str],  # noqa: ARG002
        *,
        at_ms: int,  # noqa: ARG002
        deadline: float,  # noqa: ARG002
    ) -> PlacesRead:
        return PlacesRead(places={}, detail="the log is not read back here")

    async def acts(self, transaction_id: str, *, since_ms: int, deadline: float) -> Sequence[AuditEvent]:  # noqa: ARG002 - the port's
        """Find nothing."""
        return ()


class Histories:
    """Puts together what is known of a transaction; nothing here changes anything."""

    def __init__(
        self, authority: Authority, shards: ShardTable, lookup: Lookup, history: History, journal: Journal
    ) -> None:
        """Keep the parts."""
        self._authority = authority
        self._shards = shards
        self._lookup = lookup
        self._history = history
        self._journal = journal
        self._of_groups = asyncio.Semaphore(1)
        self._waiting_of_groups = 0

    async def get(self, transaction_id: str, *, deadline: float, principal: Principal) -> HistoryView:
        """Show what happened to a transaction, also after its outcome is forgotten, as long as op has it.

        Of groups' keys one is read at a time: few are read at once in all, and operators need a place.

        Raises:
            UnknownTransactionError, OutcomeExpiredError: op does not have it either.
            OverloadedError: too many histories are being read.
            KafkaUnavailableError: op could not be read in time.

        """
        if principal.group is None:
            return await self._get(transaction_id, deadline, principal)
        if self._waiting_of_groups >= _WAITING_OF_GROUPS:
            raise OverloadedError(f"{self._waiting_of_groups} histories are being read for groups: try again later")
        self._waiting_of_groups += 1
        try:
            await self._turn_of_groups(deadline)
            try:
                return await self._get(transaction_id, deadline, principal)
            finally:
                self._of_groups.release()
        finally:
            self._waiting_of_groups -= 1

    async def _turn_of_groups(self, deadline: float) -> None:
        try:
            async with asyncio.timeout_at(deadline):
                await self._of_groups.acquire()
        except TimeoutError:
            raise OverloadedError("other histories are being read for groups: try again later") from None

    async def _get(self, transaction_id: str, deadline: float, principal: Principal) -> HistoryView:
        entry: Entry | None = None
        unknown: HalfwayError | None = None
        try:
            _, entry = await self._lookup.locate(transaction_id, Permission.GET, principal=principal, deadline=deadline)
        except (UnknownTransactionError, OutcomeExpiredError) as error:
            unknown = error
        number = self._shards.number_of(transaction_id)
        found = await self._history.ops(
            number, transaction_id, starts=_starts(entry, transaction_id), deadline=deadline
        )
        ops = _last_life(found.ops, entry)
        if entry is None and (not ops or principal.group not in (None, ops[-1].op.group)):
            raise unknown or UnknownTransactionError(transaction_id)
        group = ops[-1].op.group if entry is None else entry.group
        shown = self._put_together(transaction_id, entry, ops, complete=found.complete)
        shown = await self._named(shown, deadline)
        if not self._authority.may(principal, Permission.READ_PAYLOADS, group):
            events = tuple(msgspec.structs.replace(event, excerpt=None) for event in shown.events)
            shown = msgspec.structs.replace(shown, events=events)
        final = next((one for one in reversed(ops) if one.op.kind is OpKind.COMMITTED), None)
        return shown if final is None else await self._placed(shown, final, deadline)

    async def _named(self, shown: HistoryView, deadline: float) -> HistoryView:
        """Add who did by hand what this instance has not seen, from the audit trail."""
        by_hand = [one for one in shown.events if one.cause == Cause.OPERATOR and one.by is None]
        if not by_hand:
            return shown
        acts = await self._history.acts(shown.id, since_ms=by_hand[0].at - _NEAR_MS, deadline=deadline)
        seen = [
            HistoryEvent(at=act.at, event=event, by=_actor(act))
            for act in acts
            for event in _AUDITED.get(act.action, ())
            if act.result == DONE
        ]
        events = tuple(
            msgspec.structs.replace(one, by=_by(one.event, one.at, seen)) if one in by_hand else one
            for one in shown.events
        )
        return msgspec.structs.replace(shown, events=events)

    async def _placed(self, shown: HistoryView, final: LoggedOp, deadline: float) -> HistoryView:
        """Add where the messages stand in their topics."""
        wanted = [one.topic for one in shown.messages]
        found = await self._history.places(shown.id, wanted, at_ms=final.timestamp, deadline=deadline)
        messages = tuple(
            msgspec.structs.replace(one, partition=place[0], offset=place[1]) if place is not None else one
            for one, place in ((one, found.places.get(one.message)) for one in shown.messages)
        )
        return msgspec.structs.replace(shown, messages=messages, messages_detail=found.detail)

    def _put_together(
        self, transaction_id: str, entry: Entry | None, ops: Sequence[LoggedOp], *, complete: bool
    ) -> HistoryView:
        last = ops[-1].op if ops else None
        seen = self._journal.of(transaction_id)
        prepared_at = entry.prepared_at if entry is not None else last.prepared_at if last is not None else 0
        # If it is forgotten, its id may be in use again, by another group: what came after its end is not its own.
        until = float("inf") if entry is not None or last is None else last.at + _TOLD_LATE_MS
        seen = tuple(event for event in seen if prepared_at <= event.at <= until)
        events = [HistoryEvent(at=prepared_at, event="prepared")]
        events += [event for event in seen if event.event in ("check", "reanchored")]
        events += _of_ops(ops, seen)
        events += _of_entry(entry, {event.event for event in events})
        events.sort(key=lambda event: (event.at, event.event != "prepared"))
        messages = _messages(entry, last)
        state = entry.state if entry is not None else _state_of(last)
        detail = None if state is State.COMMITTED else "messages stand in their topics once it is committed"
        missing = list(self._missing(entry, last, events, complete=complete))
        if len(events) > MOST_EVENTS:
            missing.append(f"the first {len(events) - MOST_EVENTS} of {len(events)} events are left out")
        return HistoryView(
            id=transaction_id,
            group=entry.group if entry is not None else "" if last is None else last.group,
            state=state,
            prepared_at=prepared_at,
            events=tuple(events[-MOST_EVENTS:]),
            missing=tuple(missing),
            messages=messages,
            messages_detail=detail,
        )

    def _missing(
        self, entry: Entry | None, last: Op | None, events: Sequence[HistoryEvent], *, complete: bool
    ) -> Iterator[str]:
        if not complete:
            yield "op has more records of that time than are read for one answer: some of this one may be missing"
        counted = max(0 if entry is None else entry.checks, 0 if last is None else last.checks)
        told = len({event.attempt for event in events if event.event == "check"})
        if counted > told:
            yield f"{counted - told} of {counted} checks stand in the count alone: compaction has taken their records"
        if any(event.event == "check" and event.host is None for event in events):
            yield "what came back of a check is known to the instance that sent it, until it ends or forgets it"


def _starts(entry: Entry | None, transaction_id: str) -> list[int]:
    """Return the times from which records of it are looked for, in order; nothing for the end of the log."""
    if entry is None:
        made = server_made(transaction_id)
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
    """Leave out what an earlier transaction with the same id left."""
    if not ops:
        return ops
    prepared_at = ops[-1].op.prepared_at if entry is None else entry.prepared_at
    return [one for one in ops if one.op.at >= prepared_at]


def _of_ops(ops: Sequence[LoggedOp], seen: Sequence[HistoryEvent]) -> Iterator[HistoryEvent]:
    told = {event.at for event in seen if event.event == "check"}
    checks = told | {one.op.checked_at for one in ops if one.op.kind is OpKind.CHECKED}
    before: str | None = None
    for one in ops:
        op = one.op
        # A marker that has no remark of its own keeps the one that stands.
        remark = op.remark if op.kind.final or op.remark != before else None
        before = op.remark
        if op.kind is OpKind.CHECKED and op.cause is not Cause.CHECK:
            yield HistoryEvent(at=op.at, event="unknown", cause=op.cause.value, remark=remark)
        elif op.kind is not OpKind.CHECKED:
            if op.cause is Cause.CHECK and op.checked_at is not None and op.checked_at not in checks:
                checks.add(op.checked_at)
                yield HistoryEvent(
                    at=op.checked_at, event="check", attempt=op.checks, sent=True, verdict=_DECIDED.get(op.kind)
                )
            parked = op.kind is OpKind.PARKED
            yield HistoryEvent(
                at=op.at,
                event=_EVENTS[op.kind],
                cause=op.cause.value,
                by=_by(_EVENTS[op.kind], op.at, seen),
                detail=op.remark if parked else None,
                remark=None if parked else remark,
            )
        elif op.checked_at not in told:
            yield HistoryEvent(at=op.at, event="check", attempt=op.checks, sent=True, remark=remark)


def _actor(act: AuditEvent) -> str:
    return str(Principal(kind=PrincipalKind(act.actor_kind), name=act.actor, key_id=act.key_id))


def _by(event: str, at: int, seen: Sequence[HistoryEvent]) -> str | None:
    """Return who did something by hand, if it was seen here."""
    near = [one for one in seen if one.event == event and one.by is not None and abs(one.at - at) < _NEAR_MS]
    return min(near, key=lambda one: abs(one.at - at)).by if near else None


def _of_entry(entry: Entry | None, told: set[str]) -> Iterator[HistoryEvent]:
    """Give what the state tells if no record of op does."""
    if isinstance(entry, ParkedEntry) and "parked" not in told:
        yield HistoryEvent(at=entry.parked_at, event="parked", detail=entry.reason)
    if isinstance(entry, Ended) and entry.state.value not in told:
        yield HistoryEvent(at=entry.at, event=entry.state.value, cause=entry.cause.value, remark=entry.remark)


def _messages(entry: Entry | None, last: Op | None) -> tuple[MessagePlace, ...]:
    if last is not None and last.messages:
        return tuple(
            MessagePlace(message=number, topic=one.topic, size=one.size) for number, one in enumerate(last.messages, 1)
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
