"""The network between the order service and halfway, which loses what the plan says."""

import json
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping
from typing import Self

import aiohttp
from aiohttp import web

from examples.orders.plan import Fault
from examples.orders.recorder import Recorder

MAX_BODY = 1024 * 1024


class LossyNetwork:
    """A proxy in front of halfway. It changes no request and no answer: it delivers them, or the connection breaks."""

    def __init__(
        self,
        halfway_url: str,
        faults: Mapping[str, Fault],
        kill: Callable[[str], Awaitable[None]],
        recorder: Recorder | None = None,
    ) -> None:
        """Keep the faults by order id; `kill` is awaited when the end arrives of an order whose fault is that."""
        self._recorder = recorder
        self._halfway_url = halfway_url
        self._faults = faults
        self._kill = kill
        self._done: set[str] = set()
        self.happened: Counter[Fault] = Counter()

    async def __aenter__(self) -> Self:
        self._session = aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=30))
        app = web.Application(client_max_size=MAX_BODY)
        app.router.add_route("*", "/{path:.*}", self._pass)
        self._runner = web.AppRunner(app, access_log=None, shutdown_timeout=1)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", 0)
        await site.start()
        self.url = f"http://127.0.0.1:{self._runner.addresses[0][1]}"
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._runner.cleanup()
        await self._session.close()

    async def _pass(self, request: web.Request) -> web.StreamResponse:
        body = await request.read()
        order, step = _about(request, body)
        fault = self._faults.get(order, Fault.NONE)
        match step, fault:
            case "end", Fault.END_LOST:
                return self._lose(request, order, fault)
            case "end", Fault.KILLED if order not in self._done:
                await self._kill(order)
                return self._lose(request, order, fault)
            case ("prepare", Fault.PREPARE_ANSWERS_LOST) | ("end", Fault.END_ANSWER_LOST):
                await self._forward(request, body)
                return self._lose(request, order, fault)
            case "prepare", Fault.PREPARE_ANSWER_LOST_ONCE if order not in self._done:
                await self._forward(request, body)
                return self._lose(request, order, fault)
            case _:
                return await self._forward(request, body)

    def _lose(self, request: web.Request, order: str, fault: Fault) -> web.StreamResponse:
        """Break the connection: whoever waits at its other end learns nothing."""
        if order not in self._done:
            self._done.add(order)
            self.happened[fault] += 1
        if request.transport is not None:
            request.transport.abort()
        return web.Response()

    async def _forward(self, request: web.Request, body: bytes) -> web.StreamResponse:
        headers = {"content-type": request.content_type}
        order, step = _about(request, body)
        asked = None if self._recorder is None else self._recorder.asked(order, step, body)
        try:
            async with self._session.request(
                request.method, self._halfway_url + request.path_qs, data=body, headers=headers
            ) as answer:
                told = await answer.read()
                if self._recorder is not None and asked is not None:
                    self._recorder.answered(order, step, body, asked, answer.status, told)
                return web.Response(status=answer.status, body=told, content_type=answer.content_type)
        except (aiohttp.ClientError, TimeoutError):
            return web.Response(status=502)


def _about(request: web.Request, body: bytes) -> tuple[str, str]:
    """Return the order's id and the step of the protocol that a request is, empty for neither."""
    match request.path.strip("/").split("/"):
        case ["v1", "transactions", order, "end"]:
            return order, "end"
        case ["v1", "transactions"]:
            return str(json.loads(body).get("id", "")), "prepare"
        case _:
            return "", ""
