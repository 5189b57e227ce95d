"""The offsets that a job reads, by partition. A job that is repeated with the same pins reads the same records."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Final

from halfway.pipeline.errors import SourceError

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

    at: int
    topics: Mapping[str, TopicPin]

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

    def without(self, *topics: str) -> Pins:
        """Return the pins of all but some topics."""
        return replace(self, topics={name: pin for name, pin in self.topics.items() if name not in topics})

    def behind(self, topics: Sequence[str], now: Pins) -> dict[str, dict[int, tuple[int, int]]]:
        """Return, by topic and partition, the committed range between these pins and later ones."""
        return {
            name: {
                each.partition: (each.end, ends.get(each.partition, each.end)) for each in self.topics[name].partitions
            }
            for name in topics
            if name in self.topics and name in now.topics
            for ends in [{each.partition: each.end for each in now.topics[name].partitions}]
        }

    def to_json(self) -> str:
        """Return the pins as JSON."""
        content = {"at": self.at, "topics": [asdict(self.topics[name]) for name in sorted(self.topics)]}
        return json.dumps(content, indent=1) + "\n"

    @classmethod
    def from_json(cls, text: str) -> Pins:
        """Read the result of `to_json`; SourceError if the text is something else."""
        try:
            content = json.loads(text)
            return cls(at=int(content["at"]), topics=_by_name(map(_topic, content["topics"])))
        except (ValueError, KeyError, TypeError) as error:
            raise SourceError(f"these are no offsets of an earlier run: {error!r}") from None


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

    def to_json(self) -> str:
        """Return the ends as JSON."""
        return json.dumps([json.loads(pins.to_json()) for pins in self.seen]) + "\n"

    @classmethod
    def from_json(cls, text: str) -> Ends:
        """Read the result of `to_json`; SourceError if the text is something else."""
        try:
            return cls(seen=tuple(Pins.from_json(json.dumps(each)) for each in json.loads(text)))
        except (ValueError, TypeError) as error:
            raise SourceError(f"these are no ends of earlier audits: {error!r}") from None


def _topic(fields: dict[str, Any]) -> TopicPin:
    return TopicPin(**{**fields, "partitions": tuple(PartitionPin(**pin) for pin in fields["partitions"])})


def _by_name(topics: Iterable[TopicPin]) -> dict[str, TopicPin]:
    return {topic.topic: topic for topic in topics}
