"""An orderly stop takes nothing new, finishes what is in flight, and ends in time."""

import asyncio
from collections import Counter

import aiohttp

from tests.acceptance.coordinator_process import NewCoordinator
from tests.acceptance.endpoints import Endpoints
from tests.acceptance.rest_client import QUIET, Connect, Json, Rest, message
from tests.acceptance.topics import Cluster
from tests.acceptance.waiting import eventually, until_true

CALLERS = 16


async def test_what_was_accepted_is_answered_and_the_next_start_finds_it(
    new_coordinator: NewCoordinator, connect: Connect, cluster: Cluster, group: str, topic: str
) -> None:
    """Under load: no connection is cut in the middle of a request, and every answer is a proper one."""
    coordinator = new_coordinator()
    coordinator.start()
    rest = connect(coordinator)
    (await rest.put_group(group, topics=[topic], policy=QUIET)).expect(201)
    committed: set[str] = set()
    prepared: set[str] = set()
    statuses: Counter[int] = Counter()
    cut: list[BaseException] = []

    async def caller(rest: Rest) -> None:
        while True:
            try:
                answer = await rest.prepare(group, [message(topic)])
                statuses[answer.status] += 1
                if answer.status == 503:
                    continue
                transaction = str(answer.expect(201)["id"])
                prepared.add(transaction)
                ended = await rest.end(transaction, "commit")
                statuses[ended.status] += 1
                if ended.status != 503:
                    assert ended.expect(200)["changed"] is True
                    committed.add(transaction)
            except aiohttp.ClientConnectorError:
                return  # nobody listens any more
            except aiohttp.ClientConnectionError as error:
                cut.append(error)
                return

    callers = [asyncio.create_task(caller(rest)) for _ in range(CALLERS)]
    await until_true(lambda: len(committed) > 100, what="load runs")
    coordinator.terminate()
    await asyncio.gather(*callers)
    assert await coordinator.exited() == 0
    print(statuses, len(prepared), len(committed), cut)  # noqa: T201  shown with a failure

    assert set(statuses) <= {200, 201, 503}
    # A request on a kept connection that the server had just closed was not accepted.
    assert all(isinstance(error, aiohttp.ServerDisconnectedError | aiohttp.ClientOSError) for error in cut)
    delivered = Counter(record.transaction_id for record in await cluster.read(topic))
    coordinator.start()
    states = {name: (await rest.show(name))["state"] for name in prepared}
    assert {name for name in prepared if states[name] == "committed"} == committed
    assert delivered == Counter(committed)


async def test_a_stop_waits_for_neither_hung_checks_nor_polls(
    new_coordinator: NewCoordinator, connect: Connect, endpoints: Endpoints, group: str, topic: str
) -> None:
    """Polls are answered, checks under way are left alone; the transactions are there after the next start."""
    coordinator = new_coordinator({"HALFWAY_CHECK_TIMEOUT_S": "600", "HALFWAY_SHUTDOWN_TIMEOUT_S": "20"})
    coordinator.start()
    rest = connect(coordinator)
    forever = asyncio.Event()

    async def hang(_: Json) -> str:
        await forever.wait()
        return "commit"

    endpoint = await endpoints.check(hang)
    (await rest.put_group(group, topics=[topic], urls=[endpoint.url], policy={"first_check_after_s": 0.1})).expect(201)
    (await rest.put_group(f"{group}-pull", topics=[topic], policy=QUIET)).expect(201)
    transaction = await rest.prepared(group, [message(topic)])
    await endpoint.until_asked(about=transaction)
    poll = asyncio.create_task(rest.call("GET", f"/groups/{group}-pull/checks", query={"wait_s": 25}))
    await eventually(lambda: rest.health("/health/ready"), lambda answer: answer[0] == 200)
    await asyncio.sleep(0.2)

    coordinator.terminate()

    assert await coordinator.exited(within_s=40) == 0
    assert (await poll).status in {200, 503}
    forever.set()
    coordinator.start(HALFWAY_CHECK_TIMEOUT_S="2")
    endpoint.answer("rollback")
    await rest.until(transaction, "rolled_back")


async def test_a_client_that_sends_its_request_too_slowly_does_not_hold_up_the_stop(
    new_coordinator: NewCoordinator, connect: Connect
) -> None:
    coordinator = new_coordinator({"HALFWAY_SHUTDOWN_TIMEOUT_S": "3"})
    coordinator.start()
    _, idle = await asyncio.open_connection("127.0.0.1", coordinator.port)
    _, slow = await asyncio.open_connection("127.0.0.1", coordinator.port)
    slow.write(
        b"POST /v1/transactions HTTP/1.1\r\nHost: h\r\nContent-Type: application/json\r\nContent-Length: 9\r\n\r\n{"
    )
    await slow.drain()
    try:
        coordinator.terminate()
        assert await coordinator.exited(within_s=40) == 0
    finally:
        for writer in (idle, slow):
            writer.close()


async def test_its_topics_and_its_place_are_released(
    new_coordinator: NewCoordinator, connect: Connect, cluster: Cluster
) -> None:
    """After an orderly stop the owner records are tombstones, so that the next owner need not fence."""
    coordinator = new_coordinator()
    coordinator.start()
    assert coordinator.stop() == 0
    last = {record.key: record.value for record in await cluster.read(coordinator.topic("owners"))}
    owners = {key: value for key, value in last.items() if key in {b"0", b"1"}}
    assert owners == {b"0": None, b"1": None}
