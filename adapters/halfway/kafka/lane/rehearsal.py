"""Trying out a suspect's real messages in Kafka transactions that are always aborted.

A failure of the suspects' own producer ends the incarnation (docs/protocol.md#end-the-lane), so a bad end would end
one with every try. A rehearsal finds it first: its transactional id never commits and stands in no owner record, so
nothing that it writes can resolve a transaction. It writes to real topics only, one after the other, so that a topic
that hangs does not hold back the readers of the others. The next owner of the shards aborts the rehearsal's open
transaction, so that the readers of a topic do not wait for an instance that is frozen.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, Final

import structlog
from confluent_kafka import KafkaError

from halfway.domain.errors import MessageTooLargeError, NotAuthorisedError, TopicUnavailableError
from halfway.kafka.clients.config import KafkaConfig
from halfway.kafka.clients.transactional_ids import rehearsal_id
from halfway.kafka.clients.transactional_producer import ProducerFailedError, TransactionalProducer, fence, initialised
from halfway.kafka.lane.quarantine import Blame
from halfway.kafka.records.lane_records import UserRecord

log = structlog.get_logger()

_DELIVERY_S: Final = 10.0
_INITIALISE_S: Final = 10.0
_ABORT_S: Final = 5.0
_ENDED_AT_ONCE: Final = 16
_PROPAGATION_MS: Final = 500
_TOO_LARGE: Final = frozenset({KafkaError.MSG_SIZE_TOO_LARGE, KafkaError.RECORD_LIST_TOO_LARGE})
_NOT_AUTHORISED: Final = frozenset({KafkaError.TOPIC_AUTHORIZATION_FAILED, KafkaError.CLUSTER_AUTHORIZATION_FAILED})
_OF_A_MESSAGE: Final = _TOO_LARGE | {
    KafkaError.INVALID_MSG,
    KafkaError.INVALID_MSG_SIZE,
    KafkaError.INVALID_RECORD,
    KafkaError.INVALID_TIMESTAMP,
    KafkaError._UNKNOWN_PARTITION,  # noqa: SLF001 - the names of librdkafka's own errors start so
}
_AFTERMATH: Final = frozenset({KafkaError._PURGE_QUEUE, KafkaError._PURGE_INFLIGHT})  # noqa: SLF001 - as above


class RehearsalFailure:
    """What a rehearsal found wrong with messages of one topic."""

    def __init__(self, topic: str, code: int | None, detail: str) -> None:
        """Keep the Kafka error; None if time ran out without one."""
        self.topic = topic
        self.code = code
        self.detail = detail

    @property
    def of_the_topic(self) -> bool:
        """Whether the whole topic is bad, rather than one of the messages."""
        return self.code not in _OF_A_MESSAGE

    @property
    def of_the_size(self) -> bool:
        """Whether a message is too large."""
        return self.code in _TOO_LARGE

    def blame(self) -> Blame:
        """Return the blame that its callers are told."""
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
        return Blame(
            refusal=TopicUnavailableError,
            topic=self.topic,
            detail=f"topic {self.topic!r} cannot be written now: {self.detail}",
        )


class Rehearsal:
    """Writes messages and aborts, with a producer that is replaced after each failure. One thread at a time."""

    def __init__(self, config: KafkaConfig, transactional_id: str) -> None:
        """Keep the configuration; nothing connects before the first try."""
        self._config = config
        self._transactional_id = transactional_id
        self._producer: TransactionalProducer | None = None

    def close(self) -> None:
        """Abandon the producer."""
        producer, self._producer = self._producer, None
        if producer is not None:
            producer.abandon()

    def idle(self) -> None:
        """Serve the producer's events; one that has failed is replaced when it is needed."""
        if self._producer is not None:
            try:
                self._producer.idle()
            except ProducerFailedError as error:
                log.info("rehearsal_failed", error=str(error))
                self.close()

    def attempt(self, topic: str, messages: Sequence[UserRecord]) -> RehearsalFailure | None:
        """Write messages of one topic and abort; None if every replica in sync took them."""
        failure: RehearsalFailure | None = None
        try:
            failure = self._attempt(topic, messages)
        except ProducerFailedError as error:
            failure = RehearsalFailure(topic, error.code, str(error))
        if failure is not None:
            self.close()
        return failure

    def _attempt(self, topic: str, messages: Sequence[UserRecord]) -> RehearsalFailure | None:
        producer = self._ready()
        errors: list[KafkaError] = []
        taken: list[int] = []
        report = _reports(errors, taken)
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
                failed = ProducerFailedError.of("produce", error)
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
        if len(taken) < len(messages):
            # The messages were purged: librdkafka gave the Kafka transaction up and gives the reason only in its log.
            return RehearsalFailure(topic, None, "Kafka refuses it in a transaction")
        return None

    def _abort_failed(self, producer: TransactionalProducer) -> None:
        """Abort what failed; if the abort fails, the next producer's `init_transactions` or the time-out aborts it."""
        try:
            producer.abort(_ABORT_S)
        except ProducerFailedError as error:
            log.info("rehearsal_not_aborted", error=str(error))

    def _ready(self) -> TransactionalProducer:
        if self._producer is None:
            over: dict[str, Any] = {"topic.metadata.propagation.max.ms": _PROPAGATION_MS}
            [self._producer] = initialised(
                self._config,
                [self._transactional_id],
                time.monotonic() + _INITIALISE_S,
                message_timeout_s=_DELIVERY_S,
                **over,
            )
        return self._producer


class _Endings:
    """Aborts the open transactions of former owners' rehearsals; acquisitions do not wait for it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._under_way: set[str] = set()

    def take(self, config: KafkaConfig, transactional_id: str) -> None:
        with self._lock:
            if transactional_id in self._under_way or len(self._under_way) >= _ENDED_AT_ONCE:
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


_ENDINGS: Final = _Endings()


def end_rehearsal(config: KafkaConfig, incarnation: str) -> None:
    """Abort the open transaction of a former owner's rehearsal, so that it holds no consumer back; does not wait.

    A rehearsal commits nothing, so safety does not depend on the abort. It may take long, because the rehearsed topic
    may be one that takes no writes.
    """
    _ENDINGS.take(config, rehearsal_id(config.prefix, incarnation))


def _reports(errors: list[KafkaError], taken: list[int]) -> Callable[[Any, Any], None]:
    """Return a delivery callback that collects the first errors, and the offsets of what was taken."""

    def report(error: Any, message: Any) -> None:
        if error is None:
            taken.append(message.offset())
        elif error.code() not in _AFTERMATH:
            errors.append(error)

    return report
