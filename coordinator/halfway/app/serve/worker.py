"""A worker: one of the processes that `halfway serve --workers N` runs on one port (docs/operating.md#workers).

Each is an instance with shards of its own. Its supervisor has bound the ports; it tells the worker of the others, and
when to stop. If the supervisor is gone, the worker ends. Any worker answers the health port for all: it asks the others
for their pages, each of which is on a port of loopback that only holders of the supervisor's token may read.
"""

from __future__ import annotations

import asyncio
import hmac
import mmap
import os
import pickle
import re
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from http import HTTPStatus
from typing import Any, Final

import aiohttp
import msgspec
from aiohttp import web
from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector
from yarl import URL

from halfway.app.metrics import encoding
from halfway.app.settings import MAX_WORKERS, Settings
from halfway.http.server.health_port import HealthPort
from halfway.http.server.server import HttpServer
from halfway.protocol.errors import ForbiddenError

BEAT_S: Final = 5.0
"""How often a worker tells its supervisor that its event loop runs."""
_LOOK_S: Final = 0.1
_GONE_S: Final = 25.0
"""How long a worker may take to stop once its supervisor is gone."""
_READ: Final = 65_536
LOOPBACK: Final = "127.0.0.1"
_HEALTH_S: Final = 1.0
_METRICS_S: Final = 3.0
_MERGED: Final = ("/health/started", "/health/ready", "/metrics")
TOKEN_HEADER: Final = "Halfway-Worker-Token"  # noqa: S105 - the name of a header


# --- what a supervisor and its workers tell each other, each message a line of JSON


class Assignment(msgspec.Struct, frozen=True, kw_only=True, tag="assignment"):
    """The first message to a worker."""

    number: int
    settings: bytes
    """The pickled settings, as the supervisor has read them."""
    api: list[int]
    """The descriptors of the sockets of the API, and those of the health port."""
    health: list[int]
    port: int
    """The port at which other instances reach this worker; 0: a free one."""
    token: str
    credential: str
    """The credential between instances, for settings that give none."""
    shared: int
    """The descriptor of a file in memory: it is locked while a line is logged, and has the counts of `Connections`."""


class Colleague(msgspec.Struct, frozen=True, kw_only=True):
    """A worker, as the others know it."""

    number: int
    ready: bool
    pages: int
    """The port of its pages; 0: none yet."""


class State(msgspec.Struct, frozen=True, kw_only=True, tag="state"):
    """All workers, whenever something has changed."""

    started: bool
    """Whether a worker has ever been ready."""
    workers: list[Colleague]
    replaced: dict[int, int]
    """How often the worker of each number has died and was replaced."""


class Stop(msgspec.Struct, frozen=True, kw_only=True, tag="stop"):
    """Stop, and serve on for so long."""

    drain_s: float


class Alive(msgspec.Struct, frozen=True, kw_only=True, tag="alive"):
    """The worker's event loop runs."""

    ready: bool
    pages: int


class Failed(msgspec.Struct, frozen=True, kw_only=True, tag="failed"):
    """The start has failed, for a reason that a person has to remove."""

    detail: str


TO_WORKER: Final[msgspec.json.Decoder[Assignment | State | Stop]] = msgspec.json.Decoder(Assignment | State | Stop)
FROM_WORKER: Final[msgspec.json.Decoder[Alive | Failed]] = msgspec.json.Decoder(Alive | Failed)


def encoded(message: msgspec.Struct) -> bytes:
    return msgspec.json.encode(message) + b"\n"


class Connections:
    """How many connections each worker has, in memory that all share; a worker leaves new ones to those with fewer.

    Otherwise the worker that is first on the CPU takes most of them, and with connections that stay most of the load.
    """

    def __init__(self, shared: int, number: int) -> None:
        """Map the memory, and show nothing of this worker yet."""
        size = 4 * (MAX_WORKERS + 1)
        os.ftruncate(shared, size)
        self._counts = memoryview(mmap.mmap(shared, size)).cast("i")
        self._number = number
        self.publish(None)

    def publish(self, count: int | None) -> None:
        """Show the others how many connections this worker has; None: it accepts none."""
        self._counts[self._number] = 0 if count is None else count + 1

    def is_least(self, count: int) -> bool:
        """Return whether no other worker that accepts has fewer connections."""
        return not any(0 < other <= count for number, other in enumerate(self._counts) if number != self._number)


# --- the worker


class Worker:
    """This process as a worker: what it knows of its supervisor and of the others."""

    def __init__(self, descriptor: int) -> None:
        """Read the assignment from the supervisor's socket."""
        self._socket = socket.socket(fileno=descriptor)
        self._lines = self._socket.makefile("rb", buffering=_READ)
        assignment = TO_WORKER.decode(self._lines.readline())
        if not isinstance(assignment, Assignment):
            raise TypeError(assignment)
        self.assignment = assignment
        self.number = assignment.number
        settings: Settings = pickle.loads(assignment.settings)  # noqa: S301 - of the supervisor
        self.settings = settings.of_worker(assignment.credential)
        self.connections = Connections(assignment.shared, assignment.number)
        self.state = State(started=False, workers=[], replaced={})
        self._session: aiohttp.ClientSession | None = None

    def url(self, base: str | None, port: int) -> str | None:
        """Return the URL at which other instances reach this worker, if the operator has set one for all workers."""
        return None if base is None else str(URL(base).with_port(port))

    def sockets(self, descriptors: Sequence[int]) -> list[socket.socket]:
        found = [socket.socket(fileno=descriptor) for descriptor in descriptors]
        for one in found:
            one.setblocking(False)
        return found

    def tell(self, message: Alive | Failed) -> None:
        with suppress(OSError):  # the supervisor is gone, and `follow` ends this process; or it hangs
            self._socket.send(encoded(message), socket.MSG_DONTWAIT)

    def follow(self, stop: Callable[[float], None]) -> None:
        """Follow the supervisor on a thread of its own; stop if it says so, and at once if it is gone."""
        loop = asyncio.get_running_loop()

        def read() -> None:
            for line in self._lines:
                message = TO_WORKER.decode(line)
                if isinstance(message, State):
                    self.state = message
                elif isinstance(message, Stop):
                    loop.call_soon_threadsafe(stop, message.drain_s)
            with suppress(RuntimeError):  # the loop is closed
                loop.call_soon_threadsafe(stop, 0.0)
            time.sleep(_GONE_S)
            os._exit(1)

        threading.Thread(target=read, name="halfway-supervisor", daemon=True).start()

    async def report(self, is_ready: Callable[[], bool], server: HttpServer, pages: int) -> None:
        """Tell the supervisor whether this worker is ready, and accept connections while it is, or while none is."""
        said, said_at, accepts = None, 0.0, True
        loop = asyncio.get_running_loop()
        while True:
            ready = is_ready()
            if ready is not said or loop.time() - said_at > BEAT_S:
                self.tell(Alive(ready=ready, pages=pages))
                said, said_at = ready, loop.time()
            others = any(one.ready for one in self.state.workers if one.number != self.number)
            if accepts is not (ready or not others):
                accepts = not accepts
                server.accept(accepts)
            await asyncio.sleep(_LOOK_S)

    def demand_colleague(self, request: web.BaseRequest) -> None:
        """Raise ForbiddenError unless another worker of this supervisor sends the request."""
        token = request.headers.get(TOKEN_HEADER, "").encode(errors="surrogateescape")
        if not hmac.compare_digest(token, self.assignment.token.encode()):
            raise ForbiddenError("this page is for the other workers: read the health port")

    async def ask_others(self, path: str, within_s: float, accept: str = "") -> dict[int, bytes | None]:
        """Return the page of each other worker, None for one that does not answer."""
        if self._session is None:
            self._session = aiohttp.ClientSession(cookie_jar=aiohttp.DummyCookieJar(), trust_env=False)
        others = [one for one in self.state.workers if one.number != self.number]
        pages = await asyncio.gather(*(self._ask(one, path, within_s, accept) for one in others))
        return {one.number: page for one, page in zip(others, pages, strict=True)}

    async def _ask(self, other: Colleague, path: str, within_s: float, accept: str) -> bytes | None:
        assert self._session is not None  # noqa: S101 - `ask_others` has opened it
        if not other.pages:
            return None
        try:
            async with (
                asyncio.timeout(within_s),
                self._session.get(
                    f"http://{LOOPBACK}:{other.pages}{path}",
                    headers={TOKEN_HEADER: self.assignment.token, "Accept": accept},
                    allow_redirects=False,
                ) as answer,
            ):
                return await answer.read()
        except (aiohttp.ClientError, TimeoutError):
            return None

    async def close(self) -> None:
        if self._session is not None:
            await self._session.close()


# --- the pages of all workers as one


class ServicePort:
    """The handler of the health port: it answers for all workers."""

    def __init__(self, own: HealthPort, worker: Worker) -> None:
        self._own = own
        self._worker = worker

    async def __call__(self, request: web.BaseRequest) -> web.StreamResponse:
        """Answer as one instance does: ready if a worker is, started if one ever was.

        What a worker that is not ready says, or one that does not answer, is in the warnings then.
        """
        answer = await self._own(request)
        path = request.rel_url.raw_path
        if path not in _MERGED or not isinstance(answer, web.Response):
            return answer
        if answer.status not in (HTTPStatus.OK, HTTPStatus.SERVICE_UNAVAILABLE):
            return answer
        worker, state = self._worker, self._worker.state
        if path == "/metrics":
            if answer.status != HTTPStatus.OK:
                return answer
            accept = request.headers.get("Accept", "")
            others = await worker.ask_others(path, _METRICS_S, accept)
            pages = {worker.number: _body(answer), **others}
            text = merged_metrics(pages, state.replaced, accept)
            return web.Response(body=text, headers={"Content-Type": answer.headers["Content-Type"]})
        others = await worker.ask_others(path, _HEALTH_S)
        pages = {worker.number: _body(answer), **others}
        started = path == "/health/started" and state.started
        status, document = merged_health(pages, is_ok=started)
        return web.Response(status=status, body=msgspec.json.encode(document), content_type="application/json")


def _body(answer: web.Response) -> bytes:
    return bytes(answer.body) if isinstance(answer.body, bytes) else b""


def merged_health(pages: Mapping[int, bytes | None], *, is_ok: bool = False) -> tuple[int, dict[str, Any]]:
    """Return the status and the document of the service: it is well if a worker is, or if `is_ok`.

    Each reason, warning and shard names its worker.
    """
    found: dict[str, list[dict[str, Any]]] = {"reasons": [], "warnings": [], "not_acquired": []}
    status = "ok"
    for number, page in sorted(pages.items()):
        document = {} if page is None else msgspec.json.decode(page, type=dict[str, Any])
        if page is None:
            found["reasons"].append({"worker": number, "check": "worker", "detail": "this worker does not answer"})
        elif document["status"] == "ok":
            is_ok = True
        else:
            status = document["status"]
        for name, items in found.items():
            items += [{"worker": number, **item} for item in document.get(name, [])]
    if is_ok:
        found["warnings"] += found["reasons"]
        found["reasons"] = []
    elif status == "ok":
        status = "not_ready"
    code = HTTPStatus.OK if is_ok else HTTPStatus.SERVICE_UNAVAILABLE
    return code, {"status": "ok" if is_ok else status, **found}


_END: Final = "# EOF"
_LABELLED: Final = re.compile(r"^(\w+)\{", re.MULTILINE)
_PLAIN: Final = re.compile(r"^(\w+) ", re.MULTILINE)


def merged_metrics(pages: Mapping[int, bytes | None], replaced: Mapping[int, int], accept: str = "") -> bytes:
    """Return the metrics of all workers: each series once, with the label `worker`, and each family once.

    They are not added up: a sum falls when a worker is replaced, and Prometheus would take that for a restart of all.
    """
    families: dict[str, list[str]] = {}
    for number, page in sorted(pages.items()):
        shown = "" if page is None else page.decode().rstrip("\n").removesuffix(_END).rstrip("\n")
        for family in f"\n{shown}".split("\n# HELP ")[1:]:
            help_text, _, rest = family.partition("\n")
            type_text, _, samples = rest.partition("\n")
            label = f'worker="{number}"'
            lines = _PLAIN.sub(rf"\1{{{label}}} ", _LABELLED.sub(rf"\1{{{label},", samples))
            families.setdefault(f"# HELP {help_text}\n{type_text}", []).extend([lines] if lines else [])
    registry = CollectorRegistry()
    registry.register(WorkerFigures({number: page is not None for number, page in pages.items()}, replaced))
    text = "".join("\n".join([head, *samples]) + "\n" for head, samples in families.items())
    return text.encode() + encoding(accept)[0](registry)


class WorkerFigures(Collector):
    """The metrics of the workers themselves, by number: whether each has answered, and how many were replaced."""

    def __init__(self, answers: Mapping[int, bool], replaced: Mapping[int, int]) -> None:
        self._answers = answers
        self._replaced = replaced

    def collect(self) -> Iterator[Metric]:
        up = GaugeMetricFamily("halfway_worker_up", "1 if a worker has answered this scrape, else 0", labels=["worker"])
        for number, answers in sorted(self._answers.items()):
            up.add_metric([str(number)], answers)
        yield up
        text = "Workers that have died and were replaced"
        replaced = CounterMetricFamily("halfway_worker_replaced", text, labels=["worker"])
        for number, count in sorted(self._replaced.items()):
            replaced.add_metric([str(number)], count)
        yield replaced
