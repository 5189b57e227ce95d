"""What a forwarded call costs: calls between instances as they are, beside the REST calls themselves in batches.

Both ways are real code over ports in memory, since what Kafka costs is the same either way. One process owns every
shard; another owns none and forwards all that it is asked; this one sends the load. A round measures the owner asked
directly, and then each way to forward. CPU is of both instances, for one call: a prepare or a commit.

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
from bench.wire import split
from halfway.memory import Memory
from halfway.peers import HttpPeers, client
from halfway.rest.handlers.calls import Call, Handler, Operation
from halfway.rest.handlers.routes import OPERATIONS
from halfway.rest.responses.answer import Answer
from halfway.rest.server.api import Api, Routes
from halfway.rest.server.peer_port import PATH, PeerPort
from halfway.rest.server.server import HttpServer
from halfway.service.coordinator import Coordinator
from halfway.service.peer_calls import EndCall
from halfway.service.ports import OwnerHint
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
"""The owner asked directly, calls between instances, and the REST calls themselves."""
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
    """The owner's answer, to be passed on as it is."""

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
    """Sends what goes to one owner at one moment as one `POST /v1/batch`, with the bodies as they came."""

    async def _exchange(self, line: Any, batch: list[Any]) -> None:
        prepares = [asked for asked in batch if not isinstance(asked.call, EndCall)]
        ends = [asked for asked in batch if isinstance(asked.call, EndCall)]
        joined = [b",".join([asked.body for asked in part]) for part in (prepares, ends)]
        for asked in batch:
            asked.sent = True
        url = URL(line.owner.url + "/v1/batch")
        body = b'{"prepare":[%b],"end":[%b]}' % (joined[0], joined[1])
        async with self._open().post(url, data=body, headers=JSON, allow_redirects=False) as response:
            answers = _BATCH.decode(await response.read())
        line.last_heard = asyncio.get_running_loop().time()
        for asked, item in zip((*prepares, *ends), (*answers.prepare, *answers.end), strict=True):
            if not asked.answer.done():
                asked.answer.set_exception(_AnsweredError(item))


def _item_of(call: Any, **_: Any) -> bytes:
    """Return the body of a call as an item of a batch."""
    body = _BODY.get()
    return b'{"id":"%b",%b' % (call.request.id.encode(), body[1:]) if isinstance(call, EndCall) else body


def _passing_on(handler: Handler) -> Handler:
    async def handle(call: Call) -> Answer:
        _BODY.set(bytes(call.body or b""))
        try:
            return await handler(call)
        except _AnsweredError as answered:
            return Answer(status=answered.item.status, body=bytes(answered.item.body))

    return handle


class _RestRoutes(Routes):
    """The routes of an instance that forwards REST calls: it answers what the owner answered."""

    def find(self, method: str, path: str) -> tuple[Operation, str]:
        operation, parameter = super().find(method, path)
        return replace(operation, handler=_passing_on(operation.handler)), parameter


async def serve(way: str, owner: str) -> None:
    """Serve as the owner of every shard, or as an instance that forwards to it; say the port."""
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
    """Callers that prepare and commit, one call at a time, until the time is over."""

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
        found = split(self._received)
        if found is None:
            return
        status, body, self._received = found
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
    """Send the load and return how many calls were answered."""
    loop, made = asyncio.get_running_loop(), _Load(seconds)
    waiting: list[asyncio.Future[None]] = []
    for number in range(callers):
        done: asyncio.Future[None] = loop.create_future()
        waiting.append(done)
        await loop.create_connection(partial(_Caller, made, f"{name}-{number}-", done), HOST, port)
    await asyncio.gather(*waiting)
    return made.calls


def _started(way: str, owner: str) -> tuple[subprocess.Popen[str], int]:
    command = [sys.executable, "-m", "bench.forwarding", "--serve", way, "--owner", owner]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)  # noqa: S603 - this very module
    for line in process.stdout or ():
        if line.startswith("port "):
            return process, int(line.split()[1])
    raise RuntimeError(f"the instance did not start: {way}")


def measured(way: str, seconds: float, callers: int) -> list[float]:
    """Return the CPU of each instance for one call, in microseconds."""
    running: list[subprocess.Popen[str]] = []
    try:
        process, port = _started(OWNER, "")
        running.append(process)
        if way != OWNER:
            process, port = _started(way, f"http://{HOST}:{port}")
            running.append(process)
        uvloop.run(load(port, 1, callers, "warm-up"))
        before = [cpu_us(one.pid) for one in running]
        calls = uvloop.run(load(port, seconds, callers, "measured"))
        return [(cpu_us(one.pid) - was) / calls for one, was in zip(running, before, strict=True)]
    finally:
        for one in running:
            one.kill()
            one.wait()


@click.command()
@click.option("--serve", "way", type=click.Choice(WAYS), hidden=True)
@click.option("--owner", default="", hidden=True)
@click.option("--seconds", default=5.0, show_default=True, help="Of each measurement.")
@click.option("--callers", default=64, show_default=True, help="Connections, one call at a time on each.")
@click.option("--rounds", default=3, show_default=True, help="The median of these is shown.")
def main(*, way: str | None, owner: str, seconds: float, callers: int, rounds: int) -> None:
    """Compare what a forwarded call costs."""
    if way is not None:
        uvloop.run(serve(way, owner))
        return
    found: dict[str, list[list[float]]] = {one: [] for one in WAYS}
    for _ in range(rounds):
        for one in WAYS:
            found[one].append(measured(one, seconds, callers))
    direct = median(sum(used) for used in found[OWNER])
    for one in WAYS:
        each = [round(median(column)) for column in zip(*found[one], strict=True)]
        total = median(sum(used) for used in found[one])
        click.echo(f"{one}: {each} us in each instance, {total:.0f} together, {total - direct:.0f} for forwarding")


if __name__ == "__main__":
    main()
