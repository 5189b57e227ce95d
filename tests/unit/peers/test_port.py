"""The port for calls of other instances: which callers it answers, and its limits."""

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack
from typing import Any

import aiohttp
import msgspec
import pytest
from aiohttp import web
from structlog.testing import capture_logs
from yarl import URL

from halfway.coordinator.records import CREDENTIAL_HEADER, TO_HEADER, VERSION_HEADER, GetCall
from halfway.http.server.peer_port import PATH
from halfway.peers import HttpPeers
from halfway.protocol.errors import ShardUnavailableError
from tests.support.loop_time import LoopTime
from tests.support.peers.owner import SECRET, Owner, Serve, ask, end_of, within
from tests.support.waiting import GENEROUS_S, until_true


async def test_the_credential_before_is_accepted_too(serve: Serve, stack: AsyncExitStack) -> None:
    """So that it can be changed while instances run."""
    owner = Owner()
    at = await serve(owner)
    for credential in ("the one before", SECRET):
        peers = await stack.enter_async_context(HttpPeers(credential))
        assert (await ask(peers, at, credential)).changed
    peers = await stack.enter_async_context(HttpPeers("another one"))
    with pytest.raises(ShardUnavailableError, match="wrong_credential"):
        await ask(peers, at, "t")
    assert len(owner.asked) == 2


async def test_another_incarnation_at_the_address_does_nothing(serve: Serve, peers: HttpPeers) -> None:
    """It may be an instance of another cluster by now, or this one after it lost its shards."""
    owner = Owner()
    at = await serve(owner)
    for incarnation in ("two", None):
        owner.incarnation = incarnation
        with pytest.raises(ShardUnavailableError, match="421"):
            await ask(peers, at, "t")
    assert owner.asked == []


async def test_bodies_are_bounded_and_nothing_is_read_without_the_credential(serve: Serve) -> None:
    at = await serve(Owner())
    url = at.url + PATH
    known = {CREDENTIAL_HEADER: SECRET, "Halfway-Peer-Version": "1", "Halfway-Peer-To": "one"}
    async with aiohttp.ClientSession() as session:

        async def status(headers: dict[str, str], data: Any) -> int:
            async with session.post(url, data=data, headers=headers) as response:
                return response.status

        async def chunks() -> AsyncIterator[bytes]:
            yield b"x"

        assert await status({}, b"x" * 1_000_000) == 401
        assert await status(known, b"x" * 200_000) == 413
        assert await status(known, chunks()) == 413
        assert await status(known, b"x") == 400
        async with session.get(url, headers=known) as response:
            assert response.status == 405


async def test_a_port_that_drains_takes_no_more_and_answers_what_it_has(serve: Serve, peers: HttpPeers) -> None:
    owner = Owner()
    owner.gates["t"] = asyncio.Event()
    at = await serve(owner)
    waiting = asyncio.create_task(ask(peers, at, "t"))
    while not owner.asked:  # noqa: ASYNC110 - no event reports its arrival
        await asyncio.sleep(0.005)
    draining = asyncio.create_task(owner.port.drain(within()))
    await asyncio.sleep(0)
    with pytest.raises(ShardUnavailableError, match="shutting_down"):
        await ask(peers, at, "later")
    assert not draining.done()
    owner.gates["t"].set()
    await draining
    assert (await waiting).id == "t"


async def test_a_call_of_which_this_release_knows_nothing_spoils_no_other(serve: Serve) -> None:
    at = await serve(Owner())
    body = msgspec.msgpack.encode(
        {
            "calls": [
                {"within_ms": 1000, "call": {"type": "teleport"}},
                {"within_ms": 1000, "call": msgspec.to_builtins(end_of("t"))},
            ]
        }
    )
    headers = {CREDENTIAL_HEADER: SECRET, "Halfway-Peer-Version": "1", "Halfway-Peer-To": "one"}
    from halfway.coordinator.cluster.peers import AnswerReader, decode_result

    async with aiohttp.ClientSession() as session, session.post(at.url + PATH, data=body, headers=headers) as response:
        frames = {frame.index: frame for frame in AnswerReader(10_000).feed(await response.read())}
    with pytest.raises(ShardUnavailableError):
        decode_result(GetCall(id="t"), frames[0])
    assert decode_result(end_of("t"), frames[1]).id == "t"


async def test_an_asker_that_dies_in_the_middle_of_its_request_is_no_fault(serve: Serve) -> None:
    """It is not logged as an error of the called instance, and its calls were not done."""
    owner, began, ended = Owner(), asyncio.Event(), asyncio.Event()

    async def handler(request: web.BaseRequest) -> web.StreamResponse:
        began.set()
        try:
            return await owner(request)
        finally:
            ended.set()

    at = URL((await serve(handler)).url)
    with capture_logs() as logged:
        async with asyncio.timeout(GENEROUS_S):
            _, writer = await asyncio.open_connection(at.host, at.port)
            head = f"POST {PATH} HTTP/1.1\r\nHost: h\r\n{CREDENTIAL_HEADER}: {SECRET}\r\n{VERSION_HEADER}: 1\r\n"
            writer.write(f"{head}{TO_HEADER}: one\r\nContent-Length: 1000\r\n\r\nhalf of it".encode())
            await began.wait()
            writer.close()
            await ended.wait()
        await asyncio.sleep(0.05)  # its log line is written in the same turn
    assert owner.asked == []
    assert [entry for entry in logged if entry["log_level"] == "error"] == []


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
            while len(owner.asked) < len(asked):  # noqa: ASYNC110 - the owner sets no event
                await asyncio.sleep(0.01)
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
                async with session.post(at.url + PATH, data=b"x", headers=headers) as response:
                    return response.status

            time = LoopTime()
            for expected in ([1, 49], [1, 49, 50], [1, 49, 50, 50]):
                assert {await send({}) for _ in range(50)} == {401}
                assert await send({CREDENTIAL_HEADER: SECRET, VERSION_HEADER: "9"}) == 505
                time.advance(10)
                await until_true(lambda expected=expected: _counts(logs, "wrong_credential") == expected)  # type: ignore[misc]
        assert _counts(logs, "unknown_version") == [1, 1, 1]


def _counts(logs: Sequence[Mapping[str, Any]], reason: str) -> list[int]:
    return [line["count"] for line in logs if line["event"] == "peer_refused" and line["reason"] == reason]
