"""Where a run happens: a cluster, its instances, and the faults that a plan has for them.

A new fault is a line of `_FAULTS` (`story.py`) and a method `_break_NAME` here.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, Final

import msgspec
from confluent_kafka import KafkaError

from checker.history import AnyEvent, Removed
from halfway.coordinator.requests import GroupSpec, ListQuery
from halfway.protocol.errors import HalfwayError
from halfway.protocol.transactions import State
from halfway.simulated import SimulatedKafka
from halfway.simulated.log import Batch, Place, RefusedError
from halfway.simulated.producer import SimulatedProducer
from tests.simulation.instances import PREFIX, Instance, World
from tests.simulation.machine import PROCESS, Machine
from tests.simulation.story import (
    GONE,
    GROUPS,
    POLICIES,
    TOPIC_SETTINGS,
    TOPICS,
    Fault,
    Plan,
    group_spec,
    repeats_alike,
)

_BOUND_S: Final = 400.0


@dataclass
class Trap:
    """Springs when a lane begins to send one more batch than it may."""

    lane: str
    """The beginning of its transactional ids."""
    left: int
    spring: Callable[[], None]


class Cluster(SimulatedKafka):
    """A cluster that tells what is appended."""

    tell: Callable[..., None]
    late_s: tuple[float, float] | None = None
    on_the_way: list[tuple[Place, Batch]]
    late_producers: frozenset[int] = frozenset()
    """Whose batches are still on the way."""
    overtaken = 0
    """How often another producer has written what is on the way."""
    arrive_first = True
    """Whether that is when such batches arrive, just before the other's."""
    trap: Trap | None = None
    cleans = True
    unsure = 0.0
    """Which share of what is written is answered as if it might not have been."""
    effects: Counter[str]

    def append(self, place: Place, batch: Batch, transactional_id: str | None) -> int:
        try:
            base = self._append(place, batch, transactional_id)
            if self.unsure and self.random.random() < self.unsure:
                raise RefusedError(KafkaError.NOT_ENOUGH_REPLICAS_AFTER_APPEND, in_doubt=True)  # noqa: TRY301 - counted
        except RefusedError as error:
            self.effects[f"refused {error}"] += 1
            raise
        return base

    def _append(self, place: Place, batch: Batch, transactional_id: str | None) -> int:
        if (trap := self.trap) is not None and (transactional_id or "").startswith(trap.lane):
            trap.left -= 1
            if trap.left < 0:
                self.trap = None
                trap.spring()
                raise RefusedError(KafkaError.NOT_LEADER_FOR_PARTITION)
        if batch.producer in self.late_producers:
            if (place, batch.sequence) not in [(at, one.sequence) for at, one in self.on_the_way]:
                self.on_the_way.append((place, batch))
                self.tell("on the way", place, [one.key for one in batch.records])
            raise RefusedError(KafkaError.NOT_LEADER_FOR_PARTITION, in_doubt=True)
        keys = {one.key for one in batch.records}
        if any(at == place and keys & {one.key for one in late.records} for at, late in self.on_the_way):
            self.overtaken += 1
            if self.arrive_first:
                self.let_arrive()
        base = super().append(place, batch, transactional_id)
        self.tell("append", place, base, [(one.key, len(one.value or b"")) for one in batch.records], transactional_id)
        return base

    def let_arrive(self) -> None:
        """Append what is on the way; Kafka may refuse it."""
        arriving, self.on_the_way, self.late_producers = self.on_the_way, [], frozenset()
        for place, batch in arriving:
            with suppress(RefusedError):
                self.append(place, batch, None)

    def clean(self) -> None:
        if self.cleans:
            super().clean()

    def latency(self) -> float:
        return super().latency() if self.late_s is None else self.random.uniform(*self.late_s)


class Stage:
    """The machine of a plan, its cluster and its instances, and what is wrong with them just now."""

    kafka: Cluster
    world: World

    def __init__(self, plan: Plan, *, keeps_trace: bool = False) -> None:
        self.plan = plan
        self.machine = Machine(plan.seed)
        self.chance = self.machine.random
        self.loop = self.machine.loop
        self.loop.bound = _BOUND_S
        self.digest = hashlib.blake2b()
        self.trace: list[str] | None = [] if keeps_trace else None
        self.denied_checks = plan.traits["endpoint_bad"]
        self.events: list[AnyEvent] = []
        self.effects: Counter[str] = Counter()
        """What faults have led to: refusals of brokers, and answers to clients."""
        self.jumps: list[tuple[float, float]] = []
        """When the clocks of all instances were set ahead, and by how much."""
        self.clients_ahead_s = 0.0
        """How far the producers' clocks are ahead."""
        self.is_horizon_over = False
        """Whether by some clock an outcome horizon has passed since the first outcomes."""
        self.is_nobody_there = False
        """Whether nobody may be started just now."""

    def tell(self, what: str, *details: object) -> None:
        """Note that something happens."""
        line = f"{self.loop.now:10.4f} {PROCESS.get().name:8} {what} {' '.join(map(str, details))}"
        self.digest.update(line.encode())
        if self.trace is not None:
            self.trace.append(line)

    def note(self, event: AnyEvent) -> None:
        self.events.append(event)
        self.tell("history", event)

    @property
    def now_ms(self) -> int:
        return round(self.loop.now * 1000)

    def any(self) -> Instance:
        return self.chance.choice(self.world.instances)

    async def put_group(self, spec: GroupSpec) -> None:
        """Register a group, or change it, until that succeeds."""
        while True:
            with suppress(HalfwayError, TimeoutError):
                await self.world.call(self.any(), 5, "put_group", spec)
                return
            await asyncio.sleep(0.2)

    async def break_it(self, fault: Fault) -> None:
        instances = self.world.instances
        instance = instances[fault.target % len(instances)]
        self.tell("fault", fault)
        work: Callable[[Fault, Instance], Any] = getattr(self, f"_break_{fault.kind}")
        await work(fault, instance)
        self.tell("fault over", fault.number)

    async def _break_kill(self, fault: Fault, instance: Instance) -> None:
        instance.kill()
        await asyncio.sleep(fault.for_s / 4)
        self._restart(instance)

    async def _break_stop(self, fault: Fault, instance: Instance) -> None:
        instance.stopping.set()
        until = self.loop.now + 20
        while (  # noqa: ASYNC110 - it may also be killed meanwhile
            instance.task is not None
            and not instance.task.done()
            and self.loop.now < until
            and not instance.process.dead
        ):
            await asyncio.sleep(0.1)
        instance.kill()
        self._restart(instance)

    def _restart(self, instance: Instance) -> None:
        if instance in self.world.instances and not self.is_nobody_there:
            self.world.start(instance.process.clock_s, replaces=instance)

    async def _break_pause(self, fault: Fault, instance: Instance) -> None:
        instance.host.cut()
        instance.process.paused = True
        await asyncio.sleep(fault.for_s * 1.5)
        self.loop.resume(instance.process)
        if not instance.process.dead:
            instance.host.heal()

    async def _break_cut(self, fault: Fault, instance: Instance) -> None:
        instance.host.cut(answers_only=fault.how < 0.5)
        await asyncio.sleep(fault.for_s)
        if not instance.process.dead:
            instance.host.heal()

    async def _break_clock(self, fault: Fault, instance: Instance) -> None:
        steps = (-7_200, -600, -40, -5, 5, 40, 600, 1_500, 7_200, 90_000)
        step_s = steps[int(fault.how * len(steps))]
        stepped = self.world.instances if fault.target % 2 else [instance]
        for one in stepped:
            one.process.clock_s += step_s
            self.is_horizon_over |= one.process.clock_s >= self.world.settings.outcome_horizon_s
        if step_s > 0 and len(stepped) == len(self.world.instances):
            self.jumps.append((self.loop.now, step_s))
        await asyncio.sleep(fault.for_s)
        if fault.how * 1000 % 1 < 0.7:
            for one in self.world.instances:
                one.process.clock_s = 0.0

    async def _break_limited(self, fault: Fault, instance: Instance) -> None:
        """Set clocks ahead, the producers' too; once they are right again, internal topics take no such times."""
        self.clients_ahead_s = 7_200.0
        await self._break_clock(replace(fault, how=0.85), instance)  # as much, and back
        self.clients_ahead_s = 0.0
        for name, topic in self.kafka.topics.items():
            if name.startswith(PREFIX):
                topic.settings["message.timestamp.after.max.ms"] = "3600000"

    async def _break_leaderless(self, fault: Fault, instance: Instance) -> None:
        places = self.kafka.places(self.kafka.topics)
        if fault.target % 2:
            places = [places[int(fault.how * len(places))]]
        self._lead(places, None)
        await asyncio.sleep(fault.for_s)
        self._lead(places, 1)

    def _lead(self, places: list[Place], leader: int | None) -> None:
        for place in places:
            partition = self.kafka.partition(place)
            if partition is not None:
                partition.leader = leader
                self.kafka.changed(place)

    async def _break_denied(self, fault: Fault, instance: Instance) -> None:
        denied = ("Write", "topic", "orders" if fault.target % 2 else "points")
        self.kafka.denied.add(denied)
        await asyncio.sleep(fault.for_s)
        self.kafka.denied.discard(denied)

    async def _break_markers(self, fault: Fault, instance: Instance) -> None:
        self.kafka.transactions._markers_s = (0.0, 0.1 + 4 * fault.how)
        await asyncio.sleep(fault.for_s)
        self.kafka.transactions._markers_s = (0.0, self.plan.traits["markers_s"])

    async def _break_slow(self, fault: Fault, instance: Instance) -> None:
        self.kafka.late_s = (0.0, 0.1 + 3 * fault.how)
        await asyncio.sleep(fault.for_s)
        self.kafka.late_s = None

    async def _break_loss(self, fault: Fault, instance: Instance) -> None:
        network = self.world.network
        network.lost_share, network.late_share, network.late_s = 0.1 + 0.5 * fault.how, 0.3, 6.0
        await asyncio.sleep(fault.for_s)
        self.calm_network()

    def calm_network(self) -> None:
        traits, network = self.plan.traits, self.world.network
        network.lost_share, network.late_share, network.late_s = (
            traits["net_lost"],
            traits["net_late"],
            traits["net_late_s"],
        )

    async def _break_fatal(self, fault: Fault, instance: Instance) -> None:
        """Make Kafka take the writers of halves for former ones: their producers fail for good."""
        writers = {one for other in self.world.instances for one in _writers(other)}
        for partition in self.kafka.topics[f"{PREFIX}half"].partitions:
            for producer, known in partition._producers.items():
                known.epoch += producer in writers

    async def _break_late(self, fault: Fault, instance: Instance) -> None:
        """Keep halves of an owner on the way until just before the next owner's; then kill all owners."""
        pausing = await self._hold_back(fault, instance, arrive_first=True)
        self.kafka.let_arrive()
        await asyncio.sleep(fault.how / 5)
        for one in list(self.world.instances):
            if fault.how * 1000 % 1 < 0.8 and one is not instance:
                one.kill()
                self._restart(one)
        await pausing

    async def _break_stray(self, fault: Fault, instance: Instance) -> None:
        """As `late`, but halves arrive after the next owner's; then nobody runs for longer than an outcome horizon.

        Kafka compacts meanwhile only if the strays were corrected: it would remove other content that was acknowledged.
        """
        pausing = await self._hold_back(fault, instance, arrive_first=False)
        await asyncio.sleep(3 * fault.how)
        self.kafka.let_arrive()
        if repeats_alike(fault):
            await asyncio.sleep(2 * (fault.how * 1000 % 1) ** 2)
            await self._be_away(1_200, compacts=False)
        elif await self._strays_are_corrected():
            await self._be_away(1_200, compacts=True)
        await pausing

    async def _hold_back(self, fault: Fault, instance: Instance, *, arrive_first: bool) -> asyncio.Task[None]:
        """Keep halves on the way until another owner writes one of their ids.

        The former owner is paused meanwhile, so that its session ends; return what lets it go on.
        """
        kafka = self.kafka
        kafka.arrive_first, kafka.late_producers = arrive_first, _writers(instance)
        await asyncio.sleep(0.25)
        pausing = asyncio.create_task(self._break_pause(fault, instance))
        await self._break_session(fault, instance)
        until, before = self.loop.now + 5, kafka.overtaken
        while kafka.overtaken == before and self.loop.now < until:  # noqa: ASYNC110 - the cluster has no events
            await asyncio.sleep(0.005)
        return pausing

    async def _break_away(self, fault: Fault, instance: Instance) -> None:
        """Delete a group while an instance is paused, and go on only when Kafka has removed the tombstone too."""
        horizon_s = self.world.settings.outcome_horizon_s
        self.kafka.topics[f"{PREFIX}groups"].settings["delete.retention.ms"] = f"{horizon_s * 1000:.0f}"
        instance.host.cut()
        instance.process.paused = True
        await self._break_session(fault, instance)
        for _ in range(20):
            with suppress(HalfwayError, TimeoutError):
                other = next(one for one in self.world.instances if one is not instance)
                await self.world.call(other, 5, "delete_group", GONE)
                break
            await asyncio.sleep(1)
        if await self._strays_are_corrected():
            await self._be_away(2.2 * horizon_s, compacts=True, spared=instance)
        self.loop.resume(instance.process)
        instance.host.heal()

    async def _strays_are_corrected(self) -> bool:
        """Wait until all of half is read, and nothing in it has to be corrected; return whether that is so in time."""
        ends = self.kafka.topics[f"{PREFIX}half"].partitions
        for _ in range(60):
            await asyncio.sleep(0.5)
            corrected = {
                shard.number
                for one in self.world.instances
                if one.coordinator is not None and not one.process.paused and not one.process.dead
                for shard in one.coordinator.shards.all()
                if shard.state.half_tail >= ends[shard.number].end and not shard.state.has_strays
            }
            if len(corrected) == len(ends):
                return True
        return False

    async def _be_away(self, seconds: float, *, compacts: bool, spared: Instance | None = None) -> None:
        """Have nobody run for a time, in which Kafka compacts or not."""
        self.loop.bound += seconds
        self.is_horizon_over = self.is_nobody_there = True
        for one in self.world.instances:
            if one is not spared:
                one.kill()
        self.kafka.cleans = compacts
        self._roll()
        await asyncio.sleep(seconds)
        self._roll()
        self.kafka.clean()
        self.is_nobody_there, self.kafka.cleans = False, True
        for one in list(self.world.instances):
            if one.process.dead:
                self._restart(one)

    async def _break_trap(self, fault: Fault, instance: Instance) -> None:
        """Pause an owner in the middle of a Kafka transaction of its lane, until others have its shards."""
        if instance.backend is None:
            return

        def spring() -> None:
            self.tell("trapped")
            instance.host.cut()
            instance.process.paused = True

        lane = f"{PREFIX}{instance.backend.status.incarnation}."
        trap = self.kafka.trap = Trap(lane, int(fault.how * 5), spring)
        until = self.loop.now + 3
        while self.kafka.trap is trap and self.loop.now < until:  # noqa: ASYNC110 - the cluster has no events
            await asyncio.sleep(0.01)
        self.kafka.trap = None
        await self._break_session(fault, instance)
        await self._break_pause(fault, instance)

    async def _break_group(self, fault: Fault, instance: Instance) -> None:
        """Change a group's policy, and have new transactions of it refused or not."""
        name = GROUPS[fault.target % len(GROUPS)]
        policy = msgspec.structs.replace(POLICIES[name], first_check_after_s=0.5 + 2 * fault.how, max_checks=1)
        await self.put_group(group_spec(name, policy=policy, reject_prepares=fault.how < 0.5))
        await asyncio.sleep(fault.for_s)
        await self.put_group(group_spec(name, reject_prepares=False))

    async def _break_deleted(self, fault: Fault, instance: Instance) -> None:
        """Delete a topic that messages go to, and create it again."""
        name = tuple(TOPICS)[fault.target % len(TOPICS)]
        if name in self.kafka.topics:
            self.kafka.delete(name)
            self.note(Removed(at=self.now_ms + 1, topic=name))
            await asyncio.sleep(fault.for_s * fault.how)
            self.kafka.create(name, TOPICS[name], 1, TOPIC_SETTINGS, dry=False)

    async def _break_grown(self, fault: Fault, instance: Instance) -> None:
        name = tuple(TOPICS)[fault.target % len(TOPICS)]
        if name in self.kafka.topics:
            self.kafka.grow(name, len(self.kafka.topics[name].partitions) + 1)

    async def _break_below(self, fault: Fault, instance: Instance) -> None:
        """Leave partitions without replicas in sync: they take no records."""
        places = self.kafka.places(self.kafka.topics)
        for place in self.chance.sample(places, max(1, int(fault.how * len(places)))):
            if (partition := self.kafka.partition(place)) is not None:
                partition.isr = ()
        await asyncio.sleep(fault.for_s)
        self._have_replicas()

    def _have_replicas(self) -> None:
        for topic in self.kafka.topics.values():
            for partition in topic.partitions:
                partition.isr = partition.replicas

    async def _break_in_doubt(self, fault: Fault, instance: Instance) -> None:
        """Take records, and answer that they may be lost."""
        self.kafka.unsure = 0.1 + 0.8 * fault.how
        await asyncio.sleep(fault.for_s)
        self.kafka.unsure = 0.0

    async def _break_internal(self, fault: Fault, instance: Instance) -> None:
        """Deny an internal topic, for reading, writing or description."""
        names = sorted(name for name in self.kafka.topics if name.startswith(PREFIX))
        name = names[int(fault.how * len(names))]
        denied = (("Read", "Write", "Describe")[fault.target % 3], "topic", name)
        self.kafka.denied.add(denied)
        await asyncio.sleep(fault.for_s)
        self.kafka.denied.discard(denied)
        for one in list(self.world.instances):
            if one.died is not None and not one.process.dead:  # it was started meanwhile, and named the ACL
                self._restart(one)

    async def _break_operator(self, fault: Fault, instance: Instance) -> None:
        """Look for transactions page by page; look at them, check them now, and resume what is parked."""
        until, cursor = self.loop.now + fault.for_s, None
        while self.loop.now < until:
            await asyncio.sleep(self.chance.uniform(0.01, 0.5))
            state = self.chance.choice((None, *State))
            query = ListQuery(limit=3, cursor=cursor, state=None if cursor else state)
            cursor = None
            with suppress(HalfwayError, TimeoutError):
                page = await self.world.call(self.any(), 5, "list", query)
                cursor = page.next
                for one in page.transactions:
                    call = self.chance.choice(("get", "history", "check", "resume"))
                    await self.world.call(self.any(), 5, call, one.id)

    async def _break_endpoint(self, fault: Fault, instance: Instance) -> None:
        self.denied_checks = 0.3 + 0.7 * fault.how
        await asyncio.sleep(fault.for_s)
        self.denied_checks = self.plan.traits["endpoint_bad"]

    async def _break_session(self, fault: Fault, instance: Instance) -> None:
        for client in list(instance.host.clients.values()):
            if client.member is not None:
                client.end_session()

    async def _break_compact(self, fault: Fault, instance: Instance) -> None:
        self._roll()
        self.kafka.clean()

    def _roll(self) -> None:
        for topic in self.kafka.topics.values():
            for partition in topic.partitions:
                partition.roll()

    async def _break_threads(self, fault: Fault, instance: Instance) -> None:
        self.machine.late_share, self.machine.late_s = 0.5, 2 * fault.how
        await asyncio.sleep(fault.for_s / 2)
        self.machine.late_share, self.machine.late_s = (
            self.plan.traits["threads_late"],
            self.plan.traits["threads_late_s"],
        )

    async def mend(self) -> None:
        """End all faults: every part works again, and nothing is lost any more."""
        self.tell("faults end")
        network = self.world.network
        network.lost_share = network.late_share = 0.0
        self.machine.late_share = 0.0
        self.machine.stretch = 8
        self.denied_checks = 0.0
        self.kafka.denied.clear()
        self.kafka.late_s, self.kafka.unsure = None, 0.0
        self._have_replicas()
        self.kafka.transactions._markers_s = (0.0, 0.002)
        self._lead(self.kafka.places(self.kafka.topics), 1)
        for instance in list(self.world.instances):
            instance.process.clock_s = 0.0
            if instance.process.paused:
                self.loop.resume(instance.process)
            if instance.process.dead or (instance.task is not None and instance.task.done()):
                self._restart(instance)
            else:
                instance.host.heal()


def _writers(instance: Instance) -> frozenset[int]:
    """Return the ids of an instance's producers that write without transactions."""
    clients = instance.host.clients.values()
    return frozenset(one._producer for one in clients if isinstance(one, SimulatedProducer) and one._id is None)
