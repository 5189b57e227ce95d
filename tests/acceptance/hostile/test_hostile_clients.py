"""Clients that announce, trickle, stop reading, die and flood: they affect only themselves."""

import asyncio
import base64
import contextlib
import json
import re
from collections.abc import Iterator
from contextlib import ExitStack

import pytest

from tests.support.coordinator.by_hand import total
from tests.support.coordinator.process import CoordinatorProcess
from tests.support.coordinator.rest_client import Rest, message, preparation
from tests.support.hostile.malformed import send
from tests.support.hostile.sockets import HOST, MIB, bounded, exchanged, head, opened, post
from tests.support.hostile.worst_bodies import WORST
from tests.support.waiting import eventually

ANNOUNCED = 8 * MIB
SOON = {"first_check_after_s": 0.2, "check_interval_s": 0.2, "max_checks": 3}


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


async def others_are_served(rest: Rest, group: str, topic: str) -> None:
    """Assert that a well-behaved client is served: with small bodies, larger ones, and none."""
    for value in ("v", "v" * 100_000):
        await rest.commit(await rest.prepared(group, [message(topic, value)]))
    (await rest.call("GET", "/groups")).expect(200)


@pytest.mark.parametrize("field", ["", "Expect: 100-continue"])
async def test_bodies_that_are_announced_and_never_sent(
    rest: Rest, coordinator: CoordinatorProcess, stack: ExitStack, quiet: str, topic: str, field: str
) -> None:
    async with bounded(coordinator, rest, f"announced bodies {field}", descriptors=120):
        for _ in range(100):
            silent = stack.enter_context(opened(coordinator.port))
            fields = [f"Content-Length: {ANNOUNCED}", *([field] if field else [])]
            silent.sendall(head("POST", "/v1/transactions", *fields))
        await others_are_served(rest, quiet, topic)


async def test_bodies_that_trickle(
    rest: Rest, coordinator: CoordinatorProcess, stack: ExitStack, quiet: str, topic: str
) -> None:
    """Byte by byte, each in a chunk of its own; a small complete one is accepted."""
    async with bounded(coordinator, rest, "trickled bodies", descriptors=120):
        chunked = head("POST", "/v1/transactions", "Transfer-Encoding: chunked")
        tricklers = [stack.enter_context(opened(coordinator.port)) for _ in range(100)]
        for one in tricklers:
            one.sendall(chunked)
        for _ in range(20):
            for one in tricklers:
                one.sendall(b"1\r\n \r\n")
        await others_are_served(rest, quiet, topic)
    whole = json.dumps({"group": quiet, "messages": [message(topic, "v" * 2000)]}).encode()
    pieces = b"".join(b"1\r\n%c\r\n" % byte for byte in whole) + b"0\r\n\r\n"
    closing = head("POST", "/v1/transactions", "Connection: close", "Transfer-Encoding: chunked")
    assert (await exchanged(coordinator.port, closing + pieces)).startswith(b"HTTP/1.1 201 ")


async def test_readers_that_stop(
    rest: Rest, coordinator: CoordinatorProcess, stack: ExitStack, quiet: str, topic: str
) -> None:
    """They request megabytes repeatedly on one connection, and read none: the connection is closed."""
    value = {"type": "BINARY", "data": base64.b64encode(b"\x01" * 700_000).decode()}
    prepared = json.dumps(preparation(quiet, [message(topic, value)] * 5)).encode()
    large = (await send(rest, "POST", "/v1/transactions", prepared)).expect(201)["id"]
    assert len(json.dumps(await rest.show(large))) < 6 * MIB, "not six characters for each of them"
    async with bounded(coordinator, rest, "readers that stop", memory=192 * MIB):
        for _ in range(12):
            deaf = stack.enter_context(opened(coordinator.port, receive_buffer=4096))
            deaf.sendall(head("GET", f"/v1/transactions/{large}") * 20)
        await eventually(lambda: total(rest, "halfway_unsent_answer_bytes"), lambda unsent: unsent > 0)
        await others_are_served(rest, quiet, topic)
        await eventually(lambda: total(rest, "halfway_unsent_answer_bytes"), lambda unsent: unsent == 0)
    assert len((await rest.show(large))["messages"]) == 5


async def test_polls_that_die(
    rest: Rest, coordinator: CoordinatorProcess, stack: ExitStack, group: str, topic: str
) -> None:
    """They take neither the group's limit of polls nor its checks."""
    (await rest.put_group(group, topics=[topic], policy=SOON)).expect(201)

    async def answer() -> int:
        return (await rest.call("GET", f"/groups/{group}/checks", query={"wait_s": 0.1})).status

    async with bounded(coordinator, rest, "dead polls"):
        for _ in range(2):
            with ExitStack() as polls:
                for _ in range(100):
                    poll = polls.enter_context(opened(coordinator.port))
                    poll.sendall(head("GET", f"/v1/groups/{group}/checks?wait_s=60"))
                await eventually(answer, lambda status: status == 429)
            await eventually(answer, lambda status: status == 200)
        # A poll whose end has not been read yet may still be given a check.
        await eventually(lambda: total(rest, "halfway_requests_in_flight"), lambda count: count == 0)
        transaction = await rest.prepared(group, [message(topic)])
        (check,) = await rest.lease(group, wait_s=30)
        assert (check["id"], check["attempt"]) == (transaction, 1)
        (await rest.end(transaction, "rollback", check_id=check["check_id"])).expect(200)


async def test_pipelined_requests_are_answered_in_their_order(
    rest: Rest, coordinator: CoordinatorProcess, quiet: str, topic: str
) -> None:
    async with bounded(coordinator, rest, "pipelining"):
        asked = b"".join(head("GET", f"/v1/groups/nobody-{number}") for number in range(100))
        answer = await exchanged(coordinator.port, asked + head("GET", "/v1/groups/nobody-100", "Connection: close"))
        assert answer.count(b"HTTP/1.1 404") == 101
        asked_in_order = [int(found) for found in re.findall(rb'"group":"nobody-(\d+)"', answer)]
        assert asked_in_order == list(range(101))
        await others_are_served(rest, quiet, topic)


@pytest.mark.parametrize(
    "name",
    [
        "a prepare of small headers",
        "small messages and one that is wrong",
        "a batch of numbers",
        "a batch of items with one wrong message",
        "nested without end",
    ],
)
async def test_the_worst_bodies(rest: Rest, coordinator: CoordinatorProcess, name: str) -> None:
    """Others are answered while they are validated."""
    path, body = WORST[name]
    async with bounded(coordinator, rest, name, memory=128 * MIB):
        hostile = asyncio.create_task(exchanged(coordinator.port, post(path, body)))
        while not hostile.done():
            (await rest.call("GET", "/groups/nobody")).expect(404)
        status = int((await hostile).split()[1])
        assert status in {200, 400, 404, 422}


async def test_idle_connections_do_not_shut_the_health_port(
    rest: Rest, coordinator: CoordinatorProcess, stack: ExitStack
) -> None:
    """They take few descriptors, and health requests are answered."""
    async with bounded(coordinator, rest, "idle connections on the health port", descriptors=80):
        for _ in range(300):
            stack.enter_context(opened(coordinator.health_port))
        assert (await rest.health("/health/ready"))[0] == 200


MARKED = {
    "control characters": "".join(map(chr, range(32))) + "\x7f",
    "markup": "see [/etc/passwd] [bold]<script>alert(1)</script> {{7*7}} ${jndi:ldap://h/a}",
    "escape sequences": "\x1b]0;owned\x07\x1b[2J\x1b[31m\x9b31m",
    "right-to-left marks": "\u202e\u2066txt.exe\u2069\u200f",
    "64 KiB of one character": "A" * 65_536,
    "64 KiB of quotes": '"' * 65_536,
    "line breaks": 'x\r\nSet-Cookie: a=b\r\n\r\nHTTP/1.1 200 OK\r\n{"level": "error"}\n',
}


@pytest.mark.parametrize("text", MARKED.values(), ids=MARKED.keys())
async def test_text_of_any_kind_anywhere(
    rest: Rest, coordinator: CoordinatorProcess, quiet: str, topic: str, text: str
) -> None:
    """It is refused, or stored and shown unchanged; answers and the log are not affected."""
    began = len(coordinator.log)
    quoted = "".join(f"%{byte:02x}" for byte in text.encode()[:2000])
    async with bounded(coordinator, rest, "text of any kind"):
        kept = await rest.prepared(
            quiet, [message(topic, text, key=text[:20_000], headers=[{"name": "h", "value": text}])]
        )
        shown = (await rest.show(kept))["messages"][0]
        for part in (shown["value"], shown["headers"][0]["value"]):
            assert (part if isinstance(part, str) else base64.b64decode(part["data"]).decode()) == text
        bodies = [
            {"group": text, "messages": [message(topic)]},
            {"group": quiet, "id": text, "messages": [message(topic)]},
            {"group": quiet, "messages": [message(text)]},
            {"group": quiet, "messages": [message(topic, headers=[{"name": text}])]},
            {text: 1, "group": quiet, "messages": [message(topic, **{text: 1})]},
            text,
        ]
        for body in bodies:
            answer = await rest.call("POST", "/transactions", body)
            assert answer.status in {201, 422}, answer
            assert len(json.dumps(answer.body)) < 16_384
        for path in (f"/groups/{quoted}", f"/transactions/{quoted}", f"/transactions?cursor={quoted[:900]}"):
            sent = head("GET", f"/v1{path}", "Connection: close")
            answer_head, _, document = (await exchanged(coordinator.port, sent)).partition(b"\r\n\r\n")
            assert int(answer_head.split()[1]) in {404, 422}, answer_head
            json.loads(document)
            assert b"\x1b" not in answer_head
            assert b"Set-Cookie" not in answer_head
        ended = await rest.end(kept, "commit", remark=text)
        assert ended.status in {200, 422}
        if ended.status == 200:
            assert (await rest.show(kept))["remark"] == text
        else:
            (await rest.end(kept, "rollback", remark=text[:100])).expect(200, 422)
    for line in coordinator.log[began:].splitlines():
        json.loads(line)


async def test_a_client_that_resets_in_the_middle_of_everything(
    rest: Rest, coordinator: CoordinatorProcess, quiet: str, topic: str
) -> None:
    """In the head, in the body, or during the answer: no resources remain."""
    moments = [
        b"POST /v1/tr",
        head("POST", "/v1/transactions", "Content-Length: 100000") + b"{",
        head("GET", "/v1/groups") * 50,
        head("GET", f"/v1/groups/{quiet}/checks?wait_s=60"),
    ]
    async with bounded(coordinator, rest, "resets"):
        for sent in moments * 20:
            _, writer = await asyncio.open_connection(HOST, coordinator.port)
            writer.write(sent)
            with contextlib.suppress(ConnectionError):
                await writer.drain()
            writer.transport.abort()
        await eventually(lambda: total(rest, "halfway_requests_in_flight"), lambda count: count == 0)
        await others_are_served(rest, quiet, topic)
