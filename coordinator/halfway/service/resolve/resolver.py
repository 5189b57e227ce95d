"""Resolving: claim an id, write through the lane, apply what was written (docs/protocol.md#end-the-lane)."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from functools import partial
from typing import TYPE_CHECKING, Final

import structlog

from halfway.domain.errors import (
    HalfwayError,
    KafkaUnavailableError,
    LaneLostError,
    MessageTooLargeError,
    NotAuthorisedError,
    NotWrittenError,
    OvertakenError,
    RetryableError,
    TopicUnavailableError,
)
from halfway.domain.records import Half
from halfway.domain.shard import Ended, Entry, Pending
from halfway.domain.transaction import Action, State
from halfway.service.ports import LaneWrite, Tombstone, Written
from halfway.service.replies import Deadlines, Reply, answer_all
from halfway.service.requests import EndResult
from halfway.service.resolve.effects import Change, Reanchor, WriteTombstone, note_error, unconfirmed
from halfway.service.shards.shard_table import Claim

if TYPE_CHECKING:
    from halfway.service.ports import Clock, Lane
    from halfway.service.query.lookup import Lookup
    from halfway.service.shards.shard_table import Shard, ShardTable
    from halfway.service.tally import Tally

log = structlog.get_logger(__name__)

WRITE_LIMIT_S: Final = 30.0
"""How long a resolution that nobody waits for (a verdict, a policy) may wait for its turn in the lane."""
_PAUSE_S: Final = 0.02
_CANNOT_BE_WRITTEN: Final = (TopicUnavailableError, MessageTooLargeError, NotAuthorisedError)
_OBSERVED: Final = {State.COMMITTED: Action.COMMIT.value, State.ROLLED_BACK: Action.ROLLBACK.value}


class Resolution(Claim):
    """One change of one transaction, from its claim to its answer, through as many writes as it takes."""

    __slots__ = ("change", "deadline", "id", "reply", "shard", "tried")

    def __init__(
        self, transaction_id: str, shard: int, change: Change, deadline: float, reply: Reply[EndResult]
    ) -> None:
        """Claim nothing yet; `deadline` is on the loop's clock: the answer is given by then."""
        super().__init__()
        self.id = transaction_id
        self.shard = shard
        self.change = change
        self.deadline = deadline
        self.reply = reply
        self.tried: tuple[int, ...] = ()
        """The times (ms since the epoch) of the writes whose lane was lost: nobody knows yet whether they stand."""


class _Attempt:
    """One write of a resolution: a `replies.Reply`, which takes the first answer of the lane and no other.

    A lane that hung may answer late, when the resolution has written again.
    """

    __slots__ = ("_is_answered", "_resolver", "at", "entry", "resolution", "write")

    write: LaneWrite

    def __init__(self, resolver: Resolver, resolution: Resolution, entry: Entry, at: int) -> None:
        self._resolver = resolver
        self._is_answered = False
        self.resolution = resolution
        self.entry = entry
        self.at = at
        """The time of the write, ms since the epoch."""

    def done(self) -> bool:
        return self._is_answered

    def set_result(self, written: Written) -> None:
        self._is_answered = True
        self._resolver.written(self, written)

    def set_exception(self, error: BaseException) -> None:
        self._is_answered = True
        self._resolver.not_written(self, error)


class Resolver:
    """The one way by which the state of a transaction changes after its prepare.

    `begin` claims the id and `_submit` hands the write to the lane; `written` applies it and answers. If the lane was
    lost or dropped the write, or the payload must be read first, `_look_again` judges what stands now and submits.
    """

    def __init__(self, shards: ShardTable, lookup: Lookup, lane: Lane, clock: Clock, tally: Tally) -> None:
        """Keep the parts; nothing is started."""
        self._shards = shards
        self._lookup = lookup
        self._lane = lane
        self._clock = clock
        self._tally = tally
        self._outgoing: list[tuple[LaneWrite, _Attempt]] = []
        """What this turn of the loop hands to the lane."""
        self._tasks: set[asyncio.Task[None]] = set()
        self._deadlines = Deadlines()

    async def resolve(self, transaction_id: str, change: Change, *, deadline: float) -> EndResult:
        """Change one transaction; if its id is claimed, wait for that and then judge by its result.

        Raises:
            AlreadyEndedError, NotPendingError: the state does not allow it.
            EndUnconfirmedError: not confirmed in time; repeat the call: it is never done twice.
            TopicUnavailableError, MessageTooLargeError, NotAuthorisedError: it cannot be written; it is still pending.
            OvertakenError: policy decided it, and no longer does.

        """
        answer: asyncio.Future[EndResult] = asyncio.get_running_loop().create_future()
        while True:
            shard, entry = await self._lookup.locate_any(transaction_id, deadline=deadline)
            if self.begin(shard, entry, change, deadline=deadline, reply=answer):
                return await answer
            await _released(self._shards.claims[transaction_id], transaction_id, deadline=deadline)

    async def reanchor(self, transaction_id: str, *, deadline: float) -> None:
        """Write the half of a prepared transaction again at the tail, unless its id is claimed."""
        shard, entry = await self._lookup.locate_any(transaction_id, deadline=deadline)
        await self._unless_claimed(shard, entry, Reanchor(), deadline)

    async def correct(self, transaction_id: str, *, deadline: float) -> None:
        """Put right a stray half: the first content again if it is pending, a tombstone if it is parked or ended."""
        shard, entry = await self._lookup.locate_any(transaction_id, deadline=deadline)
        await self._unless_claimed(
            shard, entry, Reanchor() if isinstance(entry, Pending) else WriteTombstone(), deadline
        )

    async def _unless_claimed(self, shard: Shard, entry: Entry, change: Change, deadline: float) -> None:
        answer: asyncio.Future[EndResult] = asyncio.get_running_loop().create_future()
        if self.begin(shard, entry, change, deadline=deadline, reply=answer):
            await answer

    def begin(self, shard: Shard, entry: Entry, change: Change, *, deadline: float, reply: Reply[EndResult]) -> bool:
        """Begin a change, and reply once it is done; False if the id is claimed by another change.

        What was begun is finished, whether somebody waits for the reply or not.

        Raises:
            AlreadyEndedError, NotPendingError: the state does not allow it.

        """
        claims = self._shards.claims
        if entry.id in claims:
            return False
        answer = change.answer_without_write(entry, ())
        if answer is not None:
            reply.set_result(answer)
            return True
        resolution = claims[entry.id] = Resolution(entry.id, shard.number, change, deadline, reply)
        self._deadlines.watch(reply, deadline, partial(unconfirmed, entry.id))
        half = None
        if change.needs_payload and not isinstance(entry, Ended):
            half = self._shards.payloads.get(entry.id, entry.fingerprint)
            if half is None:
                self._spawn(self._look_again(resolution))
                return True
        self._submit(resolution, entry, half)
        return True

    # --- while the id is claimed

    def _submit(self, resolution: Resolution, entry: Entry, half: Half | None) -> None:
        """Hand the write to the lane, with all others of this turn of the loop."""
        # A clock that was set back lets no outcome seem older than its prepare. One Kafka transaction may follow
        # another within a millisecond; the time must still tell them apart.
        at = max(self._clock.now_ms(), entry.prepared_at, resolution.tried[-1] + 1 if resolution.tried else 0)
        attempt = _Attempt(self, resolution, entry, at)
        try:
            write = resolution.change.write(resolution.shard, entry, half, at=at, deadline=resolution.deadline)
        except Exception as error:  # noqa: BLE001 - whatever it is, the caller gets it
            attempt.set_exception(error)
            return
        attempt.write = write
        if not self._outgoing:
            asyncio.get_running_loop().call_soon(self._hand_over)
        self._outgoing.append((write, attempt))

    def _hand_over(self) -> None:
        """Give the lane what this turn has for it."""
        outgoing, self._outgoing = self._outgoing, []
        try:
            self._lane.submit(outgoing)
        except Exception as error:  # noqa: BLE001 - whatever it is, the callers get it
            answer_all((attempt, error) for _, attempt in outgoing)

    def written(self, attempt: _Attempt, written: Written) -> None:
        """Apply what the lane wrote, and answer."""
        resolution, write = attempt.resolution, attempt.write
        try:
            self._apply(write, written)
            self._observe(write)
        except Exception as broken:  # noqa: BLE001 - as above
            self._finish(resolution, broken)
        else:
            self._finish(resolution, EndResult(id=write.id, state=write.state, changed=True))

    def not_written(self, attempt: _Attempt, error: BaseException) -> None:
        """Look again if the write may be repeated, or may even stand; else answer with the error."""
        resolution = attempt.resolution
        in_time = asyncio.get_running_loop().time() < resolution.deadline
        if isinstance(error, LaneLostError):
            resolution.tried += (attempt.at,)
            self._spawn(self._look_again(resolution, _PAUSE_S))
        elif isinstance(error, NotWrittenError) and in_time:
            self._spawn(self._look_again(resolution, _PAUSE_S))
        elif isinstance(error, NotWrittenError):
            self._finish(resolution, unconfirmed(resolution.id))
        else:
            if isinstance(error, HalfwayError) and not isinstance(error, OvertakenError):
                note_error(attempt.entry, error)
                self._note_refusal(resolution.id, error)
            self._finish(resolution, error)

    def _note_refusal(self, transaction_id: str, error: HalfwayError) -> None:
        if isinstance(error, _CANNOT_BE_WRITTEN):
            named = error.fields.get("topic")
            topic = named if isinstance(named, str) else None
            again_s = error.retry_after_s if isinstance(error, RetryableError) else 0.0
            self._tally.activity.refused(transaction_id, topic, error.code, error.detail, again_s)

    async def _look_again(self, resolution: Resolution, pause_s: float = 0.0) -> None:
        """Judge by what stands now, and write unless no write is needed.

        After a lane was lost, the fold shows whether the write stands.
        """
        try:
            if pause_s:
                await asyncio.sleep(pause_s)
            shard = await self._shards.serving(resolution.shard, deadline=resolution.deadline)
            entry = shard.state.find(resolution.id)
            if entry is None:
                self._finish(resolution, unconfirmed(resolution.id))
            elif (answer := resolution.change.answer_without_write(entry, resolution.tried)) is not None:
                self._finish(resolution, answer)
            else:
                half = await self._payload(shard, entry, resolution)
                if self._shards.find(resolution.shard) is shard:
                    self._submit(resolution, entry, half)
                else:  # while the payload was read another owner may have had the shard
                    self._spawn(self._look_again(resolution))
        except BaseException as error:
            self._finish(resolution, error)
            if not isinstance(error, Exception):
                raise

    async def _payload(self, shard: Shard, entry: Entry, resolution: Resolution) -> Half | None:
        """Return the half if the write needs it."""
        if not resolution.change.needs_payload or isinstance(entry, Ended):
            return None
        try:
            return await self._lookup.payload(shard, entry, deadline=resolution.deadline)
        except KafkaUnavailableError:
            if resolution.change.needs_whole_payload:
                raise
            log.warning("rolled_back_without_its_payload", id=entry.id, group=entry.group)
            return None

    def _finish(self, resolution: Resolution, result: EndResult | BaseException) -> None:
        """Give the id free, and answer."""
        reply = resolution.reply
        self._deadlines.forget(reply, resolution.deadline)
        if self._shards.claims.get(resolution.id) is resolution:
            del self._shards.claims[resolution.id]
        resolution.release()
        if reply.done():
            if not isinstance(result, EndResult):
                note_late(resolution.id, result)
        elif isinstance(result, EndResult):
            reply.set_result(result)
        else:
            reply.set_exception(result)

    def _spawn(self, work: Coroutine[object, object, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _apply(self, write: LaneWrite, written: Written) -> None:
        """Apply an own write as a recovery would, so that a repeat by the tail changes nothing.

        The shard may have been given up and taken back since the write was made: it goes to what is served now.
        """
        shard = self._shards.find(write.shard)
        if shard is None:
            return
        state, payloads = shard.state, self._shards.payloads
        half = None if isinstance(write.half, Tombstone) else write.half
        if write.op is not None and written.op is not None and written.half is not None and half is None:
            shard.apply_own_end(written.op, write.op, written.half)
        else:
            if write.op is not None and written.op is not None:
                state.apply_op(written.op, write.op)
            if write.half is not None and written.half is not None:
                shard.apply_own_half(written.half, write.id, half)
        if write.parked is not None and written.parked is not None:
            state.apply_parked(written.parked, write.id, None if isinstance(write.parked, Tombstone) else write.parked)
        entry = state.unresolved(write.id)
        if isinstance(entry, Pending):
            if isinstance(write.half, Half):
                payloads.put(write.half, entry.size)
                shard.agenda.put(write.id, 0)
        else:
            payloads.drop(write.id)
            shard.agenda.discard(write.id)

    def _observe(self, write: LaneWrite) -> None:
        if (activity := self._tally.activity).fails:
            activity.wrote(write.id, [message.topic for message in write.messages])
        if write.op is None and isinstance(write.half, Half):
            activity.acted(write.id, "reanchored")
        outcome = _OBSERVED.get(write.state)
        if outcome is not None and write.op is not None:
            self._tally.resolved_after(
                write.group, outcome, write.op.cause.value, max(0, write.op.at - write.prepared_at)
            )


def limit() -> float:
    """Return the deadline of a resolution that nobody waits for."""
    return asyncio.get_running_loop().time() + WRITE_LIMIT_S


def note_late(transaction_id: str, error: BaseException) -> None:
    """Log an end that failed when nobody waited for it any more, unless the same end again would mend it."""
    if isinstance(error, Exception) and not isinstance(error, RetryableError):
        log.info("late_end_failed", id=transaction_id, error=str(error))


async def _released(claim: Claim, transaction_id: str, *, deadline: float) -> None:
    """Wait until the change that has claimed an id is done."""
    try:
        async with asyncio.timeout_at(deadline):
            await asyncio.shield(claim.released())
    except TimeoutError:
        raise unconfirmed(transaction_id) from None
