"""Tries out a suspect's real messages in Kafka transactions that are always aborted.

A failure of the suspect lane's producer ends the incarnation (docs/protocol.md#end-the-lane), so every try of a bad end
would end an incarnation. A rehearsal finds the bad end first. Its transactional id never commits and is in no owner
record, so nothing that it writes can resolve a transaction. It writes to real topics only, one after the other, so that
a topic that hangs does not hold back the readers of the others. The next owner of the shards aborts the rehearsal's
open transaction, so that the readers of a topic do not wait for a paused instance.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, Final

import structlog
from confluent_kafka import KafkaError

from halfway.kafka.clients.config import KafkaConfig
from halfway.kafka.clients.transactional_producer import (
    ProducerFailedError,
    TransactionalProducer,
    fence,
    initialised,
    rehearsal_id,
)
from halfway.kafka.lane.quarantine import Blame
from halfway.kafka.records.lane_records import UserRecord
from halfway.protocol.errors import MessageTooLargeError, NotAuthorisedError, TopicUnavailableError

log = structlog.get_logger()

_DELIVERY_S: Final = 10.0
_INITIALISE_S: Final = 10.0
_ABORT_S: Final = 5.0
_MAX_CONCURRENT_ABORTS: Final = 16
_PROPAGATION_MS: Final = 500
_TOO_LARGE: Final = frozenset({KafkaError.MSG_SIZE_TOO_LARGE, KafkaError.RECORD_LIST_TOO_LARGE})
_NOT_AUTHORISED: Final = frozenset({KafkaError.TOPIC_AUTHORIZATION_FAILED, KafkaError.CLUSTER_AUTHORIZATION_FAILED})
_MESSAGE_ERRORS: Final = _TOO_LARGE | {
    KafkaError.INVALID_MSG,
    KafkaError.INVALID_MSG_SIZE,
    KafkaError.INVALID_RECORD,
    KafkaError.INVALID_TIMESTAMP,
    KafkaError._UNKNOWN_PARTITION,  # noqa: SLF001 - the names of librdkafka's own errors start so
}
_PURGED: Final = frozenset({KafkaError._PURGE_QUEUE, KafkaError._PURGE_INFLIGHT})  # noqa: SLF001 - as above


class RehearsalFailure:
    """Why a rehearsal of messages for one topic failed."""

    def __init__(self, topic: str, code: int | None, detail: str) -> None:
        """Keep the code of the Kafka error; None if time ran out without an error."""
        self.topic = topic
        self.code = code
        self.detail = detail

    @property
    def of_the_topic(self) -> bool:
        """Whether the whole topic is bad, not just one of the messages."""
        return self.code not in _MESSAGE_ERRORS

    @property
    def of_the_size(self) -> bool:
        """Whether a message is too large."""
        return self.code in _TOO_LARGE

    def blame(self) -> Blame:
        if self.code in _TOO_LARGE:
            return Blame(
                refusal=MessageTooLargeError,
                topic=self.topic,
                detail=f"a message is larger than topic {self.topic!r} takes: raise its max.message.bytes or roll back",
            )
        if self.code in _NOT_AUTHORISED:
            return Blame(
                refusal=NotAuthorisedError,
                topic=self.topic,
                detail=f"Kafka does not let halfway write to topic {self.topic!r}: grant it WRITE",
            )
        if self.code == KafkaError.INVALID_TIMESTAMP:
            return Blame(
                refusal=TopicUnavailableError,
                topic=self.topic,
                detail=f"topic {self.topic!r} does not take the time of this instance's clock: set the clock right, or "
                "raise the topic's message.timestamp.after.max.ms and message.timestamp.before.max.ms",
            )
        detail = f"topic {self.topic!r} cannot be written now: {self.detail}"
        if self.code == KafkaError.INVALID_RECORD:
            detail = (
                f"topic {self.topic!r} refuses a message ({self.detail}): if it is compacted now, it takes none "
                "without a key; set its cleanup.policy to delete, or roll back"
            )
        return Blame(
            refusal=TopicUnavailableError,
            topic=self.topic,
            detail=detail,
        )


class Rehearsal:
    """Writes messages and aborts, with a producer that is replaced after each failure. Used by one thread at a time."""

    def __init__(self, config: KafkaConfig, transactional_id: str) -> None:
        """Keep the configuration; nothing connects before the first try."""
        self._config = config
        self._transactional_id = transactional_id
        self._producer: TransactionalProducer | None = None

    def close(self) -> None:
        producer, self._producer = self._producer, None
        if producer is not None:
            producer.abandon()

    def idle(self) -> None:
        """Serve the producer's events. If it has failed, drop it; the next try creates another."""
        if self._producer is not None:
            try:
                self._producer.idle()
            except ProducerFailedError as error:
                log.info("rehearsal_failed", error=str(error))
                self.close()

    def attempt(self, topic: str, messages: Sequence[UserRecord]) -> RehearsalFailure | None:
        """Write messages of one topic and abort; return None if every in-sync replica took them."""
        failure: RehearsalFailure | None = None
        try:
            failure = self._attempt(topic, messages)
        except ProducerFailedError as error:
            failure = RehearsalFailure(topic, error.code, str(error))
        if failure is not None:
            self.close()
        return failure

    def _attempt(self, topic: str, messages: Sequence[UserRecord]) -> RehearsalFailure | None:
        producer = self._initialised_producer()
        errors: list[KafkaError] = []
        offsets: list[int] = []
        report = _delivery_callback(errors, offsets)
        producer.begin()
        for message in messages:
            try:
                producer.produce(
                    message.topic,
                    message.value,
                    message.key,
                    message.partition,
                    on_delivery=report,
                    headers=message.headers,
                )
            except Exception as error:  # noqa: BLE001 - confluent-kafka raises many kinds, and each is a failure
                failed = producer.failure("produce", error)
                self._abort_failed(producer)
                return RehearsalFailure(topic, failed.code, str(failed))
        delivered = producer.flush(time.monotonic() + _DELIVERY_S, lambda: bool(errors))
        if errors:
            self._abort_failed(producer)
            return RehearsalFailure(topic, errors[0].code(), f"{errors[0].name()}: {errors[0].str()}")
        if not delivered:
            self._abort_failed(producer)
            return RehearsalFailure(topic, None, f"no acknowledgement in {_DELIVERY_S:g} s")
        producer.abort(_ABORT_S)
        if len(offsets) < len(messages):
            # librdkafka gave up the Kafka transaction and purged the messages; only its log contains the reason.
            return RehearsalFailure(topic, None, "Kafka refuses it in a transaction")
        return None

    def _abort_failed(self, producer: TransactionalProducer) -> None:
        """Abort a failed transaction; else the next `init_transactions` or the transaction time-out does."""
        try:
            producer.abort(_ABORT_S)
        except ProducerFailedError as error:
            log.info("rehearsal_not_aborted", error=str(error))

    def _initialised_producer(self) -> TransactionalProducer:
        if self._producer is None:
            overrides: dict[str, Any] = {"topic.metadata.propagation.max.ms": _PROPAGATION_MS}
            [self._producer] = initialised(
                self._config,
                [self._transactional_id],
                time.monotonic() + _INITIALISE_S,
                message_timeout_s=_DELIVERY_S,
                **overrides,
            )
        return self._producer


class _RehearsalAborts:
    """Aborts the open transactions of former owners' rehearsals in the background, so that no acquisition waits."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._under_way: set[str] = set()

    def start(self, config: KafkaConfig, transactional_id: str) -> None:
        with self._lock:
            if transactional_id in self._under_way or len(self._under_way) >= _MAX_CONCURRENT_ABORTS:
                return  # its Kafka transaction times out
            self._under_way.add(transactional_id)
        threading.Thread(
            target=self._run, args=(config, transactional_id), name="halfway-end-rehearsal", daemon=True
        ).start()

    def _run(self, config: KafkaConfig, transactional_id: str) -> None:
        try:
            fence(config, [transactional_id], time.monotonic() + config.transaction_timeout_s)
        except ProducerFailedError as error:
            log.info("rehearsal_not_aborted", error=str(error))
        finally:
            with self._lock:
                self._under_way.discard(transactional_id)


_ABORTS: Final = _RehearsalAborts()


def end_rehearsal(config: KafkaConfig, incarnation: str) -> None:
    """Start to abort the open transaction of a former owner's rehearsal, so that it holds back no consumer.

    This does not wait for the abort, which may take long: the rehearsed topic may take no writes. A rehearsal commits
    nothing, so safety does not depend on the abort.
    """
    _ABORTS.start(config, rehearsal_id(config.prefix, incarnation))


def _delivery_callback(errors: list[KafkaError], offsets: list[int]) -> Callable[[Any, Any], None]:
    """Return a delivery callback that collects errors, and the offsets of acknowledged messages."""

    def report(error: Any, message: Any) -> None:
        if error is None:
            offsets.append(message.offset())
        elif error.code() not in _PURGED:
            errors.append(error)

    return report
