"""Only the answer to a check resolves its transaction."""

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import msgspec
import pytest

from halfway.checks import HttpCheckCaller
from halfway.coordinator.ports import CheckReply, CheckRequest
from halfway.protocol.records import Group, Message
from halfway.protocol.transactions import Outcome
from tests.support.checkback.servers import Asked, echoes, endpoint, response, sends
from tests.unit.checks.conftest import GROUP, QUESTION, Ask, local_caller

STRAY = response(b'{"outcome": "commit"}')
HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\n"
OTHER_GROUP = Group(
    name="carts", mode=GROUP.mode, urls=(), topics=(), policy=GROUP.policy, created_at=0, updated_at=0
)  # fmt: skip

Second = Callable[[Asked], bytes]


def answered(asked: Asked, outcome: str) -> bytes:
    return response(json.dumps({"outcome": outcome, "nonce": asked.nonce}).encode())


@asynccontextmanager
async def strays_after(
    first: Second, later: Second, *, pause_s: float
) -> AsyncIterator[tuple[str, list[int], asyncio.Event]]:
    """Serve answers that are followed by something more, `pause_s` later.

    Give the URL, which connection each question came on, and what is set once something more was sent.
    """
    connections: list[int] = []
    sent = asyncio.Event()

    async def serve(writer: asyncio.StreamWriter, asked: Asked) -> None:
        connections.append(writer.get_extra_info("peername")[1])
        writer.write(first(asked))
        if pause_s:
            await writer.drain()
            await asyncio.sleep(pause_s)
        writer.write(later(asked))
        sent.set()

    async with endpoint(serve, keep=True) as service:
        yield service.url, connections, sent


STRAYS: dict[str, Second] = {
    "a second answer": lambda _: STRAY,
    "a second answer that echoes": lambda asked: answered(asked, "commit"),
    "its head": lambda _: STRAY.partition(b"\r\n\r\n")[0],
    "its first byte": lambda _: b"H",
    "an empty line": lambda _: b"\r\n",
    "an interim answer": lambda _: b"HTTP/1.1 100 Continue\r\n\r\n",
    "another status": lambda _: response(b"", status="500 Oh"),
    "what is not HTTP": lambda _: b"\x00" * 100,
    "a hundred answers": lambda _: STRAY * 100,
    "an answer without end": lambda _: HEAD + b"Content-Length: 100\r\n\r\n" + b" " * 79,
}


CASES = {
    f"{name}, {when}": (stray, pause_s)
    for name, stray in STRAYS.items()
    for when, pause_s in (("at once", 0.0), ("later", 0.02))
    # HTTP allows an empty line before a message, so sent at once it is read and dropped.
    if (name, when) != ("an empty line", "at once")
}


@pytest.mark.parametrize("stray, pause_s", CASES.values(), ids=CASES.keys())
async def test_a_connection_with_anything_left_to_read_is_not_used_again(
    ask: Ask, stray: Second, pause_s: float
) -> None:
    """Whatever follows an answer, the next check uses another connection and gets its own answer or none."""
    strays = strays_after(lambda asked: answered(asked, "rollback"), stray, pause_s=pause_s)
    async with strays as (url, connections, sent):
        assert (await ask(url)).outcome is not Outcome.COMMIT
        await sent.wait()
        await asyncio.sleep(0.05)  # it was sent, and is read in the next turn of the loop
        assert (await ask(url)).outcome is not Outcome.COMMIT
    assert len(connections) == len(set(connections)) == 2


async def test_an_answer_that_strays_to_the_next_question_does_not_count(ask: Ask) -> None:
    """Sent during the next check it is not a verdict: the check is sent again on a new connection."""
    first: list[Asked] = []

    async def serve(writer: asyncio.StreamWriter, asked: Asked) -> None:
        first.append(asked)
        if len(first) == 2:
            writer.write(STRAY)
        else:
            writer.write(answered(asked, "rollback"))

    async with endpoint(serve, keep=True) as service:
        assert (await ask(service.url)).outcome is Outcome.ROLLBACK
        assert (await ask(service.url)).outcome is Outcome.ROLLBACK
    assert (service.connections, len(first)) == (2, 3)
    assert len({asked.nonce for asked in first}) == 3


async def test_the_answer_to_another_question_does_not_count_on_any_connection(ask: Ask) -> None:
    """An answer with the nonce of the check before is not a verdict, also on a new connection."""
    nonces: list[str] = []

    async def serve(writer: asyncio.StreamWriter, asked: Asked) -> None:
        nonces.append(asked.nonce)
        writer.write(response(json.dumps({"outcome": "commit", "nonce": nonces[0]}).encode()))

    async with endpoint(serve) as service:
        assert (await ask(service.url)).outcome is Outcome.COMMIT
        reply = await ask(service.url)
    assert (reply.outcome, reply.answered, reply.sent) == (Outcome.UNKNOWN, False, True)
    assert "another question" in reply.detail


async def test_groups_behind_one_address_share_no_connection(caller: HttpCheckCaller) -> None:
    """A stray answer on a connection of one group cannot reach another's check."""
    async with endpoint(echoes("rollback"), keep=True) as service:
        for group in (GROUP, OTHER_GROUP, GROUP, OTHER_GROUP):
            assert (
                await caller.call(group, [service.url], msgspec.structs.replace(QUESTION, group=group.name))
            ).answered
    assert service.connections == 2


async def test_an_answer_before_the_question_was_read_does_not_count() -> None:
    """A service that returns commit while the check is still being sent has not seen the transaction."""
    large = CheckRequest(
        check_id="a:1", id="a", group="orders", prepared_at=0, attempt=1,
        messages=(Message(topic="coupon", value=b"v" * 16_000_000),),
    )  # fmt: skip

    gone = asyncio.Event()

    async def answer_first(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read(100)
        writer.write(STRAY)
        await writer.drain()
        with contextlib.suppress(ConnectionError):
            while await reader.read(1_000_000):
                pass
        writer.close()
        gone.set()

    async with await asyncio.start_server(answer_first, "127.0.0.1", 0) as server, local_caller() as caller:
        reply = await caller.call(GROUP, [f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/"], large)
        await gone.wait()
    assert (reply.outcome, reply.answered) == (Outcome.UNKNOWN, False)


async def test_an_answer_out_of_a_cache_counts_only_if_it_echoes_the_nonce(ask: Ask) -> None:
    """A cache that stores answers to POST would return one transaction's verdict for another."""
    async with endpoint(sends(response(b'{"outcome": "commit"}', extra=("Age: 7",)))) as service:
        reply: CheckReply = await ask(service.url)
    assert (reply.outcome, reply.answered) == (Outcome.UNKNOWN, False)
    assert "cache" in reply.detail


async def test_an_answer_whose_framing_breaks_ends_at_once(ask: Ask) -> None:
    """Chunks that turn into something else are not a verdict, and the caller does not wait for the rest."""
    broken = (
        HEAD + b"Transfer-Encoding: chunked\r\n\r\n15\r\n" + b'{"outcome": "commit"}' + b"\r\n0\r\n\x00\x00: \x00\r\n"
    )
    async with endpoint(sends(broken), keep=True) as service:
        reply = await ask(service.url)
    assert (reply.answered, reply.reachable) == (False, True)
