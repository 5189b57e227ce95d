"""Sources of pinned topics: what Kafka and archives do in the same way on every engine."""

from __future__ import annotations

import json
import time
from abc import ABC, abstractmethod
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final, Protocol

from halfway.pipeline.errors import SourceError
from halfway.pipeline.sources.pins import Pins, TopicPin

if TYPE_CHECKING:
    from collections.abc import Sequence

    from halfway.pipeline.access import KafkaAccess
    from halfway.pipeline.engines.engine import Frame
    from halfway.pipeline.tables.folders import Files

Ranges = dict[str, dict[int, tuple[int, int]]]
"""By topic and partition: the first offset to read, and the one after the last."""
PINS: Final = "offsets.json"
"""The file of an archive's pins. An archive without it was not finished."""
ABOUT: Final = "archive.json"
COMMITTED: Final = "committed"
UNSETTLED: Final = "unsettled"
LATER: Final = "later"


class Source(Protocol):
    """Records of pinned topics."""

    @property
    def prefix(self) -> str:
        """The prefix of the names of halfway's own topics."""

    @property
    def pins(self) -> Pins:
        """Everything pinned so far."""

    def pin(self, topics: Sequence[str]) -> None:
        """Pin topics at their present ends. A pinned topic stays as it is; a topic that does not exist is left out."""

    def extend_unsettled(self, topic: str) -> None:
        """Extend the unsettled part of a pinned topic to its present end."""

    def reopened(self) -> Source:
        """Return the same source with nothing pinned. A comparison of both pins shows what Kafka has removed since."""

    def continue_from(self, pins: Pins) -> None:
        """Begin each topic that is pinned from now on at the end of earlier pins, except groups and owners."""

    def cover(self, pins: Pins) -> None:
        """Read everything that earlier pins and the runs before them cover, as far as Kafka still has it."""

    def committed(self, topics: Sequence[str]) -> Frame:
        """Return the committed records of those of these topics that are pinned, with the columns of a record."""

    def unsettled(self, topics: Sequence[str]) -> Frame:
        """Return the records behind the committed part, those of open and aborted Kafka transactions included."""

    def later(self, topics: Sequence[str], now: Pins) -> Frame:
        """Return what was committed in these topics between their pins and pins that were taken later."""


class PinnedKafka(ABC):
    """Topics in Kafka. An engine's source only looks up pins and reads ranges of offsets."""

    def __init__(self, access: KafkaAccess, pins: Pins | None = None) -> None:
        """Read up to the present ends or, given the pins of an earlier run, exactly what that run read."""
        self._access = access
        self._fixed = pins is not None
        self._before = Pins(at=0, topics={})
        self._pins = pins or Pins(at=round(time.time() * 1000), topics={})

    @abstractmethod
    def _find(self, topics: Sequence[str]) -> list[TopicPin]:
        """Return the present pins of those of these topics that exist."""

    @abstractmethod
    def _read(self, ranges: Ranges, isolation_level: str) -> Frame:
        """Return the records of ranges. A range can be empty."""

    @abstractmethod
    def reopened(self) -> PinnedKafka:
        """Return the same topics with nothing pinned."""

    @property
    def prefix(self) -> str:
        """The prefix of the names of halfway's own topics."""
        return self._access.prefix

    @property
    def pins(self) -> Pins:
        """Everything pinned so far."""
        return self._pins

    def pin(self, topics: Sequence[str]) -> None:
        """Pin topics at their present ends. The pins of an earlier run are never extended."""
        wanted = [topic for topic in topics if topic not in self._pins.topics]
        if self._fixed or not wanted:
            return
        self._add(self._before.followed_by(pin) for pin in self._find(wanted))

    def extend_unsettled(self, topic: str) -> None:
        """Extend the unsettled part of a pinned topic to its present end."""
        pin = self._pins.topics.get(topic)
        if self._fixed or pin is None:
            return
        self._add(pin.reaching_to(now) for now in self._find([topic]))

    def _add(self, pins: Any) -> None:
        self._pins = replace(self._pins, topics={**self._pins.topics, **{pin.topic: pin for pin in pins}})

    def continue_from(self, pins: Pins) -> None:
        """Begin each topic that is pinned from now on at the end of earlier pins."""
        self._before = pins.without(self.prefix + "groups", self.prefix + "owners")

    def cover(self, pins: Pins) -> None:
        """Read everything that earlier pins and the runs before them cover, as far as Kafka still has it."""
        now = self.reopened()
        now.pin(list(pins.topics))
        self._pins = pins.again(now.pins)
        self._fixed = True

    def committed(self, topics: Sequence[str]) -> Frame:
        """Return the records below the last stable offset, without those of aborted transactions."""
        ranges = {
            pin.topic: {each.partition: (each.start, each.end) for each in pin.partitions} for pin in self._of(topics)
        }
        return self._read(ranges, "read_committed")

    def unsettled(self, topics: Sequence[str]) -> Frame:
        """Return the records from the last stable offset to the end of the log."""
        ranges = {
            pin.topic: {each.partition: (each.end, each.high) for each in pin.partitions} for pin in self._of(topics)
        }
        return self._read(ranges, "read_uncommitted")

    def later(self, topics: Sequence[str], now: Pins) -> Frame:
        """Return the records between the last stable offset and that of later pins."""
        return self._read(self._pins.behind(topics, now), "read_committed")

    def _of(self, topics: Sequence[str]) -> list[TopicPin]:
        return [self._pins.topics[topic] for topic in topics if topic in self._pins.topics]


class PinnedArchive(ABC):
    """An archive that the job `archive` wrote. An engine's source only reads its folders."""

    def __init__(self, folder: Files, *, with_later: bool = False) -> None:
        """Open an archive; SourceError if the folder holds none, or one that was not finished."""
        self._folder = folder
        self._with_later = with_later
        self._pins = Pins.from_json(folder.read(PINS))
        self._prefix = str(json.loads(folder.read(ABOUT))["prefix"])

    @abstractmethod
    def _read(self, part: str, topics: Sequence[str]) -> Frame:
        """Return what a part of the archive holds of those of these topics that were archived."""

    @abstractmethod
    def reopened(self) -> PinnedArchive:
        """Return the same archive with what was written while it was made."""

    @abstractmethod
    def committed(self, topics: Sequence[str]) -> Frame:
        """Return the committed records."""

    @property
    def prefix(self) -> str:
        """The prefix of the names of halfway's own topics."""
        return self._prefix

    @property
    def pins(self) -> Pins:
        """What was archived."""
        return self._pins

    def pin(self, topics: Sequence[str]) -> None:  # noqa: B027 - of every archive
        """Change nothing: an archive has the pins that it was made with."""

    def extend_unsettled(self, topic: str) -> None:  # noqa: B027 - of every archive
        """Change nothing: an archive has the pins that it was made with."""

    def continue_from(self, pins: Pins) -> None:  # noqa: ARG002 - as of every source
        """Refuse: an archive gets no new records."""
        raise SourceError("an archive cannot be continued")

    def cover(self, pins: Pins) -> None:  # noqa: ARG002 - as of every source
        """Refuse: an archive has the pins that it was made with."""
        raise SourceError("an archive cannot be read as of another time")

    def unsettled(self, topics: Sequence[str]) -> Frame:
        """Return the records that were not settled."""
        return self._read(UNSETTLED, topics)

    def later(self, topics: Sequence[str], now: Pins) -> Frame:
        """Return the records that were written while the archive was made, without values."""
        del now
        return self._read(LATER, topics)
