"""Check endpoints for aiohttp, ASGI, WSGI and Flask. Django's is in halfway.client.django."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping, MutableMapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from http import HTTPStatus
from typing import Any, Final, Generic, TypedDict, TypeVar, Unpack
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
    demand_decide,
    read_check,
    refusal,
    too_large,
)
from halfway.client.errors import HalfwayError
from halfway.client.messages import Outcome
from halfway.client.producer.client import Halfway, when_back
from halfway.client.producer.sync import SyncHalfway
from halfway.client.producer.transaction import NoBarrierError

log = logging.getLogger(__name__)

_Event = MutableMapping[str, Any]
_NOT_POST: Final = (HTTPStatus.METHOD_NOT_ALLOWED, b'{"error": "a check is a POST"}')
_NOT_KNOWN: Final = (HTTPStatus.SERVICE_UNAVAILABLE, b'{"error": "how halfway signs checks is not known yet"}')


D = TypeVar("D")


class Endpoint(Generic[D]):
    """Answers the checks that a server receives."""

    _has_loop = False

    def __init__(self, decide: D, verifier: CheckVerifier | None = None) -> None:
        """Take the function that decides checks, and the verifier of their signatures."""
        demand_decide(decide, has_loop=self._has_loop)
        self._decide = decide
        self._verifier = verifier
        self.groups: dict[str, tuple[D, CheckVerifier | None]] = {}
        """The same for the groups whose clients have joined at this path."""

    def answering(self, body: bytes) -> tuple[D, CheckVerifier | None]:
        """Return what decides and what verifies a check; raises InvalidCheckError if its group has not joined."""
        if not self.groups:
            return self._decide, self._verifier
        group = read_check(body).group  # that of another service, at the wrong URL, has no row here
        if group not in self.groups:
            raise InvalidCheckError(f"no client of the group {group} has joined this application")
        return self.groups[group]


class _AsyncEndpoint(Endpoint[Decide]):
    """Answers checks in an event loop."""

    _has_loop = True
    has_begun = False
    """Whether the application has begun to start a client that has joined."""

    def __init__(self, decide: Decide | None = None, verifier: CheckVerifier | None = None) -> None:
        super().__init__(decide or _of_no_group, verifier)

    async def answer(self, body: bytes, headers: Headers) -> tuple[int, bytes]:
        try:
            decide, verifier = self.answering(body)
        except InvalidCheckError as error:
            return refusal(error)
        return await answer_check(body, decide, headers=headers, verifier=verifier)

    @asynccontextmanager
    async def joined(
        self, client: Halfway, check_url: str, decide: Decide, verifier: CheckVerifier | None, **options: Any
    ) -> AsyncIterator[None]:
        """Open and start a client, and answer its group's checks as soon as halfway has said how it signs them."""
        self.has_begun = True
        async with client:

            async def join() -> None:
                self.groups[client.group] = decide, verifier or await client.check_verifier()

            if await client.start(check_urls=[check_url], **options) or verifier or not client.has_key:
                await join()
            else:
                client.keep_running(when_back(join))
            yield


def _of_no_group(check: Check) -> Outcome:
    log.warning("a check of %s came before its group had joined", check.group)
    return "unknown"


class AiohttpChecks(_AsyncEndpoint):
    """A handler for aiohttp: `app.router.add_post("/check", AiohttpChecks(barrier.decide))`."""

    async def __call__(self, request: web.Request) -> web.Response:
        """Answer one request. The body is limited here, not by the application's `client_max_size`."""
        body = bytearray()
        async for chunk in request.content.iter_any():
            body += chunk
            if len(body) > MAX_CHECK_BYTES:
                status, answer = too_large()
                break
        else:
            status, answer = await self.answer(bytes(body), request.headers.items())
        return web.Response(status=status, body=answer, content_type=CONTENT_TYPE)


class AsgiChecks(_AsyncEndpoint):
    """An ASGI application: `app.add_route("/check", AsgiChecks(barrier.decide))` in Starlette and FastAPI."""

    async def __call__(
        self,
        scope: Mapping[str, Any],
        receive: Callable[[], Awaitable[_Event]],
        send: Callable[[_Event], Awaitable[None]],
    ) -> None:
        if scope["type"] != "http":
            raise ValueError(f"{scope['type']} is not HTTP: mount AsgiChecks at its own route")
        status, answer = await self._receive(scope, receive)
        headers = [(b"content-type", CONTENT_TYPE.encode()), (b"content-length", str(len(answer)).encode())]
        await send({"type": "http.response.start", "status": int(status), "headers": headers})
        await send({"type": "http.response.body", "body": answer})

    async def _receive(self, scope: Mapping[str, Any], receive: Callable[[], Awaitable[_Event]]) -> tuple[int, bytes]:
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
                return await self.answer(bytes(body), headers)


_AIOHTTP: Final = web.AppKey("halfway.client", dict[str, AiohttpChecks])
"""The handler for each path."""


class JoinOptions(TypedDict, total=False):
    """The keyword parameters of `join_aiohttp`, `join_starlette` and `join_flask` that may be left out."""

    policy: Mapping[str, object] | None
    decide: Any
    verifier: CheckVerifier | None
    path: str
    """The route of checks, if it is not the path of `check_url`, such as behind a proxy or a root path."""


def join_aiohttp(
    app: web.Application, client: Halfway, *, topics: Iterable[str], check_url: str, **options: Unpack[JoinOptions]
) -> None:
    """Open the client as long as the application runs, and answer checks at the path of `check_url`.

    The start of the application registers the group and starts the maintenance of its barrier (`Halfway.start`). If the
    client has a key, checks that halfway has not signed are answered with 401; `verifier` replaces the verifier that is
    created at the start. Groups may share a URL. Raises NoBarrierError if there is neither a barrier nor `decide`.
    """
    path, running = _joining(client, topics, check_url, options)
    handlers = app.setdefault(_AIOHTTP, {})
    if path not in handlers:
        handlers[path] = AiohttpChecks()
        app.router.add_post(path, handlers[path].__call__)

    async def run(_: web.Application) -> AsyncIterator[None]:
        async with running(handlers[path]):
            yield

    app.cleanup_ctx.append(run)


def join_starlette(
    app: Any, client: Halfway, *, topics: Iterable[str], check_url: str, **options: Unpack[JoinOptions]
) -> None:
    """Add a group to an application of Starlette or FastAPI: its lifespan opens the client and registers the group.

    Join the outermost application: the lifespan of a mounted one never runs, which its first request logs.
    """
    path, running = _joining(client, topics, check_url, options)
    lifespan = app.router.lifespan_context
    handlers = app.state._state.setdefault("halfway.checks", {})  # noqa: SLF001 - a dict, where no attribute can be
    if path not in handlers:
        handlers[path] = AsgiChecks()
        app.add_route(path, handlers[path], methods=["POST"])
        app.add_middleware(_LifespanWatch, checks=handlers[path])

    @asynccontextmanager
    async def run(own: Any) -> AsyncIterator[Any]:
        async with lifespan(own) as state, running(handlers[path]):
            yield state

    app.router.lifespan_context = run


class _LifespanWatch:
    """Logs once that an application is used whose lifespan has not run, so that its client was never started."""

    def __init__(self, app: Any, checks: _AsyncEndpoint) -> None:
        self._app = app
        self._checks = checks

    async def __call__(self, scope: Mapping[str, Any], receive: object, send: object) -> None:
        if scope["type"] == "http" and not self._checks.has_begun:
            self._checks.has_begun = True
            log.error(
                "a client was not started, because the lifespan of its application did not run: join the outermost"
            )
        await self._app(scope, receive, send)


def join_flask(
    app: Any, client: SyncHalfway, *, topics: Iterable[str], check_url: str, **options: Unpack[JoinOptions]
) -> None:
    """Start the client at once, and answer checks in an application of Flask at the path of `check_url`."""
    decide, verifier, path = _decider(client, options), options.get("verifier"), _path_of(check_url, options)
    views: dict[str, FlaskChecks] = app.extensions.setdefault("halfway.checks", {})
    if path not in views:
        view = FlaskChecks(_of_no_group)
        app.add_url_rule(path, f"halfway-check-{len(views)}", view, methods=["POST"])
        views[path] = view
    is_registered = client.start(topics=topics, check_urls=[check_url], policy=options.get("policy"))
    views[path].joining[client.group] = client, decide, verifier
    if is_registered:
        views[path].join(client.group)


def _joining(
    client: Halfway, topics: Iterable[str], check_url: str, options: JoinOptions
) -> tuple[str, Callable[[_AsyncEndpoint], AbstractAsyncContextManager[None]]]:
    """Return the path of the checks, and what runs a client that answers them at an endpoint."""
    decide, verifier, policy = _decider(client, options), options.get("verifier"), options.get("policy")
    return _path_of(check_url, options), lambda checks: checks.joined(
        client, check_url, decide, verifier, topics=topics, policy=policy
    )


def _path_of(check_url: str, options: JoinOptions) -> str:
    return options.get("path") or urlsplit(check_url).path or "/"


def _decider(client: Halfway | SyncHalfway, options: JoinOptions) -> Any:
    decide = options.get("decide") or (None if client.barrier is None else client.barrier.decide)
    if decide is None:
        raise NoBarrierError("nothing answers the group's checks: give the client a barrier, or `decide`")
    demand_decide(decide, has_loop=isinstance(client, Halfway))
    return decide


class WsgiChecks(Endpoint[DecideSync]):
    """A WSGI application: `DispatcherMiddleware(app, {"/check": WsgiChecks(barrier.decide)})` of Werkzeug mounts it."""

    def __call__(self, environ: Mapping[str, Any], start_response: Callable[..., object]) -> Iterable[bytes]:
        headers = ((name[5:].replace("_", "-"), value) for name, value in environ.items() if name.startswith("HTTP_"))
        status, answer = answer_request(
            environ["REQUEST_METHOD"], _reader(environ), self._decide, headers=headers, verifier=self._verifier
        )
        answer_headers = [("Content-Type", CONTENT_TYPE), ("Content-Length", str(len(answer)))]
        start_response(f"{int(status)} {HTTPStatus(status).phrase}", answer_headers)
        return [answer]


class FlaskChecks(Endpoint[DecideSync]):
    """A view for Flask: `app.add_url_rule("/check", "check", FlaskChecks(barrier.decide), methods=["POST"])`."""

    def __init__(self, decide: DecideSync, verifier: CheckVerifier | None = None) -> None:
        """Take the function that decides checks, and the verifier of their signatures."""
        super().__init__(decide, verifier)
        self.joining: dict[str, tuple[SyncHalfway, DecideSync, CheckVerifier | None]] = {}
        """The clients of groups, which halfway may not have told yet how it signs checks."""

    def join(self, group: str) -> None:
        """Answer a group's checks with its own decider. If halfway was away at the start, ask it now how it signs."""
        if group in self.joining and group not in self.groups:
            client, decide, verifier = self.joining[group]
            self.groups.setdefault(group, (decide, verifier or client.check_verifier()))

    def __call__(self) -> Any:
        """Answer one request. The body is limited here, not by MAX_CONTENT_LENGTH, which limits Flask's own stream."""
        from flask import Response, current_app, request

        app = current_app._get_current_object()  # type: ignore[attr-defined]  # noqa: SLF001 - as Flask documents it
        body = _reader(request.environ)(MAX_CHECK_BYTES + 1)
        decide_check, verifier = self._decide, self._verifier

        def decide(check: Check) -> Outcome:
            with app.app_context():  # its own context: extensions keep a session in it, and close it with the context
                return decide_check(check)

        try:
            if self.joining and len(body) <= MAX_CHECK_BYTES:
                self.join(read_check(body).group)
                decide_check, verifier = self.answering(body)
        except InvalidCheckError as error:
            status, answer = refusal(error)
        except HalfwayError as error:
            log.warning("a check cannot be verified until halfway has said how it signs checks: %s", error)
            status, answer = _NOT_KNOWN
        else:
            status, answer = answer_request(
                request.method, lambda _: body, decide, headers=request.headers, verifier=verifier
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
