"""Where answers go, one by one or many at once, and their deadlines: many replies share few timers."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Iterable
from typing import Any, Final, Protocol, TypeVar

import structlog

log = structlog.get_logger(__name__)

R_contra = TypeVar("R_contra", contravariant=True)

_TICKS_IN_S: Final = 50
"""Deadlines within one tick share a timer: a reply fails at most this fraction of a second too late."""


class Reply(Protocol[R_contra]):
    """Where one answer goes, an `asyncio.Future` for example; called on the loop's thread, and at most once.

    `done` may be called on any thread.
    """

    def done(self) -> bool:
        """Whether no answer is wanted any more."""

    def set_result(self, result: R_contra, /) -> None:
        """Answer."""

    def set_exception(self, error: BaseException, /) -> None:
        """Answer with an error."""


def answer_all(answers: Iterable[tuple[Reply[Any], Any]]) -> None:
    """Give replies their results or errors; those that are done or cancelled are left alone."""
    for reply, result in answers:
        if reply.done():
            continue
        try:
            if isinstance(result, BaseException):
                reply.set_exception(result)
            else:
                reply.set_result(result)
        except Exception:
            log.exception("reply_failed")  # it must not cost the others their answers


class Deadlines:
    """Fails replies that are not done in time. Deadlines are times on the loop's own clock."""

    def __init__(self) -> None:
        """Watch nothing."""
        self._watched: dict[int, dict[Reply[Any], Callable[[], Exception]]] = {}
        self._timers: dict[int, asyncio.TimerHandle] = {}

    def watch(self, reply: Reply[Any], deadline: float, late: Callable[[], Exception]) -> None:
        """Give a reply the error that `late` makes if it is not done by its deadline."""
        tick = math.ceil(deadline * _TICKS_IN_S)
        watched = self._watched.get(tick)
        if watched is None:
            watched = self._watched[tick] = {}
            self._timers[tick] = asyncio.get_running_loop().call_at(tick / _TICKS_IN_S, self._expire, tick)
        watched[reply] = late

    def forget(self, reply: Reply[Any], deadline: float) -> None:
        """Watch a reply no longer, whether it is done or not."""
        tick = math.ceil(deadline * _TICKS_IN_S)
        watched = self._watched.get(tick)
        if watched is None or watched.pop(reply, None) is None or watched:
            return
        del self._watched[tick]
        self._timers.pop(tick).cancel()

    def _expire(self, tick: int) -> None:
        del self._timers[tick]
        answer_all((reply, late()) for reply, late in self._watched.pop(tick).items())
