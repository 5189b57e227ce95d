"""Check endpoints for the servers that services run; Django's is in halfway.client.django."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Mapping, MutableMapping
from http import HTTPStatus
from typing import Any, Final

from aiohttp import web

from halfway.client.checks import (
    CONTENT_TYPE,
    MAX_QUESTION_BYTES,
    Decide,
    DecideSync,
    answer_check,
    answer_check_sync,
    too_large,
)

_Event = MutableMapping[str, Any]
_NOT_POST: Final = (HTTPStatus.METHOD_NOT_ALLOWED, b'{"error": "a check is a POST"}')


class AiohttpChecks:
    """A handler for aiohttp: `app.router.add_post("/check", AiohttpChecks(barrier.decide))`."""

    def __init__(self, decide: Decide) -> None:
        """Take what answers a check."""
        self._decide = decide

    async def __call__(self, request: web.Request) -> web.Response:
        """Answer one request; the body is bounded here, not by the application's `client_max_size`."""
        body = bytearray()
        async for chunk in request.content.iter_any():
            body += chunk
            if len(body) > MAX_QUESTION_BYTES:
                status, answer = too_large()
                break
        else:
            status, answer = await answer_check(bytes(body), self._decide)
        return web.Response(status=status, body=answer, content_type=CONTENT_TYPE)


class AsgiChecks:
    """An ASGI application: `app.add_route("/check", AsgiChecks(barrier.decide))` in Starlette and FastAPI."""

    def __init__(self, decide: Decide) -> None:
        """Take what answers a check."""
        self._decide = decide

    async def __call__(
        self,
        scope: Mapping[str, Any],
        receive: Callable[[], Awaitable[_Event]],
        send: Callable[[_Event], Awaitable[None]],
    ) -> None:
        """Answer one request."""
        if scope["type"] != "http":
            raise ValueError(f"{scope['type']} is not HTTP: give AsgiChecks a route of its own")
        status, answer = await self._answer(scope, receive)
        headers = [(b"content-type", CONTENT_TYPE.encode()), (b"content-length", str(len(answer)).encode())]
        await send({"type": "http.response.start", "status": int(status), "headers": headers})
        await send({"type": "http.response.body", "body": answer})

    async def _answer(self, scope: Mapping[str, Any], receive: Callable[[], Awaitable[_Event]]) -> tuple[int, bytes]:
        if scope["method"] != "POST":
            return _NOT_POST
        body = bytearray()
        while True:
            event = await receive()
            body += event.get("body", b"")
            if len(body) > MAX_QUESTION_BYTES:
                return too_large()
            if not event.get("more_body", False):
                return await answer_check(bytes(body), self._decide)


class WsgiChecks:
    """A WSGI application: `DispatcherMiddleware(app, {"/check": WsgiChecks(barrier.decide)})` of Werkzeug mounts it."""

    def __init__(self, decide: DecideSync) -> None:
        """Take what answers a check."""
        self._decide = decide

    def __call__(self, environ: Mapping[str, Any], start_response: Callable[..., object]) -> Iterable[bytes]:
        """Answer one request."""
        status, answer = answer_request(environ["REQUEST_METHOD"], _reader(environ), self._decide)
        headers = [("Content-Type", CONTENT_TYPE), ("Content-Length", str(len(answer)))]
        start_response(f"{int(status)} {HTTPStatus(status).phrase}", headers)
        return [answer]


class FlaskChecks:
    """A view for Flask: `app.add_url_rule("/check", "check", FlaskChecks(barrier.decide), methods=["POST"])`."""

    def __init__(self, decide: DecideSync) -> None:
        """Take what answers a check."""
        self._decide = decide

    def __call__(self) -> Any:
        """Answer one request."""
        from flask import Response, request

        status, answer = answer_request(request.method, request.stream.read, self._decide)
        return Response(answer, status=status, content_type=CONTENT_TYPE)


def answer_request(method: str, read: Callable[[int], bytes], decide: DecideSync) -> tuple[int, bytes]:
    """Return the status and the body that answer a request, of whose body `read` returns so many bytes."""
    if method != "POST":
        return _NOT_POST
    body = read(MAX_QUESTION_BYTES + 1)
    return too_large() if len(body) > MAX_QUESTION_BYTES else answer_check_sync(body, decide)


def _reader(environ: Mapping[str, Any]) -> Callable[[int], bytes]:
    def read(size: int) -> bytes:
        if not environ.get("wsgi.input_terminated"):  # then only the length says where the body ends
            length = environ.get("CONTENT_LENGTH") or "0"
            size = min(size, int(length)) if length.isascii() and length.isdigit() else 0
        return bytes(environ["wsgi.input"].read(size))

    return read
