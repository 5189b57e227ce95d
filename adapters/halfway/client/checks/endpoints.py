"""Check endpoints for aiohttp, ASGI, WSGI and Flask. Django's is in halfway.client.django."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping, MutableMapping
from http import HTTPStatus
from typing import Any, Final, Generic, TypeVar
from urllib.parse import urlsplit

from aiohttp import web

from halfway.client.checks.answers import (
    ANSWER_WITHIN_S,
    CONTENT_TYPE,
    MAX_CHECK_BYTES,
    Check,
    CheckVerifier,
    Decide,
    DecideSync,
    Headers,
    InvalidCheckError,
    answer_check,
    answer_check_sync,
    read_check,
    refusal,
    too_large,
)
from halfway.client.messages import Outcome
from halfway.client.producer.client import Halfway
from halfway.client.producer.transaction import NoBarrierError

_Event = MutableMapping[str, Any]
_Decider = tuple[Decide, CheckVerifier | None]
_NOT_POST: Final = (HTTPStatus.METHOD_NOT_ALLOWED, b'{"error": "a check is a POST"}')


D = TypeVar("D")


class Endpoint(Generic[D]):
    """Answers the checks that a server receives."""

    def __init__(self, decide: D, verifier: CheckVerifier | None = None) -> None:
        """Take the function that decides checks, and the verifier of their signatures."""
        self._decide = decide
        self._verifier = verifier


class AiohttpChecks(Endpoint[Decide]):
    """A handler for aiohttp: `app.router.add_post("/check", AiohttpChecks(barrier.decide))`."""

    async def __call__(self, request: web.Request) -> web.Response:
        """Answer one request. The body is limited here, not by the application's `client_max_size`."""
        return await _answer(request, lambda _: (self._decide, self._verifier))


class _JoinedChecks:
    """A handler for aiohttp that answers checks of several groups, each with the group's own decider."""

    def __init__(self) -> None:
        self.groups: dict[str, _Decider] = {}

    async def __call__(self, request: web.Request) -> web.Response:
        return await _answer(request, self._decider)

    def _decider(self, body: bytes) -> _Decider:
        if len(self.groups) == 1:
            return next(iter(self.groups.values()))
        group = read_check(body).group
        if group not in self.groups:
            raise InvalidCheckError(f"no client of the group {group} has joined this application")
        return self.groups[group]


async def _answer(request: web.Request, decider_of: Callable[[bytes], _Decider]) -> web.Response:
    body = bytearray()
    async for chunk in request.content.iter_any():
        body += chunk
        if len(body) > MAX_CHECK_BYTES:
            status, answer = too_large()
            break
    else:
        try:
            decide, verifier = decider_of(bytes(body))
        except InvalidCheckError as error:
            status, answer = refusal(error)
        else:
            status, answer = await answer_check(bytes(body), decide, headers=request.headers.items(), verifier=verifier)
    return web.Response(status=status, body=answer, content_type=CONTENT_TYPE)


_JOINED: Final = web.AppKey("halfway.client", dict[str, _JoinedChecks])
"""The handler for each path."""


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
    """Open the client as long as the application runs, and answer checks at the path of `check_url`.

    The start of the application registers the group and starts the maintenance of its barrier (`Halfway.start`). If the
    client has a key, checks that halfway has not signed are answered with 401; `verifier` replaces the verifier that is
    created at the start. Groups may share a URL. Raises NoBarrierError if there is neither a barrier nor `decide`.
    """
    if decide is None and client.barrier is not None:
        decide = client.barrier.decide
    if decide is None:
        raise NoBarrierError("nothing answers the group's checks: give the client a barrier, or `decide`")
    path = urlsplit(check_url).path or "/"
    handlers = app.setdefault(_JOINED, {})
    checks = handlers.setdefault(path, _JoinedChecks())
    chosen_decide = decide

    async def run_client(_: web.Application) -> AsyncIterator[None]:
        async with client:
            await client.start(topics=topics, check_urls=[check_url], policy=policy)
            checks.groups[client.group] = chosen_decide, verifier or await client.check_verifier()
            yield

    app.cleanup_ctx.append(run_client)
    if path not in {resource.canonical for resource in app.router.resources()}:
        app.router.add_post(path, checks.__call__)


class AsgiChecks(Endpoint[Decide]):
    """An ASGI application: `app.add_route("/check", AsgiChecks(barrier.decide))` in Starlette and FastAPI."""

    async def __call__(
        self,
        scope: Mapping[str, Any],
        receive: Callable[[], Awaitable[_Event]],
        send: Callable[[_Event], Awaitable[None]],
    ) -> None:
        """Answer one request."""
        if scope["type"] != "http":
            raise ValueError(f"{scope['type']} is not HTTP: mount AsgiChecks at its own route")
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
            if len(body) > MAX_CHECK_BYTES:
                return too_large()
            if not event.get("more_body", False):
                headers = ((name.decode("latin-1"), value.decode("latin-1")) for name, value in scope["headers"])
                return await answer_check(bytes(body), self._decide, headers=headers, verifier=self._verifier)


class WsgiChecks(Endpoint[DecideSync]):
    """A WSGI application: `DispatcherMiddleware(app, {"/check": WsgiChecks(barrier.decide)})` of Werkzeug mounts it."""

    def __call__(self, environ: Mapping[str, Any], start_response: Callable[..., object]) -> Iterable[bytes]:
        """Answer one request."""
        headers = ((name[5:].replace("_", "-"), value) for name, value in environ.items() if name.startswith("HTTP_"))
        status, answer = answer_request(
            environ["REQUEST_METHOD"], _reader(environ), self._decide, headers=headers, verifier=self._verifier
        )
        answer_headers = [("Content-Type", CONTENT_TYPE), ("Content-Length", str(len(answer)))]
        start_response(f"{int(status)} {HTTPStatus(status).phrase}", answer_headers)
        return [answer]


class FlaskChecks(Endpoint[DecideSync]):
    """A view for Flask: `app.add_url_rule("/check", "check", FlaskChecks(barrier.decide), methods=["POST"])`."""

    def __call__(self) -> Any:
        """Answer one request."""
        from flask import Response, current_app, request

        app = current_app._get_current_object()  # type: ignore[attr-defined]  # noqa: SLF001 - as Flask documents it

        def decide(check: Check) -> Outcome:
            with app.app_context():  # its own context: extensions keep a session in it, and close it with the context
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
    """Return the status and the body that answer a request. `read(n)` returns up to n bytes of the request's body."""
    if method != "POST":
        return _NOT_POST
    body = read(MAX_CHECK_BYTES + 1)
    if len(body) > MAX_CHECK_BYTES:
        return too_large()
    return answer_check_sync(body, decide, within_s=within_s, headers=headers, verifier=verifier)


def _reader(environ: Mapping[str, Any]) -> Callable[[int], bytes]:
    def read(size: int) -> bytes:
        if not environ.get("wsgi.input_terminated"):  # otherwise only the length marks the end of the body
            length = environ.get("CONTENT_LENGTH") or "0"
            size = min(size, int(length)) if length.isascii() and length.isdigit() else 0
        return bytes(environ["wsgi.input"].read(size))

    return read
