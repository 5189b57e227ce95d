"""A circuit breaker for the endpoints of one group: pure; time is a parameter, in ms since the epoch."""

from __future__ import annotations


class Breaker:
    """Closed until `failures` calls in a row reached no endpoint; then open, longer each time, with one probe."""

    def __init__(self, *, failures: int, open_s: float, max_open_s: float) -> None:
        """Start closed."""
        self._limit = failures
        self._first_ms = round(open_s * 1000)
        self._max_ms = round(max_open_s * 1000)
        self._open_ms = self._first_ms
        self._failed = 0
        self._until: int | None = None
        self._probing = False

    @property
    def open(self) -> bool:
        """Whether calls are held back."""
        return self._until is not None

    @property
    def until(self) -> int | None:
        """Until when calls are held back; None if they are not."""
        return self._until

    def admits(self, now: int) -> bool:
        """Whether a call may be made now; an open breaker admits one probe at a time."""
        if self._until is None:
            return True
        if self._probing or now < self._until:
            return False
        self._probing = True
        return True

    def retry_at(self, now: int) -> int:
        """Return when to try again."""
        if self._until is None or (now >= self._until and not self._probing):
            return now
        return max(self._until, now + self._first_ms // 2)

    def clock_was_set(self, now: int) -> None:
        """Hold calls back no longer than from now on."""
        if self._until is not None:
            self._until = min(self._until, now + self._open_ms)

    def reached(self) -> None:
        """Note that a call reached an endpoint, whatever it answered, and close."""
        self._failed, self._until, self._probing = 0, None, False
        self._open_ms = self._first_ms

    def not_tried(self) -> None:
        """Note that an admitted call was not made after all."""
        self._probing = False

    def failed(self, now: int) -> None:
        """Note that a call reached no endpoint."""
        self._failed += 1
        if self._probing:
            self._open_ms = min(self._open_ms * 2, self._max_ms)
        if self._probing or (self._until is None and self._failed >= self._limit):
            self._until = now + self._open_ms
        self._probing = False
