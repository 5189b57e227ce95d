"""A clock that is set, back or ahead, brings no transaction back to life."""

import asyncio
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from uuid import uuid4

import aiohttp
import pytest

from tests.chaos.coordinators import Instance
from tests.support.brokers.fixtures import Kafka
from tests.support.coordinator.by_hand import append_half
from tests.support.coordinator.rest_client import Json, Rest, message
from tests.support.coordinator.topics import Cluster, InternalTopics
from tests.support.waiting import until_true

SETTINGS = {"HALFWAY_SHARDS": "1"}
AN_HOUR_S = 3600
FORGOTTEN_BY_S = 2.0
"""Many scans: by then an outcome is forgotten, if it is to be."""


@pytest.fixture
def instance(kafka: Kafka, tmp_path: Path) -> Iterator[Instance]:
    port = int(kafka.bootstrap_servers.partition(",")[0].rpartition(":")[2])
    instance = Instance(1, [port], tmp_path, f"_clock-{uuid4().hex[:10]}.", SETTINGS)
    instance.start()
    yield instance
    instance.close()


@pytest.fixture
async def rest(instance: Instance) -> AsyncIterator[Rest]:
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(force_close=True)) as session:
        yield Rest(session, instance.url, instance.health_url)


@pytest.mark.parametrize(
    "at_prepare_s, at_end_s, afterwards_s",
    [(0, -AN_HOUR_S, 0), (-AN_HOUR_S, -AN_HOUR_S, 0), (0, 0, AN_HOUR_S), (AN_HOUR_S, 0, 0)],
)
async def test_what_ended_by_another_clock_stays_ended(
    kafka: Kafka, instance: Instance, rest: Rest, at_prepare_s: float, at_end_s: float, afterwards_s: float
) -> None:
    """The same prepare and the same end find the outcome again, and there is one message."""
    cluster = Cluster(kafka.bootstrap_servers)
    topic = await cluster.make_topic()
    (await rest.put_group("g", topics=[topic])).expect(200, 201)
    body = [message(topic, "v", key="k")]

    await _set_clock(instance, at_prepare_s)
    (await rest.prepare("g", body, as_id="one")).expect(201)
    await _set_clock(instance, at_end_s)
    (await rest.end("one", "commit")).expect(200)
    await _set_clock(instance, afterwards_s)

    await asyncio.sleep(FORGOTTEN_BY_S)
    await _finds_the_outcome(rest, body)
    await _set_clock(instance, 0)
    await asyncio.sleep(FORGOTTEN_BY_S)
    await _finds_the_outcome(rest, body)
    assert len(await cluster.read(topic)) == 1


async def test_an_outcome_is_found_by_a_recovery_though_the_clock_was_behind(
    kafka: Kafka, instance: Instance, rest: Rest
) -> None:
    """A transaction that was prepared by the right clock and ended by one an hour behind stays ended after a start."""
    cluster = Cluster(kafka.bootstrap_servers)
    topic = await cluster.make_topic()
    (await rest.put_group("g", topics=[topic])).expect(200, 201)
    body = [message(topic, "v", key="k")]
    (await rest.prepare("g", body, as_id="one")).expect(201)
    await _set_clock(instance, -AN_HOUR_S)
    (await rest.end("one", "commit")).expect(200)
    await _set_clock(instance, 0)
    for number in range(5):  # records after it, by the right clock
        await rest.rollback(await rest.prepared("g", body, as_id=f"later-{number}"))
    instance.kill()
    instance.start()
    await asyncio.sleep(FORGOTTEN_BY_S)
    await _finds_the_outcome(rest, body)
    assert len(await cluster.read(topic)) == 1


async def test_a_late_half_before_an_outage_longer_than_the_horizon_brings_nothing_back(
    kafka: Kafka, instance: Instance, rest: Rest
) -> None:
    """It arrived while the outcome was remembered. The next start is half an hour later, twice the horizon."""
    cluster = Cluster(kafka.bootstrap_servers)
    topic = await cluster.make_topic()
    (await rest.put_group("g", topics=[topic])).expect(200, 201)
    body = [message(topic, "v", key="k")]
    (await rest.prepare("g", body, as_id="one")).expect(201)
    [half] = await InternalTopics(cluster, instance.prefix).halves("one")
    assert half is not None
    (await rest.end("one", "commit")).expect(200)
    await asyncio.sleep(FORGOTTEN_BY_S)  # the cursors are committed
    instance.kill()
    await append_half(cluster, instance.topic("half"), 0, half)
    instance.clock.set(AN_HOUR_S / 2)
    instance.start()
    await _finds_the_outcome(rest, body)
    assert len(await cluster.read(topic)) == 1


async def _set_clock(instance: Instance, ahead_s: float) -> None:
    """Set it, and wait until it was noticed, which takes at most a scan."""
    if instance.clock.ahead_s != ahead_s:
        noticed = instance.log.count("clock_jumped")
        instance.clock.set(ahead_s)
        await until_true(lambda: instance.log.count("clock_jumped") > noticed, what="the clock's jump is noticed")


async def _finds_the_outcome(rest: Rest, body: list[Json]) -> None:
    again = await rest.prepare("g", body, as_id="one", retry=True)
    assert (again.status, again.body["state"]) == (200, "committed"), again
    ended = (await rest.end("one", "commit", retry=True)).expect(200)
    assert ended["changed"] is False
