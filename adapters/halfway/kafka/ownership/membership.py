"""The life of an instance in the cluster: incarnations, acquisitions, releases.

See docs/protocol.md#ownership.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Final, TypeVar, TypeVarTuple, Unpack

import structlog
from confluent_kafka import KafkaException

from halfway.coordinator.ports import LogLoss, Observer, ShardListener
from halfway.kafka.clients.config import KafkaConfig
from halfway.kafka.clients.threads import Loop
from halfway.kafka.clients.transactional_producer import ProducerFailedError, TransactionalProducer
from halfway.kafka.lane.lane import KafkaLane
from halfway.kafka.lane.transaction import LaneContext
from halfway.kafka.log.cursors import KafkaCursors
from halfway.kafka.ownership.acquisition import Acquired
from halfway.kafka.ownership.concurrent_acquisition import ConcurrentAcquisitions, ShardTrouble
from halfway.kafka.ownership.consumer_group import TRY_AGAIN_S, GroupMember, Trial, Uselessness, has_members
from halfway.kafka.ownership.former_owners import AcquireError
from halfway.kafka.ownership.incarnation import (
    Incarnation,
    RetryBackoff,
    UnservedTime,
    give_back,
    lane_producers,
    new_incarnation_id,
    reserve_time,
)
from halfway.kafka.ownership.log_watch import LogWatch
from halfway.kafka.records.lane_records import RecordLimits
from halfway.kafka.topics.metadata import TopicMetadata
from halfway.protocol.records import Foreign, Half

log = structlog.get_logger()

T = TypeVar("T")
Ts = TypeVarTuple("Ts")

_FENCED_HEARTBEATS: Final = 1.5
_REACH_S: Final = 2.0
_WATCH_S: Final = 1.0
_LOG_S: Final = 5.0
_DOUBTS_S: Final = 1.0
_REMEMBERED_S: Final = 600.0
"""How long this instance remembers a shard that the group has taken from it."""
_STALL_FACTOR: Final = 2
_STOP_ACQUIRING_S: Final = 2.0


def _reachable(config: KafkaConfig) -> bool:
    """Return whether a broker answers; blocks for a short time."""
    try:
        config.make_admin().list_topics(config.half_topic, timeout=_REACH_S)
    except KafkaException:
        return False
    return True


def _record_limits(config: KafkaConfig, destinations: TopicMetadata) -> RecordLimits:
    """Return the limits of the lane's topics; for one that Kafka does not describe, the needed one. Blocks."""
    topics = config.half_topic, config.op_topic, config.parked_topic
    found = destinations.max_message_bytes(topics, _REACH_S)
    return RecordLimits(*map(found.get, topics, RecordLimits.needed(config)))


@dataclass(frozen=True, kw_only=True, slots=True)
class MembershipStatus:
    """The state of an instance, for its health port."""

    joined: bool
    """The group has sent it an assignment, perhaps an empty one."""
    incarnation: str | None
    """None while there is no incarnation, for example because Kafka cannot be reached."""
    owned: tuple[int, ...]
    acquiring: tuple[int, ...]
    """Assigned but not served yet."""
    last_error: str | None
    """Why the last incarnation failed; None once a shard is acquired, unless this release is too old."""
    refused: str | None = None
    """What the brokers refuse this instance, with the remedy: a setting, or an ACL that the group needs."""
    troubles: tuple[ShardTrouble, ...] = ()
    """The shards in `acquiring` whose attempts have failed, with the reason."""
    too_old: str | None = None
    """Why this release cannot read the log: it has left the group for good."""


class KafkaMembership:
    """This instance as a member of the cluster. Its state is changed on the loop's thread only.

    Blocking work runs on owned threads: those of the group member, the lane, the suspect lane, the tail and the
    acquisitions, and two workers that begin incarnations and wait for threads.
    """

    def __init__(
        self,
        config: KafkaConfig,
        lane: KafkaLane,
        observer: Observer,
        destinations: TopicMetadata,
        cursors: KafkaCursors,
    ) -> None:
        self._config = config
        self._lane = lane
        self._observer = observer
        self._destinations = destinations
        self._group = GroupMember(config, self)
        self._workers = ThreadPoolExecutor(2, "halfway-membership")
        self._joined = False
        self._assigned: frozenset[int] = frozenset()
        self._unserved = UnservedTime()
        self._changed = asyncio.Event()
        self._incarnation: Incarnation | None = None
        self._ended: list[Incarnation] = []
        fenced_pause_s = _FENCED_HEARTBEATS * self._group.heartbeat_s
        self._backoff = RetryBackoff(fenced_pause_s)
        self._acquisitions = ConcurrentAcquisitions(config, cursors, self, fenced_pause_s)
        self._log_watch = LogWatch(config)
        self._cursors = cursors
        self._own: dict[int, set[str]] = {}
        """By shard: incarnations of this process that claimed it, without another owner since it was last served."""
        self._suspect: set[int] = set()
        """Shards whose log may have lost records that this instance knows."""
        self._stalled = False
        self._useless = Uselessness()
        self._gives_up = False
        """True if it has served nothing for so long that it should leave its shards to others."""
        self._given_up: str | None = None
        """Why it has left its shards to others."""
        self._unreadable: dict[int, str] = {}
        """The assigned shards with a record that only a newer release can read, each with the error."""
        self._too_old: str | None = None
        """Why this instance has left the group for good: every shard assigned to it was unreadable."""
        self._giving_back: set[asyncio.Task[None]] = set()
        self._refused: str | None = None
        """Why the group does not take this instance, with the remedy."""
        self._stopping = False
        self._tasks: list[asyncio.Task[None]] = []
        self._listener: ShardListener
        self._loop: Loop

    @property
    def status(self) -> MembershipStatus:
        incarnation = self._incarnation
        owned = frozenset() if incarnation is None else frozenset(incarnation.shards)
        return MembershipStatus(
            joined=self._joined,
            incarnation=None if incarnation is None else incarnation.id,
            owned=tuple(sorted(owned)),
            acquiring=tuple(sorted(self._assigned - owned)),
            refused=self._refused,
            last_error=self._too_old or self._refused or self._given_up or self._backoff.last_error,
            troubles=self._acquisitions.troubles,
            too_old=self._too_old,
        )

    # --- the port

    async def start(self, listener: ShardListener) -> None:
        """Begin an incarnation, join the group and acquire the assigned shards, in the background."""
        self._listener = listener
        self._loop = Loop(asyncio.get_running_loop())
        self._group.start()
        self._tasks = [
            asyncio.create_task(self._run(), name="halfway-keep"),
            asyncio.create_task(self._watch(), name="halfway-watch"),
            asyncio.create_task(self._watch_log(), name="halfway-watch-log"),
        ]

    async def stop(self, *, deadline: float) -> None:
        """Release every shard and leave the group; drop what is not finished by `deadline` (on the loop's clock)."""
        if self._stopping:
            return
        self._stopping = True
        self._changed.set()
        owned = () if self._incarnation is None else self._incarnation.shards
        shards = self._assigned | frozenset(owned)
        self._on_revoked(shards)
        await self._give_back(shards, reserve_time(deadline))
        self._group.close()
        if self._incarnation is not None:
            self._lane.detach()
            self._incarnation.close()
            self._ended.append(self._incarnation)
            self._incarnation = None
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if not await self._blocking(self._join, self._loop.monotonic(deadline)):
            log.warning("threads_still_running")
        await self._acquisitions.close()
        self._workers.shutdown(wait=False, cancel_futures=True)

    def _is_stopping(self) -> bool:
        return self._stopping

    def _join(self, deadline: float) -> bool:
        parts = [incarnation.join(deadline) for incarnation in self._ended]
        return all([*parts, self._group.join(max(0.0, deadline - time.monotonic()))])

    # --- events of the group, on its thread

    def assigned(self, shards: set[int]) -> None:
        self._loop.post(self._on_assigned, shards)

    def revoked(self, shards: set[int]) -> None:
        """Release shards within the session time-out; the group waits for this call."""
        within = self._config.session_timeout_s
        self._loop.post(self._on_revoked, frozenset(shards))  # before the group can assign one of them again
        returned = self._give_back(frozenset(shards), self._loop.asyncio.time() + within)
        try:
            asyncio.run_coroutine_threadsafe(returned, self._loop.asyncio).result(within + 1)
        except TimeoutError:
            # The loop is busy and drops the shards later. A new owner has fenced this one by then.
            log.warning("revoke_out_of_time", shards=sorted(shards))
        except RuntimeError:  # the loop has been closed
            returned.close()

    def dropped(self, shards: set[int], reason: str | None = None) -> None:
        self._loop.post(self._on_dropped, frozenset(shards), reason)

    def refused(self, reason: str) -> None:
        self._loop.post(self._on_refused, reason)

    def left(self) -> None:
        self._loop.post(self._on_left)

    def _on_assigned(self, shards: set[int]) -> None:
        if not self._stopping:
            self._refused = None
            self._joined = True  # together with the assignment: a member without shards is ready
            self._assigned |= shards
            self._unserved.begin(shards)
            self._changed.set()

    def _on_revoked(self, shards: frozenset[int]) -> None:
        self._assigned -= shards
        self._unserved.forget(shards)
        for shard in shards:
            self._unreadable.pop(shard, None)
        # The group may give them back soon, if only Kafka was away. If another instance has owned one of them in the
        # meantime, its owner record says so: see `follows`.
        asyncio.get_running_loop().call_later(_REMEMBERED_S, lambda: self._forget(shards - self._assigned))

    def _forget(self, shards: Collection[int]) -> None:
        """Forget what is known of shards that another instance may own from now on."""
        for shard in shards:
            self._own.pop(shard, None)
            self._suspect.discard(shard)
            self._listener.forget(shard)

    def _on_left(self) -> None:
        self._joined = False

    def _on_refused(self, reason: str) -> None:
        self._refused = reason

    def _on_dropped(self, shards: frozenset[int], reason: str | None) -> None:
        self._on_left()
        self._on_revoked(shards)
        incarnation = self._incarnation
        if incarnation is None:
            return
        if any(incarnation.holds(shard) for shard in shards) or shards & self._acquisitions.shards:
            cause = self._refused or reason or "the group gave this instance's shards to others"
            incarnation.fail(ProducerFailedError("group", cause))

    async def _give_back(self, shards: frozenset[int], deadline: float) -> None:
        """Accept no more ends of shards, finish those in flight, then release by `deadline` (on the loop's clock)."""
        until = min(deadline, self._loop.asyncio.time() + _STOP_ACQUIRING_S) if self._stopping else deadline
        await self._acquisitions.end(shards, until)
        if self._incarnation is not None:
            await give_back(self._incarnation, shards, self._listener, self._notify_lost, deadline)
        self._changed.set()

    # --- keeping an incarnation and its assigned shards

    async def _run(self) -> None:
        while not self._stopping:
            self._changed.clear()
            try:
                if self._assigned and self._assigned <= self._unreadable.keys():
                    await self._stay_out()
                elif self._stalled:
                    self._stalled = False
                    await self._leave_group()
                elif self._gives_up:
                    self._gives_up = False
                    await self._leave_shards_to_others()
                elif self._backoff.pause_s:
                    await self.pause(self._backoff.take_pause())
                elif self._incarnation is None:
                    await self._begin_incarnation()
                else:
                    held = filter(self._incarnation.holds, self._assigned)
                    self._acquisitions.begin(self._incarnation, self._assigned.difference(held))
                    await self._changed.wait()
            except Exception as error:
                log.exception("membership_failed")
                self._backoff.failed(repr(error))

    async def _watch(self) -> None:
        """End an incarnation whose lane hangs and whose own watchdog does not run; see whether it is of any use."""
        limit = _STALL_FACTOR * self._config.lane_stall_s
        while True:
            await asyncio.sleep(_WATCH_S)
            incarnation = self._incarnation
            troubled = {trouble.shard for trouble in self._acquisitions.troubles}
            serves = incarnation is not None and bool(incarnation.shards)
            if self._useless.look(useless=bool(self._assigned) and not serves and self._assigned <= troubled):
                self._gives_up = True
                self._changed.set()
            if incarnation is not None and incarnation.lane.busy_for() > limit:
                incarnation.fail(ProducerFailedError("lane", f"one batch took more than {limit:g} s", stalled=True))

    async def _watch_log(self) -> None:
        """Compare the log with what is known of it, and let what Kafka has lost be written again."""
        while True:
            await asyncio.sleep(_DOUBTS_S if self._log_watch.doubts else _LOG_S)
            incarnation = self._incarnation
            if incarnation is None:
                continue
            asked = {shard: self._listener.known_log(shard) for shard in incarnation.shards}
            known = {shard: one for shard, one in asked.items() if one is not None}
            try:
                losses = await self._log_watch.look(known)
                if incarnation is self._incarnation:
                    self._take_losses([(shard, loss) for shard, loss in losses if shard in incarnation.shards])
            except Exception:  # whatever it is, the next look may succeed
                log.exception("log_not_compared")

    def _take_losses(self, losses: Sequence[tuple[int, LogLoss]]) -> None:
        """Tell the service; if it is not known what is lost, acquire the shards again and compare."""
        for shard, loss in losses:
            self._listener.log_lost(shard, loss)
        unknown = [loss for _, loss in losses if loss.half_start is loss.op_start is loss.parked_start is None]
        if unknown:
            self.lost_records(unknown[0].detail)

    def lost_records(self, reason: str) -> None:
        """End the incarnation: Kafka has lost records of it. The new folds are compared with what is known."""
        if self._incarnation is not None:
            self._incarnation.fail(ProducerFailedError("log", reason))

    async def _begin_incarnation(self) -> None:
        """Begin an incarnation: a new random id, its producers, its threads. Then join the group."""
        incarnation_id = new_incarnation_id()
        try:
            within_s = self._backoff.attempt_s
            producers = await self._blocking(lane_producers, self._config, incarnation_id, within_s, self._is_stopping)
        except ProducerFailedError as error:
            self._backoff.failed(str(error))
            log.warning("kafka_not_ready", error=str(error), again_in_s=round(self._backoff.pause_s, 1))
            await self._leave_group()
            return
        limits = await self._blocking(_record_limits, self._config, self._destinations)
        if self._stopping:
            for producer in producers:
                producer.abandon()
            return
        incarnation = self._start_incarnation(incarnation_id, producers, limits)
        self._incarnation = incarnation
        self._backoff.incarnation_begun()
        self._lane.attach(incarnation.lane, incarnation.shards)
        self._group.join_group()
        log.info("incarnation_begun", incarnation=incarnation_id)

    def _start_incarnation(
        self, incarnation_id: str, producers: Sequence[TransactionalProducer], limits: RecordLimits
    ) -> Incarnation:
        """Create an incarnation and start its threads; if one cannot start, end the others.

        With some of its threads only, it would acquire shards for which it cannot write.
        """
        incarnation: Incarnation | None = None
        try:
            incarnation = self._new_incarnation(incarnation_id, producers, limits)
            incarnation.start()
        except Exception:
            if incarnation is not None:
                incarnation.close()
            for producer in producers:
                producer.abandon()
            raise
        return incarnation

    def _new_incarnation(
        self, incarnation_id: str, producers: Sequence[TransactionalProducer], limits: RecordLimits
    ) -> Incarnation:
        context = LaneContext(
            config=self._config,
            loop=self._loop,
            listener=self._listener,
            answer=self._lane.answer,
            observer=self._observer,
            destinations=self._destinations,
            quarantine=self._lane.quarantine,
            shards=set(),
            limits=limits,
        )

        def on_appended(shard: int, records: Sequence[tuple[int, str, Half | Foreign | None]], position: int) -> None:
            if self._incarnation is incarnation and shard in incarnation.shards:
                self._listener.appended(shard, records, position)

        incarnation = Incarnation(
            incarnation_id, producers, context, on_appended, self._on_incarnation_failed, self._on_newer
        )
        return incarnation

    def _on_incarnation_failed(self, incarnation: Incarnation, error: ProducerFailedError) -> None:
        """Drop every shard; `_run` begins a new incarnation and acquires the shards that are still assigned."""
        if self._incarnation is not incarnation:
            return
        self._incarnation = None
        self._ended = [ended for ended in self._ended if not ended.join(time.monotonic())]
        self._ended.append(incarnation)
        self._lane.detach()
        if error.step == "log" or error.out_of_sequence:
            self._suspect.update(incarnation.shards)
            self._cursors.distrust(incarnation.shards)
        self._notify_lost(sorted(incarnation.shards))
        for shard in incarnation.shards:
            self._log_watch.forget(shard)
        incarnation.shards.clear()
        reason = str(error) if error.remedy is None else f"{error}: {error.remedy}"
        self._backoff.failed(reason, fenced=error.fenced)
        self._stalled = error.stalled
        self._changed.set()

    async def _leave_group(self) -> None:
        """Leave the group until there is an incarnation again, so that other instances can serve the shards.

        If Kafka does not answer at all, stay: leaving would only cost a session time-out when Kafka is back.
        """
        if await self._blocking(_reachable, self._config):
            self._group.leave_group()

    async def _leave_shards_to_others(self) -> None:
        """Leave the group until Kafka takes from this instance what a claim writes, if others are in the group.

        Whatever the cause is, it may be this instance's alone: its clock, its network, its permissions. Alone, it goes
        on trying, because nobody else could serve the shards. If all the others leave too, it comes back.
        """
        troubles = self._acquisitions.troubles
        if not troubles or not await self._blocking(has_members, self._config, 1):
            return
        shard, error = troubles[0].shard, troubles[0].error
        self._given_up = f"it left its shards to other instances, because it could acquire none of them: {error}"
        log.error("shards_left_to_others", shards=sorted(self._assigned), error=error, remedy=troubles[0].remedy)
        self._group.leave_group()
        trial = Trial(self._config, self._is_stopping)
        until = time.monotonic() + self._useless.take_pause()
        while True:
            await asyncio.sleep(TRY_AGAIN_S)
            if not await self._blocking(has_members, self._config, 0):
                break  # all have left at once: what ails them is not this instance's alone
            if time.monotonic() < until:
                continue
            refusal = await self._blocking(trial.refusal, shard)
            if refusal is None:
                break
            log.warning("shards_still_left_to_others", shard=shard, error=refusal)
        self._given_up = None
        log.info("shards_taken_again", shard=shard)
        self._group.join_group()

    async def _stay_out(self) -> None:
        """Leave the group for good: this release can read none of its shards, but other instances may be able to."""
        self._too_old = "; ".join(self._unreadable[shard] for shard in sorted(self._unreadable))
        log.error("release_too_old", error=self._too_old)
        self._group.leave_group()
        while not self._stopping:
            self._changed.clear()
            await self._changed.wait()

    # --- called by acquisitions

    async def pause(self, seconds: float) -> None:
        """Wait for a back-off, then for a new poll of the group."""
        await self._group.pause(seconds)

    def wants(self, incarnation: Incarnation, shard: int) -> bool:
        """Return whether a shard is still to be acquired for an incarnation; called on any thread."""
        current = incarnation is self._incarnation and not incarnation.failed and not self._stopping
        return current and shard in self._assigned and not incarnation.holds(shard)

    async def serve(self, incarnation: Incarnation, acquired: Acquired) -> None:
        """Step 6: serve a shard if it is still assigned and the incarnation is still the current one."""
        shard, suspect = acquired.shard, acquired.shard in self._suspect
        if await self._blocking(self._compare, acquired, incarnation.id in self._own.get(shard, ()), suspect):
            # What was lost may have been the tombstone of a half before the cursor, which must be known again.
            self._suspect.add(shard)
            self._cursors.distrust([shard])
            remedy = "none is needed: halfway reads the log of the shard from its beginning"
            raise AcquireError("folding", "Kafka has lost the end of the log", remedy=remedy)
        if self.wants(incarnation, shard):
            self._suspect.discard(shard)
            self._own[shard] = {incarnation.id}
            incarnation.serve(acquired.shard, acquired.barrier + 1)
            self._listener.acquired(acquired.shard, acquired.state)
            self._observer.shard_moved(self._unserved.end(acquired.shard, acquired.released_at))
            self._backoff.succeeded()
            self._useless.served()
            self._unreadable.pop(acquired.shard, None)

    def _compare(self, acquired: Acquired, own: bool, suspect: bool) -> bool:  # noqa: FBT001 - called by position
        """Compare the fold with the former one, if that is this instance's `own`; then forget old outcomes.

        Return whether the shard must be folded from its beginning first, because the log has lost records. Blocks.

        The fold has old outcomes for the sake of late halves, and of ends whose answer was lost: forgotten before, such
        an end would seem to be missing from the log, and would be written a second time.
        """
        if own and self._listener.compare(acquired.shard, acquired.state, suspect=suspect) and not suspect:
            return True
        acquired.state.forget(acquired.state.acquired_at - round(self._config.outcome_horizon_s * 1000))
        return False

    def follows(self, shard: int, incarnation: Incarnation, former: str | None) -> None:
        """Record an attempt of an incarnation to claim a shard, after its former owner."""
        own = self._own.get(shard)
        if own is None:
            return
        if former in own:
            own.add(incarnation.id)
        elif former is not None:
            self._forget([shard])

    def look_again(self) -> None:
        """Acquire the shards that are assigned now: an acquisition has ended."""
        self._changed.set()

    def outdated(self, shard: int, error: str) -> None:
        """Record that only a newer release can read a shard; leave the group if that holds for every assigned one."""
        self._unreadable[shard] = error
        self._changed.set()

    def _on_newer(self, shard: int) -> None:
        """Release a served shard whose tail has met a record of a newer release; the next fold meets it as well."""
        returned = self._give_back(frozenset({shard}), self._loop.asyncio.time() + self._config.session_timeout_s)
        task = asyncio.create_task(returned, name=f"halfway-give-back-{shard}")
        self._giving_back.add(task)
        task.add_done_callback(self._giving_back.discard)

    def count_skipped(self, topic: str, reason: str) -> None:
        """Count a record that cannot be decoded; called on any thread."""
        self._loop.post(self._observer.skipped_record, topic, reason)

    # --- shared

    def _notify_lost(self, shards: Collection[int]) -> None:
        self._unserved.begin(self._assigned.intersection(shards))
        for shard in shards:
            try:
                self._listener.lost(shard)
            except Exception:
                log.exception("listener_failed", shard=shard)

    async def _blocking(self, call: Callable[[Unpack[Ts]], T], *args: *Ts) -> T:
        return await self._loop.asyncio.run_in_executor(self._workers, call, *args)


class KafkaCluster:
    """The lane and the membership of one instance. Start it by `await cluster.membership.start(service)`."""

    def __init__(
        self, config: KafkaConfig, observer: Observer, destinations: TopicMetadata, cursors: KafkaCursors
    ) -> None:
        """Create both parts. They connect in `membership.start`, which needs the internal topics to exist."""
        self.lane = KafkaLane()
        self.membership = KafkaMembership(config, self.lane, observer, destinations, cursors)
