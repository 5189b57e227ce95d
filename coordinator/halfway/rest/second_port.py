"""The second port: health and metrics, for the platform."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from http import HTTPStatus
from typing import TYPE_CHECKING, Final

import msgspec
from aiohttp import web

from halfway.rest.calls import refusal
from halfway.rest.errors import MethodNotAllowedError, UnknownPathError
from halfway.rest.problems import CONTENT_TYPE

if TYPE_CHECKING:
    from halfway.domain.errors import HalfwayError

_METHODS: Final = ("GET", "HEAD")


class Reason(msgspec.Struct, frozen=True, kw_only=True):
    """Why this instance is not ready."""

    check: str
    detail: str


class SecondPort:
    """The handler of the second port."""

    def __init__(self, *, reasons: Callable[[], Sequence[Reason]], metrics: Callable[[], tuple[bytes, str]]) -> None:
        """Take what tells why this instance is not ready, and what renders metrics with their content type."""
        self._reasons = reasons
        self._metrics = metrics

    async def __call__(self, request: web.BaseRequest) -> web.StreamResponse:
        """Answer `/health/live`, `/health/ready` (503 with reasons until ready) and `/metrics`."""
        path = request.rel_url.raw_path
        if path not in ("/health/live", "/health/ready", "/metrics"):
            return _refused(UnknownPathError("here are /health/live, /health/ready and /metrics"))
        if request.method not in _METHODS:
            return _refused(MethodNotAllowedError(request.method, _METHODS))
        if path == "/metrics":
            body, content_type = self._metrics()
            return web.Response(body=body, headers={"Content-Type": content_type})
        reasons = self._reasons() if path == "/health/ready" else ()
        status = HTTPStatus.SERVICE_UNAVAILABLE if reasons else HTTPStatus.OK
        document = {"status": "not_ready" if reasons else "ok", "reasons": reasons}
        return web.Response(status=status, body=msgspec.json.encode(document), content_type="application/json")


def _refused(error: HalfwayError) -> web.Response:
    told = refusal(error)
    return web.Response(status=told.status, body=told.body, content_type=CONTENT_TYPE)
