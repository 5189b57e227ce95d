"""How late the event loop is: what blocks it delays everybody."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from typing import Final

_EVERY_S: Final = 0.25
_KEPT: Final = 40


class LoopLag:
    """Measures by how much a short sleep is late."""

    def __init__(self) -> None:
        """Start with nothing measured."""
        self._delays: deque[float] = deque([0.0], maxlen=_KEPT)

    @property
    def worst_s(self) -> float:
        """The largest delay of the last ten seconds."""
        return max(self._delays)

    async def watch(self) -> None:
        """Measure until cancelled."""
        while True:
            due = time.monotonic() + _EVERY_S
            await asyncio.sleep(_EVERY_S)
            self._delays.append(max(0.0, time.monotonic() - due))
