"""An incarnation: one life of an instance as a writer. It begins a new one whenever its lane has failed.

A shard is released after the work in flight for it is finished. See docs/protocol.md#ownership.
"""

from __future__ import annotations

import asyncio
import math
import secrets
import time
from collections.abc import Callable, Collection, Iterable, Sequence
from enum import Enum, auto
from typing import Final

import structlog
from confluent_kafka import KafkaError

from halfway.coordinator.ports import LaneWrite, Observer, ShardListener
from halfway.kafka.clients.config import KafkaConfig, explained
from halfway.kafka.clients.threads import Loop
from halfway.kafka.clients.transactional_producer import (
    ProducerFailedError,
    TransactionalProducer,
    initialised,
    lane_ids,
    rehearsal_id,
)
from halfway.kafka.lane.lane import LaneThread
from halfway.kafka.lane.queue import Release
from halfway.kafka.lane.suspect_lane import Rehearsal, SuspectLane
from halfway.kafka.lane.transaction import LaneContext
from halfway.kafka.log.tail import OnAppended, Tail, TailEvents
from halfway.kafka.ownership.former_owners import FencedOwners
from halfway.protocol.errors import LaneLostError

log = structlog.get_logger()

INITIALISE_S: Final = 10.0
"""How long the first attempt to begin may take. Each further one in a row may take twice as long."""
_LONGEST_ATTEMPT_S: Final = 60.0
_RETRY_S: Final = 0.05
_ID_BYTES: Final = 8


def new_incarnation_id() -> str:
    return secrets.token_hex(_ID_BYTES)


def lane_producers(
    config: KafkaConfig, incarnation_id: str, within_s: float, cancelled: Callable[[], bool]
) -> list[TransactionalProducer]:
    """Initialise the producers of a new incarnation's lane ids, which happens only once. Blocks.

    Raises ProducerFailedError: Kafka did not answer in time, or refused, or the call was cancelled.
    """
    ids = lane_ids(config.prefix, incarnation_id)
    producers = initialised(config, ids, time.monotonic() + within_s, cancelled, of_a_lane=True)
    if cancelled():  # the caller may have given up
        for producer in producers:
            producer.abandon()
        raise ProducerFailedError("init_transactions", "they are no longer wanted")
    return producers


class Incarnation:
    """The lane, the suspect lane, their producers and the tail of one incarnation. The first failure ends it.

    Its lane ids are `<prefix><incarnation>.0`, `.1` and `.q`. `lane_producers` initialises each of them exactly once,
    before any owner record names it. Call methods on the loop's thread unless they say otherwise.
    """

    def __init__(
        self,
        incarnation_id: str,
        producers: Sequence[TransactionalProducer],
        context: LaneContext,
        on_appended: OnAppended,
        on_failed: Callable[[Incarnation, ProducerFailedError], None],
        on_newer: Callable[[int], None],
    ) -> None:
        """Take over the initialised producers of the lane ids, in their order."""
        first, second, for_suspects = producers
        self.id = incarnation_id
        self.lane_ids = tuple(producer.transactional_id for producer in producers)
        self.shards = context.shards
        self.fences = FencedOwners(incarnation_id)
        self._leaving: set[int] = set()
        self._config = context.config
        self._loop: Loop = context.loop
        self._answer = context.answer
        self._observer: Observer = context.observer
        self._on_failed = on_failed
        self._failure: ProducerFailedError | None = None
        self._closed = False
        rehearsal = Rehearsal(context.config, rehearsal_id(context.config.prefix, incarnation_id))
        self._suspects = SuspectLane(context, for_suspects, rehearsal, self._lane_failed)
        self.lane = LaneThread(context, (first, second), self._suspects, self._lane_failed)
        self.tail = Tail(
            context.config,
            incarnation_id,
            context.loop,
            context.listener.has_applied,
            self._record_skipped,
            TailEvents(appended=on_appended, foreign_barrier=self._foreign_barrier, newer=on_newer, failed=self.fail),
        )

    def start(self) -> None:
        self._suspects.start()
        self.lane.start()
        self.tail.start()

    @property
    def failed(self) -> bool:
        return self._failure is not None

    def holds(self, shard: int) -> bool:
        """Return whether it serves a shard, or has dropped it and not yet released it; called on any thread."""
        return shard in self.shards or shard in self._leaving

    def serve(self, shard: int, position: int) -> None:
        """Accept writes for an acquired shard, and tail it from a position on."""
        self.shards.add(shard)
        self.tail.add(shard, position)

    def drop(self, shard: int) -> bool:
        """Accept no more writes for a shard; the waiting ones get NotWrittenError.

        Until `release` is confirmed, a write of the lane may still be in flight. Only the caller that dropped the shard
        may release it; any other caller gets False. A second tombstone could land behind the next owner's claim.
        """
        if shard not in self.shards:
            return False
        self.shards.discard(shard)
        self._leaving.add(shard)
        self.tail.remove(shard)
        return True

    async def release(self, shards: Sequence[int], deadline: float) -> bool:
        """Release dropped shards, so that their next owner need not fence; return whether Kafka has confirmed it.

        `deadline` is on the loop's clock. If the release is not confirmed by then, the incarnation ends: the tombstones
        may still land, and must not land behind a later claim of the same incarnation (docs/protocol.md, step 3).
        """
        if self.failed or self._closed:
            return False
        self._leaving.update(shards)
        try:
            async with asyncio.timeout_at(deadline):
                while not await self._write_release(Release(shards=shards)):  # noqa: ASYNC110 - suspects run apart
                    await asyncio.sleep(_RETRY_S)
        except ProducerFailedError as error:
            self.fail(error)
            return False
        except (TimeoutError, asyncio.CancelledError):
            self.fail(ProducerFailedError("release", f"the release of shards {list(shards)} was not confirmed in time"))
            return False
        self._leaving.difference_update(shards)
        return True

    async def _write_release(self, release: Release) -> bool:
        """Write a release through the lane; return False if suspects of these shards are under way."""
        if not self.lane.queue.put_release(release):
            raise ProducerFailedError("release", "the lane has ended")
        return await asyncio.wrap_future(release.done)

    def fail(self, error: ProducerFailedError, writes: Sequence[LaneWrite] = ()) -> None:
        """End the incarnation: it writes nothing more. For the first failure `on_failed` is called before any caller.

        The writes under way in a lane are lost too, even if its thread hangs: the next owner of the shards fences the
        lane and finds the outcome of these writes in its fold.
        """
        first = self._failure is None and not self._closed
        if first:
            self._failure = error
        left = self._close_queues()
        if first:
            log.warning(
                "incarnation_failed",
                incarnation=self.id,
                step=error.step,
                error=str(error),
                fenced=error.fenced,
                remedy=error.remedy,
            )
            self._observer.lane_failed("fenced" if error.fenced else error.step)
            self._on_failed(self, error)
        lost = (*writes, *left, *self.lane.under_way, *self._suspects.under_way)
        self._answer([(write, LaneLostError(f"the lane ended: {error}")) for write in lost])

    def close(self) -> None:
        """End the incarnation without a failure: each thread ends after its current work."""
        self._closed = True
        left = self._close_queues()
        self._answer([(write, LaneLostError("the lane was closed")) for write in left])

    def join(self, deadline: float) -> bool:
        """Wait for the threads until `deadline` (monotonic); return whether all have ended. Blocks."""
        threads = (self.lane, self._suspects, self.tail)
        ended = [thread.join(max(0.0, deadline - time.monotonic())) for thread in threads]
        return all(ended)

    def _close_queues(self) -> list[LaneWrite]:
        left = self.lane.queue.close() + self._suspects.queue.close()
        self.tail.stop()
        for item in left:
            if isinstance(item, Release):
                item.done.cancel()
        return [item for item in left if isinstance(item, LaneWrite)]

    def _lane_failed(self, error: ProducerFailedError, writes: Sequence[LaneWrite]) -> None:
        """Handle a lane's failure; called on the lane's thread."""
        error.remedy = explained(error.code, self._config)
        self._loop.post(self.fail, error, writes)

    def _foreign_barrier(self, shard: int) -> None:
        if shard in self.shards:
            self.fail(
                ProducerFailedError(
                    "tail", f"shard {shard} was acquired by another incarnation", code=KafkaError.PRODUCER_FENCED
                )
            )

    def _record_skipped(self, topic: str, reason: str) -> None:
        self._loop.post(self._observer.skipped_record, topic, reason)


OnLost = Callable[[Collection[int]], None]
"""Called with shards that are dropped although work for them is in flight."""

_RESERVE_S: Final = 2.0


def reserve_time(deadline: float) -> float:
    """Return an earlier deadline, on the loop's clock, that leaves some time for the steps afterwards."""
    return deadline - min(_RESERVE_S, (deadline - asyncio.get_running_loop().time()) / 4)


class Drop(Enum):
    """How `finish` has dropped a shard from an incarnation."""

    FINISHED = auto()
    LATE = auto()
    BY_ANOTHER_CALLER = auto()
    """Another caller has dropped it and releases it, for example a revocation during a stop."""


async def give_back(
    incarnation: Incarnation, shards: Collection[int], listener: ShardListener, on_lost: OnLost, deadline: float
) -> None:
    """Finish the work in flight for the shards that an incarnation owns, then release them by `deadline`.

    `deadline` is on the loop's clock. If a shard is not finished early enough, nothing is released and the incarnation
    ends: a shard leaves an incarnation by a confirmed release, or with the incarnation.
    """
    owned = sorted(incarnation.shards.intersection(shards))
    finish_by = reserve_time(deadline)
    drops = await asyncio.gather(*(finish(incarnation, shard, listener, on_lost, finish_by) for shard in owned))
    if incarnation.failed:
        return
    late = [shard for shard, drop in zip(owned, drops, strict=True) if drop is Drop.LATE]
    finished = [shard for shard, drop in zip(owned, drops, strict=True) if drop is Drop.FINISHED]
    if late:
        incarnation.fail(ProducerFailedError("release", f"shards {late} were not finished in time"))
    released = bool(finished) and await incarnation.release(finished, deadline)
    log.info("shards_given_back", shards=finished, unfinished=late, released=released)


async def finish(
    incarnation: Incarnation, shard: int, listener: ShardListener, on_lost: OnLost, deadline: float
) -> Drop:
    """Wait until the service has finished the work in flight for a shard, then drop it.

    The shard is dropped in the same turn of the loop, so that nothing more is appended to it.
    """
    try:
        async with asyncio.timeout_at(deadline):
            await listener.revoked(shard)
    except TimeoutError:
        log.warning("revoke_out_of_time", shard=shard)
    except Exception:
        log.exception("revoke_failed", shard=shard)
    else:
        return Drop.FINISHED if incarnation.drop(shard) else Drop.BY_ANOTHER_CALLER
    if not incarnation.drop(shard):
        return Drop.BY_ANOTHER_CALLER
    if not incarnation.failed:  # else the failure has reported it already
        on_lost([shard])
    return Drop.LATE


_FIRST_PAUSE_S: Final = 0.1
_LONGEST_PAUSE_S: Final = 10.0
_DOUBLINGS: Final = 16
_RESET_AFTER_S: Final = 60.0
"""An incarnation that has lived this long resets the back-off."""


def pause_after(failures: int) -> float:
    """Return how long to pause after a failure that follows `failures` consecutive ones."""
    return min(_LONGEST_PAUSE_S, _FIRST_PAUSE_S * 2.0 ** min(failures, _DOUBLINGS))


class RetryBackoff:
    """The back-off of one instance, which replaces its incarnation after each failure."""

    def __init__(self, fenced_pause_s: float) -> None:
        """Start without a failure; a fenced instance pauses for at least `fenced_pause_s`."""
        self.last_error: str | None = None
        """Why the last attempt failed; None after a success."""
        self.pause_s = 0.0
        """How long to pause before the next attempt."""
        self._fenced_pause_s = fenced_pause_s
        self._incarnation_begun_at = math.inf
        """When an incarnation began, infinite if none has since the last failure."""
        self._tried_at = -math.inf
        """When the pause before the last attempt was over."""
        self._failures = 0
        self._not_begun = 0
        """Attempts in a row in which no incarnation began."""

    @property
    def attempt_s(self) -> float:
        """How long the next attempt to begin an incarnation may take.

        Each attempt makes three clients anew. If all were as short as the first one, an instance that has too little
        CPU, or whose Kafka has, would be busy with beginnings that never end.
        """
        return min(_LONGEST_ATTEMPT_S, INITIALISE_S * 2.0 ** min(self._not_begun, _DOUBLINGS))

    def incarnation_begun(self) -> None:
        self._incarnation_begun_at = time.monotonic()
        self._not_begun = 0

    def succeeded(self) -> None:
        """Record that an acquisition succeeded: clear the error."""
        self.last_error = None

    def failed(self, error: str, *, fenced: bool = False) -> None:
        """Record a failure; from one attempt to the next it takes longer each time.

        An attempt may itself take as long, if Kafka does not answer: then another one follows, for Kafka may be back.
        A fenced instance waits for at least a heartbeat, so that the group can update its assignment. Otherwise two
        instances could keep fencing each other.
        """
        now = time.monotonic()
        if now - self._incarnation_begun_at > _RESET_AFTER_S:
            self._failures = 0
        self._not_begun += self._incarnation_begun_at == math.inf
        self._incarnation_begun_at = math.inf
        self.last_error = error
        self.pause_s = max(_FIRST_PAUSE_S, pause_after(self._failures) - (now - self._tried_at))
        if fenced:
            self.pause_s = max(self.pause_s, self._fenced_pause_s)
        self._failures += 1

    def take_pause(self) -> float:
        """Return how long to pause, and reset it."""
        pause, self.pause_s = self.pause_s, 0.0
        self._tried_at = time.monotonic() + pause
        return pause


class UnservedTime:
    """The shards that are assigned to this instance and not served, each with the start time (seconds since the epoch).

    It is unknown when an owner died: the group takes up to the session time-out to notice, which is not counted here.
    """

    def __init__(self) -> None:
        """Start now: earlier releases do not count, because no instance may have run since then."""
        self._started = time.time()
        self._since: dict[int, float] = {}

    def begin(self, shards: Iterable[int]) -> None:
        """Record that shards are assigned to this instance and not served yet."""
        now = time.time()
        for shard in shards:
            self._since.setdefault(shard, now)

    def forget(self, shards: Iterable[int]) -> None:
        """Record that shards are no longer assigned to this instance."""
        for shard in shards:
            self._since.pop(shard, None)

    def end(self, shard: int, released_ms: int | None) -> float:
        """Return how long the shard was unserved, in seconds. `released_ms` is when its former owner released it."""
        now = time.time()
        since = self._since.pop(shard, now)
        if released_ms is not None and released_ms / 1000 >= self._started:
            since = min(since, released_ms / 1000)
        return max(0.0, now - since)
