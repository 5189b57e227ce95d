"""The clock of an event loop, moved on by a test: a limit of minutes ends when the test says so, and not before."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import TypeVar

from tests.support.waiting import until_true

T = TypeVar("T")


class LoopTime:
    """A loop whose time goes on as ever, and jumps where a test advances it; it stays ahead until the loop is closed.

    So a limit can be much longer than any machine stalls, and the test does not wait for it. This is for asyncio's own
    loops: uvloop's clock cannot be replaced.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop | None = None) -> None:
        self._loop = loop or asyncio.get_running_loop()
        self._time = self._loop.time
        self._ahead_s = 0.0
        self._loop.time = self._now  # type: ignore[method-assign] # the loop reads its own clock by this name

    def _now(self) -> float:
        return self._time() + self._ahead_s

    def advance(self, seconds: float) -> None:
        self._ahead_s += seconds
        self._loop.call_soon_threadsafe(lambda: None)  # it may sleep until a time that has passed now

    async def out(self, call: Awaitable[T], seconds: float, *, once: Callable[[], object], what: str) -> T:
        """Return what a call gives, or raise what it raises, if its time is over as soon as `once` is true."""
        calling = asyncio.ensure_future(call)
        await until_true(lambda: once() or calling.done(), what=what)
        self.advance(seconds)
        return await calling
