"""What a test lets go wrong next."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager


class Faults:
    """Each fault happens once for each time it was asked for, in order; switches stay until they are turned back."""

    def __init__(self) -> None:
        """Nothing goes wrong."""
        self.unavailable = False
        """Kafka does not answer: topics, groups, cursors and reads fail."""
        self.denied_topics: set[str] = set()
        """Real topics that the lane may not write to."""
        self._appends: deque[bool] = deque()
        self._batches: deque[bool] = deque()
        self._holds = 0
        self._answer_holds = 0

    def next_append_ambiguous(self, *, stored: bool) -> None:
        """Leave the next prepare's caller without an answer, whether or not the record was stored."""
        self._appends.append(stored)

    def lose_next_batch(self, *, written: bool) -> None:
        """End the incarnation with the lane's next Kafka transaction, whether or not that was committed."""
        self._batches.append(written)

    @contextmanager
    def lane_held(self) -> Iterator[None]:
        """Let the lane begin nothing inside this block: what is submitted waits, and then goes as one batch."""
        self._holds += 1
        try:
            yield
        finally:
            self._holds -= 1

    @property
    def holds_lane(self) -> bool:
        """Whether the lane is held."""
        return self._holds > 0

    @contextmanager
    def answers_held(self) -> Iterator[None]:
        """Let the lane commit inside this block and hear of it only afterwards."""
        self._answer_holds += 1
        try:
            yield
        finally:
            self._answer_holds -= 1

    @property
    def holds_answers(self) -> bool:
        """Whether the lane does not hear of what it has committed."""
        return self._answer_holds > 0

    def take_append(self) -> bool | None:
        """Return whether an ambiguous append is stored, None if it is not ambiguous."""
        return self._appends.popleft() if self._appends else None

    def take_batch(self) -> bool | None:
        """Return whether a lost batch is written, None if it is not lost."""
        return self._batches.popleft() if self._batches else None
