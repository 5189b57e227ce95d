"""How fast old rows are deleted beside a service's own transactions."""

from __future__ import annotations

from typing import Final

BATCH: Final = 100
"""Rows that one transaction deletes: a transaction beside it may wait for as long as that takes."""
_SHARE: Final = 0.1
"""Of the time, at most, a batch is being deleted: a database that is busy is cleaned more slowly."""
_LEAST_S: Final = 0.02


def pause_s(took_s: float) -> float:
    """Return the seconds to wait after a batch that took so many; at its best 2,000 to 5,000 rows go in a second."""
    return max(_LEAST_S, took_s * (1 / _SHARE - 1))
