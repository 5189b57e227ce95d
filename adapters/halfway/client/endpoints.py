"""Check endpoints for the servers that services run; Django's is in halfway.client.django."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping, MutableMapping
from http import HTTPStatus
from typing import Any, Final
from urllib.parse import urlsplit

from aiohttp import web

from halfway.client.checks import (
    ANSWER_WITHIN_S,
    CONTENT_TYPE,
    MAX_QUESTION_BYTES,
    Check,
    Decide,
    DecideSync,
    InvalidCheckError,
    answer_check,
    answer_check_sync,
    read_check,
    refused,
    too_large,
)
from halfway.client.client import Halfway
from halfway.client.outcome import Outcome
from halfway.client.sending import NoBarrierError
from halfway.client.verification import CheckVerifier, Headers

_Event = MutableMapping[str, Any]
_Answering = tuple[Decide, CheckVerifier | None]
_NOT_POST: Final = (HTTPStatus.METHOD_NOT_ALLOWED, b'{"error": "a check is a POST"}')


class AiohttpChecks:
    """A handler for aiohttp: `app.router.add_post("/check", AiohttpChecks(barrier.decide))`."""

    def __init__(self, decide: Decide, verifier: CheckVerifier | None = None) -> None:
        """Take what answers a check, and what verifies that halfway has signed it."""
        self._decide = decide
        self._verifier = verifier

    async def __call__(self, request: web.Request) -> web.Response:
        """Answer one request; the body is bounded here, not by the application's `client_max_size`."""
        return await _answered(request, lambda _: (self._decide, self._verifier))


class _JoinedChecks:
    """A handler for aiohttp that answers for several groups, for each as it says itself."""

    def __init__(self) -> None:
        self.groups: dict[str, _Answering] = {}

    async def __call__(self, request: web.Request) -> web.Response:
        return await _answered(request, self._answering)

    def _answering(self, body: bytes) -> _Answering:
        if len(self.groups) == 1:
            return next(iter(self.groups.values()))
        group = read_check(body).group
        if group not in self.groups:
            raise InvalidCheckError(f"no client of the group {group} has joined this application")
        return self.groups[group]


async def _answered(request: web.Request, answering: Callable[[bytes], _Answering]) -> web.Response:
    body = bytearray()
    async for chunk in request.content.iter_any():
        body += chunk
        if len(body) > MAX_QUESTION_BYTES:
            status, answer = too_large()
            break
    else:
        try:
            decide, verifier = answering(bytes(body))
        except InvalidCheckError as error:
            status, answer = refused(error)
        else:
            status, answer = await answer_check(bytes(body), decide, headers=request.headers.items(), verifier=verifier)
    return web.Response(status=status, body=answer, content_type=CONTENT_TYPE)


_JOINED: Final = web.AppKey("halfway.client", dict[str, _JoinedChecks])
"""What answers at each path."""


def join_aiohttp(
    app: web.Application,
    client: Halfway,
    *,
    topics: Iterable[str],
    check_url: str,
    policy: Mapping[str, object] | None = None,
    decide: Decide | None = None,
    verifier: CheckVerifier | None = None,
) -> None:
    """Have the client live as long as the application, and checks answered at the path of `check_url`.

    At its start the group is registered, and its barrier is kept (`Halfway.start`). If the client has a key, checks
    that halfway has not signed are answered 401; `verifier` replaces the one that is made at the start. Groups may
    share a URL. Raises NoBarrierError if there is neither a barrier nor `decide`.
    """
    if decide is None and client.barrier is not None:
        decide = client.barrier.decide
    if decide is None:
        raise NoBarrierError("nothing answers the group's checks: give the client a barrier, or `decide`")
    path = urlsplit(check_url).path or "/"
    joined = app.setdefault(_JOINED, {})
    checks = joined.setdefault(path, _JoinedChecks())
    answering = decide

    async def living(_: web.Application) -> AsyncIterator[None]:
        async with client:
            await client.start(topics=topics, check_urls=[check_url], policy=policy)
            checks.groups[client.group] = answering, verifier or await client.check_verifier()
            yield

    app.cleanup_ctx.append(living)
    if path not in {resource.canonical for resource in app.router.resources()}:
        app.router.add_post(path, checks.__call__)


class AsgiChecks:
    """An ASGI application: `app.add_route("/check", AsgiChecks(barrier.decide))` in Starlette and FastAPI."""

    def __init__(self, decide: Decide, verifier: CheckVerifier | None = None) -> None:
        """Take what answers a check, and what verifies that halfway has signed it."""
        self._decide = decide
        self._verifier = verifier

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
                headers = ((name.decode("latin-1"), value.decode("latin-1")) for name, value in scope["headers"])
                return await answer_check(bytes(body), self._decide, headers=headers, verifier=self._verifier)


class WsgiChecks:
    """A WSGI application: `DispatcherMiddleware(app, {"/check": WsgiChecks(barrier.decide)})` of Werkzeug mounts it."""

    def __init__(self, decide: DecideSync, verifier: CheckVerifier | None = None) -> None:
        """Take what answers a check, and what verifies that halfway has signed it."""
        self._decide = decide
        self._verifier = verifier

    def __call__(self, environ: Mapping[str, Any], start_response: Callable[..., object]) -> Iterable[bytes]:
        """Answer one request."""
        given = ((name[5:].replace("_", "-"), value) for name, value in environ.items() if name.startswith("HTTP_"))
        status, answer = answer_request(
            environ["REQUEST_METHOD"], _reader(environ), self._decide, headers=given, verifier=self._verifier
        )
        headers = [("Content-Type", CONTENT_TYPE), ("Content-Length", str(len(answer)))]
        start_response(f"{int(status)} {HTTPStatus(status).phrase}", headers)
        return [answer]


class FlaskChecks:
    """A view for Flask: `app.add_url_rule("/check", "check", FlaskChecks(barrier.decide), methods=["POST"])`."""

    def __init__(self, decide: DecideSync, verifier: CheckVerifier | None = None) -> None:
        """Take what answers a check, and what verifies that halfway has signed it."""
        self._decide = decide
        self._verifier = verifier

    def __call__(self) -> Any:
        """Answer one request."""
        from flask import Response, current_app, request

        app = current_app._get_current_object()  # type: ignore[attr-defined]  # noqa: SLF001 - how Flask documents it

        def decide(check: Check) -> Outcome:
            with app.app_context():  # of its own: extensions keep a session in it, and close it with it
                return self._decide(check)

        status, answer = answer_request(
            request.method, request.stream.read, decide, headers=request.headers, verifier=self._verifier
        )
        return Response(answer, status=status, content_type=CONTENT_TYPE)


def answer_request(
    method: str,
    read: Callable[[int], bytes],
    decide: DecideSync,
    *,
    within_s: float | None = ANSWER_WITHIN_S,
    headers: Headers = (),
    verifier: CheckVerifier | None = None,
) -> tuple[int, bytes]:
    """Return the status and the body that answer a request, of whose body `read` returns so many bytes."""
    if method != "POST":
        return _NOT_POST
    body = read(MAX_QUESTION_BYTES + 1)
    if len(body) > MAX_QUESTION_BYTES:
        return too_large()
    return answer_check_sync(body, decide, within_s=within_s, headers=headers, verifier=verifier)


def _reader(environ: Mapping[str, Any]) -> Callable[[int], bytes]:
    def read(size: int) -> bytes:
        if not environ.get("wsgi.input_terminated"):  # then only the length says where the body ends
            length = environ.get("CONTENT_LENGTH") or "0"
            size = min(size, int(length)) if length.isascii() and length.isdigit() else 0
        return bytes(environ["wsgi.input"].read(size))

    return read
