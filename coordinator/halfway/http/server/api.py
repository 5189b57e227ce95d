"""The handler of the REST interface: it routes, limits, reads and answers each request."""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import Callable, Sequence
from functools import partial
from http import HTTPMethod
from itertools import count
from secrets import token_hex
from typing import Any, Final, cast
from urllib.parse import unquote

import structlog
from aiohttp import web
from aiohttp.web_exceptions import HTTPException

from halfway.coordinator.coordinator import Coordinator
from halfway.coordinator.fairness import Places
from halfway.http.handlers import openapi
from halfway.http.handlers.handlers import Call, Operation, Site
from halfway.http.handlers.routes import OPERATIONS
from halfway.http.requests.admission import Admission, ApiLimits, HeldRefusals, InFlight
from halfway.http.requests.authentication import caller_of
from halfway.http.requests.validation import Validation
from halfway.http.responses import (
    Answer,
    InternalError,
    MethodNotAllowedError,
    RefusalLog,
    UnknownPathError,
    Unsent,
    UpgradeRequiredError,
    WholeResponse,
    http_date,
    refusal,
)
from halfway.http.server.server import call_on_data, cancelled_when_lost, note_caller
from halfway.http.stream.operations import RequestObserver, StreamOperations
from halfway.http.stream.stream import Streams
from halfway.protocol.errors import (
    EndUnconfirmedError,
    GroupLimitedError,
    HalfwayError,
    KafkaUnavailableError,
    OutcomeUnknownError,
    OverloadedError,
    ShuttingDownError,
)
from halfway.protocol.principal import RULES

log = structlog.get_logger(__name__)

_SERVER_ERROR: Final = 500
LARGE_BYTES: Final = 64 * 1024
"""A smaller answer is never refused."""
_LARGE_ANSWERS: Final = 4
"""Large answers that are being made at once: their payloads are in memory, up to 8 MB each."""
_PARAMETER_AT: Final = 3
"""The path parameter is always the third part: `/v1/groups/{group}/checks`."""
_REQUEST_ID: Final = re.compile(r"[A-Za-z0-9._~-]{1,64}\Z")


_ABANDON_S: Final = 1.0
"""The time to answer requests that are not done at the deadline of a stop."""


class Routes:
    """Finds the operation of a request."""

    def __init__(self, operations: Sequence[Operation]) -> None:
        """Index the table by path and method; raise KeyError if a permission has no rule."""
        self._paths: dict[str, dict[str, Operation]] = {}
        for operation in operations:
            RULES[operation.access]
            self._paths.setdefault(_shape(operation.path), {})[operation.method] = operation

    def find(self, method: str, path: str) -> tuple[Operation, str]:
        """Return the operation and the parameter in its path, still quoted, or "" if it has none.

        Raises UnknownPathError, MethodNotAllowedError: there is no such operation.
        """
        methods, parameter = self._paths.get(path), ""
        if methods is None:
            parts = path.split("/")
            if len(parts) > _PARAMETER_AT:
                parameter, parts[_PARAMETER_AT] = parts[_PARAMETER_AT], "{}"
                methods = self._paths.get("/".join(parts))
            if methods is None or not parameter:
                raise UnknownPathError
        operation = methods.get(method)
        if operation is None:
            get = methods.get(HTTPMethod.GET)
            if method == HTTPMethod.HEAD and get is not None and not get.waits:
                return get, parameter
            raise MethodNotAllowedError(method, sorted(methods))
        return operation, parameter


def _shape(path: str) -> str:
    parts = path.split("/")
    return "/".join("{}" if part.startswith("{") else part for part in parts)


class Api:
    """The handler of the port for clients."""

    def __init__(
        self,
        coordinator: Coordinator,
        *,
        internal_prefix: str,
        observer: RequestObserver,
        limits: ApiLimits | None = None,
        unsent: Unsent | None = None,
        demand_host: Callable[[web.BaseRequest], None] = lambda _: None,
    ) -> None:
        """Build the routes, the validation and the OpenAPI document. Nothing is started yet.

        `demand_host` raises a HalfwayError if a request names a host that is not this API.
        """
        self._demand_host = demand_host
        self.limits = limits or ApiLimits()
        self._observer = observer
        self._routes = Routes(OPERATIONS)
        self._site = Site(
            coordinator=coordinator,
            validation=Validation(internal_prefix=internal_prefix),
            openapi=openapi.encoded(),
            max_batch_items=self.limits.max_batch_items,
            unsent=unsent or Unsent(),
            refusals=RefusalLog(),
            large_answers=Places(_LARGE_ANSWERS),
        )
        self._ids = count(1)
        self._instance = token_hex(6)
        # To build a log entry takes longer than to refuse a request, so the level is checked once.
        self._log_requests = logging.getLogger(__name__).isEnabledFor(logging.DEBUG)
        self._stopping = False
        self.closes_connections = False
        """Whether every answer closes its connection, so that clients open their next one elsewhere."""
        self._idle = asyncio.Event()
        self._idle.set()
        self.in_flight = InFlight(
            most=self.limits.max_requests,
            max_bytes=self.limits.max_body_bytes,
            max_bytes_in_flight=self.limits.max_body_bytes_in_flight,
            timeout_s=self.limits.request_timeout_s,
        )
        self.admission = Admission(max_requests=self.limits.max_requests, wait_s=self.limits.prepare_wait_s)
        self._refusals = HeldRefusals(wait_s=self.limits.prepare_wait_s, most=max(1, self.limits.max_requests // 16))
        self._open: set[asyncio.Task[Any]] = set()
        self._abandoning = False
        self.streams = self._streams(coordinator)

    def _streams(self, coordinator: Coordinator) -> Streams:
        limits = self.limits
        operations = StreamOperations(
            coordinator,
            in_flight=self.in_flight,
            admission=self.admission,
            timeout_s=limits.request_timeout_s,
            hold_s=limits.prepare_wait_s,
            observer=self._observer,
            refusals=self._site.refusals,
        )
        return Streams(operations, self.in_flight, limits)

    async def __call__(self, request: web.BaseRequest) -> web.StreamResponse:
        """Answer one request. No input of a client causes a 500."""
        loop = asyncio.get_running_loop()
        started = loop.time()
        request_id = self._request_id(request)
        name = "none"
        calls: list[Call] = []
        task = cast("asyncio.Task[Any]", asyncio.current_task())
        self._open.add(task)
        self._idle.clear()
        try:
            self._demand_host(request)
            operation, parameter = self._routes.find(request.method, request.rel_url.raw_path)
            name = operation.id
            answer = await self._answer(operation, request, parameter, started, request_id, calls)
            if isinstance(answer, web.StreamResponse):
                return answer
        except HalfwayError as error:
            answer = refusal(error, instance=request_id)
            if answer.status == _SERVER_ERROR:
                log.exception("request_failed", operation=name, request_id=request_id)
        except (ConnectionError, HTTPException):
            raise
        except (TimeoutError, asyncio.CancelledError) as error:
            answer = refusal(self._late_error(error, task, name), instance=request_id)
        except Exception:
            log.exception("request_failed", operation=name, request_id=request_id)
            answer = refusal(InternalError(), instance=request_id)
        finally:
            self._open.discard(task)
            if not self._open:
                self._idle.set()
        self._observer.answered(name, answer.status)
        if answer.error_code is not None or self._log_requests:
            self._log(name, answer, calls, request_id, loop.time() - started)
        response = WholeResponse(answer, ("X-Request-Id", request_id), ("Date", self._date()))
        if self.closes_connections:
            response.force_close()
        return response

    def _date(self) -> str:
        """Return the time by which clients make ids: the coordinator compares their births with the same clock."""
        return http_date(self._site.coordinator.now_ms() // 1000)

    def _late_error(
        self, error: TimeoutError | asyncio.CancelledError, task: asyncio.Task[Any], operation: str
    ) -> HalfwayError:
        """Return the error for a request that missed its own deadline or the deadline of a stop.

        What it began may still be done: a caller that took it for refused would prepare the same work twice.
        """
        if isinstance(error, asyncio.CancelledError):
            if not self._abandoning:
                raise error
            task.uncancel()
        match operation:
            case "prepare" | "batch":
                return OutcomeUnknownError("not confirmed in time: it may or may not be done")
            case "end" | "resume":
                return EndUnconfirmedError("not confirmed in time: send the same again, it is never done twice")
            case _:
                return KafkaUnavailableError("not done in time: try again")

    async def drain(self, deadline: float) -> None:
        """Refuse new requests (503 `shutting_down`), and return once the requests in flight are answered.

        Requests that are not done by `deadline` (on the event loop's clock) are answered with 503.
        """
        self._stopping = self.closes_connections = True
        self.admission.close()
        self.streams.stop()
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

    def _log(self, operation: str, answer: Answer, calls: list[Call], request_id: str, seconds: float) -> None:
        """Log an answer: always for debugging, otherwise a sample of the refusals."""
        if answer.error_code is not None:
            self._note_refused(operation, answer, calls, request_id)
        if self._log_requests:
            log.debug(
                "request_answered",
                operation=operation,
                status=int(answer.status),
                request_id=request_id,
                seconds=seconds,
            )

    def _note_refused(self, operation: str, answer: Answer, calls: list[Call], request_id: str) -> None:
        group = subject = None
        for call in calls:
            path = call.request.rel_url.raw_path
            subject = call.subject or (call.parameter if path.startswith("/v1/transactions/") else None)
            group = call.group or (call.parameter if path.startswith("/v1/groups/") else call.principal.group)
            if group is None and subject is not None:
                group = self._site.coordinator.group_here(subject)
        self._site.refusals.note(
            operation, answer.status, answer.error_code, group=group, id=subject, request_id=request_id
        )

    async def _answer(
        self,
        operation: Operation,
        request: web.BaseRequest,
        parameter: str,
        started: float,
        request_id: str,
        calls: list[Call],
    ) -> Answer | web.StreamResponse:
        """Authenticate, admit and answer a call; serve a WebSocket until it ends.

        The call is appended to `calls`, for the log: none if its caller is refused.
        """
        call = Call(
            site=self._site,
            request=request,
            parameter=unquote(parameter) if "%" in parameter else parameter,
            deadline=started + self.limits.request_timeout_s,
            principal=caller_of(request, operation.access, self._site.coordinator.authority),
            id=request_id,
        )
        calls.append(call)
        caller = call.principal.group
        note_caller(request, caller)
        if self._stopping:
            raise ShuttingDownError
        if operation.upgrades:
            return await self._serve_stream(operation, call)
        if operation.waits:
            with cancelled_when_lost(call.request):
                return await operation.handler(call)
        has_body = operation.body is not None
        call.body = await self.in_flight.receive(
            call.request, call.deadline, caller, reads=has_body, expected=has_body and not operation.has_optional_body
        )
        try:
            answer = await (self._admit_and_handle(operation, call) if operation.begins else operation.handler(call))
        finally:
            self.in_flight.answered(call.body, caller)
        size = len(answer.body or b"") + sum(map(len, answer.rest))
        if size > LARGE_BYTES and operation.method == HTTPMethod.GET and not self._site.unsent.has_room(caller, size):
            raise OverloadedError("too many answers that clients have not read yet: try again later")
        return answer

    async def _admit_and_handle(self, operation: Operation, call: Call) -> Answer:
        try:
            await self.admission.enter(call.principal.group)
            try:
                if call.request.transport is None:
                    raise ConnectionResetError  # the client is gone, so nobody would end the transaction
                return await operation.handler(call)
            finally:
                self.admission.leave()
        except GroupLimitedError as error:
            await self._refusals.hold(str(error.fields["group"]))
            raise

    async def _serve_stream(self, operation: Operation, call: Call) -> web.StreamResponse:
        """Accept a WebSocket handshake, and serve the stream until it ends."""
        self.streams.demand_room(call.principal)
        answer = await operation.handler(call)
        stream = self.streams.make(call)
        if not stream.socket.can_prepare(call.request):
            raise UpgradeRequiredError("the request is not a handshake of WebSocket version 13")
        stream.socket.headers.update({"X-Request-Id": call.id, "Date": self._date()})
        self._observer.answered(operation.id, answer.status)
        with call_on_data(call.request, partial(self.streams.received, stream)):
            return await self.streams.serve(stream, call.request)

    def _request_id(self, request: web.BaseRequest) -> str:
        sent = request.headers.get("X-Request-Id")
        if sent is not None and _REQUEST_ID.match(sent) is not None:
            return sent
        return f"{self._instance}-{next(self._ids):x}"
