"""Resolves transactions: claims an id, writes through the lane, applies the write (docs/protocol.md#end-the-lane).

A `Resolution` is one change of one transaction. It has the claim of the id, and answers the caller once. If the
lane is lost, another write may follow.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from functools import partial
from typing import TYPE_CHECKING, Final
from weakref import WeakValueDictionary

import structlog

from halfway.coordinator.answers import Deadlines, answer_all
from halfway.coordinator.changes import Change, Reanchor, Restore, WriteTombstone, note_error, unconfirmed
from halfway.coordinator.logging import LogSummary
from halfway.coordinator.ports import LaneAnswers, LaneWrite, Written
from halfway.coordinator.requests import EndResult
from halfway.coordinator.shards.shard_table import Claim
from halfway.protocol.entries import Ended, Entry, Pending, Unresolved
from halfway.protocol.errors import (
    HalfwayError,
    KafkaUnavailableError,
    LaneLostError,
    MessageTooLargeError,
    NotAuthorisedError,
    NotPendingError,
    NotWrittenError,
    OvertakenError,
    RetryableError,
    ShardUnavailableError,
    TopicUnavailableError,
)
from halfway.protocol.records import Half

if TYPE_CHECKING:
    from halfway.coordinator.ports import Clock, Lane
    from halfway.coordinator.queries.activity import Activity
    from halfway.coordinator.queries.queries import Lookup
    from halfway.coordinator.shards.shard_table import Shard, ShardTable


log = structlog.get_logger(__name__)
_late_ends: Final = LogSummary(log, "info", "late_end_failed")

WRITE_LIMIT_S: Final = 30.0
"""How long a resolution that no caller waits for (of a verdict or the policy) may wait for the lane."""
_PAUSE_S: Final = 0.02
_CANNOT_BE_WRITTEN: Final = (TopicUnavailableError, MessageTooLargeError, NotAuthorisedError)


Reply = Callable[[EndResult | BaseException], None]
"""Takes the answer to a change, at most once."""


class Resolution(Claim, kw_only=True, eq=False):
    """One change of one transaction, from its claim to its answer, with as many writes as necessary."""

    id: str
    change: Change
    deadline: float
    """A time on the loop's clock. No write begins after it."""
    reply: Reply
    entry: Entry
    """The entry that the change last read."""
    written_at: int = 0
    """The time of the last write, ms since the epoch."""
    tried: tuple[int, ...] = ()
    """The times (ms since the epoch) of the writes whose lane was lost: their results are not known yet."""


class Resolver:
    """The only way in which the state of a transaction changes after its prepare.

    `_advance` claims the id and hands the write to the lane; `_take_answers` applies it and answers. If the lane
    was lost or dropped the write, or the payload must be read first, `_look_again` decides by the current state and
    submits.
    """

    def __init__(self, shards: ShardTable, lookup: Lookup, lane: Lane, clock: Clock, activity: Activity) -> None:
        """Store the parts; nothing is started."""
        self._shards = shards
        self._lookup = lookup
        self._lane = lane
        self._clock = clock
        self._activity = activity
        self._outgoing: list[LaneWrite] = []
        """The writes that this turn of the event loop hands to the lane."""
        self._tasks: set[asyncio.Task[None]] = set()
        self._deadlines = Deadlines()
        self._turns: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()
        """By id; changes that find their id claimed take turns."""
        lane.listen(self._take_answers)

    async def resolve(
        self, transaction_id: str, change: Change, *, deadline: float, begin_by: float | None = None
    ) -> EndResult:
        """Change one transaction. If its id is claimed, wait for the release, and then decide by the resulting state.

        After `begin_by`, which is `deadline` if it is not given, no write begins.

        Raises:
            AlreadyEndedError, NotPendingError: the state does not allow it.
            EndUnconfirmedError: it was not confirmed in time; repeat the call: it is never done twice.
            TopicUnavailableError, MessageTooLargeError, NotAuthorisedError: it cannot be written; it is still pending.
            OvertakenError: the policy decided it, and no longer does.

        """
        begin_by = deadline if begin_by is None else begin_by
        shard, entry = await self._lookup.locate_any(transaction_id, deadline=begin_by)
        result = await self._change_unless_claimed(shard, entry, change, deadline, begin_by)
        return await self._in_turn(transaction_id, change, deadline, begin_by) if result is None else result

    async def resolve_open(
        self, number: int, transaction_id: str, change_of: Callable[[Unresolved], Change | None], *, deadline: float
    ) -> None:
        """Change a pending or parked transaction, also in a shard that is being given up.

        When no other change has claimed the id, `change_of` returns the change, or None if none is necessary.

        Raises:
            HalfwayError: as for `resolve`; the shard is not served here.

        """
        while True:
            shard = await self._shards.wait_until_served(number, deadline=deadline)
            claim = self._shards.claims.get(transaction_id)
            if claim is not None:
                await _within(asyncio.shield(claim.released()), transaction_id, deadline=deadline)
                continue
            entry = shard.state.unresolved(transaction_id)
            change = None if entry is None else change_of(entry)
            if entry is None or change is None:
                return
            try:
                if await self._change_unless_claimed(shard, entry, change, deadline) is not None:
                    return
            except (OvertakenError, NotPendingError):  # parked or resumed in between
                continue

    async def _in_turn(self, transaction_id: str, change: Change, deadline: float, begin_by: float) -> EndResult:
        """Change a transaction whose id is claimed.

        One change at a time waits for the release; the others wait for their turn. If each release woke all of them,
        the cost of many changes of one id would grow with the square of their number.
        """
        turn = self._turns.setdefault(transaction_id, asyncio.Lock())
        await _within(turn.acquire(), transaction_id, deadline=begin_by)
        try:
            while True:
                claim = self._shards.claims.get(transaction_id)
                if claim is not None:
                    await _within(asyncio.shield(claim.released()), transaction_id, deadline=begin_by)
                shard, entry = await self._lookup.locate_any(transaction_id, deadline=begin_by)
                result = await self._change_unless_claimed(shard, entry, change, deadline, begin_by)
                if result is not None:
                    return result
        finally:
            turn.release()

    async def write_again(self, transaction_id: str, *, deadline: float) -> None:
        """Write the half of a prepared transaction again at the tail. If its id is claimed, wait; errors as above."""
        await self.resolve(transaction_id, Reanchor(), deadline=deadline)

    async def reanchor(self, transaction_id: str, *, deadline: float) -> None:
        """Write the half of a prepared transaction again at the tail, unless its id is claimed."""
        shard, entry = await self._lookup.locate_any(transaction_id, deadline=deadline)
        await self._change_unless_claimed(shard, entry, Reanchor(), deadline)

    async def correct(self, transaction_id: str, *, deadline: float) -> None:
        """Correct a stray half: write the first content again if pending, a tombstone if parked or ended."""
        shard, entry = await self._lookup.locate_any(transaction_id, deadline=deadline)
        await self._change_unless_claimed(
            shard, entry, Reanchor() if isinstance(entry, Pending) else WriteTombstone(), deadline
        )

    async def restore(self, transaction_id: str, *, deadline: float) -> None:
        """Write a transaction again that the log has lost, unless its id is claimed."""
        shard, entry = await self._lookup.locate_any(transaction_id, deadline=deadline)
        await self._change_unless_claimed(shard, entry, Restore(), deadline)

    async def _change_unless_claimed(
        self, shard: Shard, entry: Entry, change: Change, deadline: float, begin_by: float | None = None
    ) -> EndResult | None:
        """Change a transaction, and return the result; None if its id is claimed."""
        answer: asyncio.Future[EndResult] = asyncio.get_running_loop().create_future()
        payload, reply = self._cached_payload(entry, change), partial(_answer, answer, entry.id)
        if not self.begin(
            shard, entry, change, payload, deadline=deadline if begin_by is None else begin_by, reply=reply
        ):
            return None
        return await self._wait_in_time(answer, entry.id, deadline)

    def _cached_payload(self, entry: Entry, change: Change) -> Half | None:
        """Return the cached payload if the change needs it."""
        return self._shards.payloads.get(entry.id) if change.needs_payload else None

    async def _wait_in_time(self, answer: asyncio.Future[EndResult], transaction_id: str, deadline: float) -> EndResult:
        def late() -> None:
            answer_all([(answer, unconfirmed(transaction_id))])

        self._deadlines.watch(late, deadline)
        try:
            return await answer
        finally:
            self._deadlines.forget(late, deadline)

    def begin(
        self,
        shard: Shard,
        entry: Entry,
        change: Change,
        payload: Half | None,
        *,
        deadline: float,
        reply: Reply,
    ) -> bool:
        """Begin a change, and reply when it is done; return False if another change has claimed the id.

        `payload` is the cached payload of the id, if any. After `deadline` no write begins. A change that has begun is
        finished, even if no caller waits for the reply. The caller of `begin` watches the deadline of the reply.

        Raises:
            AlreadyEndedError, NotPendingError: the state does not allow it.

        """
        if entry.id in self._shards.claims:
            return False
        resolution = Resolution(
            shard=shard.number, mark=shard.mark, id=entry.id, change=change, deadline=deadline, reply=reply, entry=entry
        )
        half = payload if payload is not None and payload.fingerprint == entry.fingerprint else None
        if half is None and not isinstance(entry, Ended) and change.needs_payload:
            self._shards.claims[entry.id] = resolution
            self._spawn(self._look_again(resolution))
        else:
            self._advance(resolution, half)
        return True

    def _advance(self, resolution: Resolution, half: Half | None) -> None:
        """Answer if no write is needed; else claim the id, and hand the write to the lane at the end of the turn."""
        change, entry, tried = resolution.change, resolution.entry, resolution.tried
        # If the clock was set back, no outcome may look older than its prepare. One Kafka transaction may follow
        # another within a millisecond, and their times must differ.
        now = self._clock.now_ms()
        at = max(now, entry.prepared_at, tried[-1] + 1 if tried else 0)
        answer = change.answer_without_write(entry, tried)
        if answer is not None:
            self._finish(resolution, answer)
            return
        self._shards.claims[entry.id] = resolution
        resolution.written_at = at
        try:
            write = change.write(resolution.shard, entry, half, at=at, now=now, deadline=resolution.deadline)
        except Exception as error:  # noqa: BLE001 - the caller gets any error
            self._take_failure(resolution, error)
            return
        resolution.write = write
        if not self._outgoing:
            asyncio.get_running_loop().call_soon(self._hand_over)
        self._outgoing.append(write)

    # --- while the id is claimed

    def _hand_over(self) -> None:
        """Submit the writes of this turn to the lane."""
        outgoing, self._outgoing = self._outgoing, []
        try:
            self._lane.submit(outgoing)
        except Exception as error:  # noqa: BLE001 - the callers get any error
            self._take_answers([(write, error) for write in outgoing])

    def _take_answers(self, answers: LaneAnswers) -> None:
        """Apply the writes of the lane, and answer; look again at the others, or answer with their errors."""
        claims = self._shards.claims
        for write, result in answers:
            resolution = claims.get(write.id)
            if not isinstance(resolution, Resolution) or resolution.write is not write:
                continue  # a lane that hung may answer late, when the change has been written again
            resolution.write = None
            if not isinstance(result, Written):
                try:
                    self._take_failure(resolution, result)
                except Exception as error:  # noqa: BLE001 - whatever it is, the caller gets it
                    self._finish(resolution, error)
                continue
            answer: EndResult | Exception = EndResult(id=write.id, state=write.state, changed=True)
            try:
                self._shards.apply(write, result)
                if not isinstance(resolution.change, Restore):  # that was counted when it was written first
                    self._activity.note_write(write)
            except Exception as error:  # noqa: BLE001 - the caller gets any error
                answer = error
            self._finish(resolution, answer)

    def _take_failure(self, resolution: Resolution, error: BaseException) -> None:
        """Look again if the write may be repeated, or may have been done; else answer with the error."""
        in_time = asyncio.get_running_loop().time() < resolution.deadline
        if isinstance(error, LaneLostError):
            resolution.tried += (resolution.written_at,)
            self._spawn(self._look_again(resolution, _PAUSE_S))
        elif isinstance(error, NotWrittenError) and in_time:
            self._spawn(self._look_again(resolution, _PAUSE_S))
        elif isinstance(error, NotWrittenError):
            self._finish(resolution, unconfirmed(resolution.id))
        else:
            if isinstance(error, HalfwayError) and not isinstance(error, OvertakenError):
                note_error(resolution.entry, error)
                self._note_refusal(resolution.id, error)
            self._finish(resolution, error)

    def _note_refusal(self, transaction_id: str, error: HalfwayError) -> None:
        if isinstance(error, _CANNOT_BE_WRITTEN):
            named = error.fields.get("topic")
            topic = named if isinstance(named, str) else None
            again_s = error.retry_after_s if isinstance(error, RetryableError) else 0.0
            self._activity.note_refused_write(transaction_id, topic, error.code, error.detail, again_s)

    async def _look_again(self, resolution: Resolution, pause_s: float = 0.0) -> None:
        """Decide by the current state, and write if a write is needed.

        After the loss of a lane the fold shows whether the write was done.
        """
        try:
            if pause_s:
                await asyncio.sleep(pause_s)
            shard = await self._shards.wait_until_served(resolution.shard, deadline=resolution.deadline)
            resolution.mark = shard.mark
            entry = shard.state.find(resolution.id)
            if entry is None:
                self._finish(resolution, unconfirmed(resolution.id))
            else:
                resolution.entry = entry
                half = await self._payload(shard, entry, resolution)
                if self._shards.find(resolution.shard) is shard:
                    self._advance(resolution, half)
                else:  # another owner may have had the shard while the payload was read
                    self._spawn(self._look_again(resolution))
        except ShardUnavailableError as error:
            # The error means that nothing was done, which is not known of a write that was tried.
            self._finish(resolution, unconfirmed(resolution.id) if resolution.tried else error)
        except BaseException as error:
            self._finish(resolution, error)
            if not isinstance(error, Exception):
                raise

    async def _payload(self, shard: Shard, entry: Entry, resolution: Resolution) -> Half | None:
        """Return the half if there is a write that needs it."""
        change = resolution.change
        if not change.needs_payload or isinstance(entry, Ended) or change.answer_without_write(entry, resolution.tried):
            return None
        try:
            return await self._lookup.payload(shard, entry, deadline=resolution.deadline)
        except KafkaUnavailableError:
            if change.needs_whole_payload:
                raise
            log.warning("rolled_back_without_its_payload", id=entry.id, group=entry.group)
            return None

    def _finish(self, resolution: Resolution, result: EndResult | BaseException) -> None:
        """Release the id, and answer."""
        if self._shards.claims.get(resolution.id) is resolution:
            del self._shards.claims[resolution.id]
        if resolution.waiter is not None and not resolution.waiter.done():
            resolution.waiter.set_result(None)
        try:
            resolution.reply(result)
        except Exception:
            log.exception("reply_failed")  # the others must still get their answers

    def _spawn(self, work: Coroutine[object, object, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


def _answer(future: asyncio.Future[EndResult], transaction_id: str, result: EndResult | BaseException) -> None:
    """Answer a caller that waits for a future."""
    if future.done():
        log_late_error(transaction_id, result)
    elif isinstance(result, EndResult):
        future.set_result(result)
    else:
        future.set_exception(result)


def background_deadline() -> float:
    """Return the deadline of a resolution that no caller waits for."""
    return asyncio.get_running_loop().time() + WRITE_LIMIT_S


def log_late_error(transaction_id: str, error: EndResult | BaseException) -> None:
    """Log an end that failed when no caller waited any more, unless a repeat of the end would succeed."""
    if isinstance(error, Exception) and not isinstance(error, RetryableError):
        _late_ends.note({"error": getattr(error, "code", type(error).__name__)}, id=transaction_id, detail=str(error))


async def _within(wait: Awaitable[object], transaction_id: str, *, deadline: float) -> None:
    """Wait; raise EndUnconfirmedError at the deadline."""
    try:
        async with asyncio.timeout_at(deadline):
            await wait
    except TimeoutError:
        raise unconfirmed(transaction_id) from None
