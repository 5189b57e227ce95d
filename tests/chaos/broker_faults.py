"""Faults of brokers, one broker at a time, and the full stop of everything."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Final

from tests.chaos.brokers import Broker
from tests.chaos.coordinators import Instance
from tests.chaos.stage import Stage

FULL_STOP: Final = "full_stop"


class BrokerFaults:
    """The faults of brokers."""

    def __init__(self, stage: Stage) -> None:
        """Keep the stage."""
        self._stage = stage

    def _some_broker(self) -> Broker:
        return self._stage.chance.choice(self._stage.cluster.brokers)

    @contextmanager
    def _noted(self, kind: str, target: str) -> Iterator[None]:
        """Record a fault, which counts if calls were under way when it began."""
        since, busy = self._stage.now(), self._stage.caller.in_flight.total()
        yield
        self._stage.note(kind, target, counts=busy > 0, since=since, in_flight=busy)

    async def broker_kill(self) -> None:
        """Kill a broker, and start it again some time later."""
        broker = self._some_broker()
        with self._noted("broker_kill", broker.name):
            await asyncio.to_thread(broker.kill)
            await asyncio.sleep(self._stage.between(0, 6))
            await self._restart(broker)

    async def broker_stop(self) -> None:
        """Shut a broker down and start it again."""
        await self._roll("broker_stop", [self._some_broker()])

    async def brokers_rolled(self) -> None:
        """Restart all brokers, one after the other, as an upgrade does."""
        brokers = self._stage.cluster.brokers
        await self._roll("brokers_rolled", self._stage.chance.sample(brokers, len(brokers)))

    async def _roll(self, kind: str, brokers: Sequence[Broker]) -> None:
        with self._noted(kind, ", ".join(broker.name for broker in brokers)):
            for broker in brokers:
                await asyncio.to_thread(broker.stop)
                await self._restart(broker)

    async def leaders_elected(self) -> None:
        """Let other replicas of all partitions lead, several times, as an operator does who balances the brokers."""
        stage = self._stage
        with self._noted("leaders_elected", "all"):
            for _ in range(stage.chance.randrange(1, 9)):
                await asyncio.to_thread(stage.cluster.let_others_lead)
                await asyncio.sleep(stage.between(0.2, 2))

    async def replicas_moved(self) -> None:
        """Move some of the internal topics, Kafka's too, to two brokers, to others, and back to all three."""
        with self._noted("replicas_moved", "internal topics"):
            await asyncio.to_thread(self._stage.cluster.move_some, self._stage.chance)

    async def broker_pause(self) -> None:
        """Pause a broker past its session with the controller."""
        broker = self._some_broker()
        with self._noted("broker_pause", broker.name):
            await self._pause(broker, self._stage.between(4, 9))
            await asyncio.to_thread(self._stage.cluster.wait_until_ready)

    async def broker_slow_disk(self) -> None:
        """Imitate a disk that stalls: pause the broker for moments that are shorter than its session."""
        stage, broker = self._stage, self._some_broker()
        with self._noted("broker_slow_disk", broker.name):
            for _ in range(stage.chance.randrange(5, 12)):
                await self._pause(broker, stage.between(0.1, 0.8))
                await asyncio.sleep(stage.between(0.05, 0.3))

    async def full_stop(self) -> None:
        """Kill everything at the same moment, and start it again."""
        stage = self._stage
        async with stage.coordinators_free:
            with self._noted(FULL_STOP, "everything"):
                everything: list[Instance | Broker] = [*stage.instances, *stage.cluster.brokers]
                await asyncio.gather(*(asyncio.to_thread(part.kill) for part in everything if part.running))
                for part in stage.chance.sample(everything, len(everything)):
                    await asyncio.to_thread(part.launch)
                await asyncio.to_thread(stage.cluster.wait_until_ready)

    async def _pause(self, broker: Broker, seconds: float) -> None:
        await asyncio.to_thread(broker.pause)
        try:
            await asyncio.sleep(seconds)
        finally:
            broker.resume()

    async def _restart(self, broker: Broker) -> None:
        await asyncio.to_thread(broker.launch)
        # With a second broker down nothing could be written at all: the full stop covers that.
        await asyncio.to_thread(self._stage.cluster.wait_until_ready)


BROKER_FAULTS: Final[Mapping[str, int]] = {
    "broker_kill": 4,
    "broker_stop": 2,
    "broker_pause": 2,
    "broker_slow_disk": 1,
    "brokers_rolled": 1,
    "leaders_elected": 1,
    "replicas_moved": 1,
    FULL_STOP: 1,
}
