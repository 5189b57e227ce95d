"""How long the event loop pauses: a pause delays every request."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from typing import Final

_EVERY_S: Final = 0.025
"""A pause is measured short by this much at most."""
_KEPT_S: Final = 60


class LoopPauses:
    """Measures by how much short sleeps are late; the longest of each of the last sixty seconds is kept."""

    def __init__(self) -> None:
        """Start with nothing measured."""
        self._longest: deque[tuple[int, float]] = deque(maxlen=_KEPT_S)

    def longest_s(self, *, within_s: float = _KEPT_S) -> float:
        """Return the longest pause of the last seconds."""
        since = time.monotonic() - within_s
        return max((pause for second, pause in self._longest if second >= since), default=0.0)

    def note(self, now: float, pause_s: float) -> None:
        """Keep a pause that ended now."""
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
            self.note(now, max(0.0, now - due))
