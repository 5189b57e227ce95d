"""The consumers: each message takes effect once, in the transaction that also records it in the inbox."""

from __future__ import annotations

import asyncio
import inspect
import logging
import re
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Mapping, Sequence
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from contextlib import AbstractAsyncContextManager, ExitStack, asynccontextmanager, nullcontext, suppress
from dataclasses import dataclass
from typing import Any, Final, Generic, TypeVar, cast

from confluent_kafka import Consumer as KafkaConsumer
from confluent_kafka import KafkaError, KafkaException, TopicPartition

from halfway.client.barrier import (
    MissingTableError,
    NoTransactionError,
    UncommittedConnectionError,
    UncountedRowsError,
    UnsupportedConnectionError,
)
from halfway.client.barrier.drivers import ASYNC_WITH, WITH, at_once, is_open, opened_by, transaction_of
from halfway.client.consumer.inbox import AsyncInbox, Cleaning, Inbox, check_topics
from halfway.client.consumer.record import (
    DeadLetters,
    Record,
    RejectedMessageError,
    Retries,
    described,
    loggable,
    with_defaults,
)
from halfway.client.errors import InvalidSettingError, MissingRowError, demand, demand_positive, matches
from halfway.client.threads import awaited, is_async

log = logging.getLogger(__name__)
librdkafka_log = logging.getLogger("halfway.client.consumer.librdkafka")
"""Takes the log lines of the Kafka clients, which otherwise go to standard error."""

Afterwards = Callable[[], object]
"""Called after the commit; what an AsyncConsumer gets from it is awaited if it can be."""
Handler = Callable[[Record, Any], Afterwards | None]
"""Processes a record on a connection whose transaction the consumer commits. If it returns a function, the consumer
calls that after the commit."""
AsyncHandler = Callable[[Record, Any], Awaitable[Afterwards | None]]

_GROUP: Final = re.compile(r"[A-Za-z0-9._~-]{1,128}")
_POLL_S: Final = 0.5
_ROLLED_BACK: Final = (
    "the database rolled the transaction back within the handler: let an error of the database leave the handler, or"
    " catch it around a savepoint"
)
_LOOK_AGAIN_S: Final = 1.0
"""How long to wait if Kafka is away at the start."""
_DELIVERY_POLL_S: Final = 0.02
"""How long to wait for messages while a dead letter is being delivered."""
_RESERVED: Final = frozenset(
    {"group.id", "isolation.level", "enable.auto.commit", "enable.auto.offset.store", "enable.partition.eof"}
)
_FINAL: Final = frozenset(
    {
        KafkaError.TOPIC_AUTHORIZATION_FAILED,
        KafkaError.GROUP_AUTHORIZATION_FAILED,
        KafkaError.SASL_AUTHENTICATION_FAILED,
        KafkaError._AUTHENTICATION,  # noqa: SLF001 - the library's name
        KafkaError._AUTO_OFFSET_RESET,  # noqa: SLF001 - the same
    }
)
"""Errors that a further poll does not resolve."""

_UNUSABLE: Final = (
    MissingTableError,
    NoTransactionError,
    UncommittedConnectionError,
    UncountedRowsError,
    UnsupportedConnectionError,
)
"""Errors of the inbox's connection that do not resolve with time."""

Partition = tuple[str, int]


class _RollbackError(Exception):
    """Rolls back a transaction that only reads."""


class _DatabaseError(Exception):
    """The database was not reached, or refused the row: this does not count as a failure of the message."""


@dataclass(slots=True)
class _PendingRecord:
    """A record that is not finished. After a failure its partition is paused until it is."""

    record: Record
    failures: int = 0
    """How often its handler, or the commit after it, failed."""
    outages: int = 0
    """How often in a row the database or the dead-letter topic failed."""
    due_at: float = 0.0
    """On the monotonic clock; infinite while its dead letter is being delivered."""
    reason: Exception | None = None
    """Why it becomes a dead letter; None while attempts remain."""
    handled: bool = False
    """Whether the last attempt failed after the handler had returned, so it may have committed."""

    @property
    def partition(self) -> Partition:
        return self.record.topic, self.record.partition


class _CancelledError(BaseException):
    """The task that ran the consumer was cancelled: the message under way is left to the next consumer."""


I = TypeVar("I", Inbox, AsyncInbox)  # noqa: E741 - an inbox
H = TypeVar("H")
T = TypeVar("T")


class _BaseConsumer(Generic[I, H]):
    """What both consumers do, on one thread; `_wait_for` runs the coroutines that use the database."""

    def __init__(
        self,
        settings: Mapping[str, Any],
        *,
        group: str,
        topics: Sequence[str],
        handle: H,
        inbox: I,
        retries: Retries | None = None,
        dead_letter_topic: str | None = None,
        clean_every_s: float = 60.0,
    ) -> None:
        """Take librdkafka's settings, such as `bootstrap.servers`, and the handler. Nothing is connected yet.

        The default of `auto.offset.reset` is `earliest`, that of `logger` is the logger
        `halfway.client.consumer.librdkafka`. Raises InvalidSettingError.
        """
        _demand_usable(settings, group, topics, dead_letter_topic)
        demand_positive(clean_every_s=clean_every_s)
        self._demand_kinds(handle, inbox)
        _demand_two_parameters(handle)
        self._settings = {"logger": librdkafka_log, **with_defaults(settings)}
        self._group = group
        self._topics = list(topics)
        self._handle: Any = handle
        self._inbox: I = inbox
        self._retries = retries or Retries()
        self._dead_letter_topic = dead_letter_topic
        self._cleaning = Cleaning(self._clean, clean_every_s)
        self._dead_letters: DeadLetters | None = None
        self._paused: dict[Partition, _PendingRecord] = {}
        self._stopping = threading.Event()
        self._inbox_commits = False

    def stop(self) -> None:
        """Make `run` return after the current message. Call it from any thread, or from a signal handler."""
        self._stopping.set()

    def _demand_kinds(self, handle: H, inbox: I) -> None:
        """Raise InvalidSettingError if the other consumer is the one for this handler and this inbox."""
        raise NotImplementedError

    def _wait_for(self, work: Coroutine[Any, Any, T]) -> T:
        """Run what uses the database."""
        raise NotImplementedError

    def _clean(self, limit: int) -> int:
        """Delete old rows of the inbox, on the thread of `Cleaning`."""
        raise NotImplementedError

    def _consume(self) -> None:
        if not self._topics_are_usable():
            return
        try:
            self._wait_for(self._demand_commits())
        except _UNUSABLE:
            raise
        except Exception as error:  # of any driver; the first message waits for the database
            log.warning("the inbox cannot be used yet: %s", described(error), exc_info=loggable(error))
        with ExitStack() as stack:
            self._consumer = KafkaConsumer(self._consumer_settings())
            stack.callback(self._consumer.close)
            if self._dead_letter_topic is not None:
                self._dead_letters = DeadLetters(self._settings, self._dead_letter_topic, self._group)
                stack.callback(self._dead_letters.close)
            self._cleaning.start()
            stack.callback(self._cleaning.stop)
            self._consumer.subscribe(self._topics, on_revoke=self._forget, on_lost=self._forget)
            while not self._stopping.is_set():
                self._poll()

    def _topics_are_usable(self) -> bool:
        """Wait until Kafka answers; return False if `stop` came first. Raises as `run` does at its start."""
        others = [] if self._dead_letter_topic is None else [self._dead_letter_topic]
        while not self._stopping.is_set():
            try:
                check_topics(self._settings, self._topics, others, self._inbox.retention_s)
            except KafkaException as error:
                _raise_if_final(error.args[0])
                self._stopping.wait(_LOOK_AGAIN_S)
            else:
                return True
        return False

    def _consumer_settings(self) -> dict[str, Any]:
        return {
            "auto.offset.reset": "earliest",
            "auto.commit.interval.ms": 1000,
            **self._settings,
            "group.id": self._group,
            "isolation.level": "read_committed",
            # Commits the stored offsets. An offset is stored only after the effect.
            "enable.auto.commit": True,
            "enable.auto.offset.store": False,
            "enable.partition.eof": True,
        }

    def _poll(self) -> None:
        """Process the pending records that are due, and the next message of a partition that is not paused."""
        if self._dead_letters is not None:
            self._dead_letters.poll()
        now = time.monotonic()
        for pending in [pending for pending in self._paused.values() if pending.due_at <= now]:
            self._process(pending)
        message = self._consumer.poll(self._timeout_s(time.monotonic()))
        if message is None:
            return
        error = message.error()
        if error is None:
            self._process(_PendingRecord(Record.of(message)))
        elif error.code() == KafkaError._PARTITION_EOF:  # noqa: SLF001 - the library's name
            self._note_end(message.topic() or "", message.partition() or 0, message.offset() or 0)
        else:
            _raise_if_final(error)

    def _note_end(self, topic: str, partition: int, offset: int) -> None:
        """Store the position at the end of a partition: it is behind the transaction markers, which are no records.

        Otherwise the lag of the group would never reach 0.
        """
        if (topic, partition) not in self._paused:
            self._store(TopicPartition(topic, partition, offset))

    def _timeout_s(self, now: float) -> float:
        times: list[float] = [pending.due_at for pending in self._paused.values()]
        if float("inf") in times:
            return _DELIVERY_POLL_S
        return min([_POLL_S, *(max(0.0, due_at - now) for due_at in times)])

    def _process(self, pending: _PendingRecord) -> None:
        if pending.reason is not None:
            self._set_aside(pending)
            return
        try:
            afterwards = self._wait_for(self._apply(pending))
        except _DatabaseError as error:
            pending.outages += 1
            self._retry_later(pending, pending.outages)
            self._log_outage(pending, error.__cause__)
        except _UNUSABLE:
            raise
        except Exception as error:  # noqa: BLE001 - of the handler
            self._handle_failure(pending, error)
        else:
            self._finish(pending)
            if afterwards is not None:
                self._wait_for(_call(afterwards, pending.record))

    async def _apply(self, pending: _PendingRecord) -> Afterwards | None:
        """Process the record once. Return the function to call after the commit, if any."""
        record, afterwards = pending.record, None
        is_handling = pending.handled = has_row = False
        try:
            await self._demand_commits()
            # Step 1: a transaction of the service's own database.
            async with _opened(opened_by("connect", self._inbox.connect, ASYNC_WITH, WITH)) as connection:
                # Step 2: the row. The insert waits for a consumer that is processing the same message.
                if await awaited(self._inbox.insert(connection, self._group, record.id)):
                    # Step 3: the effect.
                    is_handling = True
                    afterwards = await awaited(self._handle(record, connection))
                    has_row = is_open(connection)  # otherwise the handler has ended the transaction
                    if has_row:
                        await self._demand_row(connection, record)
                else:
                    has_row = True  # of an earlier transaction
                    log.info("%s has already taken effect", record.id)
                pending.handled = True
            # Step 4: the commit, when the context exits.
        except _UNUSABLE:
            raise
        except Exception as error:
            if is_handling:
                raise
            raise _DatabaseError from error
        if not pending.handled:
            raise InvalidSettingError("the inbox's connection suppressed an exception: its context must not do that")
        if not has_row and not await self._has_taken_effect(record):
            raise MissingRowError(_ROLLED_BACK)
        return afterwards

    async def _demand_commits(self) -> None:
        if not self._inbox_commits:
            await awaited(self._inbox.demand_commits())
            self._inbox_commits = True

    async def _demand_row(self, connection: Any, record: Record) -> None:
        """Raise if the handler has caught an error with which the database has rolled back, or will at the commit."""
        if not await awaited(self._inbox.still_has(connection, self._group, record.id)):
            raise MissingRowError(_ROLLED_BACK)

    def _handle_failure(self, pending: _PendingRecord, error: Exception) -> None:
        pending.failures += 1
        pending.outages = 0
        is_last = pending.failures >= self._retries.attempts or isinstance(error, RejectedMessageError)
        log.warning(
            "attempt %d of %s failed: %s",
            pending.failures,
            pending.record.id,
            described(error),
            exc_info=loggable(error),
        )
        if is_last and self._dead_letters is not None:
            pending.reason = error
            self._set_aside(pending)
        else:
            self._retry_later(pending, pending.failures)

    def _set_aside(self, pending: _PendingRecord) -> None:
        """Send the dead letter. The partition waits until it is delivered."""
        if self._dead_letters is None or pending.reason is None:
            raise AssertionError(pending)
        if pending.handled:
            try:
                has_taken_effect = self._wait_for(self._has_taken_effect(pending.record))
            except Exception as error:  # noqa: BLE001 - of the database
                pending.outages += 1
                self._retry_later(pending, pending.outages)
                self._log_outage(pending, error)
                return
            if has_taken_effect:
                log.warning("%s has taken effect, although its commit raised an exception", pending.record.id)
                self._finish(pending)
                return

        reason = described(pending.reason)

        def delivered(problem: str | None) -> None:
            if self._paused.get(pending.partition) is not pending:
                return  # the partition was reassigned to another consumer, which starts with this record
            if problem is None:
                record = pending.record
                where = f"{record.id} at offset {record.offset} of {record.topic}/{record.partition}"
                log.error("%s became a dead letter after %d attempts: %s", where, pending.failures, reason)
                self._finish(pending)
                return
            pending.outages += 1
            self._retry_later(pending, pending.outages)
            log.error("the dead letter of %s was not delivered: %s", pending.record.id, problem)

        self._pause(pending, float("inf"))
        self._dead_letters.send(pending.record, reason, pending.failures, delivered)

    @staticmethod
    def _log_outage(pending: _PendingRecord, error: BaseException | None) -> None:
        log.warning("%s waits for the database: %s", pending.record.id, described(error), exc_info=loggable(error))

    async def _has_taken_effect(self, record: Record) -> bool:
        """Return whether a record has a committed row; wait for a transaction that may still write it."""
        has_row = False
        with suppress(_RollbackError):
            async with _opened(opened_by("connect", self._inbox.connect, ASYNC_WITH, WITH)) as connection:
                has_row = not await awaited(self._inbox.insert(connection, self._group, record.id))
                raise _RollbackError
        return has_row

    def _retry_later(self, pending: _PendingRecord, failures: int) -> None:
        self._pause(pending, time.monotonic() + self._retries.pause_s(failures))

    def _pause(self, pending: _PendingRecord, due_at: float) -> None:
        pending.due_at = due_at
        if pending.partition not in self._paused:
            self._paused[pending.partition] = pending
            self._consumer.pause([TopicPartition(*pending.partition)])

    def _finish(self, pending: _PendingRecord) -> None:
        if not self._store(TopicPartition(*pending.partition, pending.record.offset + 1)):
            log.info("%s now belongs to another consumer, which skips it", pending.record.id)
        if self._paused.pop(pending.partition, None) is not None:
            self._consumer.resume([TopicPartition(*pending.partition)])

    def _store(self, position: TopicPartition) -> bool:
        """Store a position; return False if the partition belongs to another consumer now."""
        try:
            self._consumer.store_offsets(offsets=[position])
        except KafkaException as error:
            if error.args[0].code() != KafkaError._STATE:  # noqa: SLF001 - the library's name
                raise
            return False
        return True

    def _forget(self, consumer: KafkaConsumer, partitions: list[TopicPartition]) -> None:
        """Forget records of revoked partitions: another consumer retries them. librdkafka commits offsets."""
        for partition in partitions:
            if self._paused.pop((partition.topic, partition.partition), None) is not None:
                consumer.resume([TopicPartition(partition.topic, partition.partition)])


class Consumer(_BaseConsumer[Inbox, Handler]):
    """Consumes topics in one thread: the one that calls `run`.

    For each message it opens a transaction, writes a row into the inbox, and calls the handler. Both commit together,
    and only then is the offset stored. A message that already has a row is skipped.

    If the handler raises, the message is retried after a pause, while other partitions continue. After the last attempt
    the message goes to the dead-letter topic; without one it is retried for ever. The order within a partition is kept.
    """

    def run(self) -> None:
        """Consume until `stop`; then commit the offsets of all processed messages, and leave the group.

        Raises UnknownTopicError, RetentionTooShortError, MissingTableError and UncommittedConnectionError before the
        first effect, and confluent_kafka.KafkaException for errors that a retry does not resolve. Errors of the
        database and of the handler are logged and retried.
        """
        self._consume()

    def _demand_kinds(self, handle: Handler, inbox: Inbox) -> None:
        if is_async(handle) or not isinstance(inbox, Inbox):
            raise InvalidSettingError("a handler with async, or an AsyncInbox: give both to an AsyncConsumer")

    def _wait_for(self, work: Coroutine[Any, Any, T]) -> T:
        return at_once(work)

    def _clean(self, limit: int) -> int:
        return self._inbox.clean(limit)


class AsyncConsumer(_BaseConsumer[AsyncInbox, AsyncHandler]):
    """A `Consumer` for asynchronous drivers: the handler runs on the event loop of `run`, one message at a time."""

    _loop: asyncio.AbstractEventLoop
    _under_way: Future[Any] | None = None
    """What the consumer's thread waits for, or has waited for."""
    _is_cancelled = False
    """Whether the task that runs the consumer was cancelled."""

    async def run(self) -> None:
        """Consume until `stop`, as `Consumer.run` does, with the same errors.

        If the task is cancelled, the transaction of the message under way is rolled back, and the next consumer of the
        group reads that message again.
        """
        self._loop = asyncio.get_running_loop()
        threads = ThreadPoolExecutor(1, thread_name_prefix="halfway-consumer")
        consuming = asyncio.wrap_future(threads.submit(self._consume))
        threads.shutdown(wait=False)
        try:
            await asyncio.shield(consuming)
        except asyncio.CancelledError:
            self.stop()
            self._is_cancelled = True
            if self._under_way is not None:
                self._under_way.cancel()
            await asyncio.wait([consuming])
            consuming.exception()  # the thread ended because of the cancellation
            raise

    def _demand_kinds(self, handle: AsyncHandler, inbox: AsyncInbox) -> None:
        del handle  # what it returns is awaited if it can be
        if not isinstance(inbox, AsyncInbox):
            raise InvalidSettingError("an Inbox blocks the event loop: give an AsyncInbox, or use a Consumer")

    def _wait_for(self, work: Coroutine[Any, Any, T]) -> T:
        self._under_way = future = asyncio.run_coroutine_threadsafe(work, self._loop)
        if self._is_cancelled:  # before the thread had this to wait for
            future.cancel()
        try:
            return future.result()
        except CancelledError:
            if self._is_cancelled:
                raise _CancelledError from None
            raise RuntimeError("the handler was cancelled") from None

    def _clean(self, limit: int) -> int:
        return asyncio.run_coroutine_threadsafe(self._inbox.clean(limit), self._loop).result()


@asynccontextmanager
async def _opened(context: Any) -> AsyncIterator[Any]:
    """Enter the connection of an inbox of either kind; asyncpg's pool opens no transaction by itself."""
    if not isinstance(context, AbstractAsyncContextManager):
        with context as connection:
            yield connection
    else:
        async with context as connection, transaction_of(connection) or nullcontext():
            yield connection


def _demand_usable(
    settings: Mapping[str, Any], group: str, topics: Sequence[str], dead_letter_topic: str | None
) -> None:
    if reserved := sorted(_RESERVED & settings.keys()):
        raise InvalidSettingError(f"{', '.join(reserved)}: leave it out, because the consumer sets it")
    if "bootstrap.servers" not in settings:
        raise InvalidSettingError("bootstrap.servers is missing: give it, for example 'kafka:9092'")
    demand(matches(_GROUP, group), "group", group, "1 to 128 letters, digits and . _ ~ -")
    is_list = not isinstance(topics, str) and topics and not any(topic.startswith("^") for topic in topics)
    demand(is_list, "topics", topics, "a list of at least one name, without patterns")
    demand(dead_letter_topic not in topics, "dead_letter_topic", dead_letter_topic, "another topic: it is consumed")


def _demand_two_parameters(handle: object) -> None:
    try:
        # not that of `__wrapped__`, to which a decorator may give more
        inspect.signature(cast("Callable[..., object]", handle), follow_wrapped=False).bind(None, None)
    except TypeError:
        raise InvalidSettingError(f"handle is {handle!r}: give a function of a record and a connection") from None
    except ValueError:  # of C: nothing says what it takes
        pass


def _raise_if_final(error: KafkaError) -> None:
    """Raise an error that a further poll does not resolve; log any other."""
    if error.fatal() or error.code() in _FINAL:
        raise KafkaException(error)
    log.warning("Kafka: %s", error.str())


async def _call(afterwards: Afterwards, record: Record) -> None:
    try:
        await awaited(afterwards())
    except Exception as error:
        log.error(  # noqa: TRY400 - its text may not be encodable
            "the function after the commit of %s failed; the record has taken effect",
            record.id,
            exc_info=loggable(error),
        )
