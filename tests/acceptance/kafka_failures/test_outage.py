"""The broker goes away under load and comes back.

Kafka 4.3.1 can forget transactions of its own when the only broker is killed in the middle of a commit: while it
starts, partitions have no leader for a moment, markers for them are taken as done, and transactions in them stay
undecided forever (docs/verification.md). Its log says so, while it starts or later; the test is then repeated with
another interrupted commit, since the rest would show nothing.
"""

import asyncio
from collections.abc import Callable
from typing import Literal

import pytest

from tests.support.brokers.proxied import ProxiedKafka
from tests.support.coordinator.callers import Callers
from tests.support.coordinator.process import CoordinatorProcess, NewCoordinator
from tests.support.coordinator.rest_client import QUIET, Connect, Rest, message
from tests.support.coordinator.topics import Cluster
from tests.support.ids import new_id
from tests.support.waiting import eventually, until_true

OUTAGE_S = 12.0
ATTEMPTS = 10
FORGOTTEN = "these partitions are likely deleted already and hence can be skipped"
SETTINGS = {"HALFWAY_REQUEST_TIMEOUT_S": "4"}


@pytest.mark.timeout(900)
@pytest.mark.xdist_group("proxied_kafka")
@pytest.mark.parametrize("how", ["killed", "frozen"])
async def test_the_broker_stops_under_load_and_returns(
    how: Literal["killed", "frozen"],
    new_coordinator: NewCoordinator,
    connect: Connect,
    proxied_kafka: ProxiedKafka,
    group: str,
) -> None:
    """Callers get 503 with Retry-After; no acknowledged end is lost or doubled; the coordinator recovers by itself."""
    for _ in range(ATTEMPTS):
        coordinator = new_coordinator(SETTINGS, bootstrap_servers=proxied_kafka.bootstrap_servers).start()
        forgotten = _forgotten(proxied_kafka)
        try:
            return await _outage(how, coordinator, connect(coordinator), proxied_kafka, group)
        except AssertionError:
            if _forgotten(proxied_kafka) == forgotten:
                raise
        coordinator.kill()
    pytest.fail(f"Kafka forgot a transaction in each of {ATTEMPTS} attempts")


@pytest.mark.xdist_group("proxied_kafka")
async def test_a_coordinator_of_the_group_that_is_away_is_the_cause_and_no_other_instance(
    new_coordinator: NewCoordinator, proxied_kafka: ProxiedKafka
) -> None:
    """Nothing else is in flight, so the end of the session is what ends the incarnation."""
    settings = {"HALFWAY_SESSION_TIMEOUT_S": "6"}
    coordinator = new_coordinator(settings, bootstrap_servers=proxied_kafka.bootstrap_servers).start()
    proxied_kafka.pause()
    try:
        await until_true(lambda: '"incarnation_failed"' in coordinator.log, what="the session ends")
    finally:
        proxied_kafka.resume()
    [failed] = [line for line in coordinator.log.splitlines() if '"incarnation_failed"' in line]
    assert "session timed out" in failed


async def _outage(
    how: Literal["killed", "frozen"], coordinator: CoordinatorProcess, rest: Rest, kafka: ProxiedKafka, group: str
) -> None:
    cluster = Cluster(kafka.bootstrap_servers)
    topics = await cluster.make_topics("orders", "points")
    (await rest.put_group(group, topics=topics, policy=QUIET)).expect(200, 201)
    waiting = [
        await rest.prepared(group, [message(topic) for topic in topics], as_id=new_id(), retry=True) for _ in range(5)
    ]
    away: Callable[[], None] = kafka.kill if how == "killed" else kafka.pause
    back: Callable[[], object] = kafka.start if how == "killed" else kafka.resume

    async with Callers(rest, group, topics) as callers:
        history = callers.history
        await callers.committed(50)
        pid, forgotten = coordinator.pid, _forgotten(kafka)
        away()
        outage = asyncio.create_task(asyncio.sleep(OUTAGE_S))
        for answer in await asyncio.gather(*(rest.end(transaction, "commit") for transaction in waiting)):
            assert answer.status == 503, answer
            assert int(answer.headers["Retry-After"]) > 0
        await outage
        refused = history.refused("prepare") + history.refused("end")
        await asyncio.to_thread(back)
        assert _forgotten(kafka) == forgotten, "Kafka has forgotten a transaction"
        await callers.committed(50)
        await callers.finish()

    for transaction in waiting:
        assert (await rest.commit(transaction, retry=True))["state"] == "committed"
        history.committed.add(transaction)
    assert refused > 0, "callers were answered meanwhile"
    assert history.cut == [], "the coordinator keeps its connections"
    assert coordinator.running
    assert coordinator.pid == pid
    await eventually(lambda: rest.health("/health/ready"), lambda answer: answer[0] == 200)
    await history.audit(cluster, topics)
    pending = {one["id"] for one in (await rest.page(group=group, state="prepared", limit=1000))["transactions"]}
    assert len(pending) <= history.lost_prepares
    assert not pending & (history.committed | history.rolled_back)


def _forgotten(kafka: ProxiedKafka) -> int:
    """Count how often Kafka has logged that it skipped markers of a transaction."""
    return kafka.log_path.read_text(errors="replace").count(FORGOTTEN)
