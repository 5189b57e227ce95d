"""The offsets that a job reads, by partition, as the brokers know them. The same pins give the same records."""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Final, Literal

from confluent_kafka import IsolationLevel, KafkaError, KafkaException, TopicCollection, TopicPartition, admin

from halfway.pipeline.access import KafkaAccess
from halfway.pipeline.errors import PipelineError

_MOST_ENDS: Final = 32


@dataclass(frozen=True, kw_only=True)
class PartitionPin:
    """One partition: records from `start` to `end` are read; those up to `high` are not settled yet."""

    partition: int
    start: int
    end: int
    """The last stable offset: no Kafka transaction before it is open."""
    high: int
    """The end of the log."""
    first_at: int | None = None
    """The timestamp of the first record, in ms; None if the partition is empty."""


@dataclass(frozen=True, kw_only=True)
class TopicPin:
    """One topic when it was pinned, and the part of its configuration that can remove records."""

    topic: str
    at: int
    partitions: tuple[PartitionPin, ...]
    compacted: bool = False
    tombstones_kept_ms: int = 0
    kept_ms: int | None = None
    """How long a record is kept at most; None if records are not removed by age."""
    made: str | None = None
    """Kafka's own id of the topic, None if it is not known. A topic that is created again gets another one."""

    def is_another(self, pin: TopicPin) -> bool:
        """Return True if the topic is known to have been created again between two pins."""
        return None not in (self.made, pin.made) and self.made != pin.made

    def reaching_to(self, now: TopicPin) -> TopicPin:
        """Return this pin with its unsettled part extended to the end of a later pin."""
        high = {each.partition: each.high for each in now.partitions}
        partitions = tuple(
            replace(each, high=max(each.high, high.get(each.partition, each.high))) for each in self.partitions
        )
        return replace(self, partitions=partitions)

    def provable_since(self, first: Mapping[int, int], ends: Mapping[int, int]) -> dict[int, int]:
        """Return, by partition, the time in ms since which no message can have been removed: 0 for ever.

        `first` has the time of the first message of halfway's that is there, and `ends` the time of the earliest audit
        that saw an end of the log that is still there: all that was written since then follows it. The times of
        records of other producers prove nothing. Without a proof, everything can have been removed just now: by age,
        by size, manually, or by a retention that was short for a while. A compacted topic also loses tombstones.
        """
        tombstones = self.at - self.tombstones_kept_ms if self.compacted else 0
        return {
            pin.partition: max(
                tombstones,
                0 if pin.start == 0 else min(first.get(pin.partition, self.at), ends.get(pin.partition, self.at)),
            )
            for pin in self.partitions
        }

    @property
    def kept_since(self) -> int:
        """The time in ms since which no record can have been removed by age or as a tombstone, by the configuration."""
        by_age = 0 if self.kept_ms is None else self.at - self.kept_ms
        return max(by_age, self.at - self.tombstones_kept_ms) if self.compacted else by_age

    def whole_since(self, ends: Mapping[int, int]) -> dict[int, int]:
        """Return, by partition, the time in ms since which no record was removed by age: 0 if none was.

        For halfway's own topics, which have halfway's times. `ends` is as for `provable_since`. A partition that has
        lost all its records proves nothing by itself.
        """
        first = {pin.partition: pin.first_at for pin in self.partitions if pin.first_at is not None}
        return replace(self, compacted=False).provable_since(first, ends)


@dataclass(frozen=True, kw_only=True)
class Pins:
    """All topics of a job. `at` is when the first of them, op, was pinned."""

    at: int = 0
    topics: Mapping[str, TopicPin] = field(default_factory=dict)

    def followed_by(self, pin: TopicPin) -> TopicPin:
        """Return a pin of the same topic that begins where these pins end, or where the topic now begins."""
        ends = self.ends_of(pin)
        partitions = tuple(replace(each, start=max(each.start, ends[each.partition])) for each in pin.partitions)
        return replace(pin, partitions=partitions)

    def ends_of(self, pin: TopicPin) -> Mapping[int, int]:
        """Return, by partition, the offset to which these pins have read the topic of another pin.

        Nothing has been read of a topic that was created again. Without an id it is recognised if it is shorter than it
        was.
        """
        before = self.topics.get(pin.topic)
        known = before is not None and not before.is_another(pin)
        ends = {each.partition: each.end for each in before.partitions} if before is not None and known else {}
        return {
            each.partition: end if (end := ends.get(each.partition, 0)) <= each.end else 0 for each in pin.partitions
        }

    def again(self, now: Pins) -> Pins:
        """Return everything that these pins and the runs before them cover, as far as it is there by later pins."""
        topics = {}
        for name in self.topics.keys() & now.topics.keys():
            if self.topics[name].is_another(now.topics[name]):
                continue
            starts = {each.partition: each.start for each in now.topics[name].partitions}
            partitions = tuple(
                replace(each, start=min(starts[each.partition], each.end))
                for each in self.topics[name].partitions
                if each.partition in starts
            )
            topics[name] = replace(self.topics[name], partitions=partitions)
        return replace(self, topics=topics)

    def behind(self, topics: Sequence[str], now: Pins) -> list[tuple[str, int, int, int]]:
        """Return the topics and partitions with the committed range between these pins and later ones."""
        return [
            (name, each.partition, each.end, ends.get(each.partition, each.end))
            for name in topics
            if name in self.topics and name in now.topics
            for ends in [{each.partition: each.end for each in now.topics[name].partitions}]
            for each in self.topics[name].partitions
        ]

    @property
    def content(self) -> dict[str, Any]:
        return {"at": self.at, "topics": [asdict(self.topics[name]) for name in sorted(self.topics)]}

    @classmethod
    def of(cls, content: Any) -> Pins:
        """Return the pins of a `content`; PipelineError if it is something else."""
        try:
            pins = [
                TopicPin(**{**fields, "partitions": tuple(PartitionPin(**each) for each in fields["partitions"])})
                for fields in content["topics"]
            ]
            return cls(at=int(content["at"]), topics={pin.topic: pin for pin in pins})
        except (ValueError, KeyError, TypeError) as error:
            raise PipelineError(f"these are no offsets of an earlier run: {error!r}") from None

    def to_json(self) -> str:
        return json.dumps(self.content, indent=1) + "\n"

    @classmethod
    def from_json(cls, text: str) -> Pins:
        """Read the result of `to_json`; PipelineError if the text is something else."""
        try:
            return cls.of(json.loads(text))
        except ValueError as error:
            raise PipelineError(f"these are no offsets of an earlier run: {error!r}") from None


@dataclass(frozen=True, kw_only=True)
class Ends:
    """Where the logs of topics ended at earlier audits. They prove what cannot have been removed since.

    Kafka removes records from the beginning of a log. If a log still holds the place where it ended at an earlier
    audit, then it holds everything that was written after that audit.
    """

    seen: tuple[Pins, ...] = ()
    """From old to new."""

    def since(self, now: TopicPin) -> dict[int, int]:
        """Return, by partition, the time of the earliest audit that saw an end which is still there."""
        found: dict[int, int] = {}
        for pins in reversed(self.seen):
            pin = pins.topics.get(now.topic)
            if pin is None or pin.is_another(now):
                continue
            ended = {each.partition: each.end for each in pin.partitions}
            for each in now.partitions:
                if each.start <= ended.get(each.partition, -1) <= each.end:
                    found[each.partition] = pin.at
        return found

    def followed_by(self, pins: Pins) -> Ends:
        """Return these and the ends of a later audit. Old ones are thinned out: their times matter less exactly."""
        there = [each for each in self.seen if any(Ends(seen=(each,)).since(now) for now in pins.topics.values())]
        kept = [*there, pins]
        while len(kept) > _MOST_ENDS:
            gaps = {
                number: (kept[number + 1].at - kept[number - 1].at) / (pins.at - kept[number - 1].at + 1)
                for number in range(1, len(kept) - 1)
            }
            del kept[min(gaps, key=lambda number: gaps[number])]
        return Ends(seen=tuple(kept))


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
    """An admin client. It raises PipelineError if Kafka does not answer."""

    def __init__(self, access: KafkaAccess) -> None:
        """Take the addresses; PipelineError if the properties cannot be used."""
        self._servers = access.bootstrap_servers
        self._errors: list[KafkaError] = []
        try:
            self._admin = _KAFKA.AdminClient({**CLIENT_DEFAULTS, **access.librdkafka, "error_cb": self._errors.append})
        except KafkaException as error:
            raise PipelineError(
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
        resources = [_KAFKA.ConfigResource(_KAFKA.ResourceType.TOPIC, name) for name in found]
        with self._answering():
            futures = self._admin.describe_configs(resources, request_timeout=_TIMEOUT_S)
            configured = {resource.name: future.result() for resource, future in futures.items()}
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

    @contextmanager
    def _answering(self) -> Iterator[None]:
        try:
            yield
        except KafkaException as error:
            self._admin.poll(0)
            whole = KafkaError._ALL_BROKERS_DOWN  # noqa: SLF001 - the names of librdkafka's own errors begin with _
            reasons = [error.args[0].str(), *[one.str() for one in self._errors if one.code() != whole][-1:]]
            raise PipelineError(f"Kafka at {self._servers} did not answer: {': '.join(reasons)}") from None
