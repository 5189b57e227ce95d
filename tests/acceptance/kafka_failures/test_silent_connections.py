"""A firewall or a balancer between halfway and Kafka drops connections silently: nothing closes, no answer comes."""

import asyncio

import pytest

from tests.support.brokers.proxied import ProxiedKafka
from tests.support.coordinator.process import NewCoordinator
from tests.support.coordinator.rest_client import QUIET, Connect, message
from tests.support.coordinator.topics import Cluster
from tests.support.ids import new_id

pytestmark = pytest.mark.xdist_group("proxied_kafka")
SESSION_S = "30"
"""Long enough that a stalled machine loses no session; heartbeats are repeated after a third of it."""


async def test_all_connections_dropped_at_once_cost_no_session_and_no_end(
    new_coordinator: NewCoordinator, connect: Connect, proxied_kafka: ProxiedKafka, group: str
) -> None:
    """Look-ups, heartbeats, appends and the lane each repeat over a new connection: one call of each is done."""
    proxy = proxied_kafka.proxy
    coordinator = new_coordinator(
        {"HALFWAY_REQUEST_TIMEOUT_S": "120", "HALFWAY_SESSION_TIMEOUT_S": SESSION_S},
        bootstrap_servers=proxied_kafka.through(proxy),
    )
    coordinator.start()
    topic = await Cluster(proxied_kafka.bootstrap_servers).make_topic()
    rest = connect(coordinator)
    (await rest.put_group(group, topics=[topic], policy=QUIET)).expect(201)
    first, second = [await rest.prepared(group, [message(topic)]) for _ in range(2)]
    await rest.commit(first)
    dropped = proxy.dropped
    proxy.silence()
    ended, _, unknown = await asyncio.gather(
        rest.end(second, "commit"),
        rest.prepared(group, [message(topic)], as_id=new_id(), retry=True),
        rest.get(f"{group}-unknown"),
    )
    assert ended.expect(200)["state"] == "committed"
    unknown.refused(404, "unknown_transaction")
    assert proxy.dropped > dropped
    assert "session timed out" not in coordinator.log
    assert "no progress" not in coordinator.log


async def test_connections_that_are_closed_in_time_meet_no_firewall(
    new_coordinator: NewCoordinator, connect: Connect, proxied_kafka: ProxiedKafka, group: str
) -> None:
    """The operator sets the time below the firewall's: nothing is refused, and no incarnation is lost.

    Nor may librdkafka close a connection just as a commit begins on it: that costs the incarnation.
    """
    proxy = proxied_kafka.proxy
    coordinator = new_coordinator(
        {"HALFWAY_KAFKA__CONNECTIONS_MAX_IDLE_MS": "3000"}, bootstrap_servers=proxied_kafka.through(proxy)
    )
    coordinator.start()
    topic = await Cluster(proxied_kafka.bootstrap_servers).make_topic()
    rest = connect(coordinator)
    (await rest.put_group(group, topics=[topic], policy=QUIET)).expect(201)
    await rest.commit(await rest.prepared(group, [message(topic)]))
    dropped = proxy.dropped
    proxy.idle_s = 6.0
    await asyncio.sleep(proxy.idle_s + 1)
    name = (await rest.prepare(group, [message(topic)])).expect(201)["id"]
    (await rest.end(name, "commit")).expect(200)
    assert proxy.dropped == dropped
    assert coordinator.log.count('"incarnation_begun"') == 1
