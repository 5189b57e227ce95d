"""Consecutive failures: the last error, and how long to pause before the next attempt."""

from __future__ import annotations

import time
from typing import Final

_FIRST_PAUSE_S: Final = 0.1
_LONGEST_PAUSE_S: Final = 10.0
_DOUBLINGS: Final = 16
_RESET_AFTER_S: Final = 60.0
"""An incarnation that has lived this long resets the back-off."""


def pause_after(failures: int) -> float:
    """Return how long to pause after a failure that follows `failures` consecutive ones."""
    return min(_LONGEST_PAUSE_S, _FIRST_PAUSE_S * 2.0 ** min(failures, _DOUBLINGS))


class RetryBackoff:
    """The back-off of one instance, which replaces its incarnation after each failure."""

    def __init__(self, fenced_pause_s: float) -> None:
        """Start without a failure; a fenced instance pauses for at least `fenced_pause_s`."""
        self.last_error: str | None = None
        """Why the last attempt failed; None after a success."""
        self.pause_s = 0.0
        """How long to pause before the next attempt."""
        self._fenced_pause_s = fenced_pause_s
        self._incarnation_begun_at = 0.0
        self._failures = 0

    def incarnation_begun(self) -> None:
        """Record that an incarnation begins."""
        self._incarnation_begun_at = time.monotonic()

    def succeeded(self) -> None:
        """Record that an acquisition succeeded: clear the error."""
        self.last_error = None

    def failed(self, error: str, *, fenced: bool = False) -> None:
        """Record a failure, and pause longer each time.

        A fenced instance waits for at least a heartbeat, so that the group can update its assignment. Otherwise two
        instances could keep fencing each other.
        """
        if time.monotonic() - self._incarnation_begun_at > _RESET_AFTER_S:
            self._failures = 0
        self.last_error = error
        self.pause_s = pause_after(self._failures)
        if fenced:
            self.pause_s = max(self.pause_s, self._fenced_pause_s)
        self._failures += 1

    def take_pause(self) -> float:
        """Return how long to pause, and reset it."""
        pause, self.pause_s = self.pause_s, 0.0
        return pause
