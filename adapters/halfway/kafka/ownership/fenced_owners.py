"""The former owners that an incarnation has fenced: each one once, even if several of its shards are acquired."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Final

_CHECK_S: Final = 0.25


class FencedOwners:
    """The fenced owners of one incarnation. A fenced owner stays fenced: it initialises its lane ids only once."""

    def __init__(self, own: str) -> None:
        """Start with the incarnation itself, which must not be fenced."""
        self._lock = threading.Lock()
        self._fenced = {own}
        self._under_way: dict[str, Future[None]] = {}

    def __contains__(self, incarnation: str) -> bool:
        """Return whether an incarnation is fenced, or is this one."""
        return incarnation in self._fenced

    def once(self, incarnation: str, fence: Callable[[], None], check: Callable[[], None]) -> None:
        """Fence an incarnation by calling `fence`, or wait while another thread does so for another shard.

        While it waits it calls `check`, which raises to stop the wait. An error of the other thread's `fence` is raised
        here too; the next call tries again.
        """
        with self._lock:
            if incarnation in self._fenced:
                return
            running = self._under_way.get(incarnation)
            outcome: Future[None] = Future()
            if running is None:
                self._under_way[incarnation] = outcome
        if running is None:
            self._fence(incarnation, fence, outcome)
        else:
            _wait(running, check)

    def _fence(self, incarnation: str, fence: Callable[[], None], outcome: Future[None]) -> None:
        try:
            fence()
        except BaseException as error:
            with self._lock:
                del self._under_way[incarnation]
            outcome.set_exception(error)
            raise
        with self._lock:
            del self._under_way[incarnation]
            self._fenced.add(incarnation)
        outcome.set_result(None)


def _wait(running: Future[None], check: Callable[[], None]) -> None:
    while True:
        try:
            running.result(_CHECK_S)
        except TimeoutError:
            if running.done():
                raise
            check()
        else:
            return
