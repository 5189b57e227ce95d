"""A REST interface on a simulated broker, and a client that can send any request, byte by byte if needed."""

import asyncio
import json
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from types import SimpleNamespace, TracebackType
from typing import Any, Self
from unittest.mock import patch

import aiohttp

from halfway.coordinator.access import Keys
from halfway.coordinator.coordinator import Coordinator
from halfway.coordinator.logging import flush_all
from halfway.coordinator.requests import ServiceLimits
from halfway.http.console import Console
from halfway.http.requests.admission import ApiLimits
from halfway.http.responses import Unsent
from halfway.http.server.api import Api
from halfway.http.server.server import HttpServer, ServerTls
from tests.support.service.broker import Memory
from tests.support.waiting import GENEROUS_S

HOST = "127.0.0.1"
_CONSOLE = Console()
SHOP: dict[str, Any] = {"check": {"urls": ["http://shop:9000/check"]}, "topics": ["orders", "coupons"]}


@dataclass(frozen=True, kw_only=True)
class Answer:
    """The answer to a request; `body` is the parsed JSON, None if there is none."""

    status: int
    body: Any
    headers: Mapping[str, str]

    @property
    def error_code(self) -> str | None:
        return self.body.get("error_code") if isinstance(self.body, dict) else None

    @property
    def fields(self) -> dict[str, str]:
        """The wrong fields of a problem, with the detail of each."""
        return {error["field"]: error["detail"] for error in self.body["errors"]}


class Requests:
    """A `RequestObserver` that counts."""

    def __init__(self) -> None:
        self.counts: Counter[tuple[str, int]] = Counter()

    def answered(self, operation: str, status: int) -> None:
        self.counts[operation, status] += 1

    def streamed(self, operation: str, status: int, count: int) -> None:
        self.counts[operation, status] += count


class RestWorld:
    """A REST interface on a free port, and its client."""

    leaves = False
    """Whether its instance leaves the cluster at the end, which takes longer than to kill it. On a loop of several
    tests it must: the tasks of a killed one run on until their loop is closed."""

    def __init__(
        self,
        limits: ApiLimits | None = None,
        *,
        unsent: Unsent | None = None,
        memory: Memory | None = None,
        keys: Keys | None = None,
        tls: ServerTls | None = None,
        port: int = 0,
    ) -> None:
        self.memory = memory or Memory(shards=2, topics={"orders": 3, "coupons": 1})
        self._limits, self._unsent, self._keys = limits, unsent, keys
        self._tls = tls
        self._port = port
        self.requests = Requests()
        self._session: aiohttp.ClientSession | None = None
        machine = SimpleNamespace(time=lambda: self.memory.clock.now_ms() / 1000, monotonic=time.monotonic)
        self._patch = patch("halfway.client.ids.time", machine)

    async def __aenter__(self) -> Self:
        # A client that has had no answer yet goes by the clock of its machine: here that is the coordinator's too.
        self._patch.start()
        memory = self.memory
        await memory.open()
        self.coordinator = Coordinator(limits=ServiceLimits(shards=2), keys=self._keys, **memory.ports)
        memory.peers.serve(self.coordinator.peer_handler)
        self.api = Api(
            self.coordinator,
            internal_prefix="_halfway.",
            observer=self.requests,
            limits=self._limits,
            unsent=self._unsent,
        )
        self._server = HttpServer(self.api, console=_CONSOLE, unsent=self._unsent)
        await memory.start(self.coordinator.shards)
        await memory.within(self._server.start(HOST, self._port, self._tls))
        self._session = aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=GENEROUS_S))
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.session.close()
        await self.coordinator.drain()
        await self._server.stop()
        if self.leaves and not self.memory.is_dead:
            await self.memory.stop(deadline=asyncio.get_running_loop().time() + GENEROUS_S)
        elif not self.memory.is_dead:
            self.memory.kill()
        self._patch.stop()
        flush_all()  # else a summary is printed within a minute, into the output of another test

    @property
    def session(self) -> aiohttp.ClientSession:
        assert self._session is not None
        return self._session

    @property
    def port(self) -> int:
        return self._server.port

    @property
    def url(self) -> str:
        return f"{'http' if self._tls is None else 'https'}://{HOST}:{self.port}"

    async def call(
        self,
        method: str,
        path: str,
        body: object = None,
        *,
        raw: bytes | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> Answer:
        """Send a body as JSON, or the bytes of `raw` as if they were JSON."""
        data = raw if body is None else json.dumps(body).encode()
        sent = {"Content-Type": "application/json"} if data is not None else {}
        async with self.session.request(method, self.url + path, data=data, headers={**sent, **(headers or {})}) as got:
            text = await got.read()
            return Answer(status=got.status, body=json.loads(text) if text else None, headers=got.headers.copy())

    async def put_shop(self, **changes: object) -> Answer:
        answer = await self.call("PUT", "/v1/groups/shop", {**SHOP, **changes})
        assert answer.status in {200, 201}, answer
        return answer

    async def prepare(self, *messages: Mapping[str, object], **fields: object) -> Answer:
        wanted = list(messages) or [{"topic": "orders", "value": "v"}]
        return await self.call("POST", "/v1/transactions", {"group": "shop", "messages": wanted, **fields})

    async def prepared(self, *messages: Mapping[str, object], **fields: object) -> str:
        answer = await self.prepare(*messages, **fields)
        assert answer.status == 201, answer
        return str(answer.body["id"])

    async def end(self, transaction_id: str, outcome: str, **fields: object) -> Answer:
        return await self.call("POST", f"/v1/transactions/{transaction_id}/end", {"outcome": outcome, **fields})

    async def show(self, transaction_id: str) -> Answer:
        return await self.call("GET", f"/v1/transactions/{transaction_id}")

    async def send(self, data: bytes) -> bytes:
        """Send bytes on a new connection, and return everything that is received until it is closed."""
        reader, writer = await asyncio.open_connection(HOST, self.port)
        try:
            writer.write(data)
            await writer.drain()
            return await asyncio.wait_for(reader.read(), GENEROUS_S)
        finally:
            writer.transport.abort()  # data that the server did not read would keep it open
