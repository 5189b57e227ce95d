"""The health port: health and metrics for the platform."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from http import HTTPStatus
from typing import Final

import msgspec
from aiohttp import web

from halfway.domain.errors import HalfwayError
from halfway.rest.responses.answer import refusal
from halfway.rest.responses.errors import MethodNotAllowedError, UnknownPathError
from halfway.rest.responses.problems import CONTENT_TYPE

_METHODS: Final = ("GET", "HEAD")
_API: Final = ("/v1/", "/openapi.json")


class Reason(msgspec.Struct, frozen=True, kw_only=True):
    """Why this instance is not ready."""

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
    """The handler of the health port."""

    def __init__(
        self,
        *,
        reasons: Callable[[], Sequence[Reason]],
        not_acquired: Callable[[], Sequence[ShardNotAcquired]],
        metrics: Callable[[], tuple[bytes, str]],
        demand_reader: Callable[[web.BaseRequest], object] = lambda _: None,
        api: Callable[[web.BaseRequest], Awaitable[web.StreamResponse]] | None = None,
    ) -> None:
        """Take the functions that return why this instance is not ready, and the metrics with their content type.

        `not_acquired` is shown whether the instance is ready or not. `demand_reader` raises a HalfwayError if the
        caller may not read metrics; everybody may read health. `api` answers the calls of the API if this port serves
        the console.
        """
        self._reasons = reasons
        self._not_acquired = not_acquired
        self._metrics = metrics
        self._demand_reader = demand_reader
        self._api = api

    async def __call__(self, request: web.BaseRequest) -> web.StreamResponse:
        """Answer `/health/live`, `/health/ready` (503 with the reasons until the instance is ready) and `/metrics`."""
        path = request.rel_url.raw_path
        if self._api is not None and path.startswith(_API):
            return await self._api(request)
        if path not in ("/health/live", "/health/ready", "/metrics"):
            return _problem(UnknownPathError("this port serves /health/live, /health/ready and /metrics"))
        if request.method not in _METHODS:
            return _problem(MethodNotAllowedError(request.method, _METHODS))
        if path == "/metrics":
            try:
                self._demand_reader(request)
            except HalfwayError as error:
                return _problem(error)
            body, content_type = self._metrics()
            return web.Response(body=body, headers={"Content-Type": content_type})
        document: dict[str, object] = {"status": "ok"}
        status = HTTPStatus.OK
        if path == "/health/ready":
            reasons = self._reasons()
            if reasons:
                status, document["status"] = HTTPStatus.SERVICE_UNAVAILABLE, "not_ready"
            document |= {"reasons": reasons, "not_acquired": self._not_acquired()}
        return web.Response(status=status, body=msgspec.json.encode(document), content_type="application/json")


def _problem(error: HalfwayError) -> web.Response:
    answer = refusal(error)
    headers = {**dict(answer.headers), "Content-Type": CONTENT_TYPE}
    return web.Response(status=answer.status, body=answer.body, headers=headers)
