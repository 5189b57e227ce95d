"""Gets, lists and looks up the transactions of the shards served here, and reads their histories from op.

What other instances append to half stays unknown until this one has read it: an id is unknown only after a read
barrier.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import math
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Sequence
from heapq import nsmallest
from itertools import chain, islice
from typing import Final

import msgspec
import structlog

from halfway.coordinator.fairness import Places, Turns
from halfway.coordinator.logging import Instant
from halfway.coordinator.ports import Authority, Clock, HalfLog, History, LoggedOp
from halfway.coordinator.records import HistoryEvent, HistoryView, ListResult, MessagePlace
from halfway.coordinator.requests import ListQuery, Moment, ServiceLimits, TransactionView, moment
from halfway.coordinator.shards.groups import Groups, check_at
from halfway.coordinator.shards.shard import Shard, not_served
from halfway.coordinator.shards.shard_table import ShardTable
from halfway.protocol.entries import Ended, Entry, ParkedEntry, Unresolved, short_key_hash
from halfway.protocol.errors import (
    HalfwayError,
    InvalidRequestError,
    NotServedError,
    OutcomeExpiredError,
    OverloadedError,
    UnknownTransactionError,
)
from halfway.protocol.ids import birth_of
from halfway.protocol.principal import Permission, Principal
from halfway.protocol.records import Half, Message, Op, OpKind
from halfway.protocol.shard import ShardState
from halfway.protocol.transactions import Cause, Outcome, State


class Filter:
    """The filters of a query, from a place in the order of lists on."""

    def __init__(self, query: ListQuery, after: tuple[int, str] | None = None) -> None:
        """Take a query; `after` is the last place (time of the prepare, id) of the previous page."""
        self._query = query
        self._tests = list(_tests(query, after))

    def apply(self, entries: Iterable[Entry]) -> list[Entry]:
        matches = list(entries)
        for test in self._tests:
            matches = [entry for entry in matches if test(entry)]
        return matches

    def candidates(self, state: ShardState) -> Iterator[Entry]:
        """Iterate over the entries of a shard whose state matches."""
        wanted = self._query.state
        # Both are taken at one moment: otherwise a transaction that is parked or resumed would be missed or come twice.
        unresolved: tuple[Iterator[Entry], ...] = (state.pending(), state.parked())
        if wanted in (None, State.PREPARED):
            yield from unresolved[0]
        if wanted in (None, State.PARKED):
            yield from unresolved[1]
        if wanted is None or wanted.ended:
            yield from (entry for entry in state.ended() if wanted in (None, entry.state))


def _tests(query: ListQuery, after: tuple[int, str] | None) -> Iterator[Callable[[Entry], bool]]:
    """Yield a test for each filter, the cheap ones first."""
    if after is not None:
        yield lambda entry: entry.prepared_at > after[0] or (entry.prepared_at, entry.id) > after
    if (group := query.group) is not None:
        yield lambda entry: entry.group == group
    if (since := query.prepared_from) is not None:
        yield lambda entry: entry.prepared_at >= since
    if (until := query.prepared_until) is not None:
        yield lambda entry: entry.prepared_at <= until
    if (start := query.id) is not None:
        yield lambda entry: entry.id.startswith(start)
    if (cause := query.cause) is not None:
        yield lambda entry: isinstance(entry, Ended) and entry.cause is cause
    if query.error is not None:
        part = query.error.casefold()
        yield lambda entry: part in (_error_of(entry) or "").casefold()
    topic, key = query.topic, short_key_hash(query.key)
    if topic is not None or key is not None:
        yield lambda entry: any(
            (topic is None or name == topic) and (key is None or hashed == key) for name, hashed in entry.index
        )


def _error_of(entry: Entry) -> str | None:
    """Return why a transaction has not ended yet, if it is known."""
    if isinstance(entry, Ended):
        return None
    return entry.reason if isinstance(entry, ParkedEntry) else entry.last_error


class Lookup:
    """Looks up ids in their shards, after a read barrier if necessary."""

    def __init__(
        self, limits: ServiceLimits, authority: Authority, shards: ShardTable, half_log: HalfLog, clock: Clock
    ) -> None:
        self._authority = authority
        self._limits = limits
        self._shards = shards
        self._half_log = half_log
        self._clock = clock

    def group_here(self, transaction_id: str) -> str | None:
        """Return the group of a transaction, None if this instance does not serve or does not know it."""
        try:
            entry = self._shards.of(transaction_id).state.find(transaction_id)
        except (NotServedError, UnknownTransactionError):
            return None
        return None if entry is None else entry.group

    async def locate(
        self, transaction_id: str, permission: Permission, *, principal: Principal, deadline: float
    ) -> tuple[Shard, Entry]:
        """Find the entry of an id in its shard, for a caller.

        For a group's principal a transaction of another group does not exist: the answer and its cost are those of an
        unused id.

        Raises:
            ForbiddenError: the caller may do this to no transaction. It does not reveal whether this one exists.
            UnknownTransactionError, OutcomeExpiredError: it is certainly not pending. Neither means "rolled back".
            ShardUnavailableError: its shard is not served here now.
        """
        self._authority.require(principal, permission)
        shard = self._shards.of(transaction_id)
        entry = _visible_entry(shard, transaction_id, principal.group)
        if entry is None:
            await self.read_barrier(shard.number, deadline=deadline)
            shard = self._shards.get(shard.number)
            entry = _visible_entry(shard, transaction_id, principal.group)
        if entry is None:
            raise self.unknown(transaction_id, shard)
        return shard, entry

    async def read_barrier(self, number: int, *, deadline: float) -> None:
        """Return when the tail has reached the end of half[s] as of this call (docs/protocol.md#ownership).

        Raises:
            KafkaUnavailableError: it did not in time.
            ShardUnavailableError: the shard is not served here now.
        """
        end = await self._half_log.half_end(number, deadline=deadline)
        await self._shards.get(number).wait_for_tail(end, deadline=deadline)

    def is_past_horizon(self, born: int | None, shard: Shard) -> bool:
        """Return whether an unknown id that was born then may have ended: its outcome would be forgotten."""
        past = self._clock.now_ms() - self._limits.outcome_horizon_s * 1000
        return born is not None and born < max(past, shard.state.complete_from)

    def unknown(self, transaction_id: str, shard: Shard) -> HalfwayError:
        """Return the error for an id that is certainly not pending. It does not mean "rolled back"."""
        if self.is_past_horizon(birth_of(transaction_id), shard):
            return OutcomeExpiredError(transaction_id, horizon_s=self._limits.outcome_horizon_s)
        return UnknownTransactionError(transaction_id)

    async def payload(self, shard: Shard, entry: Unresolved, *, deadline: float) -> Half:
        """Return the half of a prepared or parked transaction. It is read by offset if it is not in memory."""
        payloads = self._shards.payloads
        half = payloads.get(entry.id) or shard.unwritten.get(entry.id)
        if half is not None and half.fingerprint == entry.fingerprint:
            return half
        if isinstance(entry, ParkedEntry):
            record = await self._half_log.read_parked(shard.number, entry.offset, entry.id, deadline=deadline)
            half = record.half
        else:
            half = await self._half_log.read_half(shard.number, entry.offset, entry.id, deadline=deadline)
        payloads.misses += 1
        payloads.put(half, entry.size)
        return half


def _visible_entry(shard: Shard, transaction_id: str, group: str | None) -> Entry | None:
    """Return the entry of an id; None if there is none, or if it belongs to another group than `group`."""
    entry = shard.state.find(transaction_id)
    return None if entry is None or group not in (None, entry.group) else entry


def view(groups: Groups, entry: Entry, messages: tuple[Message, ...] | None = None) -> TransactionView:
    """Return the view of an entry; `messages` is its payload if it was requested."""
    shown = TransactionView(
        id=entry.id,
        state=entry.state,
        group=entry.group,
        prepared_at=Moment(entry.prepared_at),
        topics=tuple(topic for topic, _ in entry.index),
        checks=entry.checks,
        remark=entry.remark,
    )
    replace = msgspec.structs.replace
    if isinstance(entry, Ended):
        return replace(shown, ended_at=Moment(entry.at), cause=entry.cause)
    shown = replace(shown, size=entry.size, messages=messages, commit_verdict=entry.commit_verdict)
    if isinstance(entry, ParkedEntry):
        return replace(shown, parked_at=Moment(entry.parked_at), reason=entry.reason)
    due, checked_at = Moment(check_at(groups, entry)), moment(entry.checked_at)
    return replace(shown, next_check_at=due, last_check_at=checked_at, last_error=entry.last_error)


_SLICE = 1000
_SHOWN_AT_ONCE = 250


class Queries:
    """Reads transactions. It changes nothing."""

    def __init__(self, authority: Authority, shards: ShardTable, groups: Groups, lookup: Lookup, turns: Turns) -> None:
        self._turns = turns
        self._authority = authority
        self._shards = shards
        self._groups = groups
        self._lookup = lookup

    async def get(
        self,
        transaction_id: str,
        *,
        payload: bool = True,
        at_most: int | None = None,
        deadline: float,
        principal: Principal,
    ) -> TransactionView:
        """Return one transaction, with the payload if it is prepared or parked and the caller may read payloads.

        A payload of more than `at_most` bytes is left out.
        """
        shard, entry = await self._lookup.locate(transaction_id, Permission.GET, principal=principal, deadline=deadline)
        payload = payload and self._authority.may(principal, Permission.READ_PAYLOADS, entry.group)
        messages = None
        if payload and not isinstance(entry, Ended) and (at_most is None or entry.size <= at_most):
            messages = (await self._lookup.payload(shard, entry, deadline=deadline)).messages
            entry = shard.state.find(transaction_id) or entry
        shown, change = view(self._groups, entry, messages), self._shards.claims.get(entry.id)
        return shown if change is None else msgspec.structs.replace(shown, waits=change.waits.value)

    async def _slices(
        self, query: ListQuery, shards: Sequence[int], deadline: float, caller: str | None
    ) -> AsyncIterator[list[Entry]]:
        """Yield the matches in these shards slice by slice, each in the caller's turn."""
        query_filter = Filter(query, _decode_cursor(query.cursor))
        served = [self._shards.get(number) for number in shards]
        entries = chain.from_iterable(query_filter.candidates(shard.state) for shard in served)
        at_end = False
        while not at_end:
            await self._turns.next(caller)
            examined = list(islice(entries, _SLICE))
            at_end = len(examined) < _SLICE
            yield query_filter.apply(examined)
            if asyncio.get_running_loop().time() > deadline:
                raise OverloadedError(
                    "there are too many transactions to search in time: narrow the list with a filter"
                )
        for shard in served:
            if self._shards.get(shard.number) is not shard:
                raise not_served(shard.number)

    async def list(
        self, query: ListQuery, shards: Sequence[int], *, deadline: float, principal: Principal
    ) -> ListResult:
        """List the transactions of these shards, oldest prepare first; NotServedError if one is not served here.

        The work is done in slices, so that other requests continue. A transaction that changes in the meantime is
        listed once, in its latest seen state. One that exists all the time is always listed.
        """
        query = self.restrict(query, principal)
        if query.group is not None:
            await self._groups.get_latest(query.group, deadline=deadline)
        best: list[Entry] = []
        count = 0
        async for matches in self._slices(query, shards, deadline, principal.group):
            chunk = matches
            count += len(matches)
            if len(best) > query.limit:  # drop the entries after this page early: mostly nearly all of them
                last = sort_key(best[-1])
                chunk = [entry for entry in matches if entry.prepared_at <= last[0] and sort_key(entry) <= last]
            if not chunk:
                continue
            # A transaction that has ended since it was seen comes again with its outcome, which replaces the first.
            latest = {entry.id: entry for entry in (*best, *chunk)}
            best = nsmallest(query.limit + 1, latest.values(), key=sort_key)
        shown: list[TransactionView] = []
        for first in range(0, min(len(best), query.limit), _SHOWN_AT_ONCE):
            if first:
                await self._turns.next(principal.group)
            last_one = min(first + _SHOWN_AT_ONCE, query.limit)
            shown += [view(self._groups, entry) for entry in best[first:last_one]]
        return ListResult(transactions=tuple(shown), more=len(best) > query.limit, count=count)

    def restrict(self, query: ListQuery, principal: Principal) -> ListQuery:
        """Return the part of a query that the caller may list: a group's principal lists its own transactions."""
        if query.group is None and principal.group is not None:
            query = msgspec.structs.replace(query, group=principal.group)
        self._authority.require(principal, Permission.LIST, query.group)
        if query.key is not None:  # a search for a message key can be used to guess it
            self._authority.require(principal, Permission.READ_PAYLOADS, query.group)
        return query


def sort_key(transaction: Entry | TransactionView) -> tuple[int, str]:
    """Return a transaction's place in the order of all lists."""
    return transaction.prepared_at, transaction.id


def encode_cursor(last: TransactionView) -> str:
    return base64.urlsafe_b64encode(msgspec.json.encode(sort_key(last), enc_hook=int)).decode().rstrip("=")


def _decode_cursor(cursor: str | None) -> tuple[int, str] | None:
    if cursor is None:
        return None
    try:
        raw = base64.b64decode(cursor + "=" * (-len(cursor) % 4), altchars=b"-_", validate=True)
        return msgspec.json.decode(raw, type=tuple[int, str])
    except (binascii.Error, ValueError, msgspec.MsgspecError):
        raise InvalidRequestError(
            f"cursor {cursor[:80]!r} does not come from a list: leave it out to start from the beginning",
            field="cursor",
        ) from None


log = structlog.get_logger(__name__)

LATE_S: Final = 30.0
_EVERY_S: Final = 5.0
_WITHIN_S: Final = 5.0


class TailFreshness:
    """Waits until the tail of each served shard has passed the end of half[s], at an interval."""

    def __init__(
        self, shards: ShardTable, half_log: HalfLog, *, late_s: float = LATE_S, every_s: float = _EVERY_S
    ) -> None:
        """Take the served shards and the log that gives their ends. Nothing is read before `watch`."""
        self._shards = shards
        self._half_log = half_log
        self._late_s = late_s
        self._every_s = every_s
        self._read_at: dict[int, Instant] = {}
        """By served shard: what was appended before this moment is known."""
        self._warned = False

    @property
    def age_s(self) -> float:
        """For how long at most a record of a served shard may not have been seen; 0 if no shard is served."""
        return max((at.age_s for at in self._read_at.values()), default=0.0)

    @property
    def least_age_s(self) -> float:
        """How long ago any served shard was read to its end; infinite if no shard is served."""
        return min((at.age_s for at in self._read_at.values()), default=math.inf)

    @property
    def is_late(self) -> bool:
        return self.age_s > self._late_s

    async def watch(self) -> None:
        """Read at an interval. Log once if that fails for long, and once when it succeeds again."""
        while True:
            served = self._shards.served
            self._read_at = {number: self._read_at.get(number) or Instant.now() for number in served}
            errors = await asyncio.gather(*(self._pass_end(number) for number in served))
            if self.is_late and not self._warned:
                self._warned = True
                reason = next((error for error in errors if error is not None), None)
                log.warning("tail_not_current", age_s=round(self.age_s, 1), error=reason)
            elif self._warned and not self.is_late:
                self._warned = False
                log.info("tail_current_again")
            await asyncio.sleep(self._every_s)

    async def _pass_end(self, number: int) -> str | None:
        """Wait until the tail has passed the present end; return the error if it has not."""
        asked = Instant.now()
        deadline = asyncio.get_running_loop().time() + _WITHIN_S
        try:
            end = await self._half_log.half_end(number, deadline=deadline)
            await self._shards.get(number).wait_for_tail(end, deadline=deadline)
        except HalfwayError as error:
            return error.detail
        self._read_at[number] = asked
        return None


MAX_EVENTS: Final = 500
_MAX_WAITING: Final = 16
"""Histories that may wait for operators, or for one group."""
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
_STATES: Final = {OpKind.COMMITTED: State.COMMITTED, OpKind.ROLLED_BACK: State.ROLLED_BACK, OpKind.PARKED: State.PARKED}


class Histories:
    """Reads the histories of transactions. It changes nothing."""

    def __init__(self, shards: ShardTable, history: History) -> None:
        self._shards = shards
        self._history = history
        self._operator_places, self._group_places = Places(1), Places(1)

    async def read(
        self, transaction_id: str, known: TransactionView | None, *, deadline: float, principal: Principal
    ) -> HistoryView | None:
        """Return the history of a transaction: of one that is known, or what op still has of one that is forgotten.

        None if op has nothing either that the caller may read. One is read at a time for callers with groups' keys, the
        groups in turn, and one for operators: each takes a consumer and a thread.

        Raises:
            OverloadedError: too many histories are being read.
            KafkaUnavailableError: op could not be read in time.
        """
        group = principal.group
        places = self._operator_places if group is None else self._group_places
        if (waiting := places.waiting_of(group)) >= _MAX_WAITING:
            raise OverloadedError(f"{waiting} histories wait to be read already: try again later")
        try:
            async with places.place(group, until=deadline):
                return await self._read(transaction_id, known, deadline, group)
        except TimeoutError:
            raise OverloadedError("other histories are being read: try again later") from None

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
