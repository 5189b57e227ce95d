"""Makes Python search for reference cycles only rarely, because transactions leave none.

With the default thresholds, a third of the CPU time of a batch went into the search for cycles among the transactions
in flight.
"""

from __future__ import annotations

import asyncio
import gc
from typing import Final

_THRESHOLD_0: Final = 50_000
"""The youngest generation is searched after this many net allocations: more than a few full batches in flight."""
_THRESHOLD_1: Final = 20
EVERY_S: Final = 30.0


def collect_rarely() -> None:
    """Set thresholds for a rare search. `collect_periodically` finds cycles nevertheless."""
    gc.set_threshold(_THRESHOLD_0, _THRESHOLD_1, _THRESHOLD_1)


async def collect_periodically(every_s: float = EVERY_S) -> None:
    """Collect all cycles periodically until cancelled, because objects in a cycle may hold threads and connections."""
    while True:
        await asyncio.sleep(every_s)
        gc.collect()


def freeze_existing() -> None:
    """Exclude all existing objects from later searches: modules, settings, and the records of a recovery."""
    gc.collect()
    gc.freeze()
