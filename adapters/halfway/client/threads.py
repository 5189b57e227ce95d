"""Blocking functions in a limited number of threads, tasks that are waited for, and locks that survive a fork."""

from __future__ import annotations

import asyncio
import inspect
import os
import threading
import weakref
from collections.abc import Awaitable, Callable
from concurrent.futures import Future
from typing import Any, ParamSpec, TypeVar, cast

P = ParamSpec("P")
T = TypeVar("T")


async def call_async(function: Callable[P, T | Awaitable[T]], *args: P.args, **kwargs: P.kwargs) -> T:
    """Await a coroutine function; run any other function in a thread, because it may block."""
    if is_async(function):
        return await function(*args, **kwargs)  # type: ignore[misc,no-any-return]  # T, by its type
    blocking = cast("Callable[P, T]", function)
    return await asyncio.to_thread(blocking, *args, **kwargs)


def is_async(function: object) -> bool:
    try:
        return inspect.iscoroutinefunction(function)
    except TypeError:  # of `Mock(spec=function)`, which says that it is a function and has no code
        return False


async def awaited(value: Any) -> Any:
    """Return what a function of either kind has returned: await it if it can be."""
    return await value if inspect.isawaitable(value) else value


async def wait_for(task: asyncio.Task[None]) -> None:
    """Wait for a task. The task continues if the wait is cancelled."""
    await asyncio.wait({task})


class ForkSafeLock:
    """A lock that is always free in the child of a fork. A thread of the parent could never release it there.

    Its thread may take it again, as a handler of SIGTERM does that closes a client.
    """

    def __init__(self) -> None:
        self._lock = threading.RLock()
        _locks.add(self)

    def __enter__(self) -> None:
        self._lock.acquire()

    def __exit__(self, *_: object) -> None:
        self._lock.release()

    def renew(self) -> None:
        self._lock = threading.RLock()


_locks: weakref.WeakSet[ForkSafeLock] = weakref.WeakSet()


def _after_fork() -> None:
    for lock in _locks:
        lock.renew()


os.register_at_fork(after_in_child=_after_fork)


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
