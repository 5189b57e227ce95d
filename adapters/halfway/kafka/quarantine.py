"""What is remembered of ends that could not be written, across incarnations (DESIGN section 4, the last rules).

After a Kafka transaction of the lane has failed, its topics and its ids are suspects: ends that carry them are kept
out of the lane and tried alone. A suspect that proves good is cleared; one that proves bad is refused until its
back-off is over, then tried again. Times are seconds on a monotonic clock and come in as parameters.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import Enum

from halfway.domain.errors import (
    HalfwayError,
    MessageTooLargeError,
    NotAuthorisedError,
    RetryableError,
    TopicUnavailableError,
)

FIRST_BACKOFF_S = 1.0
MAX_BACKOFF_S = 300.0
FORGET_AFTER_S = 3600.0
MAX_IDS = 10_000

Refusal = type[TopicUnavailableError | MessageTooLargeError | NotAuthorisedError]


@dataclass(frozen=True, kw_only=True, slots=True)
class Blame:
    """Why a suspect was found bad: the error for its callers and the topic that it names."""

    refusal: Refusal
    topic: str
    detail: str

    def error(self, retry_after_s: float) -> HalfwayError:
        """Make the error for one caller."""
        error = self.refusal(self.detail, topic=self.topic)
        if isinstance(error, RetryableError):
            error.retry_after_s = max(1.0, retry_after_s)
        return error


class Route(Enum):
    """Where a write goes that is not refused."""

    LANE = "lane"
    SUSPECT = "suspect"
    ALONE = "alone"


class _Suspect:
    """One topic or one id: how often it was found bad, and until when it is refused."""

    __slots__ = ("alone", "blame", "failures", "since", "until")

    def __init__(self, now: float) -> None:
        self.alone = False
        self.blame: Blame | None = None
        self.failures = 0
        self.since = now
        self.until = now

    def found_bad(self, blame: Blame, now: float) -> None:
        self.blame = blame
        self.until = now + min(MAX_BACKOFF_S, FIRST_BACKOFF_S * 2**self.failures)
        self.failures = min(self.failures + 1, 30)
        self.since = now

    def refused(self, now: float) -> HalfwayError | None:
        return self.blame.error(self.until - now) if self.blame is not None and now < self.until else None


class Quarantine:
    """The suspects of an instance. Thread-safe; outlives incarnations; bounded in ids and in time."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._topics: dict[str, _Suspect] = {}
        self._ids: dict[str, _Suspect] = {}

    def __bool__(self) -> bool:
        """Whether there is any suspect."""
        return bool(self._topics or self._ids)

    def topics(self) -> list[str]:
        """Return the topics under suspicion."""
        with self._lock:
            return list(self._topics)

    def suspect(self, topics: Iterable[str], ids: Iterable[str], now: float) -> None:
        """Suspect the topics and ids of a Kafka transaction that failed; what is known of them stays."""
        with self._lock:
            for topic in topics:
                self._topics.setdefault(topic, _Suspect(now))
            for transaction_id in ids:
                self._ids.setdefault(transaction_id, _Suspect(now))
            self._bound(now)

    def isolate(self, ids: Iterable[str], now: float) -> None:
        """Run each of these ids without any other from now on: together they failed."""
        with self._lock:
            for transaction_id in ids:
                self._ids.setdefault(transaction_id, _Suspect(now)).alone = True
            self._bound(now)

    def route(self, transaction_id: str, topics: Sequence[str], now: float) -> Route | HalfwayError:
        """Tell where a write goes, or with which error it is refused while a back-off lasts."""
        with self._lock:
            suspects = [self._topics[topic] for topic in topics if topic in self._topics]
            mine = self._ids.get(transaction_id)
            if mine is not None:
                suspects.insert(0, mine)
            for suspect in suspects:
                refused = suspect.refused(now)
                if refused is not None:
                    return refused
            if mine is not None and mine.alone:
                return Route.ALONE
            return Route.SUSPECT if suspects else Route.LANE

    def blame_topic(self, blame: Blame, now: float) -> HalfwayError:
        """Refuse every write to the topic for a while, twice as long each time; return the error for a caller."""
        with self._lock:
            suspect = self._topics.setdefault(blame.topic, _Suspect(now))
            suspect.found_bad(blame, now)
            return blame.error(suspect.until - now)

    def backoff_of(self, topic: str, now: float) -> float:
        """Return for how many more seconds a topic is refused, 0 where it is not."""
        with self._lock:
            suspect = self._topics.get(topic)
            return 0.0 if suspect is None else max(0.0, suspect.until - now)

    def blame_id(self, transaction_id: str, blame: Blame, now: float) -> HalfwayError:
        """Refuse this id for a while, twice as long each time; return the error for its caller."""
        with self._lock:
            suspect = self._ids.setdefault(transaction_id, _Suspect(now))
            suspect.found_bad(blame, now)
            self._bound(now)
            return blame.error(suspect.until - now)

    def clear_topics(self, topics: Iterable[str]) -> None:
        """Trust topics again: messages were written to them."""
        with self._lock:
            for topic in topics:
                self._topics.pop(topic, None)

    def clear_ids(self, ids: Iterable[str]) -> None:
        """Trust ids again: they were written."""
        with self._lock:
            for transaction_id in ids:
                self._ids.pop(transaction_id, None)

    def _bound(self, now: float) -> None:
        for table in (self._topics, self._ids):
            surplus = len(table) - MAX_IDS
            for name, suspect in list(table.items()):
                if surplus <= 0 and now - suspect.since <= FORGET_AFTER_S:
                    break
                del table[name]
                surplus -= 1
