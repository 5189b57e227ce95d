"""The one place where owned threads post calls to the event loop."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from contextlib import suppress
from typing import TypeVarTuple, Unpack

Ts = TypeVarTuple("Ts")


class Loop:
    """The event loop, for use by the owned threads."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.asyncio = loop
        self._offset = time.monotonic() - loop.time()

    def monotonic(self, loop_time: float) -> float:
        """Convert a time on the loop's clock to `time.monotonic()`."""
        return loop_time + self._offset

    def time(self) -> float:
        """Return the time on the loop's clock; on any thread."""
        return time.monotonic() - self._offset

    def post(self, call: Callable[[Unpack[Ts]], object], *args: *Ts) -> None:
        """Call a function on the loop's thread; do nothing if the loop is closed."""
        with suppress(RuntimeError):
            self.asyncio.call_soon_threadsafe(call, *args)
