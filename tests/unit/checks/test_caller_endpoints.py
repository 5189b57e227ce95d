"""Which of a group's endpoints are called, in which order, and for how long."""

import asyncio
import json

import msgspec

from halfway.protocol.transactions import Outcome
from tests.support.checkback.servers import Asked, endpoint, hangs, response, sends
from tests.support.loop_time import LoopTime
from tests.unit.checks.conftest import COMMIT, GROUP, QUESTION, Ask, local_caller


async def test_no_endpoint_at_all_is_unknown(ask: Ask) -> None:
    """A group without endpoints gets no call."""
    reply = await ask()
    assert (reply.outcome, reply.sent, reply.reachable) == (Outcome.UNKNOWN, False, False)


async def test_the_next_endpoint_is_asked_when_one_fails(ask: Ask, refusing_port: int) -> None:
    """Refused, 500 and HTML are not verdicts, so the fourth endpoint decides; the fifth is not called."""
    async with (
        endpoint(sends(response(b"", status="500 Oh"))) as broken,
        endpoint(sends(response(b"<html>", content_type="text/html"))) as html,
        endpoint(sends(COMMIT)) as good,
        endpoint(sends(COMMIT)) as spare,
    ):
        reply = await ask(f"http://127.0.0.1:{refusing_port}/", broken.url, html.url, good.url, spare.url)
    assert (reply.outcome, reply.sent, reply.answered, reply.reachable) == (Outcome.COMMIT, True, True, True)
    assert [len(service.asked) for service in (broken, html, good, spare)] == [1, 1, 1, 0]
    assert {asked.headers["webhook-id"] for service in (broken, html, good) for asked in service.asked} == {"order-1:2"}


async def test_each_host_gets_one_attempt_of_a_check(ask: Ask) -> None:
    """Ten URLs of one host do not cause ten requests of one check; another host is called too."""
    async with endpoint(sends(response(b"", status="500 Oh"))) as broken, endpoint(sends(COMMIT)) as good:
        reply = await ask(*(f"{broken.url}/{number}" for number in range(9)), good.url)
    assert reply.outcome is Outcome.COMMIT
    assert (len(broken.asked), len(good.asked)) == (1, 1)


async def test_twenty_hung_groups_on_a_host_do_not_hold_up_another() -> None:
    """Each group has its own connections to an address: 16 hanging checks of each of twenty delay no other's."""
    waiting: list[asyncio.Task[object]] = []

    async def serve(writer: asyncio.StreamWriter, asked: Asked) -> None:
        if json.loads(asked.body)["group"] == "orders":
            writer.write(COMMIT)
        else:
            await asyncio.Event().wait()

    async with endpoint(serve) as service, local_caller(timeout_s=170, connect_timeout_s=160) as caller:
        for number in range(20 * 16):
            hung = msgspec.structs.replace(QUESTION, group=f"hung{number % 20}")
            group = msgspec.structs.replace(GROUP, name=hung.group)
            waiting.append(asyncio.create_task(caller.call(group, [service.url], hung)))
        while len(service.asked) < len(waiting):
            assert not any(task.done() for task in waiting)
            await asyncio.sleep(0.01)
        assert (await caller.call(GROUP, [service.url], QUESTION)).outcome is Outcome.COMMIT
        assert not any(task.done() for task in waiting)
        for task in waiting:
            task.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)


async def test_unknown_said_so_ends_the_asking(ask: Ask) -> None:
    """It is a verdict: the next endpoint of the same service knows no more."""
    async with endpoint(sends(response(b'{"outcome": "unknown"}'))) as first, endpoint(sends(COMMIT)) as second:
        reply = await ask(first.url, second.url)
    assert (reply.outcome, reply.answered) == (Outcome.UNKNOWN, True)
    assert second.asked == []


async def test_an_endpoint_that_hangs_leaves_time_for_the_next() -> None:
    """One deadline covers all endpoints, and none may use it up alone."""
    async with endpoint(hangs()) as frozen, endpoint(sends(COMMIT)) as good, local_caller(timeout_s=200) as caller:
        asking = caller.call(GROUP, [frozen.url, good.url], QUESTION)
        reply = await LoopTime().out(asking, 102, once=lambda: frozen.asked, what="one hangs")
    assert (reply.outcome, reply.reachable) == (Outcome.COMMIT, True)


async def test_one_reachable_endpoint_makes_the_group_reachable(ask: Ask, refusing_port: int) -> None:
    """The first was sent and gave an invalid answer, the second was refused: sent, and not for the circuit breaker."""
    async with endpoint(sends(response(b"", status="500 Oh"))) as broken:
        reply = await ask(broken.url, f"http://127.0.0.1:{refusing_port}/check")
    assert (reply.sent, reply.answered, reply.reachable) == (True, False, True)
    assert "500" in reply.detail
    assert "refused" in reply.detail


async def test_twenty_hung_endpoints_do_not_hold_up_another(ask: Ask) -> None:
    """While checks to twenty paused services wait, one to a healthy service is answered."""
    async with endpoint(sends(COMMIT)) as healthy, endpoint(hangs()) as frozen:
        waiting = [asyncio.create_task(ask(frozen.url)) for _ in range(20)]
        while len(frozen.asked) < 20:  # noqa: ASYNC110 - the server has no event for it
            await asyncio.sleep(0.01)
        assert (await ask(healthy.url)).outcome is Outcome.COMMIT
        assert not any(task.done() for task in waiting)
        for task in waiting:
            task.cancel()
        ended = await asyncio.gather(*waiting, return_exceptions=True)
    assert all(isinstance(error, asyncio.CancelledError) for error in ended)


async def test_a_place_that_does_not_come_free_says_nothing_of_the_endpoint() -> None:
    """If the only connection hangs, the other endpoint was not tried: not sent, not unreachable."""
    async with (
        endpoint(hangs()) as frozen,
        endpoint(sends(COMMIT)) as healthy,
        local_caller(max_connections=1) as caller,
        local_caller() as other,
    ):
        waiting = asyncio.create_task(caller.call(GROUP, [frozen.url], QUESTION))
        while not frozen.asked:  # noqa: ASYNC110 - the server has no event for it
            await asyncio.sleep(0.01)
        caller._timeout_s = 0.3
        reply = await caller.call(GROUP, [healthy.url], QUESTION)
        waiting.cancel()
        assert (await other.call(GROUP, [healthy.url], QUESTION)).answered
    assert (reply.sent, reply.answered, reply.reachable) == (False, False, True)
