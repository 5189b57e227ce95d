"""Resolving: claim an id, write through the lane, apply what was written (docs/protocol.md#end-the-lane)."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from functools import partial
from typing import TYPE_CHECKING, Final

import msgspec
import structlog

from halfway.domain.errors import (
    HalfwayError,
    KafkaUnavailableError,
    LaneLostError,
    NotWrittenError,
    OvertakenError,
    RetryableError,
)
from halfway.domain.records import Half
from halfway.domain.shard import Ended, Entry, Pending
from halfway.domain.transaction import Action, State
from halfway.service.ports import LaneWrite, Tombstone, Written
from halfway.service.requests import EndResult
from halfway.service.resolve.deadlines import Deadlines
from halfway.service.resolve.effects import Bury, Change, Reanchor, note_error, unconfirmed

if TYPE_CHECKING:
    from halfway.service.ports import Clock, Lane, Observer
    from halfway.service.query.lookup import Lookup
    from halfway.service.shards.shard_table import Shard, ShardTable

log = structlog.get_logger(__name__)

WRITE_LIMIT_S: Final = 30.0
"""How long a resolution that nobody waits for (a verdict, a policy) may wait for its turn in the lane."""
_PAUSE_S: Final = 0.02
_OBSERVED: Final = {State.COMMITTED: Action.COMMIT.value, State.ROLLED_BACK: Action.ROLLBACK.value}


class Resolution(msgspec.Struct, kw_only=True):
    """One change of one transaction, from its claim to its answer, through as many writes as it takes.

    The garbage collector must see it: the traceback of an error that is its answer refers back to it.
    """

    id: str
    shard: int
    change: Change
    deadline: float
    """On the loop's clock: the answer is given by then, and no write begins after it."""
    claim: asyncio.Future[None]
    answer: asyncio.Future[EndResult]
    tried: tuple[int, ...] = ()
    """The times (ms since the epoch) of the writes whose lane was lost: nobody knows yet whether they stand."""


class Resolver:
    """The one way by which the state of a transaction changes after its prepare.

    `begin` claims the id and `_submit` hands the write to the lane; `_written` applies it and answers. If the lane was
    lost or dropped the write, or the payload must be read first, `_look_again` judges what stands now and submits.
    """

    def __init__(self, shards: ShardTable, lookup: Lookup, lane: Lane, clock: Clock, observer: Observer) -> None:
        """Keep the parts; nothing is started."""
        self._shards = shards
        self._lookup = lookup
        self._lane = lane
        self._clock = clock
        self._observer = observer
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
        while True:
            shard, entry = await self._lookup.locate(transaction_id, deadline=deadline)
            answer = self.begin(shard, entry, change, deadline=deadline)
            if answer is not None:
                return await answer
            await _released(self._shards.claims[transaction_id], transaction_id, deadline=deadline)

    async def reanchor(self, transaction_id: str, *, deadline: float) -> None:
        """Write the half of a prepared transaction again at the tail, unless its id is claimed."""
        shard, entry = await self._lookup.locate(transaction_id, deadline=deadline)
        await self._unless_claimed(shard, entry, Reanchor(), deadline)

    async def correct(self, transaction_id: str, *, deadline: float) -> None:
        """Put right a stray half: the first content again if it is pending, a tombstone if it is parked or ended."""
        shard, entry = await self._lookup.locate(transaction_id, deadline=deadline)
        await self._unless_claimed(shard, entry, Reanchor() if isinstance(entry, Pending) else Bury(), deadline)

    async def _unless_claimed(self, shard: Shard, entry: Entry, change: Change, deadline: float) -> None:
        answer = self.begin(shard, entry, change, deadline=deadline)
        if answer is not None:
            await answer

    def begin(self, shard: Shard, entry: Entry, change: Change, *, deadline: float) -> asyncio.Future[EndResult] | None:
        """Begin a change and return its answer, or None if the id is claimed by another change.

        Cancelling the answer only says that nobody waits for it: what was begun is finished all the same.

        Raises:
            AlreadyEndedError, NotPendingError: the state does not allow it.

        """
        if entry.id in self._shards.claims:
            return None
        answer: asyncio.Future[EndResult] = asyncio.get_running_loop().create_future()
        settled = change.settled(entry, ())
        if settled is not None:
            answer.set_result(settled)
            return answer
        claim = self._shards.claims[entry.id] = asyncio.get_running_loop().create_future()
        resolution = Resolution(
            id=entry.id, shard=shard.number, change=change, deadline=deadline, claim=claim, answer=answer
        )
        self._deadlines.watch(answer, deadline, partial(unconfirmed, entry.id))
        half = None
        if change.needs_payload and not isinstance(entry, Ended):
            half = self._shards.payloads.get(entry.id, entry.fingerprint)
            if half is None:
                self._spawn(self._look_again(resolution))
                return answer
        self._submit(resolution, entry, half)
        return answer

    # --- while the id is claimed

    def _submit(self, resolution: Resolution, entry: Entry, half: Half | None) -> None:
        """Hand the write to the lane."""
        # A clock that was set back lets no outcome seem older than its prepare. One Kafka transaction may follow
        # another within a millisecond; the time must still tell them apart.
        at = max(self._clock.now_ms(), entry.prepared_at, resolution.tried[-1] + 1 if resolution.tried else 0)
        try:
            write = resolution.change.write(resolution.shard, entry, half, at=at, deadline=resolution.deadline)
            written = self._lane.submit(write)
        except Exception as error:  # noqa: BLE001 - whatever it is, the caller gets it
            self._not_written(resolution, entry, error)
        else:
            written.add_done_callback(partial(self._written, resolution, entry, write, at))

    def _written(
        self, resolution: Resolution, entry: Entry, write: LaneWrite, at: int, written: asyncio.Future[Written]
    ) -> None:
        """Apply what the lane wrote, and answer."""
        error = NotWrittenError() if written.cancelled() else written.exception()
        if error is None:
            try:
                self._apply(write, written.result())
                self._observe(write)
            except Exception as broken:  # noqa: BLE001 - as above
                self._finish(resolution, broken)
            else:
                self._finish(resolution, EndResult(id=write.id, state=write.state, changed=True))
            return
        if isinstance(error, LaneLostError):
            resolution.tried += (at,)
        self._not_written(resolution, entry, error)

    def _not_written(self, resolution: Resolution, entry: Entry, error: BaseException) -> None:
        """Look again if the write may be repeated, or may even stand; else answer with the error."""
        in_time = asyncio.get_running_loop().time() < resolution.deadline
        if isinstance(error, LaneLostError) or (isinstance(error, NotWrittenError) and in_time):
            self._spawn(self._look_again(resolution, _PAUSE_S))
        elif isinstance(error, NotWrittenError):
            self._finish(resolution, unconfirmed(resolution.id))
        else:
            if isinstance(error, HalfwayError) and not isinstance(error, OvertakenError):
                note_error(entry, error)
            self._finish(resolution, error)

    async def _look_again(self, resolution: Resolution, pause_s: float = 0.0) -> None:
        """Judge by what stands now, and write unless that settles it.

        After a lane was lost, the fold shows whether the write stands.
        """
        try:
            if pause_s:
                await asyncio.sleep(pause_s)
            shard = await self._shards.serving(resolution.shard, deadline=resolution.deadline)
            entry = shard.state.find(resolution.id)
            if entry is None:
                self._finish(resolution, unconfirmed(resolution.id))
            elif (settled := resolution.change.settled(entry, resolution.tried)) is not None:
                self._finish(resolution, settled)
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
        answer = resolution.answer
        self._deadlines.forget(answer, resolution.deadline)
        if self._shards.claims.get(resolution.id) is resolution.claim:
            del self._shards.claims[resolution.id]
        if not resolution.claim.done():
            resolution.claim.set_result(None)
        if answer.done():
            if isinstance(result, Exception) and not isinstance(result, RetryableError):
                log.info("late_end_failed", id=resolution.id, error=str(result))
        elif isinstance(result, EndResult):
            answer.set_result(result)
        elif isinstance(result, asyncio.CancelledError):
            answer.cancel()
        else:
            answer.set_exception(result)

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
        if write.op is not None and written.op is not None:
            state.apply_op(written.op, write.op)
        if write.half is not None and written.half is not None:
            state.apply_half(written.half, write.id, None if isinstance(write.half, Tombstone) else write.half)
        if write.parked is not None and written.parked is not None:
            state.apply_parked(written.parked, write.id, None if isinstance(write.parked, Tombstone) else write.parked)
        if isinstance(state.unresolved(write.id), Pending):
            if isinstance(write.half, Half):
                payloads.put(write.half)
                shard.agenda.put(write.id, 0)
        else:
            payloads.drop(write.id)
            shard.agenda.discard(write.id)

    def _observe(self, write: LaneWrite) -> None:
        outcome = _OBSERVED.get(write.state)
        if outcome is not None and write.op is not None:
            self._observer.resolved_after(write.group, outcome, max(0, write.op.at - write.prepared_at) / 1000)


def limit() -> float:
    """Return the deadline of a resolution that nobody waits for."""
    return asyncio.get_running_loop().time() + WRITE_LIMIT_S


async def _released(claim: asyncio.Future[None], transaction_id: str, *, deadline: float) -> None:
    """Wait until the change that has claimed an id is done."""
    try:
        async with asyncio.timeout_at(deadline):
            await asyncio.shield(claim)
    except TimeoutError:
        raise unconfirmed(transaction_id) from None
