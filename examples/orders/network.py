"""The network between the order service and halfway, which loses what the plan says."""

import asyncio
import json
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping
from http import HTTPStatus
from typing import Any, Self

import aiohttp
from aiohttp import web

from examples.orders.plan import Fault
from examples.orders.recorder import Recorder

Json = Mapping[str, Any]

MAX_BODY = 4 * 1024 * 1024


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
        """Carry a request; the client sends prepares and ends together, and what is lost of them takes the rest along.

        The rest has arrived, or arrives when the client sends it again.
        """
        body = await request.read()
        shown = {name: request.headers[name] for name in ("Authorization",) if name in request.headers}
        if request.path != "/v1/batch":
            status, told = await self._send(request.method, request.path_qs, body, shown)
            return web.Response(status=status, body=told, content_type="application/json")
        answers: dict[str, list[Json]] = {}
        for step, items in json.loads(body).items():
            carried = await asyncio.gather(*(self._carry(step, item, shown) for item in items))
            answers[step] = [answer for answer in carried if answer is not None]
            if len(answers[step]) < len(items):
                return _break(request)
        return web.json_response(answers)

    async def _carry(self, step: str, item: Json, shown: Mapping[str, str]) -> Json | None:
        """Return the answer to a prepare or an end, None if it or its answer is lost."""
        order = str(item["id"])
        fault = self._faults.get(order, Fault.NONE)
        arrives = told = True
        match step, fault:
            case "end", Fault.END_LOST | Fault.PREPARE_ANSWERS_LOST:
                arrives = told = False
            case "end", Fault.KILLED if order not in self._done:
                await self._kill(order)
                arrives = told = False
            case ("prepare", Fault.PREPARE_ANSWERS_LOST) | ("end", Fault.END_ANSWER_LOST):
                told = False
            case "prepare", Fault.PREPARE_ANSWER_LOST_ONCE if order not in self._done:
                told = False
        answer = await self._forward(step, item, shown) if arrives else None
        if not told and order not in self._done:
            self._done.add(order)
            self.happened[fault] += 1
        return answer if told else None

    async def _forward(self, step: str, item: Json, shown: Mapping[str, str]) -> Json:
        asked = None if self._recorder is None else self._recorder.asked(step, item)
        status, told = await self._send("POST", "/v1/batch", json.dumps({step: [item]}).encode(), shown)
        answered: Any = json.loads(told)
        answer: Json = answered[step][0] if status == HTTPStatus.OK else {"status": status, "problem": answered}
        if self._recorder is not None and asked is not None:
            self._recorder.answered(step, item, asked, answer)
        return answer

    async def _send(self, method: str, path: str, body: bytes, shown: Mapping[str, str]) -> tuple[int, bytes]:
        headers = {"content-type": "application/json", **shown}
        try:
            async with self._session.request(method, self._halfway_url + path, data=body, headers=headers) as answer:
                return answer.status, await answer.read()
        except (aiohttp.ClientError, TimeoutError):
            return HTTPStatus.BAD_GATEWAY, b"{}"


def _break(request: web.Request) -> web.Response:
    """Break the connection: whoever waits at its other end learns nothing."""
    if request.transport is not None:
        request.transport.abort()
    return web.Response()
