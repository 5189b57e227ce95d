"""Locks in a process that forks."""

from __future__ import annotations

import os
import threading
import weakref


class ForkSafeLock:
    """A lock that is free in the child of a fork, where another thread of the parent could never release it."""

    def __init__(self) -> None:
        """Make it, free."""
        self._lock = threading.Lock()
        _locks.add(self)

    def __enter__(self) -> None:
        self._lock.acquire()

    def __exit__(self, *_: object) -> None:
        self._lock.release()

    def renew(self) -> None:
        """Free it, whoever holds it."""
        self._lock = threading.Lock()


_locks: weakref.WeakSet[ForkSafeLock] = weakref.WeakSet()


def _after_fork() -> None:
    for lock in _locks:
        lock.renew()


os.register_at_fork(after_in_child=_after_fork)
