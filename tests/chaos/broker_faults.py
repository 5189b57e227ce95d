"""Faults of brokers, one broker at a time, and the full stop of everything."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
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

    async def broker_kill(self) -> None:
        """Kill a broker, and start it again some time later."""
        stage, since, broker = self._stage, self._stage.now(), self._some_broker()
        busy = stage.caller.in_flight.total()
        await asyncio.to_thread(broker.kill)
        await asyncio.sleep(stage.between(0, 6))
        await self._restart(broker)
        stage.note("broker_kill", broker.name, counts=busy > 0, since=since, in_flight=busy)

    async def broker_stop(self) -> None:
        """Shut a broker down and start it again, as a rolling restart does."""
        stage, since, broker = self._stage, self._stage.now(), self._some_broker()
        busy = stage.caller.in_flight.total()
        await asyncio.to_thread(broker.stop)
        await self._restart(broker)
        stage.note("broker_stop", broker.name, counts=busy > 0, since=since, in_flight=busy)

    async def broker_pause(self) -> None:
        """Pause a broker past its session with the controller."""
        stage, since, broker = self._stage, self._stage.now(), self._some_broker()
        busy = stage.caller.in_flight.total()
        await asyncio.to_thread(broker.pause)
        try:
            await asyncio.sleep(stage.between(4, 9))
        finally:
            broker.resume()
        await asyncio.to_thread(stage.cluster.wait_until_ready)
        stage.note("broker_pause", broker.name, counts=busy > 0, since=since, in_flight=busy)

    async def broker_slow_disk(self) -> None:
        """Imitate a disk that stalls: pause the broker for moments that are shorter than its session."""
        stage, since, broker = self._stage, self._stage.now(), self._some_broker()
        for _ in range(stage.chance.randrange(5, 12)):
            await asyncio.to_thread(broker.pause)
            try:
                await asyncio.sleep(stage.between(0.1, 0.8))
            finally:
                broker.resume()
            await asyncio.sleep(stage.between(0.05, 0.3))
        stage.note("broker_slow_disk", broker.name, counts=True, since=since)

    async def full_stop(self) -> None:
        """Kill everything at the same moment, and start it again."""
        stage, since = self._stage, self._stage.now()
        async with stage.coordinators_free:
            busy = stage.caller.in_flight.total()
            everything: list[Instance | Broker] = [*stage.instances, *stage.cluster.brokers]
            await asyncio.gather(*(asyncio.to_thread(part.kill) for part in everything if part.running))
            for part in stage.chance.sample(everything, len(everything)):
                await asyncio.to_thread(part.launch)
            await asyncio.to_thread(stage.cluster.wait_until_ready)
            stage.note(FULL_STOP, "everything", counts=busy > 0, since=since, in_flight=busy)

    async def _restart(self, broker: Broker) -> None:
        await asyncio.to_thread(broker.launch)
        # With a second broker down nothing could be written at all: the full stop covers that.
        await asyncio.to_thread(self._stage.cluster.wait_until_ready)


BROKER_FAULTS: Final[Mapping[str, int]] = {
    "broker_kill": 4,
    "broker_stop": 2,
    "broker_pause": 2,
    "broker_slow_disk": 1,
    FULL_STOP: 1,
}
