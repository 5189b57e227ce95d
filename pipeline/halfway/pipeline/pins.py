"""Up to where a job reads, partition by partition, so that the same job over the same pins reads the same records."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from halfway.pipeline.errors import SourceError


@dataclass(frozen=True, kw_only=True)
class PartitionPin:
    """One partition: records from `start` up to `end` are read; those up to `high` are not settled yet."""

    partition: int
    start: int
    end: int
    """The last stable offset: no Kafka transaction that stands before it is open."""
    high: int
    """The true end."""
    first_at: int | None = None
    """Timestamp of the first record there is, in ms; None where the partition is empty."""


@dataclass(frozen=True, kw_only=True)
class TopicPin:
    """One topic as it was when it was pinned, and what its configuration may have removed from it."""

    topic: str
    at: int
    partitions: tuple[PartitionPin, ...]
    compacted: bool = False
    tombstones_kept_ms: int = 0
    kept_ms: int | None = None
    """For how long a record is kept; None where age or size do not tell, or nothing is removed by them."""
    made: str | None = None
    """Kafka's own id of the topic, another one if it was deleted and made again; None if that is not known."""

    def is_another(self, pin: TopicPin) -> bool:
        """Whether the topic was made again between two pins, as far as is known."""
        return None not in (self.made, pin.made) and self.made != pin.made

    def reaching_to(self, now: TopicPin) -> TopicPin:
        """Return this pin with its unsettled part extended to the end of a later pin."""
        high = {each.partition: each.high for each in now.partitions}
        partitions = tuple(
            replace(each, high=max(each.high, high.get(each.partition, each.high))) for each in self.partitions
        )
        return replace(self, partitions=partitions)

    def provable_since(self, first: Mapping[int, int]) -> int:
        """Return the time in ms from which on a message cannot have gone by age, size or a tombstone: 0 if none can.

        `first` is by partition the time of the first message of halfway's that is there: what other producers say of
        time proves nothing. Where there is none, all of them can have been removed just now: by age, by size, by hand,
        or by a retention that was short for a while.
        """
        since = max((first.get(pin.partition, self.at) for pin in self.partitions if pin.start > 0), default=0)
        return max(since, self.at - self.tombstones_kept_ms) if self.compacted else since

    @property
    def whole_since(self) -> Mapping[int, int]:
        """By partition the time in ms from which on no record has gone by age: 0 where none has.

        For halfway's own topics, whose times are halfway's; a partition that lost all its records proves nothing.
        """
        return {
            pin.partition: 0 if pin.start == 0 else self.at if pin.first_at is None else pin.first_at
            for pin in self.partitions
        }


@dataclass(frozen=True, kw_only=True)
class Pins:
    """All topics of a job; `at` is when the first of them, op, was pinned."""

    at: int
    topics: Mapping[str, TopicPin]

    def followed_by(self, pin: TopicPin) -> TopicPin:
        """Return a pin of the same topic that begins where this one ends, or where the topic begins by now."""
        ends = self.ends_of(pin)
        partitions = tuple(replace(each, start=max(each.start, ends[each.partition])) for each in pin.partitions)
        return replace(pin, partitions=partitions)

    def ends_of(self, pin: TopicPin) -> Mapping[int, int]:
        """Return by partition up to where these pins have read the topic of another.

        Of a topic that was made anew nothing has been read. It is shorter than it was, if nothing else tells.
        """
        before = self.topics.get(pin.topic)
        known = before is not None and not before.is_another(pin)
        ends = {each.partition: each.end for each in before.partitions} if before is not None and known else {}
        return {
            each.partition: end if (end := ends.get(each.partition, 0)) <= each.end else 0 for each in pin.partitions
        }

    def again(self, now: Pins) -> Pins:
        """Return all that these pins and those before them cover, as far as it is there by other pins, taken now."""
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
        """Return all but some topics."""
        return replace(self, topics={name: pin for name, pin in self.topics.items() if name not in topics})

    def behind(self, topics: Sequence[str], now: Pins) -> dict[str, dict[int, tuple[int, int]]]:
        """Return by topic and partition what is committed behind these pins, up to others that were taken since."""
        return {
            name: {
                each.partition: (each.end, ends.get(each.partition, each.end)) for each in self.topics[name].partitions
            }
            for name in topics
            if name in self.topics and name in now.topics
            for ends in [{each.partition: each.end for each in now.topics[name].partitions}]
        }

    def to_json(self) -> str:
        """Return them as JSON."""
        content = {"at": self.at, "topics": [asdict(self.topics[name]) for name in sorted(self.topics)]}
        return json.dumps(content, indent=1) + "\n"

    @classmethod
    def from_json(cls, text: str) -> Pins:
        """Read what `to_json` gave; SourceError where the text is something else."""
        try:
            content = json.loads(text)
            return cls(at=int(content["at"]), topics=_by_name(map(_topic, content["topics"])))
        except (ValueError, KeyError, TypeError) as error:
            raise SourceError(f"these are no offsets of an earlier run: {error!r}") from None


def _topic(fields: dict[str, Any]) -> TopicPin:
    return TopicPin(**{**fields, "partitions": tuple(PartitionPin(**pin) for pin in fields["partitions"])})


def _by_name(topics: Iterable[TopicPin]) -> dict[str, TopicPin]:
    return {topic.topic: topic for topic in topics}
