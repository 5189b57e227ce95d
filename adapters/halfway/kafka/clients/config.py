"""How to reach Kafka, the librdkafka configuration of each kind of client, and what Kafka's ACLs deny halfway.

The operator's librdkafka properties pass through. The properties that safety depends on are set here and cannot be
overridden.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Annotated, Any, Final

from confluent_kafka import KafkaError, KafkaException, TopicCollection
from confluent_kafka.admin import AclOperation  # type: ignore[attr-defined] # public, but not for mypy
from pydantic import Field

from halfway.coordinator.requests import Seconds, SharedSettings
from halfway.kafka.clients.librdkafka_events import THROTTLING, LibrdkafkaLog
from halfway.kafka.clients.seam import Admin, Clients, Consumer, Producer
from halfway.protocol.errors import ConfigurationError

KINDS: Final = ("half", "op", "parked", "groups", "owners", "keys", "audit")
KIB: Final = 1024
MIB: Final = 1024 * 1024
RECORD_OVERHEAD: Final = 64 * KIB
"""Bytes that a record may have beyond its payload: ids, names, headers, framing, and a remark that is added later."""
HALF_BATCH_BYTES: Final = 256 * KIB
_DIGEST_BYTES: Final = 56
"""The most bytes that an op marker stores for a message, besides the name of its topic."""
_TOPIC_BYTES: Final = 252
_LEAST_MESSAGE_BYTES: Final = 6
"""The fewest bytes that a message takes in a half record."""
_NAMED_PROPERTY: Final = re.compile(r"(?<![\w./])[a-z]+(?:\.+[a-z]+)+(?![\w./])")
USUAL_PROPERTIES: Final = (
    "bootstrap.servers",
    "security.protocol",
    "sasl.mechanism",
    "sasl.username",
    "sasl.password",
    "ssl.ca.location",
    "ssl.certificate.location",
    "ssl.key.location",
    "ssl.key.password",
    "client.id",
)
"""Properties that a misspelt one may have meant. Any other property of librdkafka passes through as well."""
_SIMILARITY: Final = 0.85
_PREFIX = re.compile(r"[A-Za-z0-9._-]{1,64}\Z")
MAX_PREPARE_TIMEOUT_S: Final = 5.0
"""An instance that was frozen must not deliver old prepares."""
_MAX_MESSAGE_BYTES: Final = 1_000_000_000
"""The most that librdkafka allows."""
_MAX_SESSION_TIMEOUT_S: Final = 300.0
"""librdkafka's `max.poll.interval.ms`, which must not be shorter."""
_PLACE: Final = re.compile(r"(?P<topic>[A-Za-z0-9._-]+)\[(?P<partition>\d{1,9})\]@(?P<offset>\d{1,18})\Z")

_DEFAULTS: Final[Mapping[str, str | int | bool]] = {
    # Preferences: an operator may choose otherwise.
    "client.id": "halfway",
    "reconnect.backoff.ms": 50,
    "reconnect.backoff.max.ms": 1_000,
    "socket.keepalive.enable": True,
    "log.connection.close": False,
    # A firewall or balancer between halfway and Kafka forgets a connection that is idle, and then drops what is sent on
    # it without a word. So close it before that, and give up a connection on which no answer comes.
    "connections.max.idle.ms": 120_000,
    "socket.timeout.ms": 10_000,
}
_CONSUMER_DEFAULTS: Final[Mapping[str, str | int | bool]] = {
    # The default lets one consumer hold 64 MiB per partition.
    "queued.max.messages.kbytes": 16_384,
    "fetch.error.backoff.ms": 100,
    # How long the consumer stops fetching after it finds its queue full. Handling a queue of this size takes a small
    # part of the default of 1 s, so a recovery would mostly wait.
    "fetch.queue.backoff.ms": 20,
}

_RESERVED: Final[Mapping[str, str]] = {
    "acks": "an acknowledged record must be on every replica in sync",
    "request.required.acks": "an acknowledged record must be on every replica in sync",
    "enable.idempotence": "a retried record must be written once",
    "enable.gapless.guarantee": "halfway replaces its producers itself",
    "transactional.id": "fencing rests on it",
    "transaction.timeout.ms": "set HALFWAY_TRANSACTION_TIMEOUT_S instead",
    "message.timeout.ms": "set HALFWAY_REQUEST_TIMEOUT_S instead",
    "delivery.timeout.ms": "set HALFWAY_REQUEST_TIMEOUT_S instead",
    "max.in.flight": "keyed order rests on it",
    "max.in.flight.requests.per.connection": "keyed order rests on it",
    "retries": "retries are bounded by time, not by number",
    "message.send.max.retries": "retries are bounded by time, not by number",
    "partitioner": "keyed messages must land where a Java client puts them",
    "batch.size": "a topic refuses batches above its max.message.bytes",
    "message.max.bytes": "the limits of the topics apply",
    "max.request.size": "the limits of the topics apply",
    "delivery.report.only.error": "every prepare waits for its delivery report",
    "isolation.level": "what an unfinished Kafka transaction wrote must not be read",
    "group.id": "set HALFWAY_KAFKA_PREFIX instead",
    "group.instance.id": "membership is dynamic",
    "group.protocol": "the classic protocol is used",
    "group.protocol.type": "the classic protocol is used",
    "group.remote.assignor": "the classic protocol is used",
    "partition.assignment.strategy": "shards move one by one, not all at once",
    "session.timeout.ms": "set HALFWAY_SESSION_TIMEOUT_S instead",
    "heartbeat.interval.ms": "set HALFWAY_SESSION_TIMEOUT_S instead",
    "max.poll.interval.ms": "set HALFWAY_SESSION_TIMEOUT_S instead",
    "enable.auto.commit": "halfway commits cursors itself",
    "auto.commit.enable": "halfway commits cursors itself",
    "auto.commit.interval.ms": "halfway commits cursors itself",
    "enable.auto.offset.store": "halfway commits cursors itself",
    "auto.offset.reset": "a cursor must never skip records",
    "enable.partition.eof": "recovery rests on it",
    "allow.auto.create.topics": "halfway never creates a topic by accident",
    "topic.blacklist": "halfway's topics must be seen",
    "default.topic.config": "set the properties themselves",
    "plugin.library.paths": "plugins can change every record",
    # Nothing rests on these. But every client has its own value, so another one would have no effect.
    "linger.ms": "each of its producers has its own",
    "queue.buffering.max.ms": "each of its producers has its own",
    "queue.buffering.max.messages": "it bounds what is in flight itself",
    "queue.buffering.max.kbytes": "it bounds what is in flight itself",
    "statistics.interval.ms": "nothing reads them but the metrics of round trips",
}
_RESERVED_PREFIXES: Final = ("test.mock.",)


@dataclass(frozen=True, kw_only=True)
class KafkaSettings(SharedSettings):
    """The settings of the Kafka adapter: waiting, work in flight, and the configuration of the internal topics."""

    replication_factor: Annotated[int, Field(ge=1, le=32_767)] | None = None
    """Replicas of the internal topics; without it 3 if the cluster has three brokers at the first start, else 1."""
    session_timeout_s: Annotated[float, Field(gt=0, le=_MAX_SESSION_TIMEOUT_S)] = 10
    """After this time a silent instance loses its shards; within the brokers' limits (by default 6 to 300 s)."""
    transaction_timeout_s: Seconds = 45
    """`transaction.timeout.ms` of the lane; a commit stuck for two thirds of it, at most 30 s, ends the lane."""
    skip_records: tuple[str, ...] = ()
    """Records of half, op and parked in an unknown schema that are treated as foreign: `topic[partition]@offset`."""


@dataclass(frozen=True, kw_only=True)
class KafkaConfig(KafkaSettings):
    """How to reach Kafka, and the settings of the adapter.

    Raises ConfigurationError, which names the setting, if a value is invalid or a property would break safety.
    """

    properties: Mapping[str, str] = field(repr=False)
    """The operator's librdkafka properties, including `bootstrap.servers`; they may contain secrets."""
    prefix: str = "_halfway."
    instance_url: str = ""
    """The URL at which other instances reach this one; the owner record contains it."""
    has_keys: bool = False
    """Whether the topic of keys exists."""
    prepare_timeout_s: float = MAX_PREPARE_TIMEOUT_S
    """`message.timeout.ms` of the half writer: a frozen process that thaws later than this delivers nothing more."""
    max_stall_s: float = 30
    lane_max_ends: int = 1_000
    lane_max_bytes: int = 16 * MIB
    lane_queue: int = 10_000
    """Ends that may wait for the lane."""
    lane_queue_bytes: int = 256 * MIB
    """Payload bytes of the ends that may wait for the lane; the suspect lane has the same limit of its own."""
    writer_in_flight: int = 20_000
    """Prepares that may wait for their delivery report."""
    writer_in_flight_bytes: int = 64 * MIB
    clients: Clients = field(default=Clients(), repr=False)
    """Makes the clients: librdkafka's, or those of a simulated broker."""

    def __post_init__(self) -> None:
        """Reject values that cannot work or would not be safe."""
        if not self.properties.get("bootstrap.servers"):
            raise ConfigurationError(
                "bootstrap.servers is not set: set HALFWAY_KAFKA__BOOTSTRAP_SERVERS to host:port of a Kafka broker"
            )
        for name, value in self.properties.items():
            _refuse_reserved(name)
            _require_text(name, value)
        if _PREFIX.match(self.prefix) is None:
            raise ConfigurationError(
                f"kafka_prefix {self.prefix!r} cannot be the start of a topic name: use up to 64 of A-Z a-z 0-9 . _ -"
            )
        self._require_places()
        if self.op_retention_ms <= self.outcome_horizon_s * 1000:
            raise ConfigurationError(
                f"op_retention_ms is {self.op_retention_ms}: op markers must outlive outcome_horizon_s "
                f"({self.outcome_horizon_s:g} s)"
            )

    def _require_places(self) -> None:
        topics = (self.half_topic, self.op_topic, self.parked_topic)
        for place in self.skip_records:
            match = _PLACE.match(place)
            if match is None or match["topic"] not in topics:
                raise ConfigurationError(
                    f"skip_records contains {place!r}: name records as the error does, of {', '.join(topics)}: for "
                    f"example {self.half_topic}[0]@42"
                )

    # --- names

    def topic(self, kind: str) -> str:
        """Return the name of an internal topic; `kind` is one of `KINDS`."""
        if kind not in KINDS:
            raise ValueError(kind)
        return self.prefix + kind

    @cached_property
    def prefix_header(self) -> tuple[str, bytes]:
        """The header that identifies this prefix's messages in a real topic that other deployments write to as well."""
        return "halfway-prefix", self.prefix.encode()

    @cached_property
    def half_topic(self) -> str:
        return self.prefix + "half"

    @cached_property
    def op_topic(self) -> str:
        return self.prefix + "op"

    @cached_property
    def parked_topic(self) -> str:
        return self.prefix + "parked"

    @property
    def owners_topic(self) -> str:
        return self.prefix + "owners"

    @property
    def members_group(self) -> str:
        return self.prefix + "members"

    @property
    def cursors_group(self) -> str:
        """The consumer group whose offsets are the cursors."""
        return self.prefix + "cursors"

    # --- sizes and times

    @cached_property
    def half_record_bytes(self) -> int:
        """The largest encoded half record that a first prepare may write."""
        return self.max_prepare_bytes + RECORD_OVERHEAD

    @property
    def half_max_message_bytes(self) -> int:
        """The least `max.message.bytes` of half: the largest record, with room for what the lane adds."""
        return max(self.half_record_bytes, HALF_BATCH_BYTES) + RECORD_OVERHEAD

    @property
    def parked_max_message_bytes(self) -> int:
        """The least `max.message.bytes` of parked: any record of half, with the reason for parking."""
        return self.half_max_message_bytes + RECORD_OVERHEAD

    @cached_property
    def op_record_bytes(self) -> int:
        """The largest encoded op marker of a transaction with as many messages as a prepare may have."""
        messages = min(self.max_messages, self.half_record_bytes // _LEAST_MESSAGE_BYTES)
        # The half record contains the topic names too.
        names = min(messages * _TOPIC_BYTES, self.half_record_bytes)
        return names + messages * _DIGEST_BYTES + RECORD_OVERHEAD

    @property
    def op_max_message_bytes(self) -> int:
        """The least `max.message.bytes` of op: the largest marker, and a batch of small ones."""
        return max(self.op_record_bytes, HALF_BATCH_BYTES) + RECORD_OVERHEAD

    @property
    def min_compaction_lag_ms(self) -> int:
        """The `min.compaction.lag.ms` of the internal topics: the smallest safe value."""
        return round(self.outcome_horizon_s * 1000)

    @property
    def segment_ms(self) -> int:
        """The `segment.ms` of the internal topics. A segment is compacted only after it is rolled."""
        return min(3_600_000, 4 * self.min_compaction_lag_ms)

    @property
    def max_compaction_lag_ms(self) -> int:
        return 2 * max(self.segment_ms, self.min_compaction_lag_ms)

    @property
    def lane_stall_s(self) -> float:
        """An incarnation ends if its lane makes no progress for this long; the broker waits for longer."""
        return min(self.max_stall_s, self.transaction_timeout_s * 2 / 3)

    # --- clients

    def producer(self, **overrides: Any) -> dict[str, Any]:
        """Return the configuration of a producer; `overrides` are properties by their librdkafka names.

        The producer is idempotent, with acks=all and the Java client's partitioner. Pass `transactional.id` to make it
        transactional.
        """
        if "transaction.timeout.ms" in overrides:
            # librdkafka refuses a longer one: a request must be able to fail before the transaction times out.
            longest = min(self._socket_timeout_ms, overrides["transaction.timeout.ms"])
            overrides = {"socket.timeout.ms": longest, **overrides}
        return self._properties(
            {},
            {
                "acks": "all",
                "enable.idempotence": True,
                "partitioner": "murmur2_random",
                "message.timeout.ms": round(self.prepare_timeout_s * 1000),
                # The topics' limits apply. What was prepared under a higher limit of this configuration must be ended.
                "message.max.bytes": _MAX_MESSAGE_BYTES,
                "batch.size": HALF_BATCH_BYTES,
                "allow.auto.create.topics": False,
            },
            overrides,
        )

    def consumer(self, **overrides: Any) -> dict[str, Any]:
        """Return the configuration of a consumer without auto-commit; `overrides` are librdkafka properties.

        It reads committed records, from the earliest one. Its group is that of the cursors; consumers that only assign
        themselves partitions never use the group.
        """
        return self._properties(
            _CONSUMER_DEFAULTS,
            {
                "group.id": self.cursors_group,
                "enable.auto.commit": False,
                "enable.auto.offset.store": False,
                "auto.offset.reset": "earliest",
                "isolation.level": "read_committed",
                "allow.auto.create.topics": False,
            },
            overrides,
        )

    @property
    def for_tools(self) -> str:
        """Return what Kafka's own tools need after `--bootstrap-server`; for a guarded listener a login too."""
        is_open = self.properties.get("security.protocol", "plaintext").lower() == "plaintext"
        return self.properties["bootstrap.servers"] + ("" if is_open else " --command-config admin.properties")

    def make_producer(self, **overrides: Any) -> Producer:
        return self.clients.producer(self.producer(**overrides))

    def make_consumer(self, **overrides: Any) -> Consumer:
        return self.clients.consumer(self.consumer(**overrides))

    def make_admin(self, **overrides: Any) -> Admin:
        return self.clients.admin(self.admin(**overrides))

    @property
    def _socket_timeout_ms(self) -> int:
        return int(self.properties.get("socket.timeout.ms", _DEFAULTS["socket.timeout.ms"]))

    def admin(self, **overrides: Any) -> dict[str, Any]:
        """Return the configuration of an admin client; `overrides` are properties by their librdkafka names."""
        return self._properties({}, {"allow.auto.create.topics": False}, overrides)

    def _properties(
        self, defaults: Mapping[str, Any], reserved: Mapping[str, Any], overrides: Mapping[str, Any]
    ) -> dict[str, Any]:
        own = {"logger": LibrdkafkaLog(), "throttle_cb": THROTTLING.note}
        return {**_DEFAULTS, **defaults, **self.properties, **reserved, **own, **overrides}


def _refuse_reserved(name: str) -> None:
    reason = _RESERVED.get(name)
    if reason is None and name.startswith(_RESERVED_PREFIXES):
        reason = "it is for tests of librdkafka"
    if reason is None and name.endswith("_cb"):
        reason = "it is a function"
    if reason is not None:
        raise ConfigurationError(
            f"Kafka property {name!r} is set by halfway ({reason}): remove HALFWAY_KAFKA__{variable_suffix(name)}",
            setting=name,
        )


def _require_text(name: str, value: str) -> None:
    """Raise ConfigurationError for text that confluent-kafka cannot take: it ends the process without a message."""
    try:
        readable = b"\0" not in f"{name}={value}".encode()
    except UnicodeEncodeError:
        readable = False
    if not readable:
        variable = f"HALFWAY_KAFKA__{variable_suffix(name)}"
        raise ConfigurationError(f"{variable!r} is not UTF-8, or contains a NUL: write it in UTF-8", setting=name)


def variable_suffix(name: str) -> str:
    """Return what follows HALFWAY_KAFKA__ in the variable of a property."""
    return name.upper().replace(".", "_")


def named_variables(message: str, properties: Mapping[str, str]) -> str:
    """Return the variables of the properties that a message of librdkafka names: those that are set, else any."""
    named = dict.fromkeys(_NAMED_PROPERTY.findall(message))
    names = [name for name in named if name in properties] or list(named)
    unknown = "No such configuration property" in message
    shown = (_variable(name) + (_meant(name) if unknown else "") for name in names)
    return ", ".join(shown) or "the HALFWAY_KAFKA__ settings"


def _meant(name: str) -> str:
    near = difflib.get_close_matches(name, USUAL_PROPERTIES, n=1, cutoff=_SIMILARITY)
    return f" (did you mean {_variable(near[0])}?)" if near else ""


def _variable(name: str) -> str:
    return f"HALFWAY_KAFKA__{variable_suffix(name)}"


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
        f"kafka-acls.sh --bootstrap-server {config.for_tools} --add "
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
