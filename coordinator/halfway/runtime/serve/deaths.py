"""Ends the process if one of its threads or background tasks dies, so that the platform starts it again.

Each of them does something that nobody else does: without it the process would be alive and of no use. A file of its
own, because it belongs to no part.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine
from typing import Any, Final

import structlog

log = structlog.get_logger(__name__)

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


class Deaths:
    """Watches all threads, and the background tasks of the running loop, from `watch` to `close`."""

    def __init__(self, stop: Callable[[], object]) -> None:
        """Take the function that stops the process; it is called on the loop's thread."""
        self._stop = stop
        self._died = False
        self._loop = asyncio.get_running_loop()
        self._former_hook = threading.excepthook

    def watch(self) -> None:
        """Stop the process after the next death."""
        threading.excepthook = self._thread_died
        self._loop.set_exception_handler(self._loop_failed)

    def close(self) -> None:
        """Stop watching."""
        threading.excepthook = self._former_hook
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
