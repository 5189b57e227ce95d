"""A circuit breaker for the endpoints of one group. It is pure: time is a parameter, in ms since the epoch."""

from __future__ import annotations


class Breaker:
    """Closed until `failures` calls in a row reach no endpoint; then open, longer each time, with one probe."""

    def __init__(self, *, failures: int, open_s: float, max_open_s: float) -> None:
        """Start closed."""
        self._limit = failures
        self._first_ms = round(open_s * 1000)
        self._max_ms = round(max_open_s * 1000)
        self._open_ms = self._first_ms
        self._failures = 0
        self._until: int | None = None
        self._probing = False

    @property
    def is_open(self) -> bool:
        """Return whether calls are held back."""
        return self._until is not None

    @property
    def until(self) -> int | None:
        """The time until which calls are held back; None if they are not."""
        return self._until

    def admits(self, now: int) -> bool:
        """Return whether a call may be made now. An open breaker admits one probe at a time."""
        if self._until is None:
            return True
        if self._probing or now < self._until:
            return False
        self._probing = True
        return True

    def retry_at(self, now: int) -> int:
        """Return the time of the next try."""
        if self._until is None or (now >= self._until and not self._probing):
            return now
        return max(self._until, now + self._first_ms // 2)

    def clock_was_set(self, now: int) -> None:
        """Adapt to a wall clock that was set: hold calls back for at most one open period from `now`."""
        if self._until is not None:
            self._until = min(self._until, now + self._open_ms)

    def record_success(self) -> None:
        """Close, because a call reached an endpoint; its answer does not matter."""
        self._failures, self._until, self._probing = 0, None, False
        self._open_ms = self._first_ms

    def cancel(self) -> None:
        """Withdraw an admitted call that was not made."""
        self._probing = False

    def record_failure(self, now: int) -> None:
        """Record that a call reached no endpoint."""
        self._failures += 1
        if self._probing:
            self._open_ms = min(self._open_ms * 2, self._max_ms)
        if self._probing or (self._until is None and self._failures >= self._limit):
            self._until = now + self._open_ms
        self._probing = False
