"""How often a message is tried, and with what pauses."""

from __future__ import annotations

import random
from dataclasses import dataclass

from halfway.client.errors import HalfwayError


class RejectedMessageError(HalfwayError):
    """Raise it in a handler if no further attempt can help: the message becomes a dead letter at once."""


@dataclass(frozen=True, kw_only=True)
class Retries:
    """A message is tried `attempts` times, with a pause that doubles up to `max_pause_s` and is shortened by chance.

    Only its own partition waits for it.
    """

    attempts: int = 5
    first_pause_s: float = 0.5
    max_pause_s: float = 30.0

    def __post_init__(self) -> None:
        """Refuse what would never try, or never pause."""
        if self.attempts < 1 or not 0 < self.first_pause_s <= self.max_pause_s:
            raise ValueError(f"{self}: give at least 1 attempt, and 0 < first_pause_s <= max_pause_s")

    def pause_s(self, failures: int) -> float:
        """Return how long to wait after so many failures in a row."""
        longest = min(self.first_pause_s * 2.0 ** min(failures - 1, 60), self.max_pause_s)
        return longest * random.uniform(0.5, 1)  # noqa: S311 - consumers that failed together come back apart
