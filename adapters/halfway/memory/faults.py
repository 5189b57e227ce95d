"""Faults that a test injects."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager


class Faults:
    """Each requested fault happens once, in order; a switch stays on until it is turned off."""

    def __init__(self) -> None:
        """Start without faults."""
        self.unavailable = False
        """Kafka does not answer: topics, groups, cursors and reads fail."""
        self.denied_topics: set[str] = set()
        """Real topics that the lane may not write to."""
        self._appends: deque[bool] = deque()
        self._batches: deque[bool] = deque()
        self._holds = 0
        self._answer_holds = 0

    def next_append_ambiguous(self, *, stored: bool) -> None:
        """Leave the caller of the next prepare without an answer; `stored`: the record is stored."""
        self._appends.append(stored)

    def lose_next_batch(self, *, written: bool) -> None:
        """End the incarnation with the lane's next Kafka transaction; `written`: the transaction is committed."""
        self._batches.append(written)

    @contextmanager
    def lane_held(self) -> Iterator[None]:
        """Hold the lane inside this block: submitted writes wait, and are then written as one batch."""
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
        """Delay the lane's answers until the end of this block; it commits inside the block."""
        self._answer_holds += 1
        try:
            yield
        finally:
            self._answer_holds -= 1

    @property
    def holds_answers(self) -> bool:
        """Whether answers of committed transactions are held."""
        return self._answer_holds > 0

    def take_append(self) -> bool | None:
        """Return whether the next append, which gets no answer, is stored; None if it is answered as usual."""
        return self._appends.popleft() if self._appends else None

    def take_batch(self) -> bool | None:
        """Return whether the next batch, which ends the incarnation, is written; None if it does not end it."""
        return self._batches.popleft() if self._batches else None
