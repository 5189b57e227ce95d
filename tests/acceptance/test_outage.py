"""The broker goes away under load and comes back."""

import asyncio
from collections.abc import Callable
from typing import Literal

import pytest

from tests.acceptance.callers import Callers
from tests.acceptance.coordinator_process import NewCoordinator
from tests.acceptance.rest_client import QUIET, Connect, message
from tests.acceptance.topics import Cluster
from tests.acceptance.waiting import eventually
from tests.proxied_kafka import ProxiedKafka

OUTAGE_S = 20.0
SETTINGS = {"HALFWAY_REQUEST_TIMEOUT_S": "4", "HALFWAY_PREPARE_TIMEOUT_S": "2"}


@pytest.mark.xdist_group("proxied_kafka")
@pytest.mark.parametrize("how", ["killed", "frozen"])
async def test_the_broker_stops_for_20_s_under_load_and_returns(
    how: Literal["killed", "frozen"],
    new_coordinator: NewCoordinator,
    connect: Connect,
    proxied_kafka: ProxiedKafka,
    group: str,
) -> None:
    """Callers get 503 with Retry-After meanwhile; no acknowledged end is lost or doubled; it goes on by itself."""
    cluster = Cluster(proxied_kafka.bootstrap_servers)
    topics = await cluster.make_topics("orders", "points")
    coordinator = new_coordinator(SETTINGS, bootstrap_servers=proxied_kafka.bootstrap_servers)
    coordinator.start()
    rest = connect(coordinator)
    (await rest.put_group(group, topics=topics, policy=QUIET)).expect(201)
    waiting = [await rest.prepared(group, [message(topic) for topic in topics]) for _ in range(5)]
    away: Callable[[], None] = proxied_kafka.kill if how == "killed" else proxied_kafka.pause
    back: Callable[[], object] = proxied_kafka.start if how == "killed" else proxied_kafka.resume

    async with Callers(rest, group, topics) as callers:
        history = callers.history
        await callers.committed(50)
        pid = coordinator.pid
        away()
        outage = asyncio.create_task(asyncio.sleep(OUTAGE_S))
        for answer in await asyncio.gather(*(rest.end(transaction, "commit") for transaction in waiting)):
            assert answer.status == 503, answer
            assert int(answer.headers["Retry-After"]) > 0
        await outage
        refused = history.refused("prepare") + history.refused("end")
        await asyncio.to_thread(back)
        await callers.committed(50)
        await callers.finish()

    for transaction in waiting:
        assert (await rest.end(transaction, "commit", retry=True)).expect(200)["state"] == "committed"
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
