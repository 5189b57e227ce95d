"""The composition root: builds a coordinator from settings, runs it, and stops its parts in reverse order."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
import time
from collections.abc import Awaitable, Callable, Coroutine
from contextlib import AsyncExitStack
from dataclasses import dataclass
from datetime import UTC, datetime
from http import HTTPStatus
from typing import Any, Final

import structlog
from aiohttp import web

from halfway.app.metrics import LONG_S, LoopPauses, Metrics
from halfway.app.serve.addresses import demand_guarded, demand_host, instance_url_of, listen, local_url, server_tls
from halfway.app.serve.backend import STOP_S, WARNINGS, Backend, running_backend, silence
from halfway.app.serve.process import (
    CONSOLE_CONNECTIONS,
    HEALTH_CONNECTIONS,
    DeathError,
    Deaths,
    collect_periodically,
    collect_rarely,
    configure,
    freeze_existing,
    log_start_failure,
    raise_limit,
    supervised,
)
from halfway.app.serve.worker import LOOPBACK, Failed, ServicePort, Worker
from halfway.app.settings import Settings
from halfway.coordinator import tracing
from halfway.coordinator.logging import flush_all
from halfway.coordinator.records import PATH, HealthWarning
from halfway.http.console import Console
from halfway.http.requests.authentication import caller_of
from halfway.http.responses import Unsent, problem_response
from halfway.http.server.api import Api
from halfway.http.server.health_port import HealthPort, Reason, ShardNotAcquired
from halfway.http.server.peer_port import PeerPort
from halfway.http.server.server import HttpServer, ServerTls
from halfway.kafka.clients.librdkafka_events import ROUND_TRIPS, THROTTLING
from halfway.protocol.errors import ConfigurationError, ShardUnavailableError
from halfway.protocol.principal import Permission

log = structlog.get_logger(__name__)

_READY_POLL_S: Final = 0.05
_PAUSE_WINDOW_S: Final = 10.0
_PEER_REQUEST_BYTES: Final = 1024 * 1024
_PEER_CONNECTIONS: Final = 1000
"""The most connections to a worker's port for instances, of which each has two."""
_CLOSING_S: Final = 7.0
"""The part of a stop that is reserved for threads and Kafka clients. They need 4 s if Kafka does not answer."""


@dataclass(frozen=True, kw_only=True)
class Ready:
    """The URLs of a coordinator that is ready."""

    url: str
    health_url: str


def run(settings: Settings, *, on_ready: Callable[[Ready], None] | None = None, worker: Worker | None = None) -> int:
    """Run the coordinator until SIGTERM or SIGINT, and return the exit status. A second signal ends it at once.

    The status is 1 if it ended by itself: it could not start, or one of its threads or background tasks has died.
    A `worker` is stopped by its supervisor, and leaves it to it to say why it could not start.
    """
    if worker is None:
        configure(level=settings.log_level)
        warn_of_removed(settings)
    else:
        configure(level=settings.log_level, worker=worker.number, lock=worker.assignment.shared)
    collect_rarely()
    try:
        demand_guarded(settings)
        tracing.turn_on()
        _run_loop(_serve(settings, on_ready, worker))
    except ConfigurationError as error:
        if worker is None:
            log_start_failure(error.detail)
        else:
            worker.tell(Failed(detail=error.detail))
        return 1
    except DeathError:
        return 1
    finally:
        tracing.stop()
    return 0


def warn_of_removed(settings: Settings) -> None:
    for variable, value in settings.removed.items():
        log.warning("setting_removed", setting=variable, remedy=f"remove it: it is {value} now")


def _run_loop(main: Coroutine[Any, Any, None]) -> None:
    try:
        import uvloop
    except ImportError:  # not available on every platform
        asyncio.run(main)
    else:
        uvloop.run(main)


class Stage:
    """The state of this instance for its two ports, which answer from the start to the end."""

    def __init__(self, pauses: LoopPauses, *, metrics_need_key: bool = False) -> None:
        self.backend: Backend | None = None
        self.api: Api | None = None
        self.peers: PeerPort | None = None
        self.stopping = False
        self._since = time.monotonic()
        self._pauses = pauses
        self._metrics_need_key = metrics_need_key

    def starting(self) -> list[Reason]:
        """Return what the first recovery waits for; nothing once it is finished."""
        if self.backend is None or self.api is None:
            return [Reason(check="kafka", detail="Kafka cannot be reached, or the topics are not verified yet")]
        return _reasons("shards", self.backend.readiness.starting())

    def reasons(self) -> list[Reason]:
        """Return why this instance should get no requests."""
        if self.stopping:
            return [Reason(check="stopping", detail="this instance is stopping")]
        if self.backend is None or self.api is None:
            return self.starting()
        return _reasons("shards", self.backend.readiness.reason())

    def warnings(self) -> list[HealthWarning]:
        """Return what is unsafe, whether this instance is ready or not."""
        found = silence(time.monotonic() - self._since) if self.backend is None else self.backend.warnings()
        if (pause_s := self._pauses.longest_s(within_s=_PAUSE_WINDOW_S)) > LONG_S:
            found.append(HealthWarning(check="event_loop", detail=f"the event loop paused for {pause_s:.1f} s"))
        return found

    def warning_counts(self) -> dict[str, float]:
        """Return the number of warnings of each check, 0 if it has none."""
        found = [warning.check for warning in self.warnings()]
        return {check: found.count(check) for check in dict.fromkeys((*WARNINGS, *found))}

    def demand_reader(self, request: web.BaseRequest) -> None:
        """Raise a HalfwayError if the caller may not read metrics."""
        if not self._metrics_need_key:
            return
        if self.backend is None:
            raise ShardUnavailableError("this instance is starting, and has not read the keys yet: try again")
        caller_of(request, Permission.READ_METRICS, self.backend.coordinator.authority)

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

    def __call__(self, request: web.BaseRequest) -> Awaitable[web.StreamResponse]:
        if self.peers is not None and request.rel_url.raw_path == PATH:
            return self.peers(request)
        return self._starting() if self.api is None else self.api(request)

    async def answer_peer(self, request: web.BaseRequest) -> web.StreamResponse:
        """Answer another instance at the port of a worker, which serves nothing else."""
        if self.peers is not None and request.rel_url.raw_path == PATH:
            return await self.peers(request)
        return web.Response(status=HTTPStatus.NOT_FOUND)

    async def _starting(self) -> web.StreamResponse:
        return problem_response(ShardUnavailableError("this instance is starting: try again"))


def _reasons(check: str, detail: str | None) -> list[Reason]:
    return [] if detail is None else [Reason(check=check, detail=detail)]


async def _serve(settings: Settings, on_ready: Callable[[Ready], None] | None, worker: Worker | None) -> None:
    stop = _Stop(settings.drain_s)
    stop.on_signals(worker)
    deaths = Deaths(stop.begin)
    pauses, metrics = LoopPauses(), Metrics()
    tracing.follow(metrics.traced)
    stage = Stage(pauses, metrics_need_key=settings.access_control and settings.open_access != "metrics")
    show_process(metrics, pauses, stage)
    tls = server_tls(settings)
    async with AsyncExitStack() as stack:
        deaths.watch()
        stack.callback(deaths.close)
        pauses_task = supervised(pauses.watch())
        stack.callback(pauses_task.cancel)
        garbage_task = supervised(collect_periodically())
        stack.callback(garbage_task.cancel)
        ports = await _open_ports(stack, settings, stage, metrics, tls, worker)
        log.info("listening", url=ports.ready.url, health_url=ports.ready.health_url)

        backend_task = asyncio.ensure_future(_run_backend(settings, stage, metrics, ports, on_ready, stop))
        stop_task = asyncio.ensure_future(stop.begun.wait())
        await asyncio.wait({backend_task, stop_task}, return_when=asyncio.FIRST_COMPLETED)
        stop_task.cancel()
        if not backend_task.done() and stage.backend is None:
            backend_task.cancel()  # it still waits for Kafka, so nothing is in flight
        try:
            await backend_task
        except asyncio.CancelledError:
            log.info("stopped_before_it_was_ready")
    flush_all()
    log.info("stopped")
    deaths.demand_none()


@dataclass(frozen=True, kw_only=True)
class _Ports:
    """The open ports of this process."""

    server: HttpServer
    unsent: Unsent
    ready: Ready
    instance_port: int
    """The port at which other instances reach this one."""
    instance_url: str | None
    """The URL of that port, if the operator has set it."""


async def _open_ports(
    stack: AsyncExitStack,
    settings: Settings,
    stage: Stage,
    metrics: Metrics,
    tls: ServerTls | None,
    worker: Worker | None,
) -> _Ports:
    """Open the API and the health port, or those of the supervisor and the further ones of a worker."""

    def health_port(demand_reader: Callable[[web.BaseRequest], object], api: Stage | None = None) -> HealthPort:
        return HealthPort(
            starting=stage.starting,
            reasons=stage.reasons,
            warnings=lambda: [Reason(check=one.check, detail=one.detail) for one in stage.warnings()],
            not_acquired=stage.not_acquired,
            metrics=metrics.render,
            demand_reader=demand_reader,
            api=api,
        )

    console = Console() if settings.console != "off" else None
    on_health_port = settings.console == "health"
    unsent = Unsent()
    own_health = health_port(stage.demand_reader, stage if on_health_port else None)
    health = HttpServer(
        own_health if worker is None else ServicePort(own_health, worker),
        console=console if on_health_port else None,
        max_connections=HEALTH_CONNECTIONS + (CONSOLE_CONNECTIONS if on_health_port else 0),
        unsent=unsent,
    )
    stack.push_async_callback(health.stop)
    health_tls = tls if settings.health_tls else None
    if worker is None:
        await listen(health, settings.health_host, settings.health_port, "HALFWAY_HEALTH_PORT", health_tls)
    else:
        health.serve(worker.sockets(worker.assignment.health), health_tls)
    server = HttpServer(
        stage,
        console=console if settings.console == "api" else None,
        max_connections=raise_limit(),
        unsent=unsent,
        idle_s=settings.keepalive_s,
    )
    stack.push_async_callback(server.stop)
    if worker is None:
        await listen(server, settings.host, settings.port, "HALFWAY_PORT", tls)
        instance_port, instance_url = server.port, settings.instance_url
    else:
        server.serve(worker.sockets(worker.assignment.api), tls, worker.connections)
        pages = HttpServer(health_port(worker.demand_colleague), max_connections=HEALTH_CONNECTIONS)
        stack.push_async_callback(pages.stop)
        await listen(pages, LOOPBACK, 0, "HALFWAY_WORKERS")
        peers = HttpServer(stage.answer_peer, max_connections=min(_PEER_CONNECTIONS, raise_limit()))
        stack.push_async_callback(peers.stop)
        await listen(peers, settings.host, worker.assignment.port, "HALFWAY_PORT", tls)
        stack.push_async_callback(worker.close)
        report_task = supervised(worker.report(lambda: not stage.reasons(), server, pages.port))
        stack.callback(report_task.cancel)
        instance_port, instance_url = peers.port, worker.url(settings.instance_url, peers.port)
    return _Ports(
        server=server,
        unsent=unsent,
        ready=Ready(
            url=local_url(settings.host, server.port, tls=tls is not None),
            health_url=local_url(settings.health_host, health.port, tls=health_tls is not None),
        ),
        instance_port=instance_port,
        instance_url=instance_url,
    )


async def _run_backend(
    settings: Settings,
    stage: Stage,
    metrics: Metrics,
    ports: _Ports,
    on_ready: Callable[[Ready], None] | None,
    stop: _Stop,
) -> None:
    """Run the backend and accept requests until the stop; then finish the requests in flight within the time limit."""
    loop = asyncio.get_running_loop()
    server, unsent, instance_url = ports.server, ports.unsent, ports.instance_url
    if instance_url is None:
        instance_url = await asyncio.to_thread(instance_url_of, settings, ports.instance_port)
    log.info("instance_url", url=instance_url, is_default=ports.instance_url is None)
    config = settings.kafka_config(instance_url)
    metrics.export_zeros(config, has_peers=bool(settings.peer_credentials))
    async with running_backend(settings, config, metrics) as backend:
        api = Api(
            backend.coordinator,
            internal_prefix=settings.kafka_prefix,
            observer=metrics,
            limits=settings.api_limits(),
            unsent=unsent,
            demand_host=demand_host(settings),
        )
        metrics.show(backend.coordinator, api)
        show_backend(metrics, backend, unsent)
        if settings.peer_credentials:
            stage.peers = PeerPort(
                backend.coordinator.peer_handler,
                credentials=settings.peer_credentials,
                incarnation=lambda: backend.status.incarnation,
                # A client's request can be somewhat larger here, because it includes every default.
                max_body_bytes=2 * settings.max_body_bytes + _PEER_REQUEST_BYTES,
                longest_s=settings.request_timeout_s,
            )
        stage.backend, stage.api = backend, api
        backend.coordinator.statistics.warnings = stage.warnings
        backend.coordinator.statistics.totals = metrics.totals
        announce_task = asyncio.create_task(_announce(stage, backend, ports.ready, on_ready))
        stop_task = asyncio.ensure_future(stop.begun.wait())
        try:
            await asyncio.wait({announce_task, stop_task}, return_when=asyncio.FIRST_COMPLETED)
            if announce_task.done():
                announce_task.result()
            await stop_task
            was_ready = announce_task.done()
        finally:
            announce_task.cancel()
            stop_task.cancel()

        stage.stopping = True
        if was_ready and stop.drain_s > 0:
            log.info("draining", for_s=stop.drain_s)
            api.closes_connections = True
            await asyncio.sleep(stop.drain_s)
        finishing_s = STOP_S - _CLOSING_S
        log.info("stopping", within_s=STOP_S, finishing_s=finishing_s)
        deadline = backend.leave_by = loop.time() + finishing_s
        await server.close_port()
        await backend.coordinator.drain()
        await asyncio.gather(api.drain(deadline), *([] if stage.peers is None else [stage.peers.drain(deadline)]))


def show_process(metrics: Metrics, pauses: LoopPauses, stage: Stage) -> None:
    text = "The longest pause of the event loop in the last minute"
    metrics.show_gauge("halfway_loop_pause_seconds", text, pauses.longest_s)
    text = "What is unsafe on this instance, by check: the number of warnings in /health/ready"
    metrics.show_gauges("halfway_warnings", text, "check", stage.warning_counts)
    metrics.show_gauge("halfway_ready", "1 if /health/ready is 200, else 0", lambda: not stage.reasons())
    metrics.show_gauge("halfway_clock_seconds", "The time by this instance's clock, since the epoch", time.time)


def show_backend(metrics: Metrics, backend: Backend, unsent: Unsent) -> None:
    text = "Answers that clients have not read yet"
    metrics.show_gauge("halfway_unsent_answer_bytes", text, lambda: unsent.bytes)
    if (keys := backend.keys) is not None:  # for that long, a revoked key may still be accepted
        text = "Time since the keys were last read to their end"
        metrics.show_gauge("halfway_keys_age_seconds", text, lambda: keys.age_s)
    text = "Time since every served shard of half was last read to its end"
    metrics.show_gauge("halfway_tail_age_seconds", text, lambda: backend.tail.age_s)
    text = "For how long brokers have delayed answers because of quotas"
    metrics.show_counter("halfway_kafka_throttled_seconds", text, lambda: THROTTLING.seconds)
    text = "Round trip of the producer of half records to a broker in the last 15 s: the average"
    metrics.show_gauges("halfway_kafka_round_trip_seconds", text, "broker", lambda: ROUND_TRIPS.average_s)
    text = "Round trip of the producer of half records to a broker in the last 15 s: the 99th percentile"
    metrics.show_gauges("halfway_kafka_round_trip_p99_seconds", text, "broker", lambda: ROUND_TRIPS.p99_s)
    text = "How long a shard that is assigned to this instance could not be acquired"
    metrics.show_gauges("halfway_shard_not_acquired_seconds", text, "shard", backend.not_acquired_s)


async def _announce(stage: Stage, backend: Backend, ready: Ready, on_ready: Callable[[Ready], None] | None) -> None:
    """Announce that this instance is ready, once; raise ConfigurationError if it cannot become ready."""
    while stage.reasons():
        backend.demand_permission()
        await asyncio.sleep(_READY_POLL_S)
    freeze_existing()
    log.info("ready", url=ready.url, health_url=ready.health_url)
    if on_ready is not None:
        on_ready(ready)


class _Stop:
    """The stop of this process. It begins with SIGTERM, SIGHUP or SIGINT; a second signal ends the process at once."""

    def __init__(self, drain_s: float) -> None:
        """Take how long to serve while a load balancer turns away."""
        self.begun = asyncio.Event()
        self.drain_s = drain_s

    def on_signals(self, worker: Worker | None) -> None:
        """Begin with a signal. SIGINT is of a person at a terminal, who waits: it does not drain.

        A worker is also stopped by its supervisor, and perhaps by a service manager that signals all processes: for it
        no signal is the second one.
        """
        loop = asyncio.get_running_loop()
        if worker is not None:
            worker.follow(self.begin)
            loop.add_signal_handler(signal.SIGTERM, self.begin)
            loop.add_signal_handler(signal.SIGINT, self.begin, 0.0)
            return
        for number in (signal.SIGTERM, signal.SIGHUP):  # only a supervisor reads its settings again
            loop.add_signal_handler(number, self._on_signal, self.drain_s)
        loop.add_signal_handler(signal.SIGINT, self._on_signal, 0.0)

    def begin(self, drain_s: float | None = None) -> None:
        """Begin, unless it has begun; with a drain of its own if `drain_s` is given."""
        if self.begun.is_set():
            return
        if drain_s is not None:
            self.drain_s = drain_s
        self.begun.set()
        self._kill_after(self.drain_s + STOP_S)

    def _on_signal(self, drain_s: float) -> None:
        if self.begun.is_set():
            log.warning("stopped_at_once")
            os._exit(1)
        self.begin(drain_s)

    def _kill_after(self, seconds: float) -> None:
        """End the process if closing hangs. This uses a thread because the event loop itself may hang."""

        def kill() -> None:
            log.error("stop_timed_out", after_s=seconds)
            os._exit(1)

        timer = threading.Timer(seconds, kill)
        timer.daemon = True
        timer.start()
