"""The REST interface as one handler: route, bound, read, answer."""

from __future__ import annotations

import asyncio
import logging
import re
from http import HTTPMethod
from itertools import count
from secrets import token_hex
from typing import TYPE_CHECKING, Any, Final, Protocol, cast
from urllib.parse import unquote

import msgspec
import structlog
from aiohttp import web
from aiohttp.web_exceptions import HTTPException
from multidict import CIMultiDict

from halfway.domain.errors import HalfwayError, KafkaUnavailableError, OverloadedError, ShuttingDownError
from halfway.rest.handlers.calls import Answer, Call, Site, refusal
from halfway.rest.handlers.openapi import document
from halfway.rest.handlers.routes import OPERATIONS, Operation, Routes
from halfway.rest.requests import bodies
from halfway.rest.requests.bodies import JSON, Bodies
from halfway.rest.requests.structure import demand_few_members
from halfway.rest.requests.validation import Validation
from halfway.rest.responses.errors import InternalError, MethodNotAllowedError
from halfway.rest.responses.problems import CONTENT_TYPE
from halfway.rest.responses.unsent import Unsent
from halfway.rest.server.admission import Admission
from halfway.rest.server.server import cancelled_when_lost

if TYPE_CHECKING:
    from halfway.service.coordinator import Coordinator

log = structlog.get_logger(__name__)

_SERVER_ERROR: Final = 500
LARGE_BYTES: Final = 64 * 1024
"""A smaller answer is never refused."""
_REQUEST_ID: Final = re.compile(r"[A-Za-z0-9._~-]{1,64}\Z")


class ApiLimits(msgspec.Struct, frozen=True, kw_only=True):
    """The limits of the interface; seconds, bytes and counts."""

    request_timeout_s: float = 15.0
    max_body_bytes: int = 8 * 1024 * 1024
    max_requests: int = 4096
    prepare_wait_s: float = 1.0
    max_body_bytes_in_flight: int = 256 * 1024 * 1024
    max_batch_items: int = 1000


class RequestObserver(Protocol):
    """Counts requests."""

    def answered(self, operation: str, status: int, seconds: float) -> None:
        """Count a request by operation (`none` if there is none) and status."""


_ABANDON_S: Final = 1.0
"""Time to answer the requests that are not done at the deadline of a stop."""


class Api:
    """The handler of the first port."""

    def __init__(
        self,
        coordinator: Coordinator,
        *,
        internal_prefix: str,
        observer: RequestObserver,
        limits: ApiLimits | None = None,
        unsent: Unsent | None = None,
    ) -> None:
        """Make routes, validation and the OpenAPI document; nothing is started."""
        self._limits = limits or ApiLimits()
        self._observer = observer
        self._routes = Routes()
        self._site = Site(
            coordinator=coordinator,
            validation=Validation(internal_prefix=internal_prefix),
            openapi=msgspec.json.encode(document(OPERATIONS)),
            max_batch_items=self._limits.max_batch_items,
            unsent=unsent or Unsent(),
        )
        self._ids = count(1)
        self._instance = token_hex(6)
        # Building a log entry costs more than a refusal, so the level is checked once.
        self._log_requests = logging.getLogger(__name__).isEnabledFor(logging.DEBUG)
        self._stopping = False
        self._idle = asyncio.Event()
        self._idle.set()
        self.in_flight = 0
        self.admission = Admission(max_requests=self._limits.max_requests, wait_s=self._limits.prepare_wait_s)
        self._open: set[asyncio.Task[Any]] = set()
        self._abandoning = False
        self.bodies = Bodies(
            max_bytes=self._limits.max_body_bytes,
            max_bytes_in_flight=self._limits.max_body_bytes_in_flight,
            timeout_s=self._limits.request_timeout_s,
        )

    async def __call__(self, request: web.BaseRequest) -> web.StreamResponse:
        """Answer one request; nothing that a client sends is a 500."""
        loop = asyncio.get_running_loop()
        began = loop.time()
        request_id = self._request_id(request)
        name = "none"
        allowed = None
        task = cast("asyncio.Task[Any]", asyncio.current_task())
        self._open.add(task)
        self._idle.clear()
        try:
            operation, parameter = self._routes.find(request.method, request.rel_url.raw_path)
            name = operation.id
            given = await self._admitted(operation, parameter, request, began + self._limits.request_timeout_s)
        except MethodNotAllowedError as error:
            allowed = error.allowed
            given = refusal(error, instance=request_id)
        except HalfwayError as error:
            given = refusal(error, instance=request_id)
            if given.status == _SERVER_ERROR:
                log.exception("request_failed", operation=name, request_id=request_id)
        except (ConnectionError, HTTPException):
            raise
        except (TimeoutError, asyncio.CancelledError) as error:
            given = refusal(self._cut_off(error, task), instance=request_id)
        except Exception:
            log.exception("request_failed", operation=name, request_id=request_id)
            given = refusal(InternalError(), instance=request_id)
        finally:
            self._open.discard(task)
            if not self._open:
                self._idle.set()
        seconds = loop.time() - began
        self._observer.answered(name, given.status, seconds)
        if self._log_requests:
            log.debug(
                "request_answered", operation=name, status=int(given.status), request_id=request_id, seconds=seconds
            )
        return self._response(given, request_id, allowed)

    def _cut_off(self, error: TimeoutError | asyncio.CancelledError, task: asyncio.Task[Any]) -> HalfwayError:
        """Return the error for a request that is late, by its own deadline or by the deadline of a stop."""
        if isinstance(error, asyncio.CancelledError):
            if not self._abandoning:
                raise error
            task.uncancel()
        return KafkaUnavailableError("not done in time: try again")

    async def drain(self, deadline: float) -> None:
        """Refuse new requests (503 `shutting_down`), and return once those in flight are answered.

        A request that is not done by `deadline` (on the loop's clock) is answered 503 then.
        """
        self._stopping = True
        self.admission.close()
        try:
            async with asyncio.timeout_at(deadline):
                await self._idle.wait()
        except TimeoutError:
            log.warning("requests_abandoned", requests=len(self._open))
            self._abandoning = True
            abandoned = list(self._open)
            for task in abandoned:
                task.cancel()
            if abandoned:
                await asyncio.wait(abandoned, timeout=_ABANDON_S)

    async def _admitted(
        self, operation: Operation, parameter: str, request: web.BaseRequest, deadline: float
    ) -> Answer:
        if self._stopping:
            raise ShuttingDownError
        if operation.waits:
            with cancelled_when_lost(request):
                return await self._answer(operation, parameter, request, b"", deadline)
        self._demand_place()
        if operation.body is None and not operation.takes_body:
            return await self._placed(operation, parameter, request, b"", deadline)
        body = await self.bodies.read(request, deadline, expected=operation.body is not None)
        try:
            if len(body) > bodies.SMALL_BYTES:
                await demand_few_members(body)
            self._demand_place()
            return await self._placed(operation, parameter, request, body, deadline)
        finally:
            self.bodies.release(body)

    def _demand_place(self) -> None:
        if self.in_flight >= self._limits.max_requests:
            raise OverloadedError(f"{self.in_flight} requests are in flight here already: try again later")

    async def _placed(
        self, operation: Operation, parameter: str, request: web.BaseRequest, body: bytes, deadline: float
    ) -> Answer:
        """Answer a request that is wholly received; only such a request takes a place."""
        self.in_flight += 1
        try:
            given = await self._answer(operation, parameter, request, body, deadline)
        finally:
            self.in_flight -= 1
        size = len(given.body or b"")
        if operation.method == HTTPMethod.GET and size > LARGE_BYTES and not self._site.unsent.has_room(size):
            raise OverloadedError("clients here do not read what they were answered: try again later")
        return given

    async def _answer(
        self, operation: Operation, parameter: str, request: web.BaseRequest, body: bytes, deadline: float
    ) -> Answer:
        if "%" in parameter:
            parameter = unquote(parameter)
        call = Call(site=self._site, request=request, parameter=parameter, body=body, deadline=deadline)
        if not operation.begins:
            return await operation.handler(call)
        await self.admission.enter()
        try:
            if request.transport is None:
                raise ConnectionResetError  # nobody would end a transaction that begins now
            return await operation.handler(call)
        finally:
            self.admission.leave()

    def _request_id(self, request: web.BaseRequest) -> str:
        given = request.headers.get("X-Request-Id")
        if given is not None and _REQUEST_ID.match(given) is not None:
            return given
        return f"{self._instance}-{next(self._ids):x}"

    def _response(self, given: Answer, request_id: str, allowed: str | None) -> web.Response:
        headers = CIMultiDict(given.headers)
        headers["X-Request-Id"] = request_id
        if given.body is not None:
            headers["Content-Type"] = JSON if given.error_code is None else CONTENT_TYPE
        if allowed is not None:
            headers["Allow"] = allowed
        response = web.Response(status=given.status, body=given.body, headers=headers)
        if self._stopping:
            response.force_close()
        return response
