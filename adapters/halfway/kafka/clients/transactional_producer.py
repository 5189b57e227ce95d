"""Transactional producers that are initialised once and never used again after a failure, and their transactional ids.

See docs/protocol.md#ownership.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any, Final, Literal

import structlog
from confluent_kafka import KafkaError, KafkaException

from halfway.kafka.clients.config import KafkaConfig, denial
from halfway.kafka.clients.librdkafka_events import CoordinatorWatch
from halfway.kafka.clients.seam import Producer
from halfway.kafka.clients.threads import CLOSER
from halfway.protocol.errors import ConfigurationError, KafkaUnavailableError

log = structlog.get_logger()

_SLICE_S: Final = 0.25
_INITIALISE_SLICE_S: Final = 1.0
_LOOK_S: Final = 1.0
_KEPT: Final = 10_000
"""Topics whose known number of partitions a producer remembers."""
_SETTLE_S: Final = 1.0
_FATAL_CAUSE_S: Final = 0.1
"""How long to wait for the cause of a fatal error that has been reported."""
_PARALLEL: Final = 8
_MARGIN_MS: Final = 5_000
_FATAL: Final = KafkaError._FATAL  # noqa: SLF001 - the names of librdkafka's own errors start so
UNSETTLED: Final = KafkaError.CONCURRENT_TRANSACTIONS
FENCED: Final = frozenset(
    {
        KafkaError._FENCED,  # noqa: SLF001 - the names of librdkafka's own errors start so
        KafkaError.PRODUCER_FENCED,
        KafkaError.INVALID_PRODUCER_EPOCH,
        KafkaError.TRANSACTION_COORDINATOR_FENCED,
    }
)
OUT_OF_SEQUENCE: Final = frozenset({KafkaError.OUT_OF_ORDER_SEQUENCE_NUMBER, KafkaError.UNKNOWN_PRODUCER_ID})
"""A partition does not hold the records of a producer that it has acknowledged."""


Step = Literal[
    "abort_transaction",
    "begin_transaction",
    "claiming",
    "commit_transaction",
    "flush",
    "group",
    "idle",
    "init_transactions",
    "lane",
    "log",
    "metadata",
    "offsets",
    "produce",
    "release",
    "suspects",
    "tail",
    "use",
]
"""The steps at which a producer, or the incarnation that it belongs to, can fail."""


class ProducerFailedError(Exception):
    """A transactional producer failed: it must not be used again. `code` is a Kafka error code, if there is one."""

    def __init__(self, step: Step, detail: str, code: int | None = None, *, stalled: bool = False) -> None:
        """Name the step and Kafka's error; `stalled` if nothing moved any more."""
        super().__init__(f"{step}: {detail}")
        self.step = step
        self.code = code
        self.stalled = stalled
        self.remedy: str | None = None
        """What the operator can do, if Kafka's error alone does not say it."""

    @classmethod
    def of(cls, step: Step, error: Exception) -> ProducerFailedError:
        """Take over what confluent-kafka raised."""
        cause = kafka_error(error)
        if cause is None:
            return cls(step, repr(error))
        return cls(step, f"{cause.name()}: {cause.str()}", cause.code())

    @property
    def fenced(self) -> bool:
        """Return whether another producer has fenced the transactional id."""
        return self.code in FENCED

    @property
    def out_of_sequence(self) -> bool:
        """Return whether Kafka has lost records of this producer."""
        return self.code in OUT_OF_SEQUENCE


def kafka_error(error: Exception) -> KafkaError | None:
    """Return the KafkaError inside an exception, None if there is none."""
    inner = error.args[0] if isinstance(error, KafkaException) and error.args else None
    return inner if isinstance(inner, KafkaError) else None


def _never() -> bool:
    return False


class TransactionalProducer:
    """One transactional id: `initialise` once, then `begin`, `produce`, `commit` or `abort`; one thread at a time.

    Whatever raises ProducerFailedError ends it: `abandon` it then. All times are in seconds.
    """

    def __init__(
        self,
        config: KafkaConfig,
        transactional_id: str,
        *,
        message_timeout_s: float | None = None,
        of_a_lane: bool = False,
        **over: Any,
    ) -> None:
        """Make the client; nothing is asked of Kafka yet. A message times out before its transaction does.

        `of_a_lane`: this is the one producer that ever writes with its id, which is closed once it has ended.
        """
        self.transactional_id = transactional_id
        self._of_a_lane = of_a_lane
        self._known_topic = config.owners_topic
        transaction_ms = round(config.transaction_timeout_s * 1000)
        longest_ms = max(transaction_ms - _MARGIN_MS, transaction_ms // 2)
        self._shown: dict[str, int] = {}
        debug = config.properties.get("debug", "")
        self._watch = CoordinatorWatch(verbose=bool(debug))
        self.worn = False
        """Its last commit stands, but its producer must not be used again: see `commit`."""
        message_ms = longest_ms if message_timeout_s is None else min(longest_ms, round(message_timeout_s * 1000))
        self._producer: Producer | None = config.make_producer(
            **{
                "transactional.id": transactional_id,
                "transaction.timeout.ms": transaction_ms,
                "message.timeout.ms": message_ms,
                "batch.size": 65_536,
                "linger.ms": 5,  # a commit flushes at once; until then records gather into batches
                "queue.buffering.max.messages": 1_000_000,
                "queue.buffering.max.kbytes": 1_048_576,
                "topic.metadata.propagation.max.ms": 2_000,
                "debug": ",".join(filter(None, (CoordinatorWatch.debug, debug))),
                "logger": self._watch,
                **over,
            }
        )
        self.produce: Callable[..., None] = self._producer.produce
        """`Producer.produce` itself: called for every record, so nothing is put in between."""

    @property
    def _client(self) -> Producer:
        if self._producer is None:
            raise ProducerFailedError("use", f"{self.transactional_id} was abandoned")
        return self._producer

    def initialise(
        self, deadline: float, cancelled: Callable[[], bool] = _never, *, optional: Callable[[], bool] = _never
    ) -> None:
        """Call `init_transactions` until it has succeeded, `time.monotonic()` passes `deadline` or it is cancelled.

        It fences the id's former users and settles what they left open. `cancelled` is called every second. If it is
        `optional`, it fails as soon as what they left open has not been settled for a short time: settling it takes as
        long as a partition of theirs takes no records.
        """
        self._connect()
        unsettled_since: float | None = None
        while True:
            if cancelled():
                raise ProducerFailedError("init_transactions", "it is no longer wanted")
            try:
                self._client.init_transactions(_INITIALISE_SLICE_S)
            except KafkaException as error:
                cause = error.args[0]
                now = time.monotonic()
                if cause.code() == UNSETTLED and unsettled_since is None:
                    unsettled_since = now
                tired = unsettled_since is not None and now - unsettled_since >= _SETTLE_S and optional()
                if not cause.retriable() or now >= deadline or tired:
                    raise ProducerFailedError.of("init_transactions", error) from error
                time.sleep(0.02)
            else:
                return

    def _connect(self) -> None:
        """Connect first: an `init_transactions` before that retries only after 500 ms."""
        with suppress(KafkaException):  # the call itself says what is wrong
            self._client.list_topics(self._known_topic, timeout=_INITIALISE_SLICE_S)

    def shows(self, topic: str, partitions: int) -> bool:
        """Return whether the client knows that many partitions of a topic; ask Kafka if that is not certain.

        The client refreshes its metadata only every few minutes. It refuses a record for a partition that it does not
        know, and takes one for a partition that has gone.
        """
        if self._shown.get(topic) == partitions:
            return True
        try:
            found = self._client.list_topics(topic, timeout=_LOOK_S).topics[topic].partitions
        except KafkaException:
            return False
        if len(found) != partitions:
            return False
        if len(self._shown) >= _KEPT:
            self._shown.clear()
        self._shown[topic] = partitions
        return True

    def begin(self) -> None:
        """Begin a Kafka transaction; local, Kafka hears of it with the first record."""
        try:
            self._client.begin_transaction()
        except KafkaException as error:
            raise ProducerFailedError.of("begin_transaction", error) from error

    def commit(self, stall_s: float) -> None:
        """Flush and commit; fail if nothing moves for `stall_s`.

        The same call is repeated in short slices, which notice a failure early, only while there is something to
        flush. A call that may find that Kafka has been asked to commit gets all of the time, and is the last one: it
        asks librdkafka's own thread for the beginning of the commit once more. If that thread does not answer within
        the time-out, librdkafka (up to 2.16) forgets which call is under way, takes Kafka's answer to the commit for
        that to an abort, and ends the process: "Invalid transaction state transition".

        If the connection to the transaction coordinator was lost meanwhile, librdkafka has asked for the commit
        again on another one. The first request may still be on its way, and would commit whatever of the producer's
        next transaction the broker has by then: all have the same epoch (without KIP-890 part 2). Such a producer is
        `worn`.
        """
        client = self._client
        self._serve("commit_transaction", client)
        connections = self._watch.connections
        left, moved = len(client), time.monotonic()
        while True:
            try:
                client.commit_transaction(_SLICE_S if left else stall_s)
            except KafkaException as error:
                cause = error.args[0]
                if not cause.retriable() or cause.fatal() or cause.txn_requires_abort():
                    raise ProducerFailedError.of("commit_transaction", error) from error
                now = time.monotonic()
                last = not left and cause.code() == KafkaError._TIMED_OUT  # noqa: SLF001
                if len(client) != left:
                    left, moved = len(client), now
                elif last or now - moved > stall_s:
                    raise ProducerFailedError(
                        "commit_transaction", f"no progress for {stall_s:g} s", stalled=True
                    ) from error
            else:
                self._serve("commit_transaction", client)
                self.worn = self._watch.connections != connections
                return

    def demand_unworn(self) -> None:
        """Raise ProducerFailedError if the producer is worn: see `commit`."""
        if self.worn:
            raise ProducerFailedError("commit_transaction", "the connection was lost while it was committed")

    def flush(self, deadline: float, failed: Callable[[], bool]) -> bool:
        """Wait until everything is delivered (True), or a report made `failed()` true or `deadline` passed (False)."""
        client = self._client
        while len(client):
            if failed() or time.monotonic() >= deadline:
                return False
            try:
                client.flush(0.05)
            except KafkaException as error:
                raise ProducerFailedError.of("flush", error) from error
        return not failed()

    def abort(self, timeout: float) -> None:
        try:
            self._client.abort_transaction(timeout)
        except KafkaException as error:
            raise ProducerFailedError.of("abort_transaction", error) from error

    def failure(self, step: Step, error: Exception) -> ProducerFailedError:
        """Return the failure behind an error of `produce`.

        After a fatal error `produce` says only that there was one. The client's next poll raises its cause, for example
        that the producer was fenced.
        """
        cause = kafka_error(error)
        if cause is not None and cause.code() == _FATAL and self._producer is not None:
            try:
                self._serve(step, self._producer, _FATAL_CAUSE_S)
            except ProducerFailedError as fatal:
                return fatal
        return ProducerFailedError.of(step, error)

    def idle(self) -> None:
        """Serve the client's log and error events while there is nothing to write."""
        if self._producer is not None:
            self._serve("idle", self._producer)

    @staticmethod
    def _serve(step: Step, producer: Producer, timeout: float = 0) -> None:
        """Run the client's callbacks; a fatal error, such as that it was fenced, may be raised here before any call."""
        try:
            producer.poll(timeout)
        except KafkaException as error:
            raise ProducerFailedError.of(step, error) from error

    def abandon(self) -> None:
        """Give the producer up without waiting for its end: a side thread takes its queues down."""
        producer, self._producer = self._producer, None
        self.produce = _refuse
        if producer is not None:
            CLOSER.take(producer, self.transactional_id if self._of_a_lane else None)


def _refuse(*_args: object, **_fields: object) -> None:
    raise ProducerFailedError("produce", "the producer was abandoned")


def initialised(
    config: KafkaConfig,
    transactional_ids: Sequence[str],
    deadline: float,
    cancelled: Callable[[], bool] = _never,
    *,
    of_a_lane: bool = False,
    **over: Any,
) -> list[TransactionalProducer]:
    """Create a producer for each id and initialise them in parallel; all of them or ProducerFailedError."""
    producers: list[TransactionalProducer] = []
    try:
        for transactional_id in transactional_ids:
            producers.append(TransactionalProducer(config, transactional_id, of_a_lane=of_a_lane, **over))  # noqa: PERF401 - the except needs those already made
        if producers:
            with ThreadPoolExecutor(min(_PARALLEL, len(producers)), "halfway-init") as pool:
                list(pool.map(lambda producer: producer.initialise(deadline, cancelled), producers))
    except BaseException:
        for producer in producers:
            producer.abandon()
        raise
    return producers


def fence(
    config: KafkaConfig, transactional_ids: Sequence[str], deadline: float, cancelled: Callable[[], bool] = _never
) -> None:
    """Fence the users of these ids: their open transactions are settled, and they can write nothing more.

    A closed id is waited for only for a short time: docs/protocol.md says why that is enough.
    """

    def take(transactional_id: str) -> None:
        def closed() -> bool:
            return CLOSER.has_closed(transactional_id)

        producer = TransactionalProducer(config, transactional_id)
        try:
            producer.initialise(deadline, cancelled, optional=closed)
        except ProducerFailedError as error:
            if error.code != UNSETTLED or not closed():
                raise
            log.warning("former_owner_not_settled", transactional_id=transactional_id, error=str(error))
        finally:
            producer.abandon()

    with ThreadPoolExecutor(_PARALLEL, "halfway-fence") as pool:
        list(pool.map(take, transactional_ids))


_ID_BYTES: Final = 8


def lane_ids(prefix: str, incarnation: str) -> tuple[str, ...]:
    """Return the ids with which an incarnation writes: the two of its lane and the one of its suspect lane.

    The format must never change: sometimes only the incarnation of a former owner is known.
    """
    return tuple(f"{prefix}{incarnation}.{name}" for name in ("0", "1", "q"))


def rehearsal_id(prefix: str, incarnation: str) -> str:
    """Return the id with which an incarnation tries messages out; it never commits anything.

    No owner record contains it: it follows from the incarnation.
    """
    return f"{prefix}{incarnation}.r"


def verify_transactional_ids(config: KafkaConfig, deadline: float, cancelled: Callable[[], bool]) -> None:
    """Initialise a transactional id that nobody uses, the only way to test the ACL. Blocks.

    If the transaction coordinator is not ready yet, it is waited for until `deadline`, on `time.monotonic()`.

    Raises:
        ConfigurationError: an ACL is missing; the error names the resource and the command that adds the ACL.
        KafkaUnavailableError: Kafka did not initialise the id in time, or the call was cancelled.
    """
    name = f"{config.prefix}verify.{secrets.token_hex(_ID_BYTES)}"
    try:
        producers = initialised(config, [name], deadline, cancelled)
    except ProducerFailedError as error:
        denied = denial(error.code, config)
        if denied is not None:
            raise ConfigurationError(denied) from error
        raise KafkaUnavailableError(f"Kafka did not initialise a transactional id: {error}") from error
    for producer in producers:
        producer.abandon()
