"""Failures in a row: what the last one was, and how long to pause before the next try."""

from __future__ import annotations

import time
from typing import Final

_FIRST_PAUSE_S: Final = 0.1
_LONGEST_PAUSE_S: Final = 10.0
_DOUBLINGS: Final = 16
_SETTLED_S: Final = 60.0
"""An incarnation that lived this long ends a row of failures."""


def pause_after(failures: int) -> float:
    """Return how long to pause after a failure that follows `failures` others in a row."""
    return min(_LONGEST_PAUSE_S, _FIRST_PAUSE_S * 2.0 ** min(failures, _DOUBLINGS))


class RetryBackoff:
    """The back-off of one instance, which replaces its incarnation after each failure."""

    def __init__(self, fenced_pause_s: float) -> None:
        """Begin a row; an instance that was fenced pauses for at least `fenced_pause_s`."""
        self.last_error: str | None = None
        """Why the last try failed; None since the last success."""
        self.pause_s = 0.0
        """How long to pause before the next try."""
        self._fenced_pause_s = fenced_pause_s
        self._begun_at = 0.0
        self._count = 0

    def begun(self) -> None:
        """Note that an incarnation begins."""
        self._begun_at = time.monotonic()

    def succeeded(self) -> None:
        """Note that an acquisition went well: nothing is wrong now."""
        self.last_error = None

    def failed(self, error: str, *, fenced: bool = False) -> None:
        """Remember a failure, and how long to pause: longer each time.

        An instance that was fenced waits for at least a heartbeat, so that the group can update its assignment:
        instances that fence back at once would go on fencing each other.
        """
        if time.monotonic() - self._begun_at > _SETTLED_S:
            self._count = 0
        self.last_error = error
        self.pause_s = pause_after(self._count)
        if fenced:
            self.pause_s = max(self.pause_s, self._fenced_pause_s)
        self._count += 1

    def take_pause(self) -> float:
        """Return how long to pause, and reset it."""
        pause, self.pause_s = self.pause_s, 0.0
        return pause
