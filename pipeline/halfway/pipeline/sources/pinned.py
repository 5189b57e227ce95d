"""Sources of pinned topics: Kafka and archives. An engine's reader only reads parts of topics, and files."""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final, Protocol

from halfway.pipeline.errors import SourceError
from halfway.pipeline.sources.pins import Brokers, Pins, TopicPin

if TYPE_CHECKING:
    from halfway.pipeline.access import KafkaAccess
    from halfway.pipeline.engines.engine import Dialect, Frame
    from halfway.pipeline.tables import Files

Part = tuple[str, int, int, int]
"""A topic, a partition, the first offset to read, and the one after the last."""
PINS: Final = "offsets.json"
"""The file of an archive's pins. An archive without it was not finished."""
ABOUT: Final = "archive.json"
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
    """Only records with one of these headers give rows. The others are of other producers, and counted. None: all."""

    def left_out(self, d: Dialect) -> str:
        """Return whether a record has none of these headers."""
        return f"not coalesce({d.any('headers', f'one.key in {self.headers}')}, false)"


WHOLE: Final = Rows()


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

    @property
    def others(self) -> int | None:
        """The number of records of other producers among those that were read; None if they are not counted."""

    def reopened(self) -> Source:
        """Return the same source with nothing pinned. A comparison of both pins shows what Kafka has removed since."""

    def continue_from(self, pins: Pins) -> None:
        """Begin each topic that is pinned from now on at the end of earlier pins, except groups and owners."""

    def cover(self, pins: Pins) -> None:
        """Read everything that earlier pins and the runs before them cover, as far as Kafka still has it."""

    def committed(self, topics: Sequence[str], rows: Rows = WHOLE) -> Frame:
        """Return rows of the committed records of those of these topics that are pinned."""

    def unsettled(self, topics: Sequence[str], rows: Rows = WHOLE) -> Frame:
        """Return rows of the records behind the committed part, those of unfinished Kafka transactions included."""

    def later(self, topics: Sequence[str], now: Pins, rows: Rows = WHOLE) -> Frame:
        """Return rows of what was committed in these topics between their pins and pins that were taken later."""


class Reader(Protocol):
    """What an engine reads records with."""

    @property
    def others(self) -> int:
        """The number of records that were read and left out, because they have none of the headers that matter."""

    def topics(self, access: KafkaAccess, parts: Sequence[Part], level: str, rows: Rows) -> Frame:
        """Return rows of the records in parts of topics, at an isolation level."""

    def files(self, folders: Sequence[tuple[str, str]], rows: Rows) -> Frame:
        """Return rows of the records in folders of Parquet, each given with the name of its topic."""


class KafkaSource:
    """Topics in Kafka."""

    def __init__(self, reader: Reader, access: KafkaAccess, pins: Pins | None = None) -> None:
        """Read up to the present ends or, given the pins of an earlier run, exactly what that run read."""
        self._reader = reader
        self._access = access
        self._fixed = pins is not None
        self._before = Pins(at=0, topics={})
        self.pins = pins or Pins(at=round(time.time() * 1000), topics={})
        self.prefix = access.prefix

    @property
    def others(self) -> int:
        """The number of records of other producers among those that were read."""
        return self._reader.others

    def reopened(self) -> KafkaSource:
        """Return the same topics with nothing pinned."""
        return KafkaSource(self._reader, self._access)

    def pin(self, topics: Sequence[str]) -> None:
        """Pin topics at their present ends. The pins of an earlier run are never extended."""
        wanted = [topic for topic in topics if topic not in self.pins.topics]
        if wanted and not self._fixed:
            self._add(self._before.followed_by(pin) for pin in Brokers(self._access).pin(wanted))

    def extend_unsettled(self, topic: str) -> None:
        """Extend the unsettled part of a pinned topic to its present end."""
        pin = self.pins.topics.get(topic)
        if pin is not None and not self._fixed:
            self._add(pin.reaching_to(now) for now in Brokers(self._access).pin([topic]))

    def _add(self, pins: Iterable[TopicPin]) -> None:
        self.pins = replace(self.pins, topics={**self.pins.topics, **{pin.topic: pin for pin in pins}})

    def continue_from(self, pins: Pins) -> None:
        """Begin each topic that is pinned from now on at the end of earlier pins."""
        self._before = pins.without(self.prefix + "groups", self.prefix + "owners")

    def cover(self, pins: Pins) -> None:
        """Read everything that earlier pins and the runs before them cover, as far as Kafka still has it."""
        now = self.reopened()
        now.pin(list(pins.topics))
        self.pins = pins.again(now.pins)
        self._fixed = True

    def committed(self, topics: Sequence[str], rows: Rows = WHOLE) -> Frame:
        """Return rows of the records below the last stable offset, without those of aborted transactions."""
        parts = [
            (pin.topic, each.partition, each.start, each.end) for pin in self._of(topics) for each in pin.partitions
        ]
        return self._read(parts, "read_committed", rows)

    def unsettled(self, topics: Sequence[str], rows: Rows = WHOLE) -> Frame:
        """Return rows of the records from the last stable offset to the end of the log."""
        parts = [
            (pin.topic, each.partition, each.end, each.high) for pin in self._of(topics) for each in pin.partitions
        ]
        return self._read(parts, "read_uncommitted", rows)

    def later(self, topics: Sequence[str], now: Pins, rows: Rows = WHOLE) -> Frame:
        """Return rows of the records between the last stable offset and that of later pins."""
        behind = self.pins.behind(topics, now)
        parts = [(topic, number, *part) for topic, found in behind.items() for number, part in found.items()]
        return self._read(parts, "read_committed", rows)

    def _read(self, parts: Sequence[Part], level: str, rows: Rows) -> Frame:
        return self._reader.topics(self._access, [part for part in parts if part[2] < part[3]], level, rows)

    def _of(self, topics: Sequence[str]) -> list[TopicPin]:
        return [self.pins.topics[topic] for topic in topics if topic in self.pins.topics]


class Fixed:
    """A source with the pins that it was made with."""

    others: int | None = None

    def pin(self, topics: Sequence[str]) -> None:
        """Change nothing."""

    def extend_unsettled(self, topic: str) -> None:
        """Change nothing."""

    def continue_from(self, pins: Pins) -> None:  # noqa: ARG002 - as of every source
        """Refuse."""
        raise SourceError("an archive cannot be continued")

    def cover(self, pins: Pins) -> None:  # noqa: ARG002 - as of every source
        """Refuse."""
        raise SourceError("an archive cannot be read as of another time")


class Archive(Fixed):
    """An archive that the job `archive` wrote."""

    def __init__(self, reader: Reader, folder: Files, *, with_later: bool = False) -> None:
        """Open an archive; SourceError if the folder holds none, or one that was not finished."""
        self._reader = reader
        self._folder = folder
        self._with_later = with_later
        self.pins = Pins.from_json(folder.read(PINS))
        self.prefix = str(json.loads(folder.read(ABOUT))["prefix"])

    def reopened(self) -> Archive:
        """Return the same archive with what was written while it was made."""
        return Archive(self._reader, self._folder, with_later=True)

    def committed(self, topics: Sequence[str], rows: Rows = WHOLE) -> Frame:
        """Return rows of the committed records."""
        return self._read((COMMITTED, LATER) if self._with_later else (COMMITTED,), topics, rows)

    def unsettled(self, topics: Sequence[str], rows: Rows = WHOLE) -> Frame:
        """Return rows of the records that were not settled."""
        return self._read((UNSETTLED,), topics, rows)

    def later(self, topics: Sequence[str], now: Pins, rows: Rows = WHOLE) -> Frame:
        """Return rows of the records that were written while the archive was made, without values."""
        del now
        return self._read((LATER,), topics, rows)

    def _read(self, parts: Sequence[str], topics: Sequence[str], rows: Rows) -> Frame:
        found = [
            (name, self._folder.path(part, f"topic={name}"))
            for part in parts
            for name in topics
            if name in self.pins.topics and self._folder.names(part, f"topic={name}")
        ]
        return self._reader.files(found, rows)
