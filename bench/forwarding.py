"""Measures the cost of a forwarded call: the calls between instances, compared with REST calls in batches.

Both ways run real code over ports in memory, because the cost of Kafka is the same for both. One process owns every
shard; another owns none and forwards every call; this one sends the load. A round measures direct calls to the owner,
and then each way to forward. CPU is that of both instances, for one call: a prepare or a commit.

`python -m bench.forwarding` takes about two minutes; see docs/protocol.md#any-instance-may-be-asked.
"""

from __future__ import annotations

import asyncio
import subprocess
import sys
from contextvars import ContextVar
from dataclasses import replace
from functools import partial
from http import HTTPStatus
from statistics import median
from typing import TYPE_CHECKING, Any, Final

import aiohttp
import click
import msgspec
import uvloop
from yarl import URL

from bench.figures import cpu_us
from bench.load.wire import split
from halfway.memory import Memory
from halfway.peers import HttpPeers, client
from halfway.rest.handlers.calls import Call, Handler, Operation
from halfway.rest.handlers.routes import OPERATIONS
from halfway.rest.responses.answer import Answer
from halfway.rest.server.api import Api, Routes
from halfway.rest.server.peer_port import PATH, PeerPort
from halfway.rest.server.server import HttpServer
from halfway.service.coordinator import Coordinator
from halfway.service.ports import OwnerHint
from halfway.service.records.peer_calls import EndCall
from halfway.service.requests import ServiceLimits

if TYPE_CHECKING:
    from aiohttp import web

HOST: Final = "127.0.0.1"
SHARDS: Final = 6
CREDENTIAL: Final = "the credential of this measurement"
OWNER: Final = "owner"
GROUP: Final = b'{"check":{"mode":"pull"},"topics":["orders"]}'
VALUE: Final = b"v" * 512
WAYS: Final = (OWNER, "calls", "rest")
"""Direct calls to the owner, calls between instances, and REST calls."""
JSON: Final = {"Content-Type": "application/json"}
_BODY: ContextVar[bytes] = ContextVar("_BODY")


class _Item(msgspec.Struct, frozen=True, gc=False):
    status: int
    body: msgspec.Raw = msgspec.Raw()
    problem: msgspec.Raw = msgspec.Raw()


class _Batch(msgspec.Struct, frozen=True, gc=False):
    prepare: list[_Item]
    end: list[_Item]


_BATCH: Final = msgspec.json.Decoder(_Batch)


class _AnsweredError(Exception):
    """Carries the owner's answer, which is returned unchanged."""

    def __init__(self, item: _Item) -> None:
        super().__init__(item.status)
        self.item = item


class _NoMetrics:
    def answered(self, operation: str, status: int) -> None:
        """Count no request."""

    def streamed(self, operation: str, status: int, count: int) -> None:
        """Count no operation of a stream."""


class _OneOwner:
    """The port `Owners`: another instance owns every shard."""

    def __init__(self, url: str) -> None:
        self._hint = OwnerHint(incarnation=OWNER, url=url)

    def find(self, shard: int) -> OwnerHint:  # noqa: ARG002 - the port's
        return self._hint


class RestPeers(HttpPeers):
    """Sends the waiting calls to an owner as one `POST /v1/batch`, with the original bodies."""

    async def _exchange(self, queue: Any, batch: list[Any]) -> None:
        prepares = [pending for pending in batch if not isinstance(pending.call, EndCall)]
        ends = [pending for pending in batch if isinstance(pending.call, EndCall)]
        joined = [b",".join([pending.body for pending in part]) for part in (prepares, ends)]
        for pending in batch:
            pending.sent = True
        url = URL(queue.owner.url + "/v1/batch")
        body = b'{"prepare":[%b],"end":[%b]}' % (joined[0], joined[1])
        async with self._open().post(url, data=body, headers=JSON, allow_redirects=False) as response:
            answers = _BATCH.decode(await response.read())
        queue.last_heard = asyncio.get_running_loop().time()
        for pending, item in zip((*prepares, *ends), (*answers.prepare, *answers.end), strict=True):
            if not pending.answer.done():
                pending.answer.set_exception(_AnsweredError(item))


def _item_of(call: Any, **_: Any) -> bytes:
    """Return the body of a call as an item of a batch."""
    body = _BODY.get()
    return b'{"id":"%b",%b' % (call.request.id.encode(), body[1:]) if isinstance(call, EndCall) else body


def _forwarding_handler(handler: Handler) -> Handler:
    async def handle(call: Call) -> Answer:
        _BODY.set(bytes(call.body or b""))
        try:
            return await handler(call)
        except _AnsweredError as answered:
            return Answer(status=answered.item.status, body=bytes(answered.item.body))

    return handle


class _RestRoutes(Routes):
    """The routes of an instance that forwards REST calls and returns the owner's answers."""

    def find(self, method: str, path: str) -> tuple[Operation, str]:
        operation, parameter = super().find(method, path)
        return replace(operation, handler=_forwarding_handler(operation.handler)), parameter


async def serve(way: str, owner: str) -> None:
    """Serve as the owner of every shard, or as an instance that forwards to it; print the port."""
    memory = Memory(shards=SHARDS, topics={"orders": 3}, owns=None if way == OWNER else ())
    ports: dict[str, Any] = dict(memory.ports)
    if way != OWNER:
        ports |= {"owners": _OneOwner(owner), "peers": (RestPeers if way == "rest" else HttpPeers)(CREDENTIAL)}
    coordinator = Coordinator(limits=ServiceLimits(shards=SHARDS), **ports)
    await memory.membership.start(coordinator.listener)
    api = Api(coordinator, internal_prefix="_halfway.", observer=_NoMetrics())
    if way == "rest":
        vars(client)["encode_call"] = _item_of
        api._routes = _RestRoutes(OPERATIONS)  # noqa: SLF001 - nothing else replaces it
    peers = PeerPort(
        coordinator.peer_handler,
        credentials=[CREDENTIAL],
        incarnation=lambda: OWNER,
        max_body_bytes=1 << 26,
        longest_s=20,
    )

    async def handle(request: web.BaseRequest) -> web.StreamResponse:
        return await (peers if request.rel_url.raw_path == PATH else api)(request)

    port = await HttpServer(handle).start(HOST, 0)
    async with aiohttp.ClientSession(headers=JSON) as session:
        await session.put(f"http://{HOST}:{port}/v1/groups/shop", data=GROUP)
    click.echo(f"port {port}")
    await asyncio.Event().wait()


class _Load:
    """The load: callers that prepare and commit, one call at a time, until the time is up."""

    def __init__(self, seconds: float) -> None:
        self.calls = 0
        self.until = asyncio.get_running_loop().time() + seconds


class _Caller(asyncio.Protocol):
    def __init__(self, load: _Load, name: str, done: asyncio.Future[None]) -> None:
        self._load, self._name, self._done = load, name, done
        self._received, self._committing, self._number = b"", False, 0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport: Any = transport
        self._next()

    def _next(self) -> None:
        name = f"{self._name}{self._number}".encode()
        if self._committing:
            path, body = b"/v1/transactions/%b/end" % name, b'{"outcome":"commit"}'
        else:
            path = b"/v1/transactions"
            body = b'{"group":"shop","id":"%b","messages":[{"topic":"orders","key":"k","value":"%b"}]}' % (name, VALUE)
        head = b"POST %b HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n"
        self._transport.write(head % (path, len(body)) + body)

    def data_received(self, data: bytes) -> None:
        self._received += data
        answer = split(self._received)
        if answer is None:
            return
        status, body, self._received = answer
        if status != (HTTPStatus.OK if self._committing else HTTPStatus.CREATED):
            self._done.set_exception(RuntimeError(f"{status}: {body!r}"))
            return
        self._load.calls += 1
        self._number += self._committing
        self._committing = not self._committing
        if self._committing or asyncio.get_running_loop().time() < self._load.until:
            self._next()
        else:
            self._transport.close()
            self._done.set_result(None)


async def load(port: int, seconds: float, callers: int, name: str) -> int:
    """Send the load and return the number of answered calls."""
    loop, shared = asyncio.get_running_loop(), _Load(seconds)
    waiting: list[asyncio.Future[None]] = []
    for number in range(callers):
        done: asyncio.Future[None] = loop.create_future()
        waiting.append(done)
        await loop.create_connection(partial(_Caller, shared, f"{name}-{number}-", done), HOST, port)
    await asyncio.gather(*waiting)
    return shared.calls


def _start(way: str, owner: str) -> tuple[subprocess.Popen[str], int]:
    command = [sys.executable, "-m", "bench.forwarding", "--serve", way, "--owner", owner]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)  # noqa: S603 - this very module
    for line in process.stdout or ():
        if line.startswith("port "):
            return process, int(line.split()[1])
    raise RuntimeError(f"the instance did not start: {way}")


def measure(way: str, seconds: float, callers: int) -> list[float]:
    """Return the CPU of each instance per call, in microseconds."""
    running: list[subprocess.Popen[str]] = []
    try:
        process, port = _start(OWNER, "")
        running.append(process)
        if way != OWNER:
            process, port = _start(way, f"http://{HOST}:{port}")
            running.append(process)
        uvloop.run(load(port, 1, callers, "warm-up"))
        before = [cpu_us(instance.pid) for instance in running]
        calls = uvloop.run(load(port, seconds, callers, "measured"))
        return [
            (cpu_us(instance.pid) - used_before) / calls for instance, used_before in zip(running, before, strict=True)
        ]
    finally:
        for instance in running:
            instance.kill()
            instance.wait()


@click.command()
@click.option("--serve", "way", type=click.Choice(WAYS), hidden=True)
@click.option("--owner", default="", hidden=True)
@click.option("--seconds", default=5.0, show_default=True, help="Length of each measurement.")
@click.option("--callers", default=64, show_default=True, help="Connections, one call at a time on each.")
@click.option("--rounds", default=3, show_default=True, help="Rounds, whose median is shown.")
def main(*, way: str | None, owner: str, seconds: float, callers: int, rounds: int) -> None:
    """Compare the costs of a forwarded call."""
    if way is not None:
        uvloop.run(serve(way, owner))
        return
    results: dict[str, list[list[float]]] = {name: [] for name in WAYS}
    for _ in range(rounds):
        for name in WAYS:
            results[name].append(measure(name, seconds, callers))
    direct = median(sum(used) for used in results[OWNER])
    for name in WAYS:
        each = [round(median(column)) for column in zip(*results[name], strict=True)]
        total = median(sum(used) for used in results[name])
        click.echo(f"{name}: {each} us in each instance, {total:.0f} together, {total - direct:.0f} for forwarding")


if __name__ == "__main__":
    main()
