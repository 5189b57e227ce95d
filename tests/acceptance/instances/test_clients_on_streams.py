"""Services with 64 tasks and 64 threads on a stream each, while instances stop and die and connections are cut."""

import asyncio
import random
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import aiohttp
import pytest

from halfway.client import Halfway, HalfwayError, Message, SyncHalfway
from tests.support.brokers.fixtures import Kafka
from tests.support.client.silent import firewall_before
from tests.support.coordinator.balancer import Balancer
from tests.support.coordinator.fleet import Fleet, settled
from tests.support.coordinator.process import CoordinatorProcess
from tests.support.coordinator.rest_client import QUIET, Connect, Rest
from tests.support.coordinator.topics import Cluster
from tests.support.waiting import eventually

CALLERS = 64
PATIENT_S = 180.0
SETTINGS = {"HALFWAY_DRAIN_S": "5", "HALFWAY_REQUEST_TIMEOUT_S": "15"}
_ROLLBACK_EVERY = 5


@dataclass
class Service:
    """Callers that prepare and end, and what the client told them."""

    topic: str
    committed: set[str] = field(default_factory=set)
    rolled_back: set[str] = field(default_factory=set)
    errors: list[HalfwayError] = field(default_factory=list)
    is_done: bool = False

    def note(self, name: str, *, commits: bool) -> None:
        (self.committed if commits else self.rolled_back).add(name)

    async def run_task(self, client: Halfway, number: int) -> None:
        while not self.is_done:
            number += 1
            commits, name = number % _ROLLBACK_EVERY != 0, client.new_id()
            try:
                await client.prepare([Message(topic=self.topic, key=name, value="paid")], id=name, new_id=True)
                await client.end(name, "commit" if commits else "rollback")
            except HalfwayError as error:
                self.errors.append(error)
                return
            self.note(name, commits=commits)

    def run_thread(self, client: SyncHalfway, number: int) -> None:
        while not self.is_done:
            number += 1
            commits, name = number % _ROLLBACK_EVERY != 0, client.new_id()
            try:
                client.prepare([Message(topic=self.topic, key=name, value="paid")], id=name, new_id=True)
                client.end(name, "commit" if commits else "rollback")
            except HalfwayError as error:
                self.errors.append(error)
                return
            self.note(name, commits=commits)

    async def until_more(self, count: int) -> None:
        """Wait until so many more are committed; fail as soon as a caller has got an error."""
        goal = len(self.committed) + count

        async def committed() -> int:
            assert self.errors == []
            return len(self.committed)

        await eventually(committed, lambda found: found >= goal)


@pytest.mark.timeout(900)
async def test_callers_notice_neither_restarts_nor_kills_nor_cuts(
    kafka: Kafka, tmp_path: Path, connect: Connect, cluster: Cluster, topic: str, group: str
) -> None:
    """The tasks reach the instances through a balancer that is cut at random, the threads one after the other.

    No call raises an error; what a caller was told is what consumers see, once.
    """
    seed = random.randrange(2**32)
    print(f"seed {seed}")  # noqa: T201 - to repeat it
    chance = random.Random(seed)
    fleet = Fleet(kafka.bootstrap_servers, tmp_path, SETTINGS)
    balancer = None
    try:
        fleet.start(3)
        await settled([connect(member) for member in fleet.members])
        balancer = Balancer(fleet.members, tmp_path / "balancer")
        await balancer.until_all_are_ready()
        async with aiohttp.ClientSession() as session:
            rest = Rest(session, balancer.url, "")
            (await rest.put_group(group, topics=[topic], policy=QUIET)).expect(201)
        tasks, threads = Service(topic), Service(topic)
        urls = [member.url for member in fleet.members]
        async with firewall_before(balancer.url) as firewall:
            firewall.bytes_of_next = lambda: chance.randrange(20_000, 2_000_000)
            async with Halfway(
                firewall.url, group, prepare_timeout_s=PATIENT_S, end_timeout_s=PATIENT_S, stream=True
            ) as client:
                with (
                    SyncHalfway(urls, group, prepare_timeout_s=PATIENT_S, end_timeout_s=PATIENT_S) as blocking,
                    ThreadPoolExecutor(CALLERS) as pool,
                ):
                    async with asyncio.TaskGroup() as callers:
                        for number in range(CALLERS):
                            callers.create_task(tasks.run_task(client, number))
                            callers.create_task(_in_thread(pool, threads, blocking, number))
                        try:
                            await _disturb(fleet.members, tasks, threads)
                            firewall.cut()
                            await tasks.until_more(CALLERS)
                        finally:
                            tasks.is_done = threads.is_done = True
                    await asyncio.to_thread(blocking.close)
            assert firewall.accepted > 3
        assert tasks.errors + threads.errors == []
        found = Counter(record.transaction_id for record in await cluster.read(topic))
        committed = tasks.committed | threads.committed
        print(f"{len(committed)} commits, {firewall.accepted} connections of the tasks")  # noqa: T201
        assert {name: found[name] for name in committed if found[name] != 1} == {}
        assert found.keys() - committed == set()
    finally:
        if balancer is not None:
            balancer.close()
        fleet.close()


async def _in_thread(pool: ThreadPoolExecutor, service: Service, client: SyncHalfway, number: int) -> None:
    await asyncio.get_running_loop().run_in_executor(pool, service.run_thread, client, number)


async def _disturb(members: list[CoordinatorProcess], *services: Service) -> None:
    async def until_served() -> None:
        for service in services:
            await service.until_more(2 * CALLERS)

    await until_served()
    for member in members:
        assert await asyncio.to_thread(member.stop) == 0
        await asyncio.to_thread(member.start)
        await until_served()
    members[0].kill()
    await until_served()
    await asyncio.to_thread(members[0].start)
    await until_served()
