"""Remembers ends that could not be written, across incarnations (docs/protocol.md#end-the-lane).

After a Kafka transaction of the lane has failed, its topics and ids are suspects: ends that contain them are kept out
of the lane and tried separately. A suspect that turns out good is cleared. One that turns out bad is refused until its
back-off is over, then tried again. If a topic is good but refused one message, it is watched for a while: messages that
may fail in the same way are tried separately too. Without this memory, the next incarnation would put the bad end into
its lane again, and end. Times are seconds on a monotonic clock, passed in as parameters.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from itertools import islice

from halfway.coordinator.records import Quarantined
from halfway.coordinator.requests import Moment
from halfway.protocol.errors import (
    HalfwayError,
    MessageTooLargeError,
    NotAuthorisedError,
    RetryableError,
    TopicUnavailableError,
)

FIRST_BACKOFF_S = 1.0
MAX_BACKOFF_S = 300.0
FIRST_WATCH_S = 10.0
FORGET_AFTER_S = 3600.0
MAX_IDS = 10_000
_CLOCK_SET_S = 1.0

Refusal = type[TopicUnavailableError | MessageTooLargeError | NotAuthorisedError]


@dataclass(frozen=True, kw_only=True, slots=True)
class Blame:
    """Why a suspect is bad: the error for its callers, and the topic that the error names."""

    refusal: Refusal
    topic: str
    detail: str
    of_internal_records: bool = False
    """The cause is one of the write's internal records, not a real message."""

    def error(self, retry_after_s: float) -> HalfwayError:
        error = self.refusal(self.detail, topic=self.topic)
        if isinstance(error, RetryableError):
            error.retry_after_s = max(1.0, retry_after_s)
        return error


class Route(Enum):
    """The lane for a write that is not refused."""

    LANE = "lane"
    SUSPECT = "suspect"
    ALONE = "alone"


class _Watch:
    """The messages of a topic that are tried separately: those of at least `size` bytes, until a time."""

    __slots__ = ("count", "size", "until")

    def __init__(self) -> None:
        self.count = 0
        self.size = 0
        self.until = 0.0

    def extend(self, size: int, now: float) -> None:
        self.size = min(self.size, size) if now < self.until else size
        self.until = now + min(MAX_BACKOFF_S, FIRST_WATCH_S * 2**self.count)
        self.count = min(self.count + 1, 30)


class _Suspect:
    """One topic or id: how often it failed, and until when it is refused."""

    __slots__ = ("alone", "blame", "failed_again", "failures", "since", "suspected", "until", "watch")

    def __init__(self, now: float) -> None:
        self.alone = False
        self.failed_again = False
        self.suspected = True
        self.watch = _Watch()
        self.blame: Blame | None = None
        self.failures = 0
        self.since = now
        self.until = now

    def concerns(self, size: int, now: float) -> bool:
        """Return whether a write whose largest message for this topic has `size` bytes must be tried separately."""
        return self.suspected or (now < self.watch.until and size >= self.watch.size)

    def mark_bad(self, blame: Blame, now: float) -> None:
        self.suspected, self.blame = True, blame
        self.until = now + min(MAX_BACKOFF_S, FIRST_BACKOFF_S * 2**self.failures)
        self.failures = min(self.failures + 1, 30)
        self.since = now

    @property
    def is_only_message_bad(self) -> bool:
        """Whether only a real message is known to be bad."""
        return self.blame is not None and not self.blame.of_internal_records

    def state(self, now: float) -> str | None:
        """Return the state in the words of `Quarantined`, None if it is trusted again."""
        if self.blame is not None and now < self.until:
            return "refused"
        if self.alone:
            return "alone"
        if self.suspected:
            return "suspected"
        return "watched" if now < self.watch.until else None

    def refusal(self, now: float) -> HalfwayError | None:
        return self.blame.error(self.until - now) if self.blame is not None and now < self.until else None


class Quarantine:
    """The suspects of an instance. Thread-safe; outlives incarnations; bounded in ids and in time."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._epoch_s = 0.0
        """Wall time (seconds since the epoch) at 0 on the monotonic clock."""
        self._topics: dict[str, _Suspect] = {}
        self._ids: dict[str, _Suspect] = {}

    def __bool__(self) -> bool:
        return bool(self._topics or self._ids)

    def suspect(self, topics: Iterable[str], ids: Iterable[str], now: float) -> None:
        """Mark the topics and ids of a failed Kafka transaction as suspects; earlier findings about them are kept."""
        with self._lock:
            for topic in topics:
                self._topics.setdefault(topic, _Suspect(now)).suspected = True
            for transaction_id in ids:
                known = self._ids.get(transaction_id)
                if known is None:
                    self._ids[transaction_id] = _Suspect(now)
                else:
                    known.failed_again = True
            self._evict(now)

    def isolate(self, ids: Iterable[str], now: float) -> None:
        """Run each of these ids alone from now on: together they failed."""
        with self._lock:
            for transaction_id in ids:
                self._ids.setdefault(transaction_id, _Suspect(now)).alone = True
            self._evict(now)

    def route(self, transaction_id: str, topics: Mapping[str, int], now: float) -> Route | HalfwayError:
        """Return the route of a write, or the error that refuses it during a back-off.

        `topics` maps each topic of the write to the size of its largest message. A write without messages, such as a
        rollback, is not refused if only a real message is bad.
        """
        with self._lock:
            suspects = [
                suspect
                for topic, size in topics.items()
                if (suspect := self._topic_suspect(topic, now)) is not None and suspect.concerns(size, now)
            ]
            own = self._ids.get(transaction_id)
            if own is not None and not topics and own.is_only_message_bad:
                if own.alone:
                    return Route.ALONE
                return Route.SUSPECT if own.failed_again else Route.LANE
            if own is not None:
                suspects.insert(0, own)
            for suspect in suspects:
                refusal = suspect.refusal(now)
                if refusal is not None:
                    return refusal
            if own is not None and own.alone:
                return Route.ALONE
            return Route.SUSPECT if suspects else Route.LANE

    def blame_topic(self, blame: Blame, now: float) -> HalfwayError:
        """Refuse every write to the topic for a while, twice as long each time; return the error for its callers."""
        with self._lock:
            suspect = self._topics.setdefault(blame.topic, _Suspect(now))
            suspect.mark_bad(blame, now)
            return blame.error(suspect.until - now)

    def backoff_of(self, topic: str, now: float) -> float:
        """Return for how many more seconds a topic is refused, 0 if it is not."""
        with self._lock:
            suspect = self._topics.get(topic)
            return 0.0 if suspect is None else max(0.0, suspect.until - now)

    def blame_id(self, transaction_id: str, blame: Blame, now: float) -> HalfwayError:
        """Refuse this id for a while, twice as long each time; return the error for its caller."""
        with self._lock:
            suspect = self._ids.setdefault(transaction_id, _Suspect(now))
            suspect.mark_bad(blame, now)
            self._evict(now)
            return blame.error(suspect.until - now)

    def watch(self, topic: str, size: int, now: float) -> None:
        """Try messages of at least `size` bytes for a good topic separately, twice as long each time."""
        with self._lock:
            suspect = self._topics.setdefault(topic, _Suspect(now))
            suspect.suspected, suspect.since = False, now
            suspect.watch.extend(size, now)

    def clear_topic(self, topic: str, size: int, now: float) -> None:
        """Trust a topic again: messages of up to `size` bytes were written to it. A watch for all sizes continues."""
        with self._lock:
            suspect = self._topics.get(topic)
            if suspect is None:
                return
            if suspect.watch.size and size >= suspect.watch.size:
                suspect.watch.until = now
            if now < suspect.watch.until:
                suspect.suspected, suspect.blame, suspect.failures, suspect.until = False, None, 0, now
            else:
                del self._topics[topic]

    def clear_ids(self, ids: Iterable[str]) -> None:
        """Trust ids again: they were written."""
        with self._lock:
            for transaction_id in ids:
                self._ids.pop(transaction_id, None)

    def shown(self, now: float, wall_s: float, most: int) -> Sequence[Quarantined]:
        """Return the latest `most` topics and as many ids, with their states.

        `wall_s` is the time now in seconds since the epoch. Unless that clock is adjusted, an unchanged suspect
        always shows the same times.
        """
        if abs(wall_s - now - self._epoch_s) > _CLOCK_SET_S:
            self._epoch_s = wall_s - now
        with self._lock:
            return [*self._entries(self._topics, now, most), *self._entries(self._ids, now, most)]

    def _entries(self, table: dict[str, _Suspect], now: float, most: int) -> Iterator[Quarantined]:
        for name, suspect in islice(reversed(table.items()), most):
            state = suspect.state(now)
            if state is None:
                continue
            blame, of_topic = suspect.blame, table is self._topics
            until = {"refused": suspect.until, "watched": suspect.watch.until}.get(state)
            yield Quarantined(
                topic=name if of_topic else None if blame is None else blame.topic,
                id=None if of_topic else name,
                state=state,
                since=self._wall_ms(suspect.since),
                until=None if until is None else self._wall_ms(until),
                min_bytes=suspect.watch.size if state == "watched" else None,
                error_code=None if blame is None else blame.refusal.code,
                detail=None if blame is None else blame.detail,
            )

    def _wall_ms(self, at: float) -> Moment:
        return Moment(round((at + self._epoch_s) * 1000))

    def _topic_suspect(self, topic: str, now: float) -> _Suspect | None:
        suspect = self._topics.get(topic)
        if suspect is not None and not suspect.suspected and now > suspect.watch.until + MAX_BACKOFF_S:
            del self._topics[topic]
            return None
        return suspect

    def _evict(self, now: float) -> None:
        for table in (self._topics, self._ids):
            surplus = len(table) - MAX_IDS
            for name, suspect in list(table.items()):
                if surplus > 0 or now - suspect.since > FORGET_AFTER_S:
                    del table[name]
                    surplus -= 1
