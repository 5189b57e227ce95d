"""Faults of coordinators, of their clocks, and of the network between them and the brokers."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Final

from tests.chaos.coordinators import Instance
from tests.chaos.deletions import TABLES, Deletions
from tests.chaos.passer_by import PasserBy
from tests.chaos.requests import Api, Fate, Meeting
from tests.chaos.stage import SESSION_S, Stage

_REQUESTS: Final[Mapping[Api, tuple[Fate, ...]]] = {
    Api.ADD_PARTITIONS_TO_TXN: (Fate.DELAY, Fate.HANG, Fate.LOSE, Fate.LOSE_ANSWER),
    Api.END_TXN: (Fate.DELAY, Fate.HANG, Fate.LOSE, Fate.LOSE_ANSWER),
    Api.FETCH: (Fate.DELAY, Fate.HANG, Fate.LOSE),
    Api.INIT_PRODUCER_ID: (Fate.DELAY, Fate.HANG, Fate.LOSE, Fate.LOSE_ANSWER),
    Api.JOIN_GROUP: (Fate.DELAY, Fate.LOSE),
}
_AT_A_START: Final = (Api.INIT_PRODUCER_ID, Api.JOIN_GROUP)
"""Requests of a coordinator that starts, joins or acquires shards: another coordinator is killed to cause them."""
AWAY: Final = "coordinator_away"
_TAKEN_OVER_MS: Final = 30_000
"""For how long an instance that is away explains unserved shards: then others have taken them over."""
_JOINED_WITHIN_S: Final = 40.0
_SERVED_AGAIN_LOOKS: Final = 20


class CoordinatorFaults:
    """The faults of coordinators, one at a time."""

    def __init__(self, stage: Stage) -> None:
        """Keep the stage."""
        self._stage = stage

    async def coordinator_kill(self) -> None:
        """Kill one, sometimes two; start them again at once or some time later."""
        stage = self._stage
        down = []
        for _ in range(2 if stage.chance.random() < 0.25 else 1):
            if (instance := await stage.some_instance()) is not None:
                down.append((instance, stage.busy(instance), stage.now()))
                await asyncio.to_thread(instance.kill)
        await asyncio.sleep(stage.chance.choice((0, stage.between(0, 1.5 * SESSION_S))))
        for instance, busy, since in down:
            await asyncio.to_thread(instance.launch)
            stage.note("coordinator_kill", instance.name, counts=busy > 0, since=since, in_flight=busy)

    async def coordinator_pause(self) -> None:
        """Pause one past its session, so that others own its shards when it continues."""
        if (instance := await self._stage.some_instance()) is not None:
            await self._stage.until_busy(instance)
            await self._pause(instance, "coordinator_pause")

    async def _pause(self, instance: Instance, kind: str) -> None:
        stage, since, busy = self._stage, self._stage.now(), self._stage.busy(instance)
        for_s = SESSION_S + stage.between(1, 5)
        await asyncio.to_thread(instance.pause)
        try:
            await asyncio.sleep(for_s)
        finally:
            instance.resume()
        stage.note(kind, instance.name, counts=busy > 0, since=since, in_flight=busy, seconds=for_s)

    async def coordinator_cut(self) -> None:
        """Disconnect one from all brokers past its session, while its callers still reach it."""
        if (instance := await self._stage.some_instance()) is not None:
            await self._stage.until_busy(instance)
            await self._cut(instance, "coordinator_cut", None)

    async def _cut(self, instance: Instance, kind: str, broker: int | None) -> None:
        stage, since = self._stage, self._stage.now()
        network = stage.networks[instance.number]
        for_s = SESSION_S + stage.between(1, 5)
        await network.cut(broker)
        await asyncio.sleep(for_s)
        if stage.chance.random() < 0.3:
            await network.reset()
        held = await network.mend()
        stage.note(kind, instance.name, counts=held > 0, since=since, seconds=for_s, broker=broker)

    async def coordinator_cut_from_one_broker(self) -> None:
        """Disconnect one coordinator from one broker; it reaches the others."""
        if (instance := await self._stage.some_instance()) is not None:
            await self._stage.until_busy(instance)
            broker = self._stage.chance.randrange(len(self._stage.cluster.brokers))
            await self._cut(instance, "coordinator_cut_from_one_broker", broker)

    async def coordinators_pause_and_cut(self) -> None:
        """Pause one and disconnect another at the same moment."""
        stage = self._stage
        if (frozen := await stage.some_instance()) is None or (cut := await stage.some_instance(frozen)) is None:
            return
        await stage.until_busy(frozen)
        since = stage.now()
        kind = "coordinators_pause_and_cut"
        busy = stage.busy(frozen)
        await asyncio.gather(self._pause(frozen, "coordinator_pause"), self._cut(cut, "coordinator_cut", None))
        stage.note(kind, f"{frozen.name} and {cut.name}", counts=busy > 0, since=since)

    async def coordinator_away(self) -> None:
        """Freeze one or disconnect it for longer than a tombstone lives, while a key is revoked and a group is deleted.

        A frozen one gets no requests from producers: what waits in its sockets would reach it when outcomes are
        forgotten, and would then be prepared as new transactions.
        """
        stage = self._stage
        for instance in stage.instances:
            await asyncio.to_thread(instance.wait_until_ready)
        away = stage.chance.choice(stage.instances)
        freezes = stage.chance.random() < 0.5
        for_s = stage.horizon_s + stage.between(1, 4)
        deletions = Deletions(stage.cluster, stage.caller, stage.instances)
        async with stage.brokers_free:
            await deletions.make()
        if freezes:
            stage.caller.resting = away
            await stage.until_idle(away)
        since, position = stage.now(), len(away.log)
        loop = asyncio.get_running_loop()
        until = loop.time() + for_s
        await (asyncio.to_thread(away.pause) if freezes else stage.networks[away.number].cut(None))
        try:
            async with stage.brokers_free:
                await deletions.delete(away)
            while loop.time() < until:
                if not freezes:
                    await deletions.look(away)
                await asyncio.sleep(min(1.0, max(0.0, until - loop.time())))
        finally:
            if freezes:
                away.resume()
            else:
                await stage.networks[away.number].mend()
            stage.caller.resting = None
        noticed_s = await deletions.noticed(away)
        for other in stage.instances:
            await deletions.look(other)
        stage.admitted += deletions.violations
        counts = away.log[position:].count('"table_swapped"') >= len(TABLES)
        detail = {"freezes": freezes, "seconds": for_s, "noticed_s": noticed_s}
        stage.note(AWAY, away.name, counts=counts, since=since, stops_ms=_TAKEN_OVER_MS, **detail)

    async def coordinator_slow_network(self) -> None:
        """Delay all traffic of one."""
        stage, since = self._stage, self._stage.now()
        if (instance := await stage.some_instance()) is None:
            return
        network = stage.networks[instance.number]
        await network.delay(delay_s := stage.between(0.05, 0.4))
        await asyncio.sleep(stage.between(2, 6))
        await network.delay(0)
        stage.note("coordinator_slow_network", instance.name, counts=True, since=since, delay_s=delay_s)

    async def coordinator_stop(self) -> None:
        """Shut one down, as an upgrade does, and start it again."""
        stage = self._stage
        if (instance := await stage.some_instance()) is None:
            return
        since, busy = stage.now(), stage.busy(instance)
        status = await asyncio.to_thread(instance.stop)
        await asyncio.to_thread(instance.launch)
        stage.note("coordinator_stop", instance.name, counts=busy > 0, since=since, in_flight=busy, status=status)

    async def coordinator_clock(self) -> None:
        """Set a clock back or ahead, and correct it some time later."""
        stage = self._stage
        if (instance := await stage.some_instance()) is None:
            return
        since, position = stage.now(), len(instance.log)
        ahead_s = stage.chance.choice(stage.clock_steps_s)
        instance.clock.set(ahead_s)
        try:
            await asyncio.sleep(stage.between(2, 5))
        finally:
            instance.clock.set(0)
        noticed = "clock_jumped" in instance.log[position:]
        stage.note("coordinator_clock", instance.name, counts=noticed, since=since, ahead_s=ahead_s)

    async def coordinators_clock(self) -> None:
        """Set all clocks at once, by the same time or each by its own, and correct them some time later."""
        stage, since = self._stage, self._stage.now()
        positions = {instance: len(instance.log) for instance in stage.instances}
        shared_s = stage.chance.choice(stage.clock_steps_s)
        together = stage.chance.random() < 0.5
        for instance in stage.instances:
            instance.clock.set(shared_s if together else stage.chance.choice(stage.clock_steps_s))
        ahead_s = [instance.clock.ahead_s for instance in stage.instances]
        try:
            await asyncio.sleep(stage.between(2, 5))
        finally:
            for instance in stage.instances:
                instance.clock.set(0)
        noticed = [instance.name for instance, at in positions.items() if "clock_jumped" in instance.log[at:]]
        names = " and ".join(noticed)
        stage.note("coordinators_clock", names, counts=len(noticed) > 1, since=since, ahead_s=ahead_s)

    async def requests(self) -> None:
        """Delay or hold requests of one kind, or break their connections, for one coordinator."""
        stage = self._stage
        if (instance := await stage.some_instance()) is None:
            return
        since = stage.now()
        api = stage.chance.choice(list(_REQUESTS))
        fate = stage.chance.choice(_REQUESTS[api])
        share = 1.0 if api in _AT_A_START or fate is Fate.HANG else stage.between(0.1, 0.6)
        network = stage.networks[instance.number]
        await network.meet(Meeting(api=api, fate=fate, share=share, seconds=stage.between(0.2, 2)))
        other = await stage.some_instance(instance) if api in _AT_A_START else None
        if other is not None:
            await asyncio.to_thread(other.kill)
        await asyncio.sleep(stage.between(3, 14))
        met = await network.let_go()
        if other is not None:
            await asyncio.to_thread(other.launch)
        name = f"request_{api.name.lower()}"
        stage.note(name, instance.name, counts=met > 0, since=since, fate=fate, share=share, met=met)

    async def release_hangs(self) -> None:
        """Let an instance join and leave while a release of a shard hangs; sometimes pause the former owner afterwards.

        The requests that begin the release arrive only when the shard has gone back to its former owner.
        """
        stage, since = self._stage, self._stage.now()
        owners = stage.instances[0].topic("owners").encode()
        release = Meeting(api=Api.ADD_PARTITIONS_TO_TXN, fate=Fate.HANG, times=1, containing=owners)
        for network in stage.networks.values():
            await network.meet(release)
        passer_by = PasserBy(stage.cluster.bootstrap_servers, stage.instances[0].prefix, SESSION_S)
        got = await asyncio.to_thread(passer_by.join_and_leave, _JOINED_WITHIN_S)
        for _ in range(_SERVED_AGAIN_LOOKS):
            await asyncio.sleep(1)
            if not stage.away():
                break
        await asyncio.sleep(stage.between(0, 2))
        met = {instance: await stage.networks[instance.number].met() for instance in stage.instances}
        held = [instance for instance, times in met.items() if times and instance.running and not instance.paused]
        for network in stage.networks.values():
            await network.let_go()
        stage.note("release_hangs", passer_by.name, counts=bool(held and got), since=since, shards=got, held=len(held))
        if held and stage.chance.random() < 0.7:
            await asyncio.sleep(stage.between(0, 1))
            await stage.until_busy(held[0])
            await self._pause(held[0], "coordinator_pause")


COORDINATOR_FAULTS: Final[Mapping[str, int]] = {
    "coordinator_kill": 5,
    "coordinator_pause": 4,
    "coordinator_cut": 3,
    "coordinator_cut_from_one_broker": 2,
    "coordinators_pause_and_cut": 1,
    AWAY: 1,
    "coordinator_stop": 2,
    "coordinator_clock": 2,
    "coordinators_clock": 1,
    "coordinator_slow_network": 1,
    "requests": 6,
    "release_hangs": 2,
}
"""How often each fault is in a deck; the next deck begins when one is played."""
REQUEST_FAULTS: Final = tuple(f"request_{api.name.lower()}" for api in _REQUESTS)
"""The name under which `requests` is recorded."""
