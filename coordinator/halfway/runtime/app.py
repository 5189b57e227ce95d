"""The composition root: settings in, a running coordinator out, everything stopped once and in reverse."""

from __future__ import annotations

import asyncio
import errno
import os
import signal
import socket
import threading
from collections.abc import Callable, Coroutine
from contextlib import AsyncExitStack
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, Final

import structlog
from aiohttp import web

from halfway.domain.errors import ConfigurationError, ShardUnavailableError
from halfway.rest.handlers.calls import refusal
from halfway.rest.responses.problems import CONTENT_TYPE
from halfway.rest.responses.unsent import Unsent
from halfway.rest.server.api import Api, ApiLimits
from halfway.rest.server.health_port import HealthPort, Reason, ShardNotAcquired
from halfway.rest.server.peer_port import PATH, PeerPort
from halfway.rest.server.server import HttpServer
from halfway.runtime.backend import Backend, running
from halfway.runtime.descriptors import HEALTH_CONNECTIONS, connections_to_hold
from halfway.runtime.garbage import leave_alone_what_stands, look_now_and_then, look_rarely
from halfway.runtime.liveness import LoopPauses
from halfway.runtime.logging import configure
from halfway.runtime.metrics import Metrics
from halfway.runtime.terminal import complain

if TYPE_CHECKING:
    from halfway.runtime.settings import Settings

log = structlog.get_logger(__name__)

_LOCAL: Final = {"0.0.0.0": "127.0.0.1", "::": "::1", "": "127.0.0.1"}  # noqa: S104 - to be reached, not to listen
_LOOK_EVERY_S: Final = 0.05
_PAUSED_S: Final = 5.0
_LOOKED_BACK_S: Final = 10.0
_PEER_REQUEST_BYTES: Final = 1024 * 1024
_CLOSING_S: Final = 7.0
"""The part of a stop that is kept for ending threads and Kafka clients, which take 4 s when Kafka does not answer."""


@dataclass(frozen=True, kw_only=True)
class Ready:
    """Where a coordinator that is ready listens."""

    url: str
    health_url: str


def run(settings: Settings, *, on_ready: Callable[[Ready], None] | None = None) -> int:
    """Run the coordinator until SIGTERM or SIGINT and return the exit status; a second signal ends it at once."""
    configure(form=settings.log_format, level=settings.log_level)
    look_rarely()
    try:
        _run_loop(_serve(settings, on_ready))
    except ConfigurationError as error:
        complain(error.detail)
        return 1
    return 0


def _run_loop(main: Coroutine[Any, Any, None]) -> None:
    try:
        import uvloop
    except ImportError:  # not on every platform
        asyncio.run(main)
    else:
        uvloop.run(main)


class _Stage:
    """How far this instance has come, for two ports that answer all the time."""

    def __init__(self, pauses: LoopPauses) -> None:
        self.backend: Backend | None = None
        self.api: Api | None = None
        self.peers: PeerPort | None = None
        self.stopping = False
        self._pauses = pauses

    def reasons(self) -> list[Reason]:
        if self.stopping:
            return [Reason(check="stopping", detail="this instance is stopping")]
        if self.backend is None or self.api is None:
            return [Reason(check="kafka", detail="Kafka is not reached, or its topics are not verified yet")]
        found = [Reason(check="shards", detail=detail) for detail in self.backend.not_ready()]
        if (pause_s := self._pauses.longest_s(within_s=_LOOKED_BACK_S)) > _PAUSED_S:
            found.append(Reason(check="event_loop", detail=f"it paused for {pause_s:.1f} s"))
        return found

    def not_acquired(self) -> list[ShardNotAcquired]:
        troubles = () if self.backend is None else self.backend.status.troubles
        return [
            ShardNotAcquired(
                shard=trouble.shard,
                since=datetime.fromtimestamp(trouble.since, UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
                tries=trouble.tries,
                error=trouble.error,
                remedy=trouble.remedy,
            )
            for trouble in troubles
        ]

    async def __call__(self, request: web.BaseRequest) -> web.StreamResponse:
        if self.peers is not None and request.rel_url.raw_path == PATH:
            return await self.peers(request)
        if self.api is not None:
            return await self.api(request)
        told = refusal(ShardUnavailableError("this instance is starting: try again"))
        return web.Response(
            status=told.status, body=told.body, headers={**dict(told.headers), "Content-Type": CONTENT_TYPE}
        )


async def _serve(settings: Settings, on_ready: Callable[[Ready], None] | None) -> None:
    stopping = asyncio.Event()
    _on_signals(stopping, end_by_force_s=time_to_finish(settings.shutdown_timeout_s) + _CLOSING_S)
    pauses, metrics = LoopPauses(), Metrics()
    metrics.show_pauses(pauses)
    stage = _Stage(pauses)
    async with AsyncExitStack() as stack:
        watching = asyncio.create_task(pauses.watch())
        stack.callback(watching.cancel)
        looking = asyncio.create_task(look_now_and_then())
        stack.callback(looking.cancel)
        health = HttpServer(
            HealthPort(reasons=stage.reasons, not_acquired=stage.not_acquired, metrics=metrics.render),
            max_connections=HEALTH_CONNECTIONS,
        )
        stack.push_async_callback(health.stop)
        await listen(health, settings.health_host, settings.health_port, "HALFWAY_HEALTH_PORT")
        unsent = Unsent()
        server = HttpServer(stage, max_connections=connections_to_hold(), unsent=unsent)
        stack.push_async_callback(server.stop)
        await listen(server, settings.host, settings.port, "HALFWAY_PORT")
        ready = Ready(
            url=reached_at(settings.host, server.port), health_url=reached_at(settings.health_host, health.port)
        )
        log.info("listening", url=ready.url, health_url=ready.health_url)

        serving = asyncio.ensure_future(_serving(settings, stage, metrics, ready, on_ready, server, unsent, stopping))
        halt = asyncio.ensure_future(stopping.wait())
        await asyncio.wait({serving, halt}, return_when=asyncio.FIRST_COMPLETED)
        halt.cancel()
        if not serving.done() and stage.backend is None:
            serving.cancel()  # still waiting for Kafka: nothing is in flight
        try:
            await serving
        except asyncio.CancelledError:
            log.info("stopped_before_it_was_ready")
    log.info("stopped")


async def _serving(
    settings: Settings,
    stage: _Stage,
    metrics: Metrics,
    ready: Ready,
    on_ready: Callable[[Ready], None] | None,
    server: HttpServer,
    unsent: Unsent,
    stopping: asyncio.Event,
) -> None:
    """Run the backend and take requests until told to stop; then finish what is in flight, within the limit."""
    loop = asyncio.get_running_loop()
    instance_url = settings.instance_url or f"http://{socket.gethostname()}:{server.port}"
    async with running(settings, settings.kafka_config(instance_url), metrics) as backend:
        api = Api(
            backend.coordinator,
            internal_prefix=settings.kafka_prefix,
            observer=metrics,
            limits=ApiLimits(
                request_timeout_s=settings.request_timeout_s,
                max_body_bytes=settings.max_body_bytes,
                max_requests=settings.max_requests,
                prepare_wait_s=settings.prepare_wait_s,
                max_batch_items=settings.max_batch_items,
            ),
            unsent=unsent,
        )
        metrics.show(backend.coordinator.shards, api)
        metrics.show_unsent(unsent)
        metrics.show_troubles(lambda: {one.shard: one.since for one in backend.status.troubles})
        if settings.peer_credential is not None:
            stage.peers = PeerPort(
                backend.coordinator.answering,
                credentials=settings.peer_credentials,
                incarnation=lambda: backend.status.incarnation,
                # What fits into a request of a client may be somewhat larger here, with every default written out.
                max_body_bytes=2 * settings.max_body_bytes + _PEER_REQUEST_BYTES,
                longest_s=settings.request_timeout_s,
            )
        stage.backend, stage.api = backend, api
        announcing = asyncio.create_task(_announce(stage, backend, ready, on_ready))
        halt = asyncio.ensure_future(stopping.wait())
        try:
            await asyncio.wait({announcing, halt}, return_when=asyncio.FIRST_COMPLETED)
            if announcing.done():
                announcing.result()
            await halt
        finally:
            announcing.cancel()
            halt.cancel()

        stage.stopping = True
        finishing_s = time_to_finish(settings.shutdown_timeout_s)
        log.info("stopping", within_s=settings.shutdown_timeout_s, finishing_s=finishing_s)
        deadline = backend.leave_by = loop.time() + finishing_s
        await server.close_port()
        await backend.coordinator.drain()
        await asyncio.gather(api.drain(deadline), *([] if stage.peers is None else [stage.peers.drain(deadline)]))


async def _announce(stage: _Stage, backend: Backend, ready: Ready, on_ready: Callable[[Ready], None] | None) -> None:
    """Announce once that this instance is ready; ConfigurationError if it cannot become ready."""
    while stage.reasons():
        backend.demand_permission()
        await asyncio.sleep(_LOOK_EVERY_S)
    leave_alone_what_stands()
    log.info("ready", url=ready.url, health_url=ready.health_url)
    if on_ready is not None:
        on_ready(ready)


def time_to_finish(stop_s: float) -> float:
    """Return how much of a stop is for what is in flight: all but the time for closing, and half of it at least."""
    return max(stop_s - _CLOSING_S, stop_s / 2)


def _end_by_force_after(seconds: float) -> None:
    """End the process if closing hangs; on a thread, because the event loop itself may hang."""

    def end() -> None:
        log.error("stop_timed_out", after_s=seconds)
        os._exit(1)

    timer = threading.Timer(seconds, end)
    timer.daemon = True
    timer.start()


def _on_signals(stopping: asyncio.Event, *, end_by_force_s: float) -> None:
    def told() -> None:
        if stopping.is_set():
            log.warning("stopped_at_once")
            os._exit(1)
        stopping.set()
        _end_by_force_after(end_by_force_s)

    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, told)


async def listen(server: HttpServer, host: str, port: int, setting: str) -> None:
    try:
        await server.start(host, port)
    except (OSError, ValueError) as error:  # text that cannot be a host's name is a ValueError
        raise not_listening(host, port, setting, error) from error


def not_listening(host: str, port: int, setting: str, error: Exception) -> ConfigurationError:
    """Return the error for a port that is taken, or for an address that is not of this machine."""
    if getattr(error, "errno", None) == errno.EADDRINUSE:
        reason = "is taken by another process"
    else:
        reason = f"cannot be listened on ({getattr(error, 'strerror', None) or error})"
    return ConfigurationError(f"port {port} of {host} {reason}: choose another with {setting}")


def reached_at(host: str, port: int) -> str:
    reached = _LOCAL.get(host, host)
    return f"http://[{reached}]:{port}" if ":" in reached else f"http://{reached}:{port}"
