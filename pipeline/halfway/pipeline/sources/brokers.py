"""Topics and offsets as the brokers know them, by librdkafka: it reaches Kafka with the coordinator's own settings."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final, Literal

from confluent_kafka import IsolationLevel, KafkaError, KafkaException, TopicCollection, TopicPartition, admin

from halfway.pipeline.errors import AccessError
from halfway.pipeline.sources.pins import PartitionPin, TopicPin

if TYPE_CHECKING:
    from halfway.pipeline.access import KafkaAccess

Place = tuple[str, int]
"""A topic and a partition."""
_TIMEOUT_S: Final = 30
CLIENT_DEFAULTS: Final = {
    # Without it librdkafka prints a line for each of twenty attempts a second. The error has the same text.
    "log_level": "2",
    # A firewall or balancer drops what is sent on an idle connection without a word.
    "connections.max.idle.ms": "120000",
    "socket.timeout.ms": "10000",
}
_KAFKA: Final[Any] = admin  # whose types are incomplete


class Brokers:
    """An admin client. It raises AccessError if Kafka does not answer."""

    def __init__(self, access: KafkaAccess) -> None:
        """Take the addresses; AccessError if the properties cannot be used."""
        self._servers = access.bootstrap_servers
        self._errors: list[KafkaError] = []
        try:
            self._admin = _KAFKA.AdminClient({**CLIENT_DEFAULTS, **access.librdkafka, "error_cb": self._errors.append})
        except KafkaException as error:
            raise AccessError(
                f"a property of HALFWAY_KAFKA__… or [kafka] cannot be used: {error.args[0].str()}: correct or remove it"
            ) from None

    def pin(self, topics: Sequence[str]) -> list[TopicPin]:
        """Return the present pins of those of these topics that exist."""
        now = round(time.time() * 1000)
        found = self._described(topics)
        places = [(topic, number) for topic, (count, _) in found.items() for number in range(count)]
        if not places:
            return []
        # In this order `high` is not below `end`.
        start, end = self.offsets(places, "earliest"), self.offsets(places, "latest", committed=True)
        high, first = self.offsets(places, "latest"), self.offsets(places, 0)
        configured = self._configured(found)
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
            config = configured[topic]
            policy, kept_ms = config["cleanup.policy"].value, int(config["retention.ms"].value)
            pins.append(
                TopicPin(
                    topic=topic,
                    at=now,
                    partitions=partitions,
                    compacted="compact" in policy,
                    tombstones_kept_ms=int(config["delete.retention.ms"].value),
                    kept_ms=kept_ms if "delete" in policy and kept_ms >= 0 else None,
                    made=made,
                )
            )
        return pins

    def offsets(
        self, places: Iterable[Place], at: Literal["earliest", "latest"] | int, *, committed: bool = False
    ) -> Mapping[Place, tuple[int, int]]:
        """Return an offset, and the time of the record there in ms, for each place; -1 if there is none.

        It is where a partition begins or ends (for readers of committed records if `committed`), or that of its first
        record that is dated at a time in ms or later.
        """
        of = _KAFKA.OffsetSpec
        spec = of.for_timestamp(at) if isinstance(at, int) else getattr(of, at)()
        level = IsolationLevel.READ_COMMITTED if committed else IsolationLevel.READ_UNCOMMITTED
        asked = dict.fromkeys((TopicPartition(*place) for place in places), spec)
        with self._answering():
            futures = self._admin.list_offsets(asked, isolation_level=level, request_timeout=_TIMEOUT_S)
            answers = {(key.topic, key.partition): future.result() for key, future in futures.items()}
            if not isinstance(at, int) and any(answer.offset < 0 for answer in answers.values()):  # in an election
                raise KafkaException(KafkaError(KafkaError.LEADER_NOT_AVAILABLE, "a partition has no leader now"))
        return {place: (answer.offset, answer.timestamp) for place, answer in answers.items()}

    def _described(self, topics: Sequence[str]) -> dict[str, tuple[int, str]]:
        """Return the number of partitions and the id of those of these topics that exist."""
        with self._answering():
            known = self._admin.list_topics(timeout=_TIMEOUT_S).topics
            there = [name for name in topics if name in known and known[name].error is None]
            if not there:
                return {}
            futures = self._admin.describe_topics(TopicCollection(there), request_timeout=_TIMEOUT_S)
            ids = {name: future.result().topic_id for name, future in futures.items()}
        halves = {name: (ids[name].get_most_significant_bits(), ids[name].get_least_significant_bits()) for name in ids}
        return {
            name: (len(known[name].partitions), "".join(f"{half % (1 << 64):016x}" for half in halves[name]))
            for name in there
        }

    def _configured(self, topics: Iterable[str]) -> dict[str, Mapping[str, Any]]:
        resources = [_KAFKA.ConfigResource(_KAFKA.ResourceType.TOPIC, name) for name in topics]
        with self._answering():
            futures = self._admin.describe_configs(resources, request_timeout=_TIMEOUT_S)
            return {resource.name: future.result() for resource, future in futures.items()}

    @contextmanager
    def _answering(self) -> Iterator[None]:
        try:
            yield
        except KafkaException as error:
            self._admin.poll(0)
            whole = KafkaError._ALL_BROKERS_DOWN  # noqa: SLF001 - the names of librdkafka's own errors begin with _
            reasons = [error.args[0].str(), *[one.str() for one in self._errors if one.code() != whole][-1:]]
            raise AccessError(f"Kafka at {self._servers} did not answer: {': '.join(reasons)}") from None
