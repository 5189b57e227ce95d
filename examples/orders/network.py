"""The network between the order service and halfway, which loses requests and answers according to the plan."""

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
    """A proxy in front of halfway. It delivers requests and answers unchanged, or it breaks the connection."""

    def __init__(
        self,
        halfway_url: str,
        faults: Mapping[str, Fault],
        kill: Callable[[str], Awaitable[None]],
        recorder: Recorder | None = None,
    ) -> None:
        """Take the faults by order id. `kill` is called when the end of an order with the fault KILLED arrives."""
        self._recorder = recorder
        self._halfway_url = halfway_url
        self._faults = faults
        self._kill = kill
        self._injected: set[str] = set()
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
        """Deliver a request. A batch contains several prepares and ends: if one of them is lost, the batch is lost.

        The others have arrived, or they arrive when the client sends the batch again.
        """
        body = await request.read()
        credentials = {name: request.headers[name] for name in ("Authorization",) if name in request.headers}
        if request.path != "/v1/batch":
            status, answer_body = await self._send(request.method, request.path_qs, body, credentials)
            return web.Response(status=status, body=answer_body, content_type="application/json")
        answers: dict[str, list[Json]] = {}
        for step, items in json.loads(body).items():
            delivered = await asyncio.gather(*(self._deliver(step, item, credentials) for item in items))
            answers[step] = [answer for answer in delivered if answer is not None]
            if len(answers[step]) < len(items):
                return _break(request)
        return web.json_response(answers)

    async def _deliver(self, step: str, item: Json, credentials: Mapping[str, str]) -> Json | None:
        """Return the answer to a prepare or an end, None if the request or its answer is lost."""
        order = str(item["id"])
        fault = self._faults.get(order, Fault.NONE)
        request_arrives = answer_arrives = True
        match step, fault:
            case "end", Fault.END_LOST | Fault.PREPARE_ANSWERS_LOST:
                request_arrives = answer_arrives = False
            case "end", Fault.KILLED if order not in self._injected:
                await self._kill(order)
                request_arrives = answer_arrives = False
            case ("prepare", Fault.PREPARE_ANSWERS_LOST) | ("end", Fault.END_ANSWER_LOST):
                answer_arrives = False
            case "prepare", Fault.PREPARE_ANSWER_LOST_ONCE if order not in self._injected:
                answer_arrives = False
        answer = await self._forward(step, item, credentials) if request_arrives else None
        if not answer_arrives and order not in self._injected:
            self._injected.add(order)
            self.happened[fault] += 1
        return answer if answer_arrives else None

    async def _forward(self, step: str, item: Json, credentials: Mapping[str, str]) -> Json:
        request = None if self._recorder is None else self._recorder.record_request(step, item)
        status, body = await self._send("POST", "/v1/batch", json.dumps({step: [item]}).encode(), credentials)
        document: Any = json.loads(body)
        answer: Json = document[step][0] if status == HTTPStatus.OK else {"status": status, "problem": document}
        if self._recorder is not None and request is not None:
            self._recorder.record_answer(step, item, request, answer)
        return answer

    async def _send(self, method: str, path: str, body: bytes, credentials: Mapping[str, str]) -> tuple[int, bytes]:
        headers = {"content-type": "application/json", **credentials}
        try:
            async with self._session.request(method, self._halfway_url + path, data=body, headers=headers) as answer:
                return answer.status, await answer.read()
        except (aiohttp.ClientError, TimeoutError):
            return HTTPStatus.BAD_GATEWAY, b"{}"


def _break(request: web.Request) -> web.Response:
    """Break the connection, so that the client gets no answer."""
    if request.transport is not None:
        request.transport.abort()
    return web.Response()
