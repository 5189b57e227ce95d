"""The number of attempts for a message, and the pauses between them."""

from __future__ import annotations

import random
from dataclasses import dataclass

from halfway.client.errors import HalfwayError


class RejectedMessageError(HalfwayError):
    """Raise it in a handler if a retry cannot help: the message becomes a dead letter at once."""


@dataclass(frozen=True, kw_only=True)
class Retries:
    """A message is tried `attempts` times. The pause doubles up to `max_pause_s`, and is shortened at random.

    Only the message's own partition waits.
    """

    attempts: int = 5
    first_pause_s: float = 0.5
    max_pause_s: float = 30.0

    def __post_init__(self) -> None:
        """Raise ValueError for settings without an attempt or without a pause."""
        if self.attempts < 1 or not 0 < self.first_pause_s <= self.max_pause_s:
            raise ValueError(f"{self}: give at least 1 attempt, and 0 < first_pause_s <= max_pause_s")

    def pause_s(self, failures: int) -> float:
        """Return the pause in seconds after this many failures in a row."""
        longest = min(self.first_pause_s * 2.0 ** min(failures - 1, 60), self.max_pause_s)
        return longest * random.uniform(0.5, 1)  # noqa: S311 - spreads consumers that failed at the same time
