"""What Kafka's ACLs deny halfway: the resource, the operations, and the command that allows them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

from confluent_kafka import KafkaError, KafkaException, TopicCollection
from confluent_kafka.admin import AclOperation  # type: ignore[attr-defined] # public, but not for mypy

from halfway.kafka.clients.config import KafkaConfig

_OPERATIONS: Final[Mapping[int, tuple[str, ...]]] = {
    KafkaError.TOPIC_AUTHORIZATION_FAILED: ("Read", "Write", "Describe"),
    KafkaError.GROUP_AUTHORIZATION_FAILED: ("Read", "Describe"),
    KafkaError.TRANSACTIONAL_ID_AUTHORIZATION_FAILED: ("Describe", "Write"),
    KafkaError.CLUSTER_AUTHORIZATION_FAILED: ("IdempotentWrite",),
}
_NEEDED: Final = (AclOperation.READ, AclOperation.WRITE, AclOperation.DESCRIBE)
_ANSWER_S: Final = 2.0


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
    allowing = acl_command(config, flags, operations)
    return f"Kafka denies halfway {' or '.join(operations)} on {thing}: allow it with {allowing}"


def explained(code: int | None, config: KafkaConfig) -> str | None:
    """Return what an ACL denies, with the internal topics that it is about: Kafka's error does not name them. Blocks.

    None if the error is another one, or if it is not about an internal topic.
    """
    if code != KafkaError.TOPIC_AUTHORIZATION_FAILED:
        return denial(code, config)
    denied = _denied(config)
    operations = sorted({operation for missing in denied.values() for operation in missing})
    return denial(code, config, topics=sorted(denied), operations=operations) if denied else None


def _denied(config: KafkaConfig) -> dict[str, list[str]]:
    """Return the operations that halfway may not do on its topics; nothing if Kafka does not say so in time."""
    topics = (config.half_topic, config.op_topic, config.parked_topic, config.owners_topic)
    admin = config.make_admin()
    requests = admin.describe_topics(
        TopicCollection(list(topics)), include_authorized_operations=True, request_timeout=_ANSWER_S
    )
    denied: dict[str, list[str]] = {}
    for name, request in requests.items():
        try:
            allowed = request.result(_ANSWER_S).authorized_operations or _NEEDED
        except KafkaException as error:
            if error.args[0].code() == KafkaError.TOPIC_AUTHORIZATION_FAILED:
                denied[name] = ["Describe"]
        except TimeoutError:
            continue
        else:
            if missing := [operation.name.title() for operation in _NEEDED if operation not in allowed]:
                denied[name] = missing
    return denied


def acl_command(config: KafkaConfig, flags: str, operations: Sequence[str]) -> str:
    """Return the whole command that allows operations on a resource."""
    user = config.properties.get("sasl.username", "<halfway's user>")
    return (
        f"kafka-acls.sh --bootstrap-server {config.properties['bootstrap.servers']} --add "
        f"--allow-principal 'User:{user}' {flags} " + " ".join(f"--operation {operation}" for operation in operations)
    )


def acl_flags(config: KafkaConfig, thing: str) -> str:
    """Return what names a resource to kafka-acls.sh; `thing` is as in an error: its kind, then its name."""
    kind, _, name = thing.rpartition(" ")
    if thing == "the cluster":
        return "--cluster"
    flag = "--group" if kind == "consumer group" else "--topic"
    own = name.startswith(config.prefix)
    return f"{flag} '{config.prefix}' --resource-pattern-type prefixed" if own else f"{flag} '{name}'"


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
