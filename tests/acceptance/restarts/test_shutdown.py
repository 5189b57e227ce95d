"""An orderly stop accepts nothing new, finishes the requests in flight, and ends in time."""

import asyncio
import os
import signal

import aiohttp
import pytest

from halfway.embedded.broker import is_free
from tests.support.brokers.proxied import ProxiedKafka
from tests.support.coordinator.callers import Callers
from tests.support.coordinator.endpoints import Endpoints
from tests.support.coordinator.metrics import samples, total
from tests.support.coordinator.process import CoordinatorProcess, NewCoordinator
from tests.support.coordinator.rest_client import QUIET, Connect, Json, Rest, message
from tests.support.coordinator.topics import Cluster
from tests.support.processes import children
from tests.support.waiting import eventually

CALLERS = 16
SOON = {"first_check_after_s": 0.1, "check_interval_s": 0.2, "max_interval_s": 0.2, "max_checks": 1000}
"""Ends and threads that wait for Kafka need a third of it; the rest of the stop takes a few seconds."""


@pytest.fixture(autouse=True)
def _as_users_do(monkeypatch: pytest.MonkeyPatch) -> None:
    """Start coordinators as the command, and stop the whole process."""
    monkeypatch.setattr(CoordinatorProcess, "warm", False)


async def test_what_was_accepted_is_answered_and_nothing_is_left_running(
    new_coordinator: NewCoordinator, cluster: Cluster, group: str, topic: str
) -> None:
    """Under load: no request on an open connection is cut, and the next start is ready at once and finds it all."""
    # A successor that waits for the end of this session would not be ready in the time of a test.
    coordinator = new_coordinator({"HALFWAY_SESSION_TIMEOUT_S": "120"}).start()
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:
        rest = Rest(session, coordinator.url, coordinator.health_url)
        (await rest.put_group(group, topics=[topic], policy=QUIET)).expect(201)
        async with Callers(rest, group, [topic], callers=CALLERS, patient=False) as callers:
            await callers.committed(100)
            assert children(coordinator.pid) == [], "nothing that could outlive it"
            coordinator.terminate()
            await callers.finish()
            assert await coordinator.exited() == 0
        history = callers.history
        assert history.cut == []
        await history.audit(cluster, [topic])
        assert "stop_timed_out" not in coordinator.log
        assert is_free(coordinator.port)
        assert is_free(coordinator.health_port)
        assert await cluster.members(coordinator.topic("members")) == 0

        coordinator.start()
        for name in history.prepared:
            state = (await rest.show(name))["state"]
            expected = {"committed"} if name in history.committed else {"prepared", "committed", "rolled_back"}
            assert state in ({"rolled_back"} if name in history.rolled_back else expected), name
        assert coordinator.stop() == 0


@pytest.mark.xdist_group("proxied_kafka")
async def test_a_stop_while_kafka_does_not_answer_ends_in_time_and_everybody_is_answered(
    new_coordinator: NewCoordinator, proxied_kafka: ProxiedKafka, connect: Connect, group: str
) -> None:
    """Accepted requests are answered with 503; the process ends by itself before the forced end at the limit.

    The limit is for the whole stop: a slightly longer grace period of a container is never used up.
    """
    cluster = Cluster(proxied_kafka.bootstrap_servers)
    topic = await cluster.make_topic()
    settings = {"HALFWAY_REQUEST_TIMEOUT_S": "5"}
    coordinator = new_coordinator(settings, bootstrap_servers=proxied_kafka.bootstrap_servers).start()
    rest = connect(coordinator)
    (await rest.put_group(group, topics=[topic], policy=QUIET)).expect(201)
    waiting = [await rest.prepared(group, [message(topic)]) for _ in range(5)]
    proxied_kafka.pause()
    ends = [asyncio.create_task(rest.end(transaction, "commit")) for transaction in waiting]
    await eventually(lambda: samples(rest), lambda found: total(found, "halfway_requests_in_flight") >= len(ends))

    coordinator.terminate()

    answers = await asyncio.gather(*ends)
    assert await coordinator.exited() == 0
    assert "stop_timed_out" not in coordinator.log, "its own clock runs from the signal on"
    for answer in answers:
        assert answer.status == 503, answer
        assert int(answer.headers["Retry-After"]) > 0
    proxied_kafka.resume()
    coordinator.start()
    for transaction in waiting:
        assert (await rest.commit(transaction, retry=True))["state"] == "committed"
    assert sorted(record.transaction_id for record in await cluster.read(topic)) == sorted(waiting)


async def test_a_stop_waits_for_neither_hung_checks_nor_polls(
    new_coordinator: NewCoordinator, connect: Connect, endpoints: Endpoints, group: str, topic: str
) -> None:
    """Polls are answered, checks in flight are abandoned; the transactions are there after the next start."""
    coordinator = new_coordinator({"HALFWAY_CHECK_TIMEOUT_S": "600"}).start()
    rest = connect(coordinator)
    forever = asyncio.Event()

    async def hang(_: Json) -> str:
        await forever.wait()
        return "commit"

    endpoint = await endpoints.check(hang)
    (await rest.put_group(group, topics=[topic], urls=[endpoint.url], policy=SOON)).expect(201)
    (await rest.put_group(f"{group}-pull", topics=[topic], policy=QUIET)).expect(201)
    transaction = await rest.prepared(group, [message(topic)])
    await endpoint.until_asked(about=transaction)
    answer, poll = await asyncio.open_connection("127.0.0.1", coordinator.port)
    poll.write(f"GET /v1/groups/{group}-pull/checks?wait_s=25 HTTP/1.1\r\nHost: localhost\r\n\r\n".encode())
    await poll.drain()
    await rest.show(transaction)  # sent later on another connection: when it is answered, the poll is waiting

    coordinator.terminate()

    assert await coordinator.exited(within_s=120) == 0
    assert (await answer.readline()).split()[1] in {b"200", b"503"}
    poll.close()
    forever.set()
    coordinator.start(HALFWAY_CHECK_TIMEOUT_S="10")
    endpoint.answer("rollback")
    await rest.until(transaction, "rolled_back")


async def test_sigterm_makes_it_unready_first_and_it_serves_on_while_a_load_balancer_turns_away(
    new_coordinator: NewCoordinator, connect: Connect, group: str, topic: str
) -> None:
    """New connections are accepted, and every answer closes its own. SIGINT, of a person who waits, does not drain."""
    coordinator = new_coordinator({"HALFWAY_DRAIN_S": "3600"}).start()
    rest = connect(coordinator)
    (await rest.put_group(group, topics=[topic], policy=QUIET)).expect(201)
    async with aiohttp.ClientSession() as session:
        kept = Rest(session, coordinator.url, coordinator.health_url)
        assert "Connection" not in (await kept.prepare(group, [message(topic)])).headers

        coordinator.terminate()

        await eventually(lambda: rest.health("/health/ready"), lambda found: found[0] == 503 and "stopping" in found[1])
        assert (await rest.health("/health/started"))[0] == (await rest.health("/health/live"))[0] == 200
        transaction = await rest.prepared(group, [message(topic)])
        ended = await kept.end(transaction, "commit")
    assert ended.expect(200)["changed"]
    assert ended.headers["Connection"] == "close"
    assert '"draining"' in coordinator.log

    coordinator.kill()
    coordinator.start()
    os.kill(coordinator.pid, signal.SIGINT)
    assert await coordinator.exited() == 0


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
async def test_its_topics_and_its_place_are_released(
    new_coordinator: NewCoordinator, connect: Connect, cluster: Cluster, number: signal.Signals
) -> None:
    """After an orderly stop the owner records are tombstones, so that the next owner need not fence."""
    coordinator = new_coordinator().start()
    os.kill(coordinator.pid, number)
    assert await coordinator.exited() == 0
    last = {record.key: record.value for record in await cluster.read(coordinator.topic("owners"))}
    owners = {key: value for key, value in last.items() if key in {b"0", b"1"}}
    assert owners == {b"0": None, b"1": None}
