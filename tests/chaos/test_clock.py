"""A clock that is set, back or ahead, brings no transaction back to life."""

import asyncio
from collections.abc import AsyncIterator, Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from uuid import uuid4

import aiohttp
import pytest

from halfway.client import transaction_id
from halfway.protocol.ids import shard_of
from tests.chaos.coordinators import Instance
from tests.support.brokers.fixtures import Kafka
from tests.support.coordinator.by_hand import append_half
from tests.support.coordinator.rest_client import QUIET, Json, Rest, message
from tests.support.coordinator.topics import Cluster, InternalTopics
from tests.support.ids import new_id
from tests.support.waiting import eventually, until_true

SHARDS = 2
SETTINGS = {"HALFWAY_SHARDS": str(SHARDS), "HALFWAY_PEER_CREDENTIAL": "x" * 40}
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
    cluster, topic = await _registered(kafka, rest)
    body = [message(topic, "v", key="k")]

    own = transaction_id("one", datetime.now(UTC) + timedelta(seconds=at_prepare_s))
    await _set_clock(instance, at_prepare_s)
    (await rest.prepare("g", body, as_id=own)).expect(201)
    await _set_clock(instance, at_end_s)
    (await rest.end(own, "commit")).expect(200)
    await _set_clock(instance, afterwards_s)

    await asyncio.sleep(FORGOTTEN_BY_S)
    await _finds_the_outcome(rest, body, own)
    await _set_clock(instance, 0)
    await asyncio.sleep(FORGOTTEN_BY_S)
    await _finds_the_outcome(rest, body, own)
    assert len(await cluster.read(topic)) == 1


async def test_an_outcome_is_found_by_a_recovery_though_the_clock_was_behind(
    kafka: Kafka, instance: Instance, rest: Rest
) -> None:
    """A transaction that was prepared by the right clock and ended by one an hour behind stays ended after a start."""
    cluster, topic = await _registered(kafka, rest)
    body = [message(topic, "v", key="k")]
    own = new_id()
    (await rest.prepare("g", body, as_id=own)).expect(201)
    await _set_clock(instance, -AN_HOUR_S)
    (await rest.end(own, "commit")).expect(200)
    await _set_clock(instance, 0)
    for _ in range(5):  # records after it, by the right clock
        await rest.rollback(await rest.prepared("g", body, as_id=new_id()))
    instance.kill()
    instance.start()
    await asyncio.sleep(FORGOTTEN_BY_S)
    await _finds_the_outcome(rest, body, own)
    assert len(await cluster.read(topic)) == 1


async def test_a_late_half_before_an_outage_longer_than_the_horizon_brings_nothing_back(
    kafka: Kafka, instance: Instance, rest: Rest
) -> None:
    """It arrived while the outcome was remembered. The next start is half an hour later, twice the horizon.

    The start finds the outcome, and the first scan forgets it: then the id is too old.
    """
    cluster, topic = await _registered(kafka, rest)
    body = [message(topic, "v", key="k")]
    own = new_id()
    (await rest.prepare("g", body, as_id=own)).expect(201)
    [half] = await InternalTopics(cluster, instance.prefix).halves(own)
    assert half is not None
    (await rest.end(own, "commit")).expect(200)
    await asyncio.sleep(FORGOTTEN_BY_S)  # the cursors are committed
    instance.kill()
    await append_half(cluster, instance.topic("half"), shard_of(own, SHARDS) or 0, half)
    instance.clock.set(AN_HOUR_S / 2)
    instance.start()
    again = await rest.prepare("g", body, as_id=own, retry=True)
    assert (again.status, again.body.get("state")) in {(200, "committed"), (410, None)}, again
    await eventually(lambda: rest.prepare("g", body, as_id=own, retry=True), lambda answer: answer.status == 410)
    assert len(await cluster.read(topic)) == 1


async def test_a_clock_that_was_hours_ahead_and_is_right_again_stops_nothing(
    kafka: Kafka, instance: Instance, rest: Rest
) -> None:
    """Kafka takes each change of what was prepared then, also where its limit is the default of an hour."""
    cluster, topic = await _registered(kafka, rest)
    await _limit_to_an_hour(cluster, instance)
    await _set_clock(instance, 3 * AN_HOUR_S)
    old = [await rest.prepared("g", [message(topic, f"{number}", key="k")]) for number in range(3)]
    await _set_clock(instance, 0)
    await rest.commit(old[0])
    await rest.rollback(old[1])
    instance.kill()
    instance.start()
    (await rest.end(old[2], "commit", retry=True)).expect(200)
    await rest.commit(await rest.prepared("g", [message(topic, "fresh", key="k")]))
    assert "incarnation_failed" not in instance.log
    assert sorted(record.value or b"" for record in await cluster.read(topic)) == [b"0", b"2", b"fresh"]


@pytest.mark.parametrize("off_s", [2 * AN_HOUR_S, -2 * AN_HOUR_S])
async def test_an_instance_that_can_claim_nothing_leaves_its_shards_to_the_others(
    kafka: Kafka, instance: Instance, rest: Rest, tmp_path: Path, off_s: float
) -> None:
    """Kafka refuses each of its claims: its clock is hours off. When it is right again, it takes its share.

    It would refuse every id that is born by another clock, as too old or of the future.
    """
    _, topic = await _registered(kafka, rest)
    port = int(kafka.bootstrap_servers.partition(",")[0].rpartition(":")[2])
    other = Instance(2, [port], tmp_path, instance.prefix, SETTINGS)
    try:
        other.clock.set(off_s)
        other.launch()
        await until_true(lambda: "shards_left_to_others" in other.log, what="it gives its shards up")
        for _ in range(20):
            (await rest.prepare("g", [message(topic, "v", key="k")], as_id=new_id(), retry=True)).expect(200, 201)
        assert "shards_taken_again" not in other.log
        other.clock.set(0)
        await until_true(lambda: '"shard_acquired"' in other.log, what="it has its share")
    finally:
        other.close()


async def _registered(kafka: Kafka, rest: Rest) -> tuple[Cluster, str]:
    """Register group `g` with a topic of its own, without checks."""
    cluster = Cluster(kafka.bootstrap_servers)
    topic = await cluster.make_topic()
    (await rest.put_group("g", topics=[topic], policy=QUIET)).expect(200, 201)
    return cluster, topic


async def _limit_to_an_hour(cluster: Cluster, instance: Instance) -> None:
    """Give the internal topics the limit that Kafka 4 has by default."""
    for kind in ("half", "op", "parked", "owners"):
        await cluster.set_config(instance.topic(kind), "message.timestamp.after.max.ms", f"{AN_HOUR_S * 1000}")


async def _set_clock(instance: Instance, ahead_s: float) -> None:
    """Set it, and wait until it was noticed, which takes at most a scan."""
    if instance.clock.ahead_s != ahead_s:
        noticed = instance.log.count("clock_jumped")
        instance.clock.set(ahead_s)
        await until_true(lambda: instance.log.count("clock_jumped") > noticed, what="the clock's jump is noticed")


async def _finds_the_outcome(rest: Rest, body: list[Json], own: str) -> None:
    again = await rest.prepare("g", body, as_id=own, retry=True)
    assert (again.status, again.body.get("state")) == (200, "committed"), again
    ended = await rest.commit(own, retry=True)
    assert ended["changed"] is False
