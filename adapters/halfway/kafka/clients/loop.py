"""From owned threads to the event loop, in one place."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from contextlib import suppress
from typing import TypeVarTuple, Unpack

from halfway.service.answers import Reply
from halfway.service.ports import Written

Ts = TypeVarTuple("Ts")

Answer = tuple[Reply[Written], Written | BaseException]


class Loop:
    """The event loop as the owned threads see it."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.asyncio = loop
        self._ahead = time.monotonic() - loop.time()

    def monotonic(self, loop_time: float) -> float:
        """Return the time on `time.monotonic()` that a time on the loop's clock is."""
        return loop_time + self._ahead

    def post(self, call: Callable[[Unpack[Ts]], object], *args: *Ts) -> None:
        """Call a function on the loop's thread; does nothing if the loop is closed."""
        with suppress(RuntimeError):
            self.asyncio.call_soon_threadsafe(call, *args)
