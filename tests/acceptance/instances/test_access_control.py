"""Access control is turned on in a running cluster, and every instance refuses a revoked key at once."""

import asyncio
import json
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import aiohttp
import pytest

from halfway.protocol.keys import RANDOM_BYTES, key_text
from halfway.protocol.principal import PrincipalKind
from tests.support.brokers.fixtures import Kafka
from tests.support.coordinator.command_line import Ended, run
from tests.support.coordinator.fleet import SHARDS, Fleet, RoundRobin, id_in, settled
from tests.support.coordinator.process import CoordinatorProcess
from tests.support.coordinator.rest_client import QUIET, Rest, message
from tests.support.coordinator.topics import Cluster
from tests.support.waiting import eventually, until_true

OPERATOR = key_text(PrincipalKind.OPERATOR, bytes(range(RANDOM_BYTES)))
SECRETS = {"HALFWAY_MASTER_SECRET": "m" * 32, "HALFWAY_OPERATOR_KEY": OPERATOR}
OPEN = "HALFWAY_OPEN_ACCESS"
"""halfway needs a second; the rest is for a slow machine."""


@pytest.fixture
def fleet(kafka: Kafka, tmp_path: Path) -> Iterator[Fleet]:
    fleet = Fleet(kafka.bootstrap_servers, tmp_path)
    try:
        yield fleet
        for member in fleet.members:
            assert '"exception"' not in member.log
            assert OPERATOR not in member.log
    finally:
        fleet.close()


@pytest.fixture
async def session() -> AsyncIterator[aiohttp.ClientSession]:
    connector = aiohttp.TCPConnector(limit=0, force_close=True)
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=240), connector=connector) as session:
        yield session


def show(session: aiohttp.ClientSession, key: str | None) -> None:
    """Send this key from now on, or none."""
    session.headers.popall("Authorization", None)
    if key is not None:
        session.headers["Authorization"] = f"Bearer {key}"


async def command(member: CoordinatorProcess, *arguments: str) -> Ended:
    settings = {"HALFWAY_URL": member.url, "HALFWAY_TOKEN": OPERATOR}
    ended = await run(member.directory, "keys", *arguments, settings=settings)
    assert ended.status == 0, ended.err
    return ended


async def test_access_control_is_turned_on_without_losing_a_transaction(
    fleet: Fleet, cluster: Cluster, session: aiohttp.ClientSession, topic: str, group: str
) -> None:
    """It starts with the topics and records of a release without keys, and takes the steps of the guide."""
    fleet.start(2)
    first, second = fleet.members
    rests = [Rest(session, member.url, member.health_url) for member in fleet.members]
    both = RoundRobin(session, fleet.members)
    await settled(rests)
    (await both.put_group(group, topics=[topic], policy=QUIET)).expect(201)
    assert f"{fleet.prefix}keys" not in await cluster.topic_names()
    values = [f"held {shard}" for shard in range(SHARDS)]
    held = [id_in(shard) for shard in range(SHARDS)]
    for name, value in zip(held, values, strict=True):
        (await both.prepare(group, [message(topic, value=value)], as_id=name, retry=True)).expect(200, 201)
    done = asyncio.Event()

    async def produce() -> None:
        while not done.is_set():
            name = id_in(len(values) % SHARDS)
            value = f"under way {len(values)}"
            (await both.prepare(group, [message(topic, value=value)], as_id=name, retry=True)).expect(200, 201)
            await both.commit(name, retry=True)
            values.append(value)

    async def restarted(member: CoordinatorProcess, **settings: str) -> None:
        begun = len(values)
        await asyncio.to_thread(member.stop)
        await asyncio.to_thread(member.start, **settings)
        await settled(rests)
        await until_true(lambda: len(values) > begun, what="callers go on")

    producing = asyncio.create_task(produce())
    for member in fleet.members:
        await restarted(member, **SECRETS, **{OPEN: "true"})
    made = json.loads((await command(second, "create", "group", group, "--json")).out)
    show(session, made["key"])
    for member in fleet.members:
        await restarted(member, **{OPEN: "metrics"})
    done.set()
    await producing

    for name in held:
        assert (await both.show(name, retry=True))["state"] == "prepared"
        await both.commit(name, retry=True)
    assert sorted((record.value or b"").decode() for record in await cluster.read(topic)) == sorted(values)
    show(session, None)
    for rest in rests:
        (await rest.get(held[0])).refused(401, "unauthenticated")
    assert made["key"] not in first.log + second.log


async def test_a_key_made_or_revoked_at_one_instance_is_so_at_the_other_and_after_a_restart(
    fleet: Fleet, session: aiohttp.ClientSession, topic: str, group: str
) -> None:
    fleet.settings |= SECRETS
    fleet.start(2)
    first, second = fleet.members
    here, there = (Rest(session, member.url, member.health_url) for member in fleet.members)
    show(session, OPERATOR)
    await settled([here, there])
    await here.put_group(group, topics=[topic], policy=QUIET)
    other = f"{group}-other"
    await here.put_group(other, topics=[topic], policy=QUIET)
    old = json.loads((await command(first, "create", "group", group, "--json")).out)
    new = json.loads((await command(first, "rotate", old["id"], "--json")).out)
    listed = (await command(second, "list", "--name", group)).out
    assert old["id"] in listed
    assert new["id"] in listed
    for key in (old, new):
        show(session, key["key"])
        await eventually(lambda: there.call("GET", f"/groups/{group}"), lambda answer: answer.status == 200)
        (await there.prepare(other, [message(topic)])).refused(403, "forbidden")
    name = await there.prepared(group, [message(topic)], as_id=id_in(0))
    assert await here.health("/metrics") == await here.health("/metrics")
    assert (await here.health("/metrics"))[0] == 403

    show(session, old["key"])
    await command(first, "revoke", old["id"])
    began = time.monotonic()
    await eventually(lambda: there.get(name), lambda answer: answer.status == 401)
    took_s = time.monotonic() - began
    print(f"refused by the other instance {took_s:.3f} s after the command that revoked it")  # noqa: T201  a measurement
    await asyncio.to_thread(second.kill)
    await asyncio.to_thread(second.exit_status)
    await asyncio.to_thread(second.start)
    (await there.get(name)).refused(401, "unauthenticated")
    show(session, new["key"])
    assert (await there.show(name, retry=True))["state"] == "prepared"
    show(session, OPERATOR)
    assert (await there.health("/metrics"))[0] == 200
    show(session, None)
    assert (await there.health("/metrics"))[0] == 401
    assert (await there.health("/health/live"))[0] == 200
