"""Limits how fast old rows are deleted, for the sake of the service's own transactions."""

from __future__ import annotations

from typing import Final

BATCH: Final = 100
"""The rows that one transaction deletes. A concurrent transaction may have to wait as long as that takes."""
_SHARE: Final = 0.1
"""Batches are being deleted for at most this share of the time, so deletion is slower while the database is busy."""
_MIN_PAUSE_S: Final = 0.02


def pause_s(took_s: float) -> float:
    """Return the pause after a batch that took `took_s` seconds. At most 2,000 to 5,000 rows are deleted per second."""
    return max(_MIN_PAUSE_S, took_s * (1 / _SHARE - 1))
