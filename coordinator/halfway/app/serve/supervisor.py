"""The supervisor of `halfway serve --workers N`: it binds the ports, starts the workers and replaces those that die.

The workers accept from the same listening socket. A connection that waits there is of no worker yet, so another one
takes it if a worker is killed. (With SO_REUSEPORT the kernel gives it to one worker at once, and resets it with that
worker.) A worker that is not ready leaves connections to the others.

Each worker is a new process of the same command, with the settings as the supervisor has read them at its start, or at
the last reload: a file that is being edited is not for one that replaces another. It ends if the supervisor does.
"""

from __future__ import annotations

import asyncio
import math
import os
import pickle
import secrets
import signal
import socket
import sys
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Final

import structlog

from halfway.app.serve.addresses import demand_guarded, listeners_of, local_url, server_tls
from halfway.app.serve.app import warn_of_removed
from halfway.app.serve.backend import STOP_S, check_authorities
from halfway.app.serve.process import configure, log_start_failure
from halfway.app.serve.worker import (
    BEAT_S,
    FROM_WORKER,
    Alive,
    Assignment,
    Colleague,
    Connections,
    Failed,
    State,
    Stop,
    encoded,
)
from halfway.app.settings import Settings
from halfway.protocol.errors import ConfigurationError

log = structlog.get_logger(__name__)

PORTS_ABOVE: Final = 100
"""Worker n is reached by other instances at the API's port plus this plus n."""
_MAX_PORT: Final = 65_535
_HANGS_S: Final = 12 * BEAT_S
"""A worker whose event loop has not run for this long is killed."""
_STARTS_S: Final = 300.0
"""One that says nothing for this long after its start is killed, too: it imports first."""
_LOOKS: Final = 12
_STOP_S: Final = STOP_S + 5.0
"""How long a worker may take to stop after its drain: it ends by itself within `STOP_S`."""
_FIRST_PAUSE_S: Final = 0.5
_LONGEST_PAUSE_S: Final = 30.0
_SETTLED_S: Final = 60.0
"""A worker that has run for so long is replaced without a pause that has grown."""
_LOOK_S: Final = 0.1
_FIXED: Final = ("host", "port", "health_host", "health_port", "workers", "kafka_prefix", "shards")
"""Settings that a reload does not change: they are of the supervisor, or of the deployment behind the port."""
_SAID_BYTES: Final = 1024 * 1024


def cpus(quota: Path = Path("/sys/fs/cgroup/cpu.max")) -> int:
    """Return how many CPUs this process may use: those of its affinity, or of its container if that has fewer."""
    count = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    with suppress(OSError, ValueError):  # no such limit here: "max", or no cgroup
        allowed, period = map(int, quota.read_text(encoding="ascii").split())
        count = min(count, math.ceil(allowed / period))
    return max(1, count)


def workers_of(settings: Settings) -> int:
    """Return the number of workers; `auto`: one for each CPU, but not more than there are shards."""
    return min(cpus(), settings.shards) if settings.workers == "auto" else settings.workers


def supervise(settings: Settings, load: Callable[[], Settings]) -> int:
    """Run the workers until SIGTERM or SIGINT, and return the exit status, as `run` does for one process.

    `load` reads the settings again, for a reload (SIGHUP).
    """
    configure(level=settings.log_level)
    warn_of_removed(settings)
    try:
        return asyncio.run(Supervisor(settings, load).run())
    except ConfigurationError as error:
        log_start_failure(error.detail)
        return 1


def demand_usable(settings: Settings) -> None:
    """Raise ConfigurationError for what every worker would refuse without asking Kafka."""
    demand_guarded(settings)
    server_tls(settings)
    check_authorities(settings)
    settings.kafka_config("")


class _Child:
    """A worker's process, as its supervisor sees it."""

    def __init__(self, number: int, process: asyncio.subprocess.Process, writer: asyncio.StreamWriter) -> None:
        self.number = number
        self.process = process
        self._writer = writer
        self.pages = 0
        self.ready = self.has_been_ready = False
        self.leaves = False
        """Whether it was told to stop."""
        self.failure: str | None = None
        """Why its start has failed."""
        self.silent = asyncio.Event()
        """Set once it says nothing any more."""

    def tell(self, message: Assignment | State | Stop) -> None:
        self.leaves = self.leaves or isinstance(message, Stop)
        self._writer.write(encoded(message))

    def kill(self) -> None:
        with suppress(ProcessLookupError):
            self.process.kill()

    def close(self) -> None:
        self._writer.close()


class Supervisor:
    """Runs the workers of one service. Their numbers are the lowest that are free."""

    def __init__(self, settings: Settings, load: Callable[[], Settings]) -> None:
        self._settings = settings
        self._load = load
        self._count = workers_of(settings)
        self._api: list[socket.socket] = []
        self._health: list[socket.socket] = []
        self._token = secrets.token_hex(32)
        self._credential = secrets.token_hex(32)
        if not hasattr(os, "memfd_create"):
            raise ConfigurationError("HALFWAY_WORKERS: several workers run on Linux only: start as many instances")
        self._shared = os.memfd_create("halfway")
        self._tasks = asyncio.TaskGroup()
        self._keepers: dict[int, asyncio.Task[int]] = {}
        """Each runs the worker of a number, and returns its last exit status."""
        self._children: dict[int, _Child] = {}
        self._replaced: Counter[int] = Counter()
        self._started = False
        """Whether a worker has ever been ready."""
        self._failure: str | None = None
        """Why the first worker of a number could not start, which ends the service."""
        self._stopping = asyncio.Event()
        self._drain_s = settings.drain_s

    async def run(self) -> int:
        """Run the workers until a signal; raise ConfigurationError if they cannot start."""
        settings = self._settings
        demand_usable(settings)
        if settings.port + PORTS_ABOVE + self._count > _MAX_PORT:
            raise ConfigurationError(
                f"HALFWAY_PORT {settings.port} is too high for {self._count} workers, which use the ports from "
                f"HALFWAY_PORT + {PORTS_ABOVE} on: choose a lower one"
            )
        self._api = await listeners_of(settings.host, settings.port, "HALFWAY_PORT")
        self._health = await listeners_of(settings.health_host, settings.health_port, "HALFWAY_HEALTH_PORT")
        loop, wanted = asyncio.get_running_loop(), asyncio.Event()
        loop.add_signal_handler(signal.SIGTERM, self._on_stop, None)
        loop.add_signal_handler(signal.SIGINT, self._on_stop, 0.0)
        loop.add_signal_handler(signal.SIGHUP, wanted.set)
        port = self._api[0].getsockname()[1]
        url = local_url(settings.host, port, tls=settings.tls_certificate_file is not None)
        log.info("supervising", workers=self._count, url=url)
        async with self._tasks:
            for number in range(self._count):
                self._keep(number, settings, first=True)
            reloads = self._tasks.create_task(self._reload_when(wanted))
            await self._stopping.wait()
            reloads.cancel()
            status = await self._stop()
        if self._failure is not None:
            raise ConfigurationError(self._failure)
        log.info("stopped")
        return status

    def _on_stop(self, drain_s: float | None) -> None:
        if self._stopping.is_set():
            log.warning("stopped_at_once")
            for child in self._children.values():
                child.kill()
            os._exit(1)
        self._drain_s = self._drain_s if drain_s is None else drain_s
        self._stopping.set()

    async def _stop(self) -> int:
        """Stop all workers at once; return 0 if each has stopped in order."""
        for listener in (*self._api, *self._health):
            listener.close()
        for child in self._children.values():
            child.tell(Stop(drain_s=self._drain_s))
        keepers = list(self._keepers.values())
        _, late = await asyncio.wait(keepers, timeout=self._drain_s + _STOP_S)
        for child in list(self._children.values()) if late else ():
            log.warning("worker_killed", worker=child.number, reason="it did not stop in time")
            child.kill()
        return int(any(await asyncio.gather(*keepers)))

    # --- one worker

    def _keep(self, number: int, settings: Settings, *, first: bool = False) -> None:
        self._keepers[number] = self._tasks.create_task(self._run_and_replace(number, settings, first=first))

    async def _run_and_replace(self, number: int, settings: Settings, *, first: bool) -> int:
        """Run the worker of a number, and replace it if it dies, until it is told to stop; return its exit status.

        If the `first` one fails before it was ready, the service ends, as one process does. A successor that ends
        before it was ready is given up.
        """
        loop, pause_s, is_new = asyncio.get_running_loop(), _FIRST_PAUSE_S, True
        while True:
            began = loop.time()
            child: _Child | None = None
            status, failure = 1, None
            try:
                child = await self._start(number, settings)
            except OSError as error:  # no process or descriptor is free, or the program is being replaced
                failure = f"a worker's process could not be started: {error}"
            else:
                status = await self._ended(child)
                failure = child.failure
            if self._stopping.is_set() or (child is not None and child.leaves):
                return status
            why = {"error": failure} if failure else {"status": status}
            if is_new and not (child is not None and child.has_been_ready) and (not first or status > 0):
                if first:
                    self._failure = failure or "a worker could not start: the log says why"
                    self._drain_s = 0.0
                    self._stopping.set()
                else:
                    log.error("worker_not_started", worker=number, **why)
                return status
            is_new = False
            pause_s = _FIRST_PAUSE_S if loop.time() - began > _SETTLED_S else pause_s
            self._replaced[number] += 1
            self._tell_all()
            pid = None if child is None else child.process.pid
            log.error("worker_died", worker=number, pid=pid, again_in_s=pause_s, **why)
            with suppress(TimeoutError):
                async with asyncio.timeout(pause_s):
                    await self._stopping.wait()
                    return 0
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)

    async def _start(self, number: int, settings: Settings) -> _Child:
        """Start a worker; raise OSError if the system has no process for it."""
        ours, theirs = socket.socketpair()
        api, health = ([one.fileno() for one in sockets] for sockets in (self._api, self._health))
        with theirs, ExitStack() as unused:
            unused.callback(ours.close)
            process = await asyncio.create_subprocess_exec(
                *(sys.executable, *sys.orig_argv[1:], "--worker", str(theirs.fileno())),
                stdin=asyncio.subprocess.DEVNULL,
                pass_fds=[theirs.fileno(), *api, *health, self._shared],
                process_group=0,  # a Ctrl-C is for the supervisor
            )
            unused.pop_all()
        reader, writer = await asyncio.open_connection(sock=ours, limit=_SAID_BYTES)
        child = self._children[number] = _Child(number, process, writer)
        port = self._settings.port
        child.tell(
            Assignment(
                number=number,
                settings=pickle.dumps(settings),
                api=api,
                health=health,
                port=port and port + PORTS_ABOVE + number,
                token=self._token,
                credential=self._credential,
                shared=self._shared,
            )
        )
        self._tasks.create_task(self._listen(child, reader))
        log.info("worker_started", worker=number, pid=process.pid)
        self._tell_all()
        if self._stopping.is_set():
            child.tell(Stop(drain_s=0.0))
        return child

    async def _ended(self, child: _Child) -> int:
        status = await child.process.wait()
        await child.silent.wait()  # its last message may say why
        child.close()
        Connections(self._shared, child.number).publish(None)
        del self._children[child.number]
        self._tell_all()
        return status

    async def _listen(self, child: _Child, reader: asyncio.StreamReader) -> None:
        """Take what a worker says until it ends; kill it if it says nothing any more.

        Its silence is counted look by look, because the supervisor may have stood still itself: that is one look.
        """
        look_s = _HANGS_S / _LOOKS
        looks, most = 0, math.ceil(_STARTS_S / look_s)
        with suppress(ConnectionError):
            while True:
                try:
                    async with asyncio.timeout(look_s):
                        line = await reader.readline()
                except TimeoutError:
                    looks += 1
                    if looks == most:
                        reason = f"its event loop hangs for {looks * look_s:g} s"
                        log.warning("worker_killed", worker=child.number, reason=reason)
                        child.kill()
                    continue
                if not line.endswith(b"\n"):  # it has ended, maybe while it spoke
                    break
                looks, most = 0, _LOOKS
                self._heard(child, FROM_WORKER.decode(line))
        child.silent.set()

    def _heard(self, child: _Child, message: Alive | Failed) -> None:
        if isinstance(message, Failed):
            child.failure = message.detail
            return
        changed = (child.pages, child.ready) != (message.pages, message.ready)
        child.pages, child.ready = message.pages, message.ready
        if child.ready:
            child.has_been_ready = self._started = True
        if changed:
            self._tell_all()

    def _tell_all(self) -> None:
        children = self._children.values()
        workers = [Colleague(number=one.number, ready=one.ready, pages=one.pages) for one in children]
        replaced = {number: self._replaced[number] for number in {*self._children, *self._replaced}}
        for child in children:
            child.tell(State(started=self._started, workers=workers, replaced=replaced))

    # --- a reload

    async def _reload_when(self, wanted: asyncio.Event) -> None:
        while True:
            await wanted.wait()
            wanted.clear()
            await self._reload(wanted)

    async def _reload(self, wanted: asyncio.Event) -> None:
        """Replace each worker by one with the settings read again: first the new one starts, then the old one stops.

        If a new one does not start, or is not ready when another reload is `wanted`, this one ends and the old ones
        stay.
        """
        fixed = {name: getattr(self._settings, name) for name in _FIXED}
        try:
            asked = self._load()
            settings = asked.model_copy(update=fixed)
            demand_usable(settings)
        except ConfigurationError as error:
            log.warning("reload_failed", error=error.detail)
            return
        for name, value in fixed.items():
            if getattr(asked, name) != value:
                log.warning("setting_not_reloaded", setting=f"HALFWAY_{name.upper()}", remedy="restart halfway")
        self._drain_s = settings.drain_s
        log.info("reloading")
        for number in sorted(self._keepers):
            free = next(one for one in range(self._count + 1) if one not in self._keepers)
            self._keep(free, settings)
            if not await self._became_ready(free, wanted):
                await self._end(free, 0.0)
                why = "is not ready yet, and another reload is wanted" if wanted.is_set() else "did not start"
                log.warning("reload_failed", error=f"a new worker {why}, so the others stay")
                return
            await self._end(number, self._drain_s)
        log.info("reloaded")

    async def _end(self, number: int, drain_s: float) -> None:
        """End the worker of a number for good."""
        keeper = self._keepers[number]
        if (child := self._children.get(number)) is not None:
            child.tell(Stop(drain_s=drain_s))
        else:
            keeper.cancel()  # it waits to replace one that has died
        await asyncio.wait([keeper])
        del self._keepers[number]

    async def _became_ready(self, number: int, wanted: asyncio.Event) -> bool:
        """Wait until a new worker is ready, has ended, or is no longer wanted."""
        while not (self._keepers[number].done() or wanted.is_set()):
            if (child := self._children.get(number)) is not None and child.ready:
                return True
            await asyncio.sleep(_LOOK_S)
        return False
