"""When Python looks for reference cycles: rarely, since transactions leave none.

With the interpreter's own thresholds a third of the CPU time of a batch of transactions went into looking for cycles
among those in flight.
"""

from __future__ import annotations

import asyncio
import gc
from typing import Final

_YOUNG: Final = 50_000
"""Objects made and not yet freed before the youngest are looked through: more than a few full batches in flight."""
_OLDER: Final = 20
EVERY_S: Final = 30.0


def collect_rarely() -> None:
    """Look for cycles rarely; `collect_now_and_then` finds them nevertheless."""
    gc.set_threshold(_YOUNG, _OLDER, _OLDER)


async def collect_now_and_then(every_s: float = EVERY_S) -> None:
    """Look through everything that came since, until cancelled: what is in a cycle may hold threads and connections."""
    while True:
        await asyncio.sleep(every_s)
        gc.collect()


def freeze_what_stands() -> None:
    """Never look through what was made so far: modules, settings, and what a recovery read."""
    gc.collect()
    gc.freeze()
