"""A connection that died silently costs a call one short attempt, and not its deadline."""

import asyncio

import pytest

from halfway.client import Halfway, Message
from tests.support.client.silent import firewall_before
from tests.support.ids import named_id
from tests.support.loop_time import LoopTime
from tests.support.rest.client import RestWorld
from tests.support.waiting import GENEROUS_S, until_true

ORDER = Message(topic="orders", key="42", value="paid")
KEPT = 5


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("call", ["prepare", "end", "show"])
async def test_a_call_is_repeated_on_a_new_connection(
    world: RestWorld, call: str, stream: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """None of the other connections of that time is tried either."""
    monkeypatch.setattr("halfway.client.calls.group.ATTEMPT_S", 1.0)
    name = await world.prepared(id=named_id("before"))
    async with (
        firewall_before(world.url) as firewall,
        Halfway(firewall.url, "shop", prepare_timeout_s=GENEROUS_S, end_timeout_s=GENEROUS_S, stream=stream) as client,
    ):
        if stream:
            await client.prepare([ORDER], id=named_id("first"))
        await asyncio.gather(*(client.show(name) for _ in range(KEPT)))
        assert firewall.accepted >= KEPT
        firewall.forget()
        match call:
            case "prepare":
                await client.prepare([ORDER], id=named_id("after"))
            case "end":
                await client.end(name, "commit")
            case _:
                await client.show(name)
        assert firewall.used_after == 1


async def test_a_stream_that_nobody_uses_is_asked_whether_it_lives(world: RestWorld) -> None:
    """A ping finds the death of the connection, so that the next call does not have to."""
    async with firewall_before(world.url) as firewall, Halfway(firewall.url, "shop", stream=True) as client:
        await client.prepare([ORDER], id=named_id("first"))
        time = LoopTime()
        for _ in range(10):  # every answer to a ping keeps it
            time.advance(2.1)
            await asyncio.sleep(0.05)
        assert len(client._shared._streams) == 1
        firewall.forget()

        def is_over() -> bool:
            time.advance(0.5)
            return not client._shared._streams

        await until_true(is_over, what="the stream is given up")
        await client.prepare([ORDER], id=named_id("second"))
        assert firewall.accepted == 2
