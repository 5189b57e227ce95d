"""Sources of pinned topics: Kafka and archives. An engine's reader only reads parts of topics, and files."""

from __future__ import annotations

import json
import time
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final, Protocol

from halfway.pipeline.errors import PipelineError
from halfway.pipeline.sources.pins import Brokers, PartitionPin, Pins, TopicPin

if TYPE_CHECKING:
    from halfway.pipeline.access import KafkaAccess
    from halfway.pipeline.engines.dialect import Frame
    from halfway.pipeline.tables import Files

Part = tuple[str, int, int, int]
"""A topic, a partition, the first offset to read, and the one after the last."""
PINS: Final = "offsets.json"
"""The file of an archive's pins. An archive without it was not finished."""
ABOUT: Final = "archive.json"
RECORD: Final = (
    "key binary, value binary, topic string, partition int, offset bigint, timestamp timestamp, "
    "headers array<struct<key: string, value: binary>>"
)
"""The columns of a record of any source."""
COMMITTED: Final = "committed"
UNSETTLED: Final = "unsettled"
LATER: Final = "later"


@dataclass(frozen=True, kw_only=True)
class Rows:
    """The rows that a job makes of records: a select from `$records` that looks at each record by itself.

    So DuckDB's reader makes them while it reads, and keeps nothing else.
    """

    sql: str = "select * from $records"
    headers: tuple[str, ...] = ()
    """Only records with one of these headers give rows. The others are of other producers. None: all."""


WHOLE: Final = Rows()


class Source(ABC):
    """Records of pinned topics: what is pinned, and which part of a topic is asked for. A subclass reads it."""

    prefix: str
    """The prefix of the names of halfway's own topics."""

    def __init__(self, prefix: str, pins: Pins, *, fixed: bool = False) -> None:
        """Begin with pins. If they are fixed, nothing else is pinned."""
        self.prefix = prefix
        self.pins = pins
        self._fixed = fixed
        self._before = Pins()

    @abstractmethod
    def reopened(self) -> Source:
        """Return the same source with nothing pinned. A comparison of both pins shows what Kafka has removed since."""

    def _present(self, topics: Sequence[str]) -> Iterable[TopicPin]:
        """Return the present pins of those of these topics that exist; none if the pins are fixed."""
        del topics
        return ()

    @abstractmethod
    def _read(self, what: str, parts: Sequence[Part], rows: Rows) -> Frame:
        """Return rows of records: COMMITTED, UNSETTLED or LATER ones."""

    def pin(self, topics: Sequence[str]) -> None:
        """Pin topics at their present ends. A pinned topic stays as it is; a topic that does not exist is left out."""
        wanted = [topic for topic in topics if topic not in self.pins.topics]
        if wanted and not self._fixed:
            self._add(self._before.followed_by(pin) for pin in self._present(wanted))

    def extend_unsettled(self, topic: str) -> None:
        """Extend the unsettled part of a pinned topic to its present end."""
        pin = self.pins.topics.get(topic)
        if pin is not None and not self._fixed:
            self._add(pin.reaching_to(now) for now in self._present([topic]))

    def continue_from(self, pins: Pins) -> None:
        """Begin each topic that is pinned from now on at the end of earlier pins, except groups and owners."""
        self._require_present()
        whole = (self.prefix + "groups", self.prefix + "owners")
        self._before = replace(pins, topics={name: pin for name, pin in pins.topics.items() if name not in whole})

    def cover(self, pins: Pins) -> None:
        """Read everything that earlier pins and the runs before them cover, as far as Kafka still has it."""
        self._require_present()
        now = self.reopened()
        now.pin(list(pins.topics))
        self.pins = pins.again(now.pins)
        self._fixed = True

    def committed(self, topics: Sequence[str], rows: Rows = WHOLE) -> Frame:
        """Return rows of the records below the last stable offset, without those of aborted transactions."""
        parts = [(topic, each.partition, each.start, each.end) for topic, each in self._of(topics)]
        return self._read(COMMITTED, parts, rows)

    def unsettled(self, topics: Sequence[str], rows: Rows = WHOLE) -> Frame:
        """Return rows of the records behind the committed part, those of unfinished Kafka transactions included."""
        parts = [(topic, each.partition, each.end, each.high) for topic, each in self._of(topics)]
        return self._read(UNSETTLED, parts, rows)

    def later(self, topics: Sequence[str], now: Pins, rows: Rows = WHOLE) -> Frame:
        """Return rows of what was committed in these topics between their pins and pins that were taken later."""
        return self._read(LATER, self.pins.behind(topics, now), rows)

    def _require_present(self) -> None:
        if self._fixed:
            raise PipelineError("an archive, or what an earlier run has read, cannot be continued or cross-checked")

    def _add(self, pins: Iterable[TopicPin]) -> None:
        self.pins = replace(self.pins, topics={**self.pins.topics, **{pin.topic: pin for pin in pins}})

    def _of(self, topics: Sequence[str]) -> list[tuple[str, PartitionPin]]:
        pins = self.pins.topics
        return [(topic, each) for topic in topics if topic in pins for each in pins[topic].partitions]


class Reader(Protocol):
    """What an engine reads records with."""

    def topics(self, access: KafkaAccess, parts: Sequence[Part], level: str, rows: Rows) -> Frame:
        """Return rows of the records in parts of topics, at an isolation level."""

    def files(self, folders: Sequence[tuple[str, str]], rows: Rows) -> Frame:
        """Return rows of the records in folders of Parquet, each given with the name of its topic."""


class KafkaSource(Source):
    """Topics in Kafka."""

    def __init__(self, reader: Reader, access: KafkaAccess, pins: Pins | None = None) -> None:
        """Read up to the present ends or, given the pins of an earlier run, exactly what that run read."""
        now = round(time.time() * 1000)
        super().__init__(access.prefix, pins or Pins(at=now, topics={}), fixed=pins is not None)
        self._reader = reader
        self._access = access

    def reopened(self) -> KafkaSource:
        return KafkaSource(self._reader, self._access)

    def _present(self, topics: Sequence[str]) -> list[TopicPin]:
        return Brokers(self._access).pin(topics)

    def _read(self, what: str, parts: Sequence[Part], rows: Rows) -> Frame:
        level = "read_uncommitted" if what == UNSETTLED else "read_committed"
        return self._reader.topics(self._access, [part for part in parts if part[2] < part[3]], level, rows)


class Archive(Source):
    """An archive that the job `archive` wrote. It has the records of a kind in a folder for each topic."""

    def __init__(self, reader: Reader, folder: Files, *, with_later: bool = False) -> None:
        """Open an archive; PipelineError if the folder holds none, or one that was not finished."""
        pins = Pins.from_json(folder.read(PINS))
        super().__init__(str(json.loads(folder.read(ABOUT))["prefix"]), pins, fixed=True)
        self._reader = reader
        self._folder = folder
        self._with_later = with_later

    def reopened(self) -> Archive:
        return Archive(self._reader, self._folder, with_later=True)

    def _read(self, what: str, parts: Sequence[Part], rows: Rows) -> Frame:
        found = [
            (topic, self._folder.path(kind, f"topic={topic}"))
            for kind in ((COMMITTED, LATER) if what == COMMITTED and self._with_later else (what,))
            for topic in dict.fromkeys(part[0] for part in parts)
            if self._folder.names(kind, f"topic={topic}")
        ]
        return self._reader.files(found, rows)
