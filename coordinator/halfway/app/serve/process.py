"""The process: its log, its descriptors, its garbage collection, and its end if one of its threads dies.

Each thread and background task does something that nobody else does: without it the process would be alive and of no
use, so the process ends and the platform starts it again. The log has a constant event name and fields; secrets are
redacted by their type and by the field's name. Reference cycles are searched only rarely, because transactions leave
none: with the default thresholds, that took a third of the CPU time of a batch.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import sys
import threading
from collections.abc import Callable, Coroutine, MutableMapping
from typing import Any, Final, TextIO

import structlog
from pydantic import SecretBytes, SecretStr

from halfway.app.terminal import complain, printable
from halfway.coordinator.logging import LogSummary
from halfway.http.server.server import MAX_CONNECTIONS

log = structlog.get_logger(__name__)

_ignored: Final = LogSummary(log, "warning", "error_ignored")
_DEATH: Final = "halfway_death"
"""The key in the context of the loop's exception handler that marks the death of a background task."""


class DeathError(Exception):
    """A thread or a background task has died; the log says which and why."""


def supervised(work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
    """Run a background task that ends only when it is cancelled."""
    task = asyncio.create_task(work, name=getattr(work, "__qualname__", None))
    task.add_done_callback(_report)
    return task


def _report(task: asyncio.Task[None]) -> None:
    if not task.cancelled() and (error := task.exception()) is not None:
        context = {"message": f"{task.get_name()} has died", "exception": error, _DEATH: task.get_name()}
        task.get_loop().call_exception_handler(context)


def _note_ignored(ignored: sys.UnraisableHookArgs) -> None:
    """Log what Python can raise to nobody, without its text: a client may cause it, as by a TLS server name."""
    _ignored.note({"error": ignored.exc_type.__name__})


class Deaths:
    """Watches all threads, and the background tasks of the running loop, from `watch` to `close`."""

    def __init__(self, stop: Callable[[], object]) -> None:
        """Take the function that stops the process; it is called on the loop's thread."""
        self._stop = stop
        self._died = False
        self._loop = asyncio.get_running_loop()
        self._former_hooks = threading.excepthook, sys.unraisablehook

    def watch(self) -> None:
        """Stop the process after the next death."""
        threading.excepthook = self._thread_died
        sys.unraisablehook = _note_ignored
        self._loop.set_exception_handler(self._loop_failed)

    def close(self) -> None:
        threading.excepthook, sys.unraisablehook = self._former_hooks
        self._loop.set_exception_handler(None)

    def demand_none(self) -> None:
        """Raise DeathError if anything has died."""
        if self._died:
            raise DeathError

    def _thread_died(self, death: threading.ExceptHookArgs) -> None:
        if issubclass(death.exc_type, SystemExit):
            return
        name = None if death.thread is None else death.thread.name
        log.error("thread_died", thread=name, exc_info=(death.exc_type, death.exc_value, death.exc_traceback))
        self._loop.call_soon_threadsafe(self._end)

    def _loop_failed(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        name = context.get(_DEATH)
        if name is None:
            loop.default_exception_handler(context)
            return
        log.error("task_died", task=name, exc_info=context["exception"])
        self._end()

    def _end(self) -> None:
        self._died = True
        self._stop()


REDACTED: Final = "**********"
_SECRET_WORDS: Final = ("password", "secret", "token", "credential", "authorization", "api_key", "jaas")


def redact(_: object, __: str, event: MutableMapping[str, Any]) -> MutableMapping[str, Any]:
    """Replace every value that is a secret according to its type or the name of its field."""
    for name, value in event.items():
        if isinstance(value, SecretStr | SecretBytes) or any(word in name.lower() for word in _SECRET_WORDS):
            event[name] = REDACTED
    return event


def escape(_: object, __: str, event: MutableMapping[str, Any]) -> MutableMapping[str, Any]:
    """Escape control characters, because fields contain text of clients and endpoints."""
    for name, value in event.items():
        if isinstance(value, str):
            event[name] = "\n".join(map(printable, value.split("\n"))) if name == "exception" else printable(value)
    return event


def log_start_failure(detail: str) -> None:
    """Say why the start has failed, in the format of the log: as JSON it is a line like any other."""
    if sys.stderr.isatty():
        complain(detail)  # with its line breaks
    else:
        log.critical("start_failed", error=detail)


class _SharedHandler(logging.StreamHandler[TextIO]):
    """Writes to a stream that several processes share, one line at a time: longer ones would be torn in a pipe."""

    def __init__(self, stream: TextIO, lock: int) -> None:
        super().__init__(stream)
        self._file = lock

    def emit(self, record: logging.LogRecord) -> None:
        import fcntl  # not available on every platform

        fcntl.lockf(self._file, fcntl.LOCK_EX)
        try:
            super().emit(record)
        finally:
            fcntl.lockf(self._file, fcntl.LOCK_UN)


def configure(*, level: str, worker: int | None = None, lock: int | None = None) -> None:
    """Send all logs, including those of libraries, to standard error: JSON, a line each, or readable on a terminal.

    Each line of a `worker` has its number. `lock` is the descriptor of a file that is locked for each line.
    """
    is_terminal = sys.stderr.isatty()

    def name_worker(_: object, __: str, event: MutableMapping[str, Any]) -> MutableMapping[str, Any]:
        return event if worker is None else {"worker": worker, **event}

    shared: list[structlog.typing.Processor] = [
        structlog.contextvars.merge_contextvars,
        name_worker,
        structlog.stdlib.add_log_level,
        structlog.stdlib.add_logger_name,
        structlog.processors.TimeStamper(fmt="%H:%M:%S", utc=False)
        if is_terminal
        else structlog.processors.TimeStamper(fmt="iso", utc=True),
        redact,
    ]
    last: list[structlog.typing.Processor] = (
        [structlog.processors.format_exc_info, structlog.processors.JSONRenderer()]
        if not is_terminal
        # A plain traceback: the rich one shows local variables, which may contain secrets.
        else [
            structlog.processors.format_exc_info,
            escape,
            structlog.dev.ConsoleRenderer(colors=not os.environ.get("NO_COLOR")),
        ]
    )
    handler = logging.StreamHandler(sys.stderr) if lock is None else _SharedHandler(sys.stderr, lock)
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            foreign_pre_chain=shared, processors=[structlog.stdlib.ProcessorFormatter.remove_processors_meta, *last]
        )
    )
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level.upper())
    # It logs the start and the end of each job, every second and for every shard.
    logging.getLogger("apscheduler").setLevel(logging.ERROR)
    structlog.configure(
        processors=[structlog.stdlib.filter_by_level, *shared, structlog.stdlib.ProcessorFormatter.wrap_for_formatter],
        logger_factory=structlog.stdlib.LoggerFactory(),
        wrapper_class=structlog.stdlib.BoundLogger,
        cache_logger_on_first_use=True,
    )


_TARGET_LIMIT: Final = 65_536
_RESERVED: Final = 1_500
"""For Kafka clients, check endpoints, other instances and the health port."""
HEALTH_CONNECTIONS: Final = 64
"""Connections of the health port, from the reserve: a platform and a few scrapers need no more."""
CONSOLE_CONNECTIONS: Final = 256
"""Further connections of the health port if it serves the console."""


def connections_within(limit: int) -> int:
    """Return how many client connections are possible if a process may have `limit` open files."""
    free = max(limit - _RESERVED, limit // 3)
    return max(1, min(MAX_CONNECTIONS, free))


def raise_limit() -> int:
    """Raise the soft limit of open files as far as allowed, and return how many client connections it permits."""
    try:
        import resource
    except ImportError:  # not available on every platform
        return MAX_CONNECTIONS
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    unlimited = resource.RLIM_INFINITY
    target = _TARGET_LIMIT if hard == unlimited else min(hard, _TARGET_LIMIT)
    if soft != unlimited and soft < target:
        resource.setrlimit(resource.RLIMIT_NOFILE, (target, hard))
        soft = target
    return connections_within(_TARGET_LIMIT if soft == unlimited else soft)


_THRESHOLD_0: Final = 50_000
"""The youngest generation is searched after this many net allocations: more than a few full batches in flight."""
_THRESHOLD_1: Final = 20
EVERY_S: Final = 30.0


def collect_rarely() -> None:
    """Set thresholds for a rare search. `collect_periodically` finds cycles nevertheless."""
    gc.set_threshold(_THRESHOLD_0, _THRESHOLD_1, _THRESHOLD_1)


async def collect_periodically(every_s: float = EVERY_S) -> None:
    """Collect all cycles periodically until cancelled, because objects in a cycle may hold threads and connections."""
    while True:
        await asyncio.sleep(every_s)
        gc.collect()


def freeze_existing() -> None:
    """Exclude all existing objects from later searches: modules, settings, and the records of a recovery."""
    gc.collect()
    gc.freeze()
