"""The transactional ids of an incarnation, and whether Kafka lets halfway use such ids at all.

See docs/protocol.md#ownership-and-fencing.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable
from typing import Final

from confluent_kafka import KafkaError

from halfway.domain.errors import ConfigurationError, KafkaUnavailableError
from halfway.kafka.clients.config import KafkaConfig
from halfway.kafka.clients.transactional_producer import ProducerFailedError, initialised

_ID_BYTES: Final = 8


def lane_ids(prefix: str, incarnation: str) -> tuple[str, ...]:
    """Return the ids with which an incarnation writes: its lane's two, and that for suspects.

    A former owner may be known by its incarnation alone: this never changes.
    """
    return tuple(f"{prefix}{incarnation}.{name}" for name in ("0", "1", "q"))


def rehearsal_id(prefix: str, incarnation: str) -> str:
    """Return the id with which an incarnation tries messages out: it never commits anything.

    It stands in no owner record: the incarnation tells it.
    """
    return f"{prefix}{incarnation}.r"


def verify_transactional_ids(config: KafkaConfig, deadline: float, cancelled: Callable[[], bool]) -> None:
    """Initialise a transactional id that nobody uses: there is no other way to test the ACL. Blocks.

    It waits for a transaction coordinator that is not ready yet until `deadline`, on `time.monotonic()`.

    Raises:
        ConfigurationError: an ACL is missing; it names on what, and the command that adds it.
        KafkaUnavailableError: Kafka did not do it in time, or it was cancelled.

    """
    name = f"{config.prefix}verify.{secrets.token_hex(_ID_BYTES)}"
    try:
        producers = initialised(config, [name], deadline, cancelled)
    except ProducerFailedError as error:
        refused = _refused(config, error)
        if refused is not None:
            raise refused from error
        raise KafkaUnavailableError(f"Kafka did not initialise a transactional id: {error}") from error
    for producer in producers:
        producer.abandon()


def _refused(config: KafkaConfig, error: ProducerFailedError) -> ConfigurationError | None:
    if error.code == KafkaError.TRANSACTIONAL_ID_AUTHORIZATION_FAILED:
        thing = f"Describe and Write on transactional ids {config.prefix}*"
        acl = (
            f"--transactional-id '{config.prefix}' --resource-pattern-type prefixed "
            "--operation Describe --operation Write"
        )
    elif error.code == KafkaError.CLUSTER_AUTHORIZATION_FAILED:
        thing, acl = "IdempotentWrite on the cluster", "--cluster --operation IdempotentWrite"
    else:
        return None
    return ConfigurationError(
        f"Kafka does not let halfway do this: {thing} ({error}): allow it with kafka-acls.sh "
        f"--bootstrap-server {config.properties['bootstrap.servers']} --add {acl}"
    )
