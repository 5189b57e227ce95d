"""Runs calls that may never return, in a limited number of threads."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

from halfway.client.concurrency.forks import ForkSafeLock

T = TypeVar("T")


class AllBusyError(Exception):
    """The limit of running calls is reached."""


class BoundedThreads:
    """Runs each call in its own daemon thread, up to a limit. The child of a fork starts without threads."""

    def __init__(self, limit: int, name: str) -> None:
        """Set the limit of concurrent calls, and the name of their threads."""
        self._limit = limit
        self._name = name
        self._lock = ForkSafeLock()
        self._threads: set[threading.Thread] = set()

    def start(self, call: Callable[[], T]) -> Future[T]:
        """Start a call; raises AllBusyError if the limit is reached. There is no queue.

        The thread does not have the caller's context variables: a session that a framework stores there is closed with
        the request, which may end before the call.
        """
        future: Future[T] = Future()

        def run() -> None:
            try:
                result = call()
            except BaseException as error:  # noqa: BLE001 - the caller gets it
                future.set_exception(error)
            else:
                future.set_result(result)

        thread = threading.Thread(target=run, name=self._name, daemon=True)
        with self._lock:
            # In the child of a fork, the parent's threads are not alive.
            self._threads = {each for each in self._threads if each.is_alive()}
            if len(self._threads) >= self._limit:
                raise AllBusyError(f"{self._limit} calls are running")
            thread.start()
            self._threads.add(thread)
        return future
