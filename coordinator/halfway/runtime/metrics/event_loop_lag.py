"""Measures pauses of the event loop. A pause delays every request."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from typing import Final

import structlog

log = structlog.get_logger(__name__)

LONG_S: Final = 5.0
"""A longer pause is a warning."""
_EVERY_S: Final = 0.025
"""The measured pause can be shorter than the real one by at most this time."""
_WINDOW_S: Final = 60


class LoopPauses:
    """Measures how late short sleeps end, and stores the longest pause of each of the last sixty seconds."""

    def __init__(self) -> None:
        """Start without measurements."""
        self._longest: deque[tuple[int, float]] = deque(maxlen=_WINDOW_S)

    def longest_s(self, *, within_s: float = _WINDOW_S) -> float:
        """Return the longest pause of the last `within_s` seconds."""
        since = time.monotonic() - within_s
        return max((pause for second, pause in self._longest if second >= since), default=0.0)

    def record(self, now: float, pause_s: float) -> None:
        """Record a pause that ended now."""
        second = int(now)
        if self._longest and self._longest[-1][0] == second:
            self._longest[-1] = (second, max(self._longest[-1][1], pause_s))
        else:
            self._longest.append((second, pause_s))

    async def watch(self) -> None:
        """Measure until cancelled."""
        while True:
            due = time.monotonic() + _EVERY_S
            await asyncio.sleep(_EVERY_S)
            now = time.monotonic()
            pause_s = max(0.0, now - due)
            if pause_s > LONG_S:
                log.warning("event_loop_paused", seconds=round(pause_s, 1))
            self.record(now, pause_s)
