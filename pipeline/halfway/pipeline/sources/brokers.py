"""Topics and offsets as the brokers know them: by librdkafka, or by the Java client of Spark's connector.

With the Java client one set of security properties is enough for a job on Spark.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final, Literal, Protocol

from halfway.pipeline.errors import AccessError, ConnectorError
from halfway.pipeline.sources.pins import PartitionPin, TopicPin

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from halfway.pipeline.access import KafkaAccess

Place = tuple[str, int]
"""A topic and a partition."""
Offsets = Mapping[Place, tuple[int, int]]
"""An offset and the time in ms of the record there; -1 if there is none."""
At = Literal["earliest", "latest"] | int
"""Where a partition begins or ends, or its first record that is dated at a time in ms or later."""
_TIMEOUT_MS: Final = 30_000
_NOT_THERE: Final = ("UnknownTopicOrPartitionException", "InvalidTopicException")
CLIENT_DEFAULTS: Final = {
    # Without it librdkafka prints a line for each of twenty attempts a second. The error has the same text.
    "log_level": "2",
    # A firewall or balancer drops what is sent on an idle connection without a word.
    "connections.max.idle.ms": "120000",
    "socket.timeout.ms": "10000",
}


class Brokers(Protocol):
    """What a client answers. It raises AccessError if Kafka does not answer."""

    def described(self, topics: Sequence[str]) -> Mapping[str, tuple[int, tuple[int, int]]]:
        """Return, for those of these topics that exist, the number of partitions, and the id as two signed numbers."""

    def offsets(self, places: Iterable[Place], at: At, *, committed: bool = False) -> Offsets:
        """Return offsets; the end is that for readers of committed records if `committed`."""

    def configured(self, topics: Iterable[str]) -> Mapping[str, Mapping[str, Any]]:
        """Return the configuration of each topic."""


def pin(brokers: Brokers, topics: Sequence[str]) -> list[TopicPin]:
    """Return the present pins of those of these topics that exist."""
    now = round(time.time() * 1000)
    found = brokers.described(topics)
    places = [(topic, number) for topic, (count, _) in found.items() for number in range(count)]
    if not places:
        return []
    # In this order `high` is not below `end`.
    start, end = brokers.offsets(places, "earliest"), brokers.offsets(places, "latest", committed=True)
    high, first = brokers.offsets(places, "latest"), brokers.offsets(places, 0)
    configured = brokers.configured(found)
    pins = []
    for topic, (count, made) in found.items():
        partitions = tuple(
            PartitionPin(
                partition=number,
                start=min(start[topic, number][0], end[topic, number][0]),
                end=end[topic, number][0],
                high=max(high[topic, number][0], end[topic, number][0]),
                first_at=first[topic, number][1] if first[topic, number][0] >= 0 else None,
            )
            for number in range(count)
        )
        policy, kept_ms = str(configured[topic]["cleanup.policy"]), int(configured[topic]["retention.ms"])
        pins.append(
            TopicPin(
                topic=topic,
                at=now,
                partitions=partitions,
                compacted="compact" in policy,
                tombstones_kept_ms=int(configured[topic]["delete.retention.ms"]),
                kept_ms=kept_ms if "delete" in policy and kept_ms >= 0 else None,
                made="".join(f"{half % (1 << 64):016x}" for half in made),
            )
        )
    return pins


class ClientBrokers:
    """An admin client of librdkafka."""

    def __init__(self, access: KafkaAccess) -> None:
        """Take the addresses; AccessError if the properties cannot be used."""
        from confluent_kafka import KafkaError, KafkaException
        from confluent_kafka import admin as kafka

        # Its types are incomplete.
        self._kafka: Any = kafka
        self._servers = access.bootstrap_servers if access.java else ""
        self._errors: list[KafkaError] = []
        try:
            self._admin = self._kafka.AdminClient({
                **CLIENT_DEFAULTS, **access.librdkafka, "error_cb": self._errors.append,
            })  # fmt: skip
        except KafkaException as error:
            raise AccessError(
                f"a property of HALFWAY_KAFKA__… or [kafka] cannot be used: {error.args[0].str()}: correct or remove it"
            ) from None

    @contextmanager
    def _answering(self) -> Iterator[float]:
        from confluent_kafka import KafkaError, KafkaException

        try:
            yield _TIMEOUT_MS / 1000
        except KafkaException as error:
            self._admin.poll(0)
            whole = KafkaError._ALL_BROKERS_DOWN  # noqa: SLF001 - the names of librdkafka's own errors begin with _
            reasons = [error.args[0].str(), *[one.str() for one in self._errors if one.code() != whole][-1:]]
            raise AccessError(f"Kafka at {self._servers} did not answer: {': '.join(reasons)}") from None

    def described(self, topics: Sequence[str]) -> Mapping[str, tuple[int, tuple[int, int]]]:
        """Return the partitions and ids of topics."""
        from confluent_kafka import TopicCollection

        with self._answering() as timeout:
            known = self._admin.list_topics(timeout=timeout).topics
            found = {
                name: len(known[name].partitions) for name in topics if name in known and known[name].error is None
            }
            if not found:
                return {}
            answers = self._admin.describe_topics(TopicCollection(list(found)), request_timeout=timeout)
            ids = {name: future.result().topic_id for name, future in answers.items()}
        return {
            name: (count, (ids[name].get_most_significant_bits(), ids[name].get_least_significant_bits()))
            for name, count in found.items()
        }

    def offsets(self, places: Iterable[Place], at: At, *, committed: bool = False) -> Offsets:
        """Return offsets."""
        from confluent_kafka import IsolationLevel, TopicPartition

        of = self._kafka.OffsetSpec
        spec = of.for_timestamp(at) if isinstance(at, int) else getattr(of, at)()
        level = IsolationLevel.READ_COMMITTED if committed else IsolationLevel.READ_UNCOMMITTED
        asked = dict.fromkeys((TopicPartition(*place) for place in places), spec)
        with self._answering() as timeout:
            futures = self._admin.list_offsets(asked, isolation_level=level, request_timeout=timeout)
            answers = {(key.topic, key.partition): future.result() for key, future in futures.items()}
        return {place: (answer.offset, answer.timestamp) for place, answer in answers.items()}

    def configured(self, topics: Iterable[str]) -> Mapping[str, Mapping[str, Any]]:
        """Return the configuration of topics."""
        resources = [self._kafka.ConfigResource(self._kafka.ResourceType.TOPIC, name) for name in topics]
        with self._answering() as timeout:
            futures = self._admin.describe_configs(resources, request_timeout=timeout)
            answers = {resource.name: future.result() for resource, future in futures.items()}
        return {name: {key: entry.value for key, entry in answer.items()} for name, answer in answers.items()}


class JavaBrokers:
    """An admin client in Spark's JVM. Close it after use."""

    def __init__(self, spark: SparkSession, access: KafkaAccess) -> None:
        """Connect; AccessError if the properties cannot be used."""
        from py4j.java_gateway import JavaClass
        from py4j.protocol import Py4JJavaError

        # Untyped: py4j builds its classes while it runs.
        jvm: Any = spark.sparkContext._jvm  # noqa: SLF001 - the documented way into Spark's JVM from Python
        self._jvm = jvm
        self._kafka = jvm.org.apache.kafka
        if not isinstance(self._kafka.clients.admin.Admin, JavaClass):
            raise ConnectorError("Spark's Kafka connector is not on the class path: submit with --packages or --jars")
        self._access = access
        properties = jvm.java.util.Properties()
        for name, value in access.java.items():
            properties.setProperty(name, value)
        properties.setProperty("default.api.timeout.ms", str(_TIMEOUT_MS))
        properties.setProperty("request.timeout.ms", str(_TIMEOUT_MS // 2))
        try:
            self._admin = self._kafka.clients.admin.Admin.create(properties)
        except Py4JJavaError as error:
            raise AccessError(f"Kafka's client cannot use its properties: {_reason(error)}") from None

    def close(self) -> None:
        """Close the connection."""
        self._admin.close()

    def described(self, topics: Sequence[str]) -> Mapping[str, tuple[int, tuple[int, int]]]:
        """Return the partitions and ids of topics."""
        futures = self._admin.describeTopics(self._list(topics)).topicNameValues()
        answers = {topic: self._get(futures.get(topic), missing_is_none=True) for topic in topics}
        return {
            topic: (
                int(answer.partitions().size()),
                (answer.topicId().getMostSignificantBits(), answer.topicId().getLeastSignificantBits()),
            )
            for topic, answer in answers.items()
            if answer is not None
        }

    def offsets(self, places: Iterable[Place], at: At, *, committed: bool = False) -> Offsets:
        """Return offsets."""
        of, level = self._kafka.clients.admin.OffsetSpec, self._kafka.common.IsolationLevel
        spec = of.forTimestamp(at) if isinstance(at, int) else getattr(of, at)()
        wanted = self._jvm.java.util.HashMap()
        keys = {place: self._kafka.common.TopicPartition(*place) for place in places}
        for key in keys.values():
            wanted.put(key, spec)
        options = self._kafka.clients.admin.ListOffsetsOptions(
            level.READ_COMMITTED if committed else level.READ_UNCOMMITTED
        )
        answers = self._get(self._admin.listOffsets(wanted, options).all())
        return {name: (int(answers.get(key).offset()), int(answers.get(key).timestamp())) for name, key in keys.items()}

    def configured(self, topics: Iterable[str]) -> Mapping[str, Mapping[str, Any]]:
        """Return the configuration of topics, as far as it removes records."""
        resource = self._kafka.common.config.ConfigResource
        kind = self._jvm.java.lang.Class.forName(
            "org.apache.kafka.common.config.ConfigResource$Type",
            True,
            self._admin.getClass().getClassLoader(),
        ).getEnumConstants()
        of_topic = next(each for each in kind if each.name() == "TOPIC")
        keys = {topic: resource(of_topic, topic) for topic in topics}
        answers = self._get(self._admin.describeConfigs(self._list(keys.values())).all())
        names = ("cleanup.policy", "delete.retention.ms", "retention.ms")
        return {topic: {name: answers.get(key).get(name).value() for name in names} for topic, key in keys.items()}

    def _list(self, items: Iterable[Any]) -> Any:
        array = self._jvm.java.util.ArrayList()
        for item in items:
            array.add(item)
        return array

    def _get(self, future: Any, *, missing_is_none: bool = False) -> Any:
        from py4j.protocol import Py4JJavaError

        try:
            return future.get()
        except Py4JJavaError as error:
            reason = _reason(error)
            if missing_is_none and reason.partition(":")[0].endswith(_NOT_THERE):
                return None
            raise AccessError(f"Kafka at {self._access.bootstrap_servers} did not answer: {reason}") from None


def _reason(error: Any) -> str:
    exception = error.java_exception
    while exception.getCause() is not None:
        exception = exception.getCause()
    return str(exception.toString())
