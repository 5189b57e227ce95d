"""Logs in memory: what the topics hold, read by an audit as of any time."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

import pyarrow as pa

from halfway.pipeline.engines.duckdb import DuckEngine
from halfway.pipeline.engines.engine import SparkEngine
from halfway.pipeline.sources.duckdb import RECORD
from halfway.pipeline.sources.pinned import UNSETTLED, Part, Rows, Source
from halfway.pipeline.sources.pins import PartitionPin, Pins, TopicPin
from halfway.pipeline.sources.spark import nothing

PREFIX = "_halfway."
START = 1_700_000_000_000
HORIZON = 900_000
SLACK = 5_000
KINDS = ("half", "op", "parked", "groups", "owners")
Headers = Sequence[tuple[str, str | bytes | None]]


@dataclass
class Written:
    """A record, when it was written, and when by the clock of its writer."""

    topic: str
    key: bytes | None
    value: bytes | None
    at: int
    told_at: int
    headers: Headers
    offset: int = -1
    gone: bool = False
    aborted: bool = False
    """It is in a Kafka transaction that was aborted."""
    named: bool = False
    """It is a message that was committed with an op marker."""


@dataclass
class Log:
    """All topics, one partition each, in the order of time."""

    records: list[Written] = field(default_factory=list)
    starts: dict[str, int] = field(default_factory=dict)
    compacted: frozenset[str] = frozenset()
    kept_ms: int | None = None
    """For how long every topic keeps a record, None for ever."""
    ahead: int = 0
    """How far the clock of the writer is ahead, in ms."""
    missing: frozenset[str] = frozenset()
    """Topics that do not exist."""
    made: dict[str, int] = field(default_factory=dict)
    """How often topics were made again."""
    aborting: bool = False
    """Records are written in a Kafka transaction that will be aborted."""

    def write(
        self,
        topic: str,
        key: bytes | None,
        value: bytes | None,
        at: int,
        headers: Headers,
        *,
        prepared_at: int = 0,
        named: bool = False,
    ) -> None:
        """`prepared_at`: of a record of halfway's own topics, which is never dated before it."""
        told_at = max(at + self.ahead, prepared_at)
        self.records.append(Written(topic, key, value, at, told_at, headers, aborted=self.aborting, named=named))

    def settle(self) -> None:
        """Return every record its offset."""
        self.records.sort(key=lambda record: record.at)
        ends: dict[str, int] = {}
        for record in self.records:
            record.offset = ends.get(record.topic, 0)
            ends[record.topic] = record.offset + 1

    def trim(self, topic: str, before: int) -> None:
        """Remove the records before an offset."""
        self.starts[topic] = max(before, self.starts.get(topic, 0))

    def make_again(self, topic: str) -> None:
        """Delete a topic, and make one of its name."""
        self.records = [record for record in self.records if record.topic != topic]
        self.made[topic] = self.made.get(topic, 0) + 1

    def compact(self, topic: str, until: int, *, tombstones: bool = True) -> None:
        """Keep, of what is older than a time, the last record of each key, and no tombstones if their time is over."""
        there = [record for record in self.records if record.topic == topic and record.at < until]
        last = {record.key: record for record in there}
        for record in there:
            record.gone |= record is not last[record.key] or (tombstones and record.value is None)


class LogSource(Source):
    """A log as of a time."""

    def __init__(
        self,
        engine: DuckEngine | SparkEngine,
        log: Log,
        at: int,
        *,
        open_since: int | None = None,
        prefix: str = PREFIX,
        clock: int | None = None,
    ) -> None:
        """Records since `open_since` are in Kafka transactions that are not finished."""
        self._engine = engine
        self._log = log
        self._at = at
        self._committed_until = at if open_since is None else open_since
        self._clock = at if clock is None else clock
        super().__init__(prefix, Pins(at=self._clock, topics={}))
        self.when_settled: Callable[[], None] = lambda: None

    def _present(self, topics: Sequence[str]) -> Iterator[TopicPin]:
        for topic in topics:
            if topic in self._log.missing:
                continue
            there = [record for record in self._log.records if record.topic == topic and record.at <= self._at]
            end = sum(record.at <= self._committed_until for record in there)
            start = self._log.starts.get(topic, 0)
            first = next((record.told_at for record in there if record.offset >= start), None)
            one = PartitionPin(partition=0, start=min(start, end), end=end, high=len(there), first_at=first)
            yield TopicPin(
                topic=topic, at=self._clock, partitions=(one,), compacted=topic in self._log.compacted,
                made=f"{self._log.made.get(topic, 0)}", kept_ms=self._log.kept_ms,
            )  # fmt: skip

    def extend_unsettled(self, topic: str) -> None:
        self.when_settled()

    def reopened(self) -> "LogSource":
        """Return it with everything that is written later too, as of the same moment."""
        now = max((record.at for record in self._log.records), default=self._at)
        return LogSource(self._engine, self._log, max(now, self._at), clock=self._clock)

    def _read(self, what: str, parts: Sequence[Part], rows: Rows) -> Any:
        ranges = {topic: bounds for topic, _, *bounds in parts}
        records = [
            {
                "key": record.key,
                "value": record.value,
                "topic": record.topic,
                "partition": 0,
                "offset": record.offset,
                "timestamp": datetime.fromtimestamp(record.told_at / 1000, UTC),
                "headers": [
                    {"key": name, "value": value.encode() if isinstance(value, str) else value}
                    for name, value in record.headers
                ],
            }
            for record in self._log.records
            if not record.gone
            and (what == UNSETTLED or not record.aborted)
            and record.topic in ranges
            and record.offset >= self._log.starts.get(record.topic, 0)
            and ranges[record.topic][0] <= record.offset < ranges[record.topic][1]
        ]
        return self._engine.query(rows.sql, records=frame_of(self._engine, pa.Table.from_pylist(records, RECORD)))


def frame_of(engine: DuckEngine | SparkEngine, records: pa.Table) -> Any:
    """Return records as a frame of an engine."""
    if isinstance(engine, DuckEngine):
        return engine.take(records)
    return engine.spark.createDataFrame(records) if records.num_rows else nothing(engine.spark)
