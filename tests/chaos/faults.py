"""Faults of every kind, whose order and lengths follow from a seed.

A fault counts only if it took effect: a coordinator was killed or paused with requests in flight, was paused or
disconnected past its session, has noticed that its clock was set, or requests were affected as arranged.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Iterable, Mapping
from contextlib import AsyncExitStack
from dataclasses import dataclass
from typing import Final

from tests.chaos.broker_faults import BROKER_FAULTS, FULL_STOP, BrokerFaults
from tests.chaos.coordinator_faults import AWAY, COORDINATOR_FAULTS, REQUEST_FAULTS, CoordinatorFaults
from tests.chaos.stage import LOOK_AGAIN_S, Stage
from tests.chaos.topic_faults import TOPIC_FAULTS, TopicFaults

KINDS: Final = (*COORDINATOR_FAULTS, *BROKER_FAULTS, *TOPIC_FAULTS)
LONGEST_AWAY_S: Final = 200.0
"""If tombstones live longer, no instance is away for as long as that: the run would be too long."""


def possible_kinds(horizon_s: float) -> frozenset[str]:
    """Return the kinds that a run with this outcome horizon plays by default."""
    return frozenset(kind for kind in KINDS if kind != AWAY or horizon_s <= LONGEST_AWAY_S)


@dataclass(frozen=True, kw_only=True)
class Pace:
    """How often one side gets faults."""

    wanted: int
    """The number of faults that must take effect."""
    gap_s: float
    """The mean time between two faults, at least while the load is slow."""


@dataclass(frozen=True, kw_only=True)
class Paces:
    """How often each side gets faults."""

    coordinators: Pace
    brokers: Pace
    topics: Pace
    full_stops: int


class Faults:
    """Injects faults into coordinators, brokers and topics, one at a time for each side, and repairs them."""

    def __init__(self, stage: Stage, topics: TopicFaults, kinds: Collection[str] = ()) -> None:
        """Keep the parts; `kinds` are the selected kinds, all if it is empty."""
        self._stage = stage
        self._kinds = frozenset(kinds) or possible_kinds(stage.horizon_s)
        self._coordinators = CoordinatorFaults(stage)
        self._brokers = BrokerFaults(stage)
        self._topics = topics
        self.deaths: list[str] = []
        """Coordinators that ended by themselves; they are started again, as an operator would."""

    async def run(self, paces: Paces, progress: Callable[[], float]) -> None:
        """Continue until it is `over`; `progress` is the done share of the load, which faults do not exceed."""
        stage = self._stage
        # Faults of topics wait for no other side; one that needs a broker requests it itself.
        sides = (
            (self._coordinators, COORDINATOR_FAULTS, paces.coordinators, stage.coordinators_free),
            (self._brokers, BROKER_FAULTS, paces.brokers, stage.brokers_free),
            (self._topics, TOPIC_FAULTS, paces.topics, asyncio.Lock()),
        )
        async with asyncio.TaskGroup() as group:
            group.create_task(self._watch())
            for side, deck, pace, free in sides:
                group.create_task(self._play(side, deck, pace, free, progress))

    def over(self) -> None:
        """Wait until the current faults end, and begin no others."""
        self._stage.is_over.set()

    def reached(self, paces: Paces) -> bool:
        """Return whether enough faults of each side, and enough full stops, took effect."""
        stopped = self._stage.happened[FULL_STOP]
        return (
            self._of(COORDINATOR_FAULTS) >= paces.coordinators.wanted
            and self._of(BROKER_FAULTS) - stopped >= paces.brokers.wanted
            and self._of(TOPIC_FAULTS) >= paces.topics.wanted
            and stopped >= paces.full_stops
        )

    def _of(self, kinds: Iterable[str]) -> int:
        names = {name for kind in kinds for name in (REQUEST_FAULTS if kind == "requests" else (kind,))}
        return sum(self._stage.happened[name] for name in names)

    def without_effect(self) -> list[str]:
        """Return the selected kinds that never took effect."""
        return sorted(kind for kind in KINDS if kind in self._kinds and not self._of((kind,)))

    async def _play(
        self,
        side: CoordinatorFaults | BrokerFaults | TopicFaults,
        kinds: Mapping[str, int],
        pace: Pace,
        free: asyncio.Lock,
        progress: Callable[[], float],
    ) -> None:
        stage = self._stage
        kinds = {kind: times for kind, times in kinds.items() if kind in self._kinds}
        deck: list[str] = []
        if not kinds:
            return
        await stage.wait(stage.between(1, 2))
        while not stage.is_over.is_set():
            if not deck:
                deck = [kind for kind, times in kinds.items() for _ in range(times)]
                stage.chance.shuffle(deck)
            kind = deck.pop()
            async with AsyncExitStack() as stack:
                await stack.enter_async_context(free)
                stack.enter_context(stage.playing(kind))
                stage.coordinator_faults += side is self._coordinators
                await getattr(side, kind)()
                stage.coordinator_faults += side is self._coordinators
            await stage.wait(pace.gap_s * stage.between(0.3, 1.7))
            while pace.wanted and progress() < min(1.0, self._of(kinds) / pace.wanted) and not stage.is_over.is_set():
                await stage.wait(LOOK_AGAIN_S)

    async def _watch(self) -> None:
        """Restart every coordinator that ended by itself."""
        while not self._stage.is_over.is_set():
            async with self._stage.coordinators_free:
                self._start_the_dead()
            await self._stage.wait(1)

    def _start_the_dead(self) -> None:
        for instance in self._stage.instances:
            if not instance.running:
                self.deaths.append(f"{instance.name} ended with {instance.exit_status(0)}")
                instance.launch()

    async def mend(self) -> None:
        """Start everything again, and return when it runs."""
        cluster = self._stage.cluster
        for broker in cluster.brokers:
            if not broker.running:
                await asyncio.to_thread(broker.launch)
            elif broker.paused:
                broker.resume()
        for network in self._stage.networks.values():
            await network.delay(0)
            await network.let_go()
            await network.mend()
        for instance in self._stage.instances:
            instance.clock.set(0)
            if not instance.running:
                instance.launch()
            elif instance.paused:
                instance.resume()
        await asyncio.to_thread(cluster.wait_until_ready)
        for instance in self._stage.instances:
            await asyncio.to_thread(instance.wait_until_ready)


__all__ = ["BROKER_FAULTS", "COORDINATOR_FAULTS", "FULL_STOP", "KINDS", "TOPIC_FAULTS", "Faults", "Pace", "Paces"]
