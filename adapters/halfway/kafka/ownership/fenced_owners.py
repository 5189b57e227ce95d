"""Which former owners an incarnation has fenced: each once, however many of its shards are acquired side by side."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Final

_LOOK_S: Final = 0.25


class FencedOwners:
    """The fenced owners of one incarnation. A fenced owner stays fenced: it initialises its lane ids only once."""

    def __init__(self, own: str) -> None:
        """Begin with the incarnation itself, which is not to be fenced."""
        self._lock = threading.Lock()
        self._done = {own}
        self._under_way: dict[str, Future[None]] = {}

    def __contains__(self, incarnation: str) -> bool:
        """Whether an incarnation is fenced, or is this one."""
        return incarnation in self._done

    def once(self, incarnation: str, fence: Callable[[], None], check: Callable[[], None]) -> None:
        """Fence an incarnation by calling `fence`, or wait while another thread does that for another shard.

        `check` is called while waiting, and raises to end that. Whatever the other thread's `fence` raises is raised
        here too; the next call tries again.
        """
        with self._lock:
            if incarnation in self._done:
                return
            others = self._under_way.get(incarnation)
            mine: Future[None] = Future()
            if others is None:
                self._under_way[incarnation] = mine
        if others is None:
            self._fence(incarnation, fence, mine)
        else:
            _wait(others, check)

    def _fence(self, incarnation: str, fence: Callable[[], None], told: Future[None]) -> None:
        try:
            fence()
        except BaseException as error:
            with self._lock:
                del self._under_way[incarnation]
            told.set_exception(error)
            raise
        with self._lock:
            del self._under_way[incarnation]
            self._done.add(incarnation)
        told.set_result(None)


def _wait(others: Future[None], check: Callable[[], None]) -> None:
    while True:
        try:
            others.result(_LOOK_S)
        except TimeoutError:
            if others.done():
                raise
            check()
        else:
            return
