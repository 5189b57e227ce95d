"""Faults of every kind, in the order and with the lengths that a seed gives.

A fault counts only where it took effect: a coordinator was killed or frozen with requests in flight, was frozen or cut
off past its session, has noticed that its clock was set.
"""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Final

from checker.history import Fault, HistoryWriter
from tests.chaos.brokers import Broker, BrokerCluster
from tests.chaos.caller import Caller
from tests.chaos.coordinators import Instance
from tests.chaos.network_process import NetworkProcess

SESSION_S: Final = 6.0
"""Above the time in which the brokers find out that one of them is gone."""
_READY_WITHIN_S: Final = 90.0
RECOVERING: Final = 0.2
"""How often a fault hits a coordinator that may not be ready yet."""
_LOOK_AGAIN_S: Final = 0.1
_PATIENCE_S: Final = 10.0
"""For one that is to serve when it is hit; then it is hit as it is."""
FULL_STOP: Final = "full_stop"

Kind = Callable[[], Awaitable[None]]


@dataclass(frozen=True, kw_only=True)
class Pace:
    """How often one side is broken."""

    wanted: int
    """So many faults are to take effect."""
    gap_s: float
    """Between two of them, on average, and at least where the load is slow."""


class Faults:
    """Breaks coordinators and brokers, each side one at a time, and mends them again."""

    def __init__(
        self,
        cluster: BrokerCluster,
        instances: Sequence[Instance],
        networks: Mapping[int, NetworkProcess],
        caller: Caller,
        history: HistoryWriter,
        chance: random.Random,
        kinds: Collection[str] = (),
    ) -> None:
        """Keep the parts; `kinds` are those that are wanted, all of them where there are none."""
        self._kinds = kinds
        self._cluster = cluster
        self._instances = instances
        self._networks = networks
        self._caller = caller
        self._history = history
        self._chance = chance
        self._coordinators_free = asyncio.Lock()
        self._brokers_free = asyncio.Lock()
        self._over = asyncio.Event()
        self.happened: Counter[str] = Counter()
        """Faults that took effect, by kind."""
        self.deaths: list[str] = []
        """Coordinators that ended by themselves; they are started again, as whoever runs them would."""

    async def run(self, coordinator: Pace, broker: Pace, progress: Callable[[], float]) -> None:
        """Go on until it is `over`; `progress` is the share of the load that is done: faults are not ahead of it."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self._watch())
            group.create_task(self._play(COORDINATOR_FAULTS, coordinator, progress))
            group.create_task(self._play(BROKER_FAULTS, broker, progress))

    def over(self) -> None:
        """Let the faults that are being played come to their end, and no other begin."""
        self._over.set()

    async def _wait(self, seconds: float) -> None:
        with suppress(TimeoutError):
            await asyncio.wait_for(self._over.wait(), seconds)

    def reached(self, coordinator: Pace, broker: Pace, full_stops: int) -> bool:
        """Tell whether so many faults of each side, and so many full stops, took effect."""
        stopped = self.happened[FULL_STOP]
        return (
            self._of(COORDINATOR_FAULTS) >= coordinator.wanted
            and self._of(BROKER_FAULTS) - stopped >= broker.wanted
            and stopped >= full_stops
        )

    def _of(self, kinds: Iterable[str]) -> int:
        return sum(self.happened[kind] for kind in kinds)

    async def _play(self, kinds: Mapping[str, int], pace: Pace, progress: Callable[[], float]) -> None:
        kinds = {kind: times for kind, times in kinds.items() if not self._kinds or kind in self._kinds}
        deck: list[str] = []
        if not kinds:
            return
        await self._wait(self._chance.uniform(1, 2))
        while not self._over.is_set():
            if not deck:
                deck = [kind for kind, times in kinds.items() for _ in range(times)]
                self._chance.shuffle(deck)
            fault: Kind = getattr(self, "_" + deck.pop())
            await fault()
            await self._wait(pace.gap_s * self._chance.uniform(0.3, 1.7))
            while pace.wanted and progress() < min(1.0, self._of(kinds) / pace.wanted) and not self._over.is_set():
                await self._wait(_LOOK_AGAIN_S)

    def _note(self, kind: str, target: str, *, counts: bool, **detail: Any) -> None:
        self._history.write(Fault(kind=kind, target=target, counts=counts, detail=detail))
        if counts:
            self.happened[kind] += 1

    # --- coordinators

    async def _some_instance(self) -> Instance | None:
        """Choose one that runs: most times one that serves, at times one that is still recovering."""
        running = [instance for instance in self._instances if instance.running and not instance.paused]
        if not running:
            return None
        chosen = self._chance.choice(running)
        if self._chance.random() < RECOVERING:
            return chosen
        patience = asyncio.get_running_loop().time() + _PATIENCE_S
        while asyncio.get_running_loop().time() < patience:
            if await asyncio.to_thread(chosen.is_ready):
                break
            await asyncio.sleep(_LOOK_AGAIN_S)
        return chosen

    async def _coordinator_kill(self) -> None:
        """Kill one, sometimes two; start them again at once or some time later."""
        async with self._coordinators_free:
            down = []
            for _ in range(2 if self._chance.random() < 0.25 else 1):
                if (instance := await self._some_instance()) is not None:
                    busy = self._caller.in_flight[instance.number]
                    await asyncio.to_thread(instance.kill)
                    self._note("coordinator_kill", instance.name, counts=busy > 0, in_flight=busy)
                    down.append(instance)
            await asyncio.sleep(self._chance.choice((0, self._chance.uniform(0, 1.5 * SESSION_S))))
            for instance in down:
                await asyncio.to_thread(instance.launch)

    async def _coordinator_pause(self) -> None:
        """Freeze one past its session, so that others own its shards when it thaws."""
        async with self._coordinators_free:
            if (instance := await self._some_instance()) is None:
                return
            await self._until_busy(instance)
            busy = self._caller.in_flight[instance.number]
            for_s = SESSION_S + self._chance.uniform(1, 5)
            await asyncio.to_thread(instance.pause)
            try:
                await asyncio.sleep(for_s)
            finally:
                instance.resume()
            self._note("coordinator_pause", instance.name, counts=busy > 0, in_flight=busy, seconds=for_s)

    async def _coordinator_cut(self) -> None:
        """Cut one off from all brokers past its session, while its callers still reach it."""
        async with self._coordinators_free:
            if (instance := await self._some_instance()) is None:
                return
            await self._until_busy(instance)
            network = self._networks[instance.number]
            for_s = SESSION_S + self._chance.uniform(1, 5)
            await network.cut()
            await asyncio.sleep(for_s)
            if self._chance.random() < 0.3:
                await network.reset()
            held = await network.mend()
            self._note("coordinator_cut", instance.name, counts=held > 0, seconds=for_s)

    async def _coordinator_slow_network(self) -> None:
        async with self._coordinators_free:
            if (instance := await self._some_instance()) is None:
                return
            network = self._networks[instance.number]
            await network.delay(delay_s := self._chance.uniform(0.05, 0.4))
            await asyncio.sleep(self._chance.uniform(2, 6))
            await network.delay(0)
            self._note("coordinator_slow_network", instance.name, counts=True, delay_s=delay_s)

    async def _coordinator_stop(self) -> None:
        """Stop one in order, as an upgrade does, and start it again."""
        async with self._coordinators_free:
            if (instance := await self._some_instance()) is None:
                return
            busy = self._caller.in_flight[instance.number]
            status = await asyncio.to_thread(instance.stop)
            self._note("coordinator_stop", instance.name, counts=busy > 0, in_flight=busy, status=status)
            await asyncio.to_thread(instance.launch)

    async def _coordinator_clock(self) -> None:
        """Set a clock, back or ahead, and some time later right again."""
        async with self._coordinators_free:
            if (instance := await self._some_instance()) is None:
                return
            position = len(instance.log)
            ahead_s = self._chance.choice((-3600, -60, -5, 5, 60, 600))
            instance.clock.set(ahead_s)
            try:
                await asyncio.sleep(self._chance.uniform(2, 5))
            finally:
                instance.clock.set(0)
            noticed = "clock_jumped" in instance.log[position:]
            self._note("coordinator_clock", instance.name, counts=noticed, ahead_s=ahead_s)

    async def _until_busy(self, instance: Instance) -> None:
        for _ in range(30):
            if self._caller.in_flight[instance.number] > 0:
                return
            await asyncio.sleep(_LOOK_AGAIN_S)

    # --- brokers

    def _some_broker(self) -> Broker:
        return self._chance.choice(self._cluster.brokers)

    async def _broker_kill(self) -> None:
        async with self._brokers_free:
            broker = self._some_broker()
            busy = self._caller.in_flight.total()
            await asyncio.to_thread(broker.kill)
            await asyncio.sleep(self._chance.uniform(0, 6))
            await self._restart(broker)
            self._note("broker_kill", broker.name, counts=busy > 0, in_flight=busy)

    async def _broker_stop(self) -> None:
        """Stop one in order and start it again, as a rolling restart does."""
        async with self._brokers_free:
            broker = self._some_broker()
            busy = self._caller.in_flight.total()
            await asyncio.to_thread(broker.stop)
            await self._restart(broker)
            self._note("broker_stop", broker.name, counts=busy > 0, in_flight=busy)

    async def _broker_pause(self) -> None:
        """Freeze one past its own session with the controller."""
        async with self._brokers_free:
            broker = self._some_broker()
            busy = self._caller.in_flight.total()
            await asyncio.to_thread(broker.pause)
            try:
                await asyncio.sleep(self._chance.uniform(4, 9))
            finally:
                broker.resume()
            self._note("broker_pause", broker.name, counts=busy > 0, in_flight=busy)
            await asyncio.to_thread(self._cluster.wait_until_ready)

    async def _broker_slow_disk(self) -> None:
        """Imitate a disk that stalls: the broker stands still for moments, each shorter than its session."""
        async with self._brokers_free:
            broker = self._some_broker()
            for _ in range(self._chance.randrange(5, 12)):
                await asyncio.to_thread(broker.pause)
                try:
                    await asyncio.sleep(self._chance.uniform(0.1, 0.8))
                finally:
                    broker.resume()
                await asyncio.sleep(self._chance.uniform(0.05, 0.3))
            self._note("broker_slow_disk", broker.name, counts=True)

    async def _full_stop(self) -> None:
        """Kill everything at one instant, and start it again."""
        async with self._brokers_free, self._coordinators_free:
            busy = self._caller.in_flight.total()
            everything: list[Instance | Broker] = [*self._instances, *self._cluster.brokers]
            await asyncio.gather(*(asyncio.to_thread(part.kill) for part in everything if part.running))
            for part in self._chance.sample(everything, len(everything)):
                await asyncio.to_thread(part.launch)
            await asyncio.to_thread(self._cluster.wait_until_ready)
            self._note(FULL_STOP, "everything", counts=busy > 0, in_flight=busy)

    async def _restart(self, broker: Broker) -> None:
        await asyncio.to_thread(broker.launch)
        # With another one down too, nothing could be written at all: that is what the full stop is for.
        await asyncio.to_thread(self._cluster.wait_until_ready)

    # --- after it

    async def _watch(self) -> None:
        """Start again whatever coordinator ended by itself."""
        while not self._over.is_set():
            async with self._coordinators_free:
                self._start_the_dead()
            await self._wait(1)

    def _start_the_dead(self) -> None:
        for instance in self._instances:
            if not instance.running:
                self.deaths.append(f"{instance.name} ended with {instance.exit_status(0)}")
                instance.launch()

    async def mend(self) -> None:
        """Have everything run again, and return when it does."""
        for broker in self._cluster.brokers:
            if not broker.running:
                await asyncio.to_thread(broker.launch)
            elif broker.paused:
                broker.resume()
        for network in self._networks.values():
            await network.delay(0)
            await network.mend()
        for instance in self._instances:
            instance.clock.set(0)
            if not instance.running:
                instance.launch()
            elif instance.paused:
                instance.resume()
        await asyncio.to_thread(self._cluster.wait_until_ready)
        for instance in self._instances:
            await asyncio.to_thread(instance.wait_until_ready, _READY_WITHIN_S)


COORDINATOR_FAULTS: Final[Mapping[str, int]] = {
    "coordinator_kill": 5,
    "coordinator_pause": 4,
    "coordinator_cut": 4,
    "coordinator_stop": 2,
    "coordinator_clock": 2,
    "coordinator_slow_network": 1,
}
"""How many of each there are in a deck; the next deck begins when one is played."""
BROKER_FAULTS: Final[Mapping[str, int]] = {
    "broker_kill": 4,
    "broker_stop": 2,
    "broker_pause": 2,
    "broker_slow_disk": 1,
    FULL_STOP: 1,
}
