"""Locks for processes that fork."""

from __future__ import annotations

import os
import threading
import weakref


class ForkSafeLock:
    """A lock that is always free in the child of a fork. A thread of the parent could never release it there."""

    def __init__(self) -> None:
        """Create the lock, released."""
        self._lock = threading.Lock()
        _locks.add(self)

    def __enter__(self) -> None:
        self._lock.acquire()

    def __exit__(self, *_: object) -> None:
        self._lock.release()

    def renew(self) -> None:
        """Replace the lock with a released one."""
        self._lock = threading.Lock()


_locks: weakref.WeakSet[ForkSafeLock] = weakref.WeakSet()


def _after_fork() -> None:
    for lock in _locks:
        lock.renew()


os.register_at_fork(after_in_child=_after_fork)
