"""What Kafka's ACLs deny halfway: the resource, the operations, and the command that allows them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

from confluent_kafka import KafkaError

from halfway.kafka.clients.config import KafkaConfig

_OPERATIONS: Final[Mapping[int, tuple[str, ...]]] = {
    KafkaError.TOPIC_AUTHORIZATION_FAILED: ("Read", "Write", "Describe"),
    KafkaError.GROUP_AUTHORIZATION_FAILED: ("Read", "Describe"),
    KafkaError.TRANSACTIONAL_ID_AUTHORIZATION_FAILED: ("Describe", "Write"),
    KafkaError.CLUSTER_AUTHORIZATION_FAILED: ("IdempotentWrite",),
}
DENIED: Final = frozenset(_OPERATIONS)
"""The errors by which Kafka says that an ACL is missing."""


def denial(
    code: int | None,
    config: KafkaConfig,
    *,
    topics: Sequence[str] = (),
    group: str | None = None,
    operations: Sequence[str] = (),
) -> str | None:
    """Return what an ACL denies and the command that allows it; None if the error is another one.

    `topics` and `group` are what was asked for. Without a name it is everything with halfway's prefix.
    """
    if code is None or code not in _OPERATIONS:
        return None
    operations = operations or _OPERATIONS[code]
    thing, flags = _resource(code, config, topics, group)
    return (
        f"Kafka denies halfway {' or '.join(operations)} on {thing}: allow it with {command(config, flags, operations)}"
    )


def command(config: KafkaConfig, flags: str, operations: Sequence[str]) -> str:
    """Return the whole command that allows operations on a resource."""
    user = config.properties.get("sasl.username", "<halfway's user>")
    return (
        f"kafka-acls.sh --bootstrap-server {config.properties['bootstrap.servers']} --add "
        f"--allow-principal 'User:{user}' {flags} " + " ".join(f"--operation {operation}" for operation in operations)
    )


def _resource(code: int, config: KafkaConfig, topics: Sequence[str], group: str | None) -> tuple[str, str]:
    of_prefix = f"'{config.prefix}' --resource-pattern-type prefixed"
    if code == KafkaError.CLUSTER_AUTHORIZATION_FAILED:
        return "the cluster", "--cluster"
    if code == KafkaError.TRANSACTIONAL_ID_AUTHORIZATION_FAILED:
        return f"transactional ids {config.prefix}*", f"--transactional-id {of_prefix}"
    if code == KafkaError.GROUP_AUTHORIZATION_FAILED:
        return f"consumer group {group or config.prefix + '*'}", f"--group {of_prefix}"
    if not topics:
        return f"topics {config.prefix}*", f"--topic {of_prefix}"
    return f"topic {', '.join(topics)}", " ".join(f"--topic '{topic}'" for topic in topics)
