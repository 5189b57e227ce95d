"""The health port: health and metrics for the platform."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from http import HTTPStatus
from typing import Final

import msgspec
from aiohttp import web

from halfway.http.responses import MethodNotAllowedError, UnknownPathError, problem_response
from halfway.protocol.errors import HalfwayError

_METHODS: Final = ("GET", "HEAD")
_PATHS: Final = ("/health/live", "/health/started", "/health/ready", "/metrics")
_API: Final = ("/v1/", "/openapi.json")


class Reason(msgspec.Struct, frozen=True, kw_only=True):
    """Why this instance is not started or not ready, or what is unsafe."""

    check: str
    detail: str


class ShardNotAcquired(msgspec.Struct, frozen=True, kw_only=True):
    """A shard that is assigned to this instance, but that it cannot acquire."""

    shard: int
    since: str
    tries: int
    error: str
    remedy: str


class HealthPort:
    def __init__(
        self,
        *,
        starting: Callable[[], Sequence[Reason]] = tuple,
        reasons: Callable[[], Sequence[Reason]],
        warnings: Callable[[], Sequence[Reason]] = tuple,
        not_acquired: Callable[[], Sequence[ShardNotAcquired]],
        metrics: Callable[[str], tuple[bytes, str]],
        demand_reader: Callable[[web.BaseRequest], object] = lambda _: None,
        api: Callable[[web.BaseRequest], Awaitable[web.StreamResponse]] | None = None,
    ) -> None:
        """Take the functions that return why this instance is not ready, and the metrics with their content type.

        `starting` returns what the first recovery waits for. `warnings` and `not_acquired` are shown whether the
        instance is ready or not. `metrics` takes what the caller accepts. `demand_reader` raises a HalfwayError if the
        caller may not read metrics; everybody may read health. `api` answers the calls of the API if this port serves
        the console.
        """
        self._starting = starting
        self._reasons = reasons
        self._warnings = warnings
        self._not_acquired = not_acquired
        self._metrics = metrics
        self._demand_reader = demand_reader
        self._api = api

    async def __call__(self, request: web.BaseRequest) -> web.StreamResponse:
        """Answer the paths of this port.

        `/health/started` and `/health/ready` are 503 with the reasons until the first recovery is finished, and while
        this instance should get no requests.
        """
        path = request.rel_url.raw_path
        if self._api is not None and path.startswith(_API):
            return await self._api(request)
        error: HalfwayError | None = None
        if path not in _PATHS:
            error = UnknownPathError(f"this port serves {', '.join(_PATHS[:-1])} and {_PATHS[-1]}")
        elif request.method not in _METHODS:
            error = MethodNotAllowedError(request.method, _METHODS)
        if error is not None:
            return problem_response(error)
        if path == "/metrics":
            return self._scraped(request)
        if path == "/health/started":
            return _health("not_started", self._starting())
        if path == "/health/ready":
            return _health("not_ready", self._reasons(), warnings=self._warnings(), not_acquired=self._not_acquired())
        return _health()

    def _scraped(self, request: web.BaseRequest) -> web.Response:
        try:
            self._demand_reader(request)
        except HalfwayError as error:
            return problem_response(error)
        body, content_type = self._metrics(request.headers.get("Accept", ""))
        return web.Response(body=body, headers={"Content-Type": content_type})


def _health(status: str = "", reasons: Sequence[Reason] = (), **more: object) -> web.Response:
    """Return the document of a health check: 503 with `status` if there are reasons."""
    code = HTTPStatus.SERVICE_UNAVAILABLE if reasons else HTTPStatus.OK
    document = {"status": status if reasons else "ok"} | ({"reasons": reasons} if status else {}) | more
    return web.Response(status=code, body=msgspec.json.encode(document), content_type="application/json")
