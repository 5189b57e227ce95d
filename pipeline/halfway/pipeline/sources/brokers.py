"""Topics and offsets, by the connector's own Java client.

So one set of security properties is enough, and a machine that submits a job needs no other client.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from halfway.pipeline.errors import AccessError, ConnectorError
from halfway.pipeline.sources.pins import PartitionPin, TopicPin

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from halfway.pipeline.access import KafkaAccess

_TIMEOUT_MS: Final = 30_000
Offsets = Mapping[tuple[str, int], tuple[int, int]]
"""By topic and partition, an offset and the time in ms of the record there; -1 if there is none."""
_NOT_THERE: Final = ("UnknownTopicOrPartitionException", "InvalidTopicException")


@dataclass(frozen=True, kw_only=True)
class Cleanup:
    """The part of a topic's configuration that removes records. A negative limit is none."""

    policy: str
    tombstones_kept_ms: int
    kept_ms: int

    def pin(self, topic: str, now: int, partitions: tuple[PartitionPin, ...], made: Any) -> TopicPin:
        """Return a pin of a topic with this configuration; `made` is its id, as two numbers of 64 bits with a sign."""
        by_age = "delete" in self.policy and self.kept_ms >= 0
        return TopicPin(
            topic=topic,
            at=now,
            partitions=partitions,
            compacted="compact" in self.policy,
            tombstones_kept_ms=self.tombstones_kept_ms,
            kept_ms=self.kept_ms if by_age else None,
            made="".join(f"{half % (1 << 64):016x}" for half in made),
        )


@dataclass(frozen=True, kw_only=True)
class Bounds:
    """Where partitions begin and end. They are asked for in this order, so `high` is not below `end`."""

    start: Offsets
    end: Offsets
    """The end for readers of committed records."""
    high: Offsets
    first: Offsets
    """The first record."""

    def pins(self, topic: str, count: int) -> tuple[PartitionPin, ...]:
        """Return pins of all partitions of a topic."""
        pins = []
        for number in range(count):
            place = topic, number
            end, (first, first_at) = self.end[place][0], self.first[place]
            pins.append(
                PartitionPin(
                    partition=number,
                    start=min(self.start[place][0], end),
                    end=end,
                    high=max(self.high[place][0], end),
                    first_at=first_at if first >= 0 else None,
                )
            )
        return tuple(pins)


class Brokers:
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

    def pin(self, topics: Sequence[str]) -> list[TopicPin]:
        """Return the present pins of those of these topics that exist; AccessError if Kafka does not answer."""
        now = round(time.time() * 1000)
        described = self._described(topics)
        found = {topic: int(description.partitions().size()) for topic, description in described.items()}
        ids = {topic: description.topicId() for topic, description in described.items()}
        made = {topic: (each.getMostSignificantBits(), each.getLeastSignificantBits()) for topic, each in ids.items()}
        everything = [(topic, partition) for topic, count in found.items() for partition in range(count)]
        spec, level = self._kafka.clients.admin.OffsetSpec, self._kafka.common.IsolationLevel
        bounds = Bounds(
            start=self._offsets(everything, spec.earliest(), level.READ_UNCOMMITTED),
            end=self._offsets(everything, spec.latest(), level.READ_COMMITTED),
            high=self._offsets(everything, spec.latest(), level.READ_UNCOMMITTED),
            first=self._offsets(everything, spec.forTimestamp(0), level.READ_UNCOMMITTED),
        )
        configured = self._configured(found)
        return [
            configured[topic].pin(topic, now, bounds.pins(topic, count), made[topic]) for topic, count in found.items()
        ]

    def first_dated_after(self, partitions: Iterable[tuple[str, int]], ms: int) -> dict[tuple[str, int], int]:
        """Return the offset of the first record of each of these partitions that is dated later, if there is one."""
        spec, level = self._kafka.clients.admin.OffsetSpec, self._kafka.common.IsolationLevel
        found = self._offsets(partitions, spec.forTimestamp(ms + 1), level.READ_UNCOMMITTED)
        return {place: offset for place, (offset, _) in found.items() if offset >= 0}

    def _described(self, topics: Sequence[str]) -> dict[str, Any]:
        futures = self._admin.describeTopics(self._list(topics)).topicNameValues()
        answers = {topic: self._get(futures.get(topic), missing_is_none=True) for topic in topics}
        return {topic: description for topic, description in answers.items() if description is not None}

    def _offsets(self, partitions: Iterable[tuple[str, int]], spec: Any, level: Any) -> Offsets:
        wanted = self._jvm.java.util.HashMap()
        keys = {}
        for topic, partition in partitions:
            keys[topic, partition] = self._kafka.common.TopicPartition(topic, partition)
            wanted.put(keys[topic, partition], spec)
        options = self._kafka.clients.admin.ListOffsetsOptions(level)
        answers = self._get(self._admin.listOffsets(wanted, options).all())
        return {name: (int(answers.get(key).offset()), int(answers.get(key).timestamp())) for name, key in keys.items()}

    def _configured(self, topics: Iterable[str]) -> dict[str, Cleanup]:
        resource = self._kafka.common.config.ConfigResource
        kind = self._jvm.java.lang.Class.forName(
            "org.apache.kafka.common.config.ConfigResource$Type",
            True,
            self._admin.getClass().getClassLoader(),
        ).getEnumConstants()
        of_topic = next(each for each in kind if each.name() == "TOPIC")
        keys = {topic: resource(of_topic, topic) for topic in topics}
        answers = self._get(self._admin.describeConfigs(self._list(keys.values())).all())
        found = {}
        for topic, key in keys.items():
            config = answers.get(key)
            found[topic] = Cleanup(
                policy=str(config.get("cleanup.policy").value()),
                tombstones_kept_ms=int(config.get("delete.retention.ms").value()),
                kept_ms=int(config.get("retention.ms").value()),
            )
        return found

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
