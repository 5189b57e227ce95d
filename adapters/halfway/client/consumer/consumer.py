"""The consumer: each message takes effect once, in the transaction that takes note of it."""

from __future__ import annotations

import logging
import re
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from typing import Any, Final

from confluent_kafka import Consumer as KafkaConsumer
from confluent_kafka import KafkaError, KafkaException, TopicPartition

from halfway.client.barrier import (
    NoTransactionError,
    UncommittedConnectionError,
    UncountedRowsError,
    UnsupportedConnectionError,
)
from halfway.client.consumer.cleaning import Cleaning
from halfway.client.consumer.dead_letters import DeadLetters
from halfway.client.consumer.inbox import Inbox
from halfway.client.consumer.record import Record
from halfway.client.consumer.retention import check_topics
from halfway.client.consumer.retries import RejectedMessageError, Retries
from halfway.client.errors import HalfwayError

log = logging.getLogger(__name__)

Handler = Callable[[Record, Any], Callable[[], object] | None]
"""Gives a record its effect, on a connection whose transaction the consumer commits. What it returns, if that can be
called, is called after the commit."""

_GROUP: Final = re.compile(r"[A-Za-z0-9._~-]{1,128}")
_WAIT_S: Final = 0.5
_DRAIN_S: Final = 0.02
"""How long to wait for messages while a dead letter is on its way."""
_OURS: Final = frozenset(
    {"group.id", "isolation.level", "enable.auto.commit", "enable.auto.offset.store", "enable.partition.eof"}
)
_FINAL: Final = frozenset(
    {
        KafkaError.TOPIC_AUTHORIZATION_FAILED,
        KafkaError.GROUP_AUTHORIZATION_FAILED,
        KafkaError.SASL_AUTHENTICATION_FAILED,
        KafkaError._AUTHENTICATION,  # noqa: SLF001 - the library names it so
        KafkaError._AUTO_OFFSET_RESET,  # noqa: SLF001 - the same
    }
)
"""Errors that no further poll mends."""

_UNUSABLE: Final = (NoTransactionError, UncommittedConnectionError, UncountedRowsError, UnsupportedConnectionError)
"""Errors of the inbox's connection that no waiting mends."""

Place = tuple[str, int]


class InvalidSettingError(HalfwayError, ValueError):
    """A setting of the consumer cannot be used; the message says why and what to give."""


class _UndoneError(Exception):
    """Rolls back a transaction that was only to look."""


class _NotBegunError(Exception):
    """The database was not reached, or did not take the row: that is no failure of the message."""


@dataclass(slots=True)
class _Held:
    """A record whose partition waits for it."""

    record: Record
    failures: int = 0
    """How often its handler, or the commit after it, failed."""
    outages: int = 0
    """How often in a row something else did: the database, or the dead-letter topic."""
    due_at: float = 0.0
    """On the monotonic clock; infinite while its dead letter is on its way."""
    reason: Exception | None = None
    """Why it is set aside; None while it is tried."""
    handled: bool = False
    """Whether the last attempt failed after the handler had returned: its commit may stand."""

    @property
    def place(self) -> Place:
        return self.record.topic, self.record.partition


class Consumer:
    """Consumes topics in one thread, the one that calls `run`.

    For each message it opens a transaction, writes a row into the inbox, and calls the handler; both commit together,
    and only then the offset is stored. A message whose row stands already is passed over.

    A handler that raises is tried again after a pause, in which the other partitions go on. After the last attempt the
    message goes to the dead-letter topic; without one it is tried for ever. Messages of one partition never pass each
    other.
    """

    def __init__(
        self,
        settings: Mapping[str, Any],
        *,
        group: str,
        topics: Sequence[str],
        handle: Handler,
        inbox: Inbox,
        retries: Retries | None = None,
        dead_letter_topic: str | None = None,
        clean_every_s: float = 60.0,
    ) -> None:
        """Take librdkafka's settings, such as `bootstrap.servers`, and what to do; nothing is connected yet.

        `auto.offset.reset` is `earliest` unless given. Raises InvalidSettingError.
        """
        _demand_usable(settings, group, topics, dead_letter_topic)
        self._settings = dict(settings)
        self._group = group
        self._topics = list(topics)
        self._handle = handle
        self._inbox = inbox
        self._retries = retries or Retries()
        self._dead_letter_topic = dead_letter_topic
        self._cleaning = Cleaning(inbox, clean_every_s)
        self._dead_letters: DeadLetters | None = None
        self._held: dict[Place, _Held] = {}
        self._stopping = threading.Event()
        self._inbox_commits = False

    def stop(self) -> None:
        """Have `run` return after the message that it is working on; from any thread, or a signal handler."""
        self._stopping.set()

    def run(self) -> None:
        """Consume until `stop`, then leave the group with every offset of what was done committed.

        Raises UnknownTopicError and RetentionTooShortError at once, UncommittedConnectionError before the first effect,
        and confluent_kafka.KafkaException for what no waiting mends. What the database or the handler raises is logged
        and tried again.
        """
        other = [] if self._dead_letter_topic is None else [self._dead_letter_topic]
        check_topics(self._settings, self._topics, other, self._inbox.retention_s)
        with ExitStack() as stack:
            self._consumer = KafkaConsumer(self._consumer_settings())
            stack.callback(self._consumer.close)
            if self._dead_letter_topic is not None:
                self._dead_letters = DeadLetters(self._settings, self._dead_letter_topic, self._group)
                stack.callback(self._dead_letters.close)
            self._cleaning.start()
            stack.callback(self._cleaning.stop)
            self._consumer.subscribe(self._topics, on_revoke=self._give_up, on_lost=self._give_up)
            while not self._stopping.is_set():
                self._turn()

    def _consumer_settings(self) -> dict[str, Any]:
        return {
            "auto.offset.reset": "earliest",
            "auto.commit.interval.ms": 1000,
            **self._settings,
            "group.id": self._group,
            "isolation.level": "read_committed",
            # Commits what was stored; an offset is stored only after the effect.
            "enable.auto.commit": True,
            "enable.auto.offset.store": False,
        }

    def _turn(self) -> None:
        """Work on what is due, and on the next message of a partition that does not wait."""
        if self._dead_letters is not None:
            self._dead_letters.poll()
        now = time.monotonic()
        for held in [held for held in self._held.values() if held.due_at <= now]:
            self._try(held)
        message = self._consumer.poll(self._patience(time.monotonic()))
        if message is None:
            return
        error = message.error()
        if error is None:
            self._try(_Held(Record.of(message)))
        else:
            _demand_passing(error)

    def _patience(self, now: float) -> float:
        times = [held.due_at for held in self._held.values()]
        if float("inf") in times:
            return _DRAIN_S
        return min([_WAIT_S, *(max(0.0, due_at - now) for due_at in times)])

    def _try(self, held: _Held) -> None:
        if held.reason is not None:
            self._set_aside(held)
            return
        try:
            afterwards = self._apply(held)
        except _NotBegunError as error:
            held.outages += 1
            self._wait(held, held.outages)
            log.warning("%s waits for the database: %s", held.record.id, error.__cause__, exc_info=error.__cause__)
        except _UNUSABLE:
            raise
        except Exception as error:  # noqa: BLE001 - the handler's own
            self._failed(held, error)
        else:
            self._done(held)
            if afterwards is not None:
                _call(afterwards, held.record)

    def _apply(self, held: _Held) -> Callable[[], object] | None:
        """Give the record its effect, once. Return what is to be done after the commit."""
        record, afterwards = held.record, None
        begun = held.handled = False
        try:
            if not self._inbox_commits:
                self._inbox.demand_commits()
                self._inbox_commits = True
            # Step 1: a transaction of the service's own database.
            with self._inbox.connect() as connection:
                # Step 2: the row. It waits for a consumer that is working on the same message.
                if self._inbox.insert(connection, self._group, record.id):
                    # Step 3: the effect.
                    begun = True
                    afterwards = self._handle(record, connection)
                else:
                    log.info("%s has taken effect before", record.id)
                held.handled = True
            # Step 4: the commit, when the context is left.
        except _UNUSABLE:
            raise
        except Exception as error:
            if begun:
                raise
            raise _NotBegunError from error
        if not held.handled:
            raise InvalidSettingError("the inbox's connection swallowed an exception: its context must let it pass")
        return afterwards

    def _failed(self, held: _Held, error: Exception) -> None:
        held.failures += 1
        held.outages = 0
        last = held.failures >= self._retries.attempts or isinstance(error, RejectedMessageError)
        log.warning("attempt %d of %s failed: %s", held.failures, held.record.id, error, exc_info=error)
        if last and self._dead_letters is not None:
            held.reason = error
            self._set_aside(held)
        else:
            self._wait(held, held.failures)

    def _set_aside(self, held: _Held) -> None:
        """Send the dead letter; the partition waits until it stands in its topic."""
        if self._dead_letters is None or held.reason is None:
            raise AssertionError(held)
        if held.handled:
            try:
                stands = self._has_taken_effect(held.record)
            except Exception as error:
                held.outages += 1
                self._wait(held, held.outages)
                log.warning("%s waits for the database: %s", held.record.id, error, exc_info=error)
                return
            if stands:
                log.warning("%s has taken effect, although its commit raised an exception", held.record.id)
                self._done(held)
                return

        def delivered(problem: str | None) -> None:
            if self._held.get(held.place) is not held:
                return  # its partition has gone to another consumer, which begins with it
            if problem is None:
                log.error("%s was set aside after %d attempts: %s", held.record.id, held.failures, held.reason)
                self._done(held)
                return
            held.outages += 1
            self._wait(held, held.outages)
            log.error("%s could not be set aside: %s", held.record.id, problem)

        self._hold(held, float("inf"))
        self._dead_letters.send(held.record, held.reason, held.failures, delivered)

    def _has_taken_effect(self, record: Record) -> bool:
        """Whether the row of a record stands; it waits for a transaction that may still write it."""
        stands = False
        with suppress(_UndoneError), self._inbox.connect() as connection:
            stands = not self._inbox.insert(connection, self._group, record.id)
            raise _UndoneError
        return stands

    def _wait(self, held: _Held, failures: int) -> None:
        self._hold(held, time.monotonic() + self._retries.pause_s(failures))

    def _hold(self, held: _Held, due_at: float) -> None:
        held.due_at = due_at
        if held.place not in self._held:
            self._held[held.place] = held
            self._consumer.pause([TopicPartition(*held.place)])

    def _done(self, held: _Held) -> None:
        after = TopicPartition(*held.place, held.record.offset + 1)
        try:
            self._consumer.store_offsets(offsets=[after])
        except KafkaException as error:
            if error.args[0].code() != KafkaError._STATE:  # noqa: SLF001 - the library names it so
                raise
            log.info("%s belongs to another consumer now, which passes over it", held.record.id)
        if self._held.pop(held.place, None) is not None:
            self._consumer.resume([TopicPartition(*held.place)])

    def _give_up(self, consumer: KafkaConsumer, partitions: list[TopicPartition]) -> None:
        """Forget the attempts at what another consumer will try; what was stored librdkafka commits."""
        for partition in partitions:
            if self._held.pop((partition.topic, partition.partition), None) is not None:
                consumer.resume([TopicPartition(partition.topic, partition.partition)])


def _demand_usable(
    settings: Mapping[str, Any], group: str, topics: Sequence[str], dead_letter_topic: str | None
) -> None:
    if taken := sorted(_OURS & settings.keys()):
        raise InvalidSettingError(f"{', '.join(taken)}: leave it out, the consumer sets it itself")
    if "bootstrap.servers" not in settings:
        raise InvalidSettingError("bootstrap.servers is missing: give such as 'kafka:9092'")
    if not _GROUP.fullmatch(group):
        raise InvalidSettingError(f"group {group!r}: give 1 to 128 of letters, digits and . _ ~ -")
    if isinstance(topics, str) or not topics or any(topic.startswith("^") for topic in topics):
        raise InvalidSettingError(f"topics {topics!r}: give a list of at least one name, no pattern")
    if dead_letter_topic in topics:
        raise InvalidSettingError(f"dead_letter_topic {dead_letter_topic!r} is consumed: give a topic of its own")


def _demand_passing(error: KafkaError) -> None:
    """Raise what no further poll mends; log the rest."""
    if error.fatal() or error.code() in _FINAL:
        raise KafkaException(error)
    log.warning("Kafka: %s", error.str())


def _call(afterwards: Callable[[], object], record: Record) -> None:
    try:
        afterwards()
    except Exception:
        log.exception("what follows the commit of %s failed; the effect stands", record.id)
