"""The port for calls of other instances: which callers it answers, and its limits."""

import asyncio
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from typing import Any

import aiohttp
import msgspec
import pytest
from aiohttp import web
from structlog.testing import capture_logs

from halfway.coordinator.logging import flush_all
from halfway.coordinator.records import (
    CREDENTIAL_HEADER,
    PATH,
    TO_HEADER,
    VERSION,
    VERSION_HEADER,
    AnswerFrame,
    GetCall,
    decode_answers,
    decode_result,
    encode_message,
)
from halfway.peers import HttpPeers
from halfway.protocol.errors import ShardUnavailableError
from tests.support.peers.owner import SECRET, Owner, Serve, ask, end_of, within
from tests.support.waiting import GENEROUS_S, until_true

UPGRADE = {
    "Connection": "Upgrade",
    "Upgrade": "websocket",
    "Sec-WebSocket-Version": "13",
    "Sec-WebSocket-Key": "AAAAAAAAAAAAAAAAAAAAAA==",
}
KNOWN = {CREDENTIAL_HEADER: SECRET, VERSION_HEADER: str(VERSION), TO_HEADER: "one"}


async def test_the_credential_before_is_accepted_too(serve: Serve, stack: AsyncExitStack) -> None:
    """So that it can be changed while instances run."""
    owner = Owner()
    at = await serve(owner)
    for credential in ("the one before", SECRET):
        peers = await stack.enter_async_context(HttpPeers(credential))
        assert (await ask(peers, at, credential)).changed
    peers = await stack.enter_async_context(HttpPeers("another one", "a third one"))
    with pytest.raises(ShardUnavailableError, match="wrong_credential"):
        await ask(peers, at, "t")
    assert len(owner.asked) == 2


async def test_an_owner_that_does_not_take_a_credential_is_shown_the_next_one(
    serve: Serve, stack: AsyncExitStack
) -> None:
    """Workers of one host have one of their own, beside those that a reload sets for some of them first."""
    at = await serve(Owner())
    peers = await stack.enter_async_context(HttpPeers("not known to it", SECRET))
    assert (await ask(peers, at, "t")).changed


async def test_another_incarnation_at_the_address_does_nothing(serve: Serve, peers: HttpPeers) -> None:
    """It may be an instance of another cluster by now, or this one after it lost its shards: each call is judged."""
    owner = Owner()
    at = await serve(owner)
    await ask(peers, at, "t")
    for owner.incarnation in ("two", None):
        async with HttpPeers(SECRET) as later:
            for asker in (peers, later):
                with pytest.raises(ShardUnavailableError, match="421"):
                    await ask(asker, at, "t")
    assert (len(owner.asked), owner.connections) == (1, 3)


async def test_messages_are_bounded_and_nothing_is_read_without_the_credential(serve: Serve) -> None:
    owner = Owner()
    url = (await serve(owner)).url + PATH
    async with aiohttp.ClientSession() as session:

        async def status(headers: dict[str, str], method: str = "GET") -> int:
            async with session.request(method, url, data=b"x" * 1_000_000, headers=headers) as response:
                return response.status

        assert await status({}) == 401
        assert await status({}, "POST") == 401
        assert await status(KNOWN) == 426
        assert await status(KNOWN, "POST") == 426, "an instance of an earlier release tries again"
        for message in (b"x" * 200_000, b"x", "text"):
            async with session.ws_connect(url, headers=KNOWN) as socket:
                await (socket.send_str(message) if isinstance(message, str) else socket.send_bytes(message))
                while (received := await socket.receive()).type is aiohttp.WSMsgType.BINARY:
                    assert received.data == encode_message([])
                assert received.type in {aiohttp.WSMsgType.CLOSE, aiohttp.WSMsgType.CLOSED}
    assert owner.asked == []


async def test_calls_under_way_are_bounded(serve: Serve, stack: AsyncExitStack) -> None:
    owner = Owner()
    owner.port._max_calls = 2
    owner.gates = {name: asyncio.Event() for name in ("a", "b")}
    at = await serve(owner)
    peers, other = [await stack.enter_async_context(HttpPeers(SECRET)) for _ in range(2)]
    waiting = [asyncio.create_task(ask(peers, at, name)) for name in owner.gates]
    await until_true(lambda: len(owner.asked) == 2, what="both are asked")
    for one in (peers, other):
        with pytest.raises(ShardUnavailableError, match="overloaded"):
            await ask(one, at, "c")
    for gate in owner.gates.values():
        gate.set()
    await asyncio.gather(*waiting)
    assert (await ask(other, at, "c")).id == "c"


async def test_a_port_that_drains_takes_no_more_and_answers_what_it_has(serve: Serve, peers: HttpPeers) -> None:
    owner = Owner()
    owner.gates["t"] = asyncio.Event()
    at = await serve(owner)
    waiting = asyncio.create_task(ask(peers, at, "t"))
    await until_true(lambda: owner.asked)
    draining = asyncio.create_task(owner.port.drain(within()))
    await asyncio.sleep(0)
    with pytest.raises(ShardUnavailableError, match="shutting_down"):
        await ask(peers, at, "later")
    assert not draining.done()
    owner.gates["t"].set()
    await draining
    assert (await waiting).id == "t"


async def test_a_call_of_which_this_release_knows_nothing_spoils_no_other(serve: Serve) -> None:
    url = (await serve(Owner())).url + PATH
    calls = [
        {"number": number, "within_ms": 1000, "principal": {"kind": "peer"}, "call": call}
        for number, call in ((1, {"type": "teleport"}), (2, msgspec.to_builtins(end_of("t"))))
    ]
    frames: dict[int, AnswerFrame] = {}
    async with aiohttp.ClientSession() as session, session.ws_connect(url, headers=KNOWN) as socket:
        await socket.send_bytes(msgspec.msgpack.encode(calls))
        while len(frames) < len(calls):
            frames |= {frame.number: frame for frame in decode_answers(await socket.receive_bytes())}
    with pytest.raises(ShardUnavailableError):
        decode_result(GetCall(id="t"), frames[1])
    assert decode_result(end_of("t"), frames[2]).id == "t"


async def test_an_asker_that_dies_before_its_answer_comes_is_no_fault(serve: Serve) -> None:
    owner, faults, ended = Owner(), list[Exception](), asyncio.Event()
    owner.gates = {name: asyncio.Event() for name in ("first", "second")}

    async def handler(request: web.BaseRequest) -> web.StreamResponse:
        try:
            return await owner(request)
        except Exception as error:
            faults.append(error)
            raise
        finally:
            ended.set()

    at = await serve(handler)
    async with asyncio.timeout(GENEROUS_S):
        async with HttpPeers(SECRET) as asker:
            asked = [asyncio.create_task(ask(asker, at, name)) for name in owner.gates]
            await until_true(lambda: len(owner.asked) >= len(asked))
        await asyncio.gather(*asked, return_exceptions=True)
        await asyncio.sleep(0.1)  # until the owner's side has seen the connection close
        owner.gates["first"].set()
        await asyncio.sleep(0)
        owner.gates["second"].set()
        await ended.wait()
    assert faults == []


async def test_refusals_are_one_line_for_each_reason_in_a_while(serve: Serve) -> None:
    """Whoever reaches the port can send any number of requests without the credential; the log says how many."""
    at = await serve(Owner())
    with capture_logs() as logs:
        async with aiohttp.ClientSession() as session:

            async def send(headers: dict[str, str]) -> int:
                async with session.get(at.url + PATH, headers=UPGRADE | headers) as response:
                    return response.status

            assert {await send({}) for _ in range(50)} == {401}
            assert await send({CREDENTIAL_HEADER: SECRET, VERSION_HEADER: "9"}) == 505
        assert _refused(logs) == [("wrong_credential", None), ("unknown_version", None)]
        flush_all()
        assert ("wrong_credential", 49) in _refused(logs)[2:]


def _refused(logs: Sequence[Mapping[str, Any]]) -> list[tuple[str, int | None]]:
    return [(line["reason"], line.get("more")) for line in logs if line["event"] == "peer_refused"]
