"""The reader of DuckDB: topics through librdkafka, and archives of them in Parquet."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Mapping, Sequence
from functools import partial
from operator import methodcaller
from pathlib import Path
from typing import Any, Final

import pyarrow as pa
import pyarrow.parquet as pq

from halfway.pipeline.access import KafkaAccess
from halfway.pipeline.engines.decoding import arrow_of
from halfway.pipeline.engines.dialect import Doing, Frame
from halfway.pipeline.engines.duckdb import DuckEngine, connected, quoted
from halfway.pipeline.errors import PipelineError
from halfway.pipeline.sources.headers import UNREADABLE
from halfway.pipeline.sources.pinned import RECORD as COLUMNS
from halfway.pipeline.sources.pinned import WHOLE, Part, Rows
from halfway.pipeline.sources.pins import CLIENT_DEFAULTS

RECORD: Final = arrow_of(COLUMNS)
_SILENT_S: Final = 60.0
"""How long a broker can give no record, although there are some, before the job fails."""
_AT_ONCE: Final = 5_000
_SHARE: Final = 100_000
"""Offsets that a process reads with one client. Progress is told after each share."""
_SHOWN: Final = 3
"""Names of topics in a line of progress."""
_MOST: Final = 20_000
_HELD: Final = 1 << 20
"""Records of a partition, and their bytes, that are kept in memory before they are written. One can have megabytes."""
LATEST_MS: Final = (1 << 63) // 1000 - 1
"""The latest timestamp whose microseconds fit into 64 bits. A producer can choose a later one."""
_read_headers: Final = methodcaller("headers")
"""`message.headers()`, by a call whose result Python checks. It does not check that of a direct call in a loop."""


class DuckReader:
    """Reads for DuckDB. Of topics, the rows go to the folder of the engine."""

    def __init__(self, engine: DuckEngine) -> None:
        self._engine = engine

    def topics(self, access: KafkaAccess, parts: Sequence[Part], level: str, rows: Rows) -> Frame:
        """Return rows of parts of topics, which are read by as many processes as there are cores."""
        folder = tempfile.mkdtemp(dir=self._engine.scratch)
        names = sorted({topic for topic, *_ in parts})
        shown = ", ".join(names[:_SHOWN]) + (f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else "")
        done, total = 0, sum(end - start for *_, start, end in parts)
        count = -(-total // _SHARE)

        def at(part: Part, number: int) -> int:
            return part[2] + (part[3] - part[2]) * number // count

        # Each share has as much of every part: all processes read the largest partition too.
        shares = [[(*part[:2], at(part, number), at(part, number + 1)) for part in parts] for number in range(count)]
        self._engine.reading = lambda: Doing(what=f"reads {shown}", done=done, total=total, unit="records")
        copied = partial(copy, client_settings(access, level), folder=folder, rows=rows)
        try:
            for offsets in map(copied, shares) if count <= 1 else self._engine.pool.map(copied, shares):
                done += offsets
        finally:
            self._engine.reading = None
        if any(Path(folder).iterdir()):
            return self._engine.query(f"select * from read_parquet({quoted(Path(folder, '*', '*.parquet'))})")  # noqa: S608
        return self._nothing(rows)

    def files(self, folders: Sequence[tuple[str, str]], rows: Rows) -> Frame:
        if not folders:
            return self._nothing(rows)
        selects = (
            f"""select "key", "value", {quoted(topic)} as topic, "partition", "offset", "timestamp", headers
            from read_parquet({quoted(Path(folder, "*.parquet"))}, hive_partitioning = false)"""  # noqa: S608
            for topic, folder in folders
        )
        records = self._engine.query(" union all ".join(selects))
        return self._engine.query(rows.sql, records=records)

    def _nothing(self, rows: Rows) -> Frame:
        return self._engine.query(rows.sql, records=self._engine.take(RECORD.empty_table()))


def client_settings(access: KafkaAccess, isolation_level: str) -> dict[str, str]:
    """Return the settings of a consumer that reads partitions from one offset to another."""
    return {
        **CLIENT_DEFAULTS,
        **access.librdkafka,
        "group.id": "halfway-pipeline",
        "isolation.level": isolation_level,
        "enable.auto.commit": "false",
        "enable.auto.offset.store": "false",
        "enable.partition.eof": "true",
        "auto.offset.reset": "earliest",
        "fetch.wait.max.ms": "20",
        "queued.max.messages.kbytes": "65536",
        "check.crcs": "false",
    }


def copy(settings: Mapping[str, str], parts: Sequence[Part], folder: str, rows: Rows = WHOLE) -> int:
    """Read parts of topics, write the rows of each to a file of Parquet, and return the number of all their offsets."""
    from confluent_kafka import Consumer, TopicPartition

    consumer = Consumer(dict(settings))
    parts = [part for part in parts if part[2] < part[3]]
    ends = {(topic, partition): end for topic, partition, _, end in parts}
    files = {part[:2]: _File(Path(folder, part[0]), part, rows) for part in parts}
    try:
        consumer.assign([TopicPartition(topic, partition, start) for topic, partition, start, _ in parts])
        last_answer = time.monotonic()
        while ends:
            messages: list[Any] = consumer.consume(_AT_ONCE, 0.5)
            for message in messages:
                key = (message.topic(), message.partition())
                if key in ends:
                    # An error that comes again and again is no answer.
                    last_answer = last_answer if message.error() else time.monotonic()
                    if _taken(message, ends[key], files[key]):
                        del ends[key]
            # Records of partitions that have been read do not count as progress of the others.
            if ends and time.monotonic() - last_answer > _SILENT_S:
                raise PipelineError(
                    f"Kafka gave no record of {', '.join(topic for topic, _ in ends)} for {_SILENT_S:g} s"
                )
    finally:
        for file in files.values():
            file.close()
        consumer.close()
    return sum(end - start for *_, start, end in parts)


def _taken(message: Any, end: int, file: _File) -> bool:
    """Take a record; return whether it, or the end of the partition, is the last one before an offset.

    A leader that was just elected does not know the end of its log for a moment. Then it reports an end that is too
    early, or the client begins again. PipelineError if the client reports an error that is not temporary.
    """
    from confluent_kafka import KafkaError

    error = message.error()
    if error is None:
        if file.position <= message.offset() < end:
            file.add(message)
        return bool(message.offset() >= end - 1)
    if error.code() == KafkaError._PARTITION_EOF:  # noqa: SLF001 - the names of librdkafka's own errors begin with _
        return bool(message.offset() >= end)
    if error.fatal() or not error.retriable():
        raise PipelineError(f"{message.topic()} cannot be read: {error.str()}")
    return False


def _headers(message: Any) -> Sequence[tuple[str, bytes | None]]:
    """Return the headers of a record; only `UNREADABLE` if a name is not UTF-8, which halfway never writes."""
    try:
        return _read_headers(message) or ()
    except SystemError:
        # confluent_kafka returns broken headers then, which would crash the process if they were read again.
        message.set_headers([])
        return ((UNREADABLE, None),)


class _File:
    """A file with the rows of a part of a topic, which is created with the first row."""

    def __init__(self, folder: Path, part: Part, rows: Rows) -> None:
        self._topic, self._partition, self.position, _ = part
        """`position` is the offset after the last record."""
        self._path = folder / f"{self._partition}-{self.position}.parquet"
        self._made = rows
        self._writer: pq.ParquetWriter | None = None
        self._database: Any = None
        self._records: list[tuple[Any, ...]] = []
        self._bytes = 0

    def add(self, message: Any) -> None:
        self.position = message.offset() + 1
        found = _headers(message)
        if self._made.headers and not any(name in self._made.headers for name, _ in found):
            return
        headers = [{"key": name, "value": value} for name, value in found]
        micros = max(0, min(message.timestamp()[1], LATEST_MS)) * 1000
        key, value = message.key(), message.value()
        self._records.append((key, value, self._topic, self._partition, message.offset(), micros, headers))
        self._bytes += sum(len(part or b"") for part in (key, value, *(each["value"] for each in headers)))
        if len(self._records) >= _MOST or self._bytes >= _HELD:
            self._flush()

    def _flush(self) -> None:
        if not self._records:
            return
        columns = [
            pa.array(column, field.type) for column, field in zip(zip(*self._records, strict=True), RECORD, strict=True)
        ]
        self._records.clear()
        self._bytes = 0
        made = self._rows_of(pa.Table.from_arrays(columns, schema=RECORD))
        if not made.num_rows:
            return
        if self._writer is None:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            self._writer = pq.ParquetWriter(self._path, made.schema, compression="lz4")
        self._writer.write_table(made)

    def _rows_of(self, records: pa.Table) -> pa.Table:
        if self._made == WHOLE:
            return records
        if self._database is None:
            self._database = connected({"threads": 1})
        self._database.register("records", records)
        return self._database.sql(self._made.sql.replace("$records", "records")).to_arrow_table()

    def close(self) -> None:
        self._flush()
        if self._writer is not None:
            self._writer.close()
        if self._database is not None:
            self._database.close()
