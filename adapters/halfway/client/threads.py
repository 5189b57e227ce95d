"""Runs calls that may never return."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

from halfway.client.forks import ForkSafeLock

T = TypeVar("T")


class AllBusyError(Exception):
    """As many calls run as may."""


class BoundedThreads:
    """Runs each call in a daemon thread of its own, so many at a time; the child of a fork begins with none."""

    def __init__(self, most: int, name: str) -> None:
        """Choose how many calls may run at a time, and what their threads are called."""
        self._most = most
        self._name = name
        self._lock = ForkSafeLock()
        self._threads: set[threading.Thread] = set()

    def start(self, call: Callable[[], T]) -> Future[T]:
        """Start a call; raises AllBusyError, and nothing waits in a queue.

        The thread has no context variables of the caller's: a session that a framework keeps there is closed with the
        request, which may be over by then.
        """
        future: Future[T] = Future()

        def run() -> None:
            try:
                result = call()
            except BaseException as error:  # noqa: BLE001 - it is told to whom waits
                future.set_exception(error)
            else:
                future.set_result(result)

        thread = threading.Thread(target=run, name=self._name, daemon=True)
        with self._lock:
            # Those of the parent of a fork are not alive in the child.
            self._threads = {each for each in self._threads if each.is_alive()}
            if len(self._threads) >= self._most:
                raise AllBusyError(f"{self._most} calls run")
            thread.start()
            self._threads.add(thread)
        return future
