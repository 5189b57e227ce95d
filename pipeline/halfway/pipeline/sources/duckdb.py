"""The sources of records for DuckDB: topics, through librdkafka, and archives of them in Parquet."""

from __future__ import annotations

import tempfile
import time
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from operator import methodcaller
from os import cpu_count
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import pyarrow as pa
import pyarrow.parquet as pq

from halfway.pipeline.errors import AccessError
from halfway.pipeline.sources.brokers import Bounds, Cleanup, Offsets
from halfway.pipeline.sources.headers import UNREADABLE
from halfway.pipeline.sources.pinned import COMMITTED, LATER, PinnedArchive, PinnedKafka, Ranges

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from halfway.pipeline.access import KafkaAccess
    from halfway.pipeline.engines.duckdb import DuckEngine
    from halfway.pipeline.engines.engine import Frame
    from halfway.pipeline.sources.pins import Pins, TopicPin
    from halfway.pipeline.tables.folders import LocalFolder

RECORD: Final = pa.schema(
    [
        ("key", pa.binary()),
        ("value", pa.binary()),
        ("topic", pa.string()),
        ("partition", pa.int32()),
        ("offset", pa.int64()),
        ("timestamp", pa.timestamp("us", "UTC")),
        ("headers", pa.list_(pa.struct([("key", pa.string()), ("value", pa.binary())]))),
    ]
)
_TIMEOUT_S: Final = 30.0
_SILENT_S: Final = 60.0
"""How long a broker can give no record, although there are some, before the job fails."""
_DEFAULTS: Final = {
    # Without it librdkafka prints a line for each of twenty attempts a second. The error has the same text.
    "log_level": "2",
    # A firewall or balancer drops what is sent on an idle connection without a word.
    "connections.max.idle.ms": "120000",
    "socket.timeout.ms": "10000",
}
_AT_ONCE: Final = 5_000
_ALONE: Final = 20_000
_HELD: Final = 4 << 20
"""Bytes of records of a partition that are kept in memory before they are written. A record can have megabytes."""
LATEST_MS: Final = (1 << 63) // 1000 - 1
"""The latest timestamp whose microseconds fit into 64 bits. A producer can choose a later one."""
_read_headers: Final = methodcaller("headers")
"""`message.headers()`, by a call whose result Python checks. It does not check that of a direct call in a loop."""


class QuickArchive(PinnedArchive):
    """An archive that the job `archive` wrote."""

    def __init__(self, engine: DuckEngine, folder: LocalFolder, *, with_later: bool = False) -> None:
        """Open an archive; SourceError if the folder holds none, or one that was not finished."""
        super().__init__(folder, with_later=with_later)
        self._engine = engine
        self._files = folder

    def reopened(self) -> QuickArchive:
        """Return the same archive with what was written while it was made."""
        return QuickArchive(self._engine, self._files, with_later=True)

    def committed(self, topics: Sequence[str]) -> Frame:
        """Return the committed records."""
        return self._parts((COMMITTED, LATER) if self._with_later else (COMMITTED,), topics)

    def _read(self, part: str, topics: Sequence[str]) -> Frame:
        return self._parts((part,), topics)

    def _parts(self, parts: Iterable[str], topics: Sequence[str]) -> Frame:
        found = [
            (name, self._folder.path(part, f"topic={name}"))
            for part in parts
            for name in topics
            if name in self.pins.topics and self._folder.names(part, f"topic={name}")
        ]
        return _frame(self._engine, found)


class QuickKafka(PinnedKafka):
    """Topics in Kafka. The records go to the folder of the engine."""

    def __init__(self, engine: DuckEngine, access: KafkaAccess, pins: Pins | None = None) -> None:
        """Read up to the present ends or, given the pins of an earlier run, exactly what that run read."""
        super().__init__(access, pins)
        self._engine = engine

    def reopened(self) -> QuickKafka:
        """Return the same topics with nothing pinned."""
        return QuickKafka(self._engine, self._access)

    def _find(self, topics: Sequence[str]) -> list[TopicPin]:
        return pin(self._access, topics)

    def _read(self, ranges: Ranges, isolation_level: str) -> Frame:
        parts = [
            (topic, partition, start, end)
            for topic, partitions in ranges.items()
            for partition, (start, end) in partitions.items()
            if start < end
        ]
        folder = Path(tempfile.mkdtemp(dir=self._engine.scratch))
        settings = client_settings(self._access, isolation_level)
        processes = cpu_count() or 1
        if sum(end - start for *_, start, end in parts) <= _ALONE:
            processes = 1
        shares = [share for number in range(processes) if (share := parts[number::processes])]
        if processes == 1:
            for share in shares:
                copy(settings, share, str(folder))
        else:
            with ProcessPoolExecutor(processes, mp_context=get_context("forkserver")) as pool:
                list(pool.map(copy, [settings] * len(shares), shares, [str(folder)] * len(shares)))
        found = [(topic, str(folder / topic)) for topic in ranges if (folder / topic).is_dir()]
        return _frame(self._engine, found)


def _frame(engine: DuckEngine, folders: Sequence[tuple[str, str]]) -> Frame:
    if not folders:
        return engine.take(RECORD.empty_table())
    selects = []
    for topic, folder in folders:
        name, pattern = topic.replace("'", "''"), str(Path(folder) / "*.parquet").replace("'", "''")
        selects.append(
            f"""select "key", "value", '{name}' as topic, "partition", "offset", "timestamp", headers
            from read_parquet('{pattern}', hive_partitioning = false)"""  # noqa: S608 - quoted above
        )
    return engine.query(" union all ".join(selects))


def client_settings(access: KafkaAccess, isolation_level: str) -> dict[str, str]:
    """Return the settings of a consumer that reads partitions from one offset to another."""
    return {
        **_DEFAULTS,
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


def read_part(settings: Mapping[str, str], part: tuple[str, int, int, int]) -> Iterator[pa.RecordBatch]:
    """Return the records of a part of a topic (its name, a partition, two offsets), through a temporary file."""
    topic, partition, *_ = part
    with tempfile.TemporaryDirectory() as folder:
        copy(settings, [part], folder)
        file = Path(folder, topic, f"{partition}.parquet")
        if file.exists():
            for batch in pq.ParquetFile(file).iter_batches():
                table = pa.Table.from_batches([batch])
                topics = pa.array([topic] * len(table), pa.string())
                yield from table.append_column("topic", topics).select(RECORD.names).cast(RECORD).to_batches()


def copy(settings: Mapping[str, str], parts: Sequence[tuple[str, int, int, int]], folder: str) -> None:
    """Read ranges of partitions into Parquet, one file for each. It runs in a process of its own."""
    from confluent_kafka import Consumer, TopicPartition

    consumer = Consumer(dict(settings))
    ends = {(topic, partition): end for topic, partition, _, end in parts}
    files = {(topic, partition): _File(Path(folder, topic), partition, start) for topic, partition, start, _ in parts}
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
                raise AccessError(
                    f"Kafka gave no record of {', '.join(topic for topic, _ in ends)} for {_SILENT_S:g} s"
                )
    finally:
        for file in files.values():
            file.close()
        consumer.close()


def _taken(message: Any, end: int, file: _File) -> bool:
    """Take a record; return whether it, or the end of the partition, is the last one before an offset.

    A leader that was just elected does not know the end of its log for a moment. Then it reports an end that is too
    early, or the client begins again.

    Raises:
        AccessError: the client reports an error that is not temporary.

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
        raise AccessError(f"{message.topic()} cannot be read: {error.str()}")
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
    """A file with the records of a partition, which is created with the first record."""

    def __init__(self, folder: Path, partition: int, position: int) -> None:
        self._path = folder / f"{partition}.parquet"
        self._partition = partition
        self.position = position
        """The offset after the last record."""
        self._writer: pq.ParquetWriter | None = None
        self._schema = RECORD.remove(RECORD.get_field_index("topic"))
        self._rows: list[tuple[Any, ...]] = []
        self._bytes = 0

    def add(self, message: Any) -> None:
        headers = [{"key": name, "value": value} for name, value in _headers(message)]
        micros = max(0, min(message.timestamp()[1], LATEST_MS)) * 1000
        key, value = message.key(), message.value()
        self._rows.append((key, value, self._partition, message.offset(), micros, headers))
        self._bytes += sum(len(part or b"") for part in (key, value, *(each["value"] for each in headers)))
        self.position = message.offset() + 1
        if len(self._rows) >= _ALONE or self._bytes >= _HELD:
            self._flush()

    def _flush(self) -> None:
        if not self._rows:
            return
        if self._writer is None:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            self._writer = pq.ParquetWriter(self._path, self._schema, compression="lz4")
        columns = [
            pa.array(column, field.type)
            for column, field in zip(zip(*self._rows, strict=True), self._schema, strict=True)
        ]
        self._writer.write_table(pa.Table.from_arrays(columns, schema=self._schema))
        self._rows.clear()
        self._bytes = 0

    def close(self) -> None:
        self._flush()
        if self._writer is not None:
            self._writer.close()


def pin(access: KafkaAccess, topics: Sequence[str]) -> list[TopicPin]:
    """Return the present pins of those of these topics that exist; AccessError if Kafka does not answer."""
    from confluent_kafka import IsolationLevel, KafkaError, KafkaException, TopicCollection, TopicPartition
    from confluent_kafka import admin as kafka

    # Its types are incomplete.
    made: Any = kafka
    errors: list[KafkaError] = []
    try:
        admin = made.AdminClient({**_DEFAULTS, **access.librdkafka, "error_cb": errors.append})
    except KafkaException as error:
        raise AccessError(
            f"a property of HALFWAY_KAFKA__… or [kafka] cannot be used: {error.args[0].str()}: correct or remove it"
        ) from None
    now = round(time.time() * 1000)
    try:
        known = admin.list_topics(timeout=_TIMEOUT_S).topics
        found = {name: len(known[name].partitions) for name in topics if name in known and known[name].error is None}
        everything = [TopicPartition(name, number) for name, count in found.items() for number in range(count)]
        if not everything:
            return []

        def offsets(spec: Any, level: IsolationLevel) -> Offsets:
            futures = admin.list_offsets(
                dict.fromkeys(everything, spec), isolation_level=level, request_timeout=_TIMEOUT_S
            )
            answers = {(key.topic, key.partition): future.result() for key, future in futures.items()}
            return {place: (answer.offset, answer.timestamp) for place, answer in answers.items()}

        bounds = Bounds(
            start=offsets(made.OffsetSpec.earliest(), IsolationLevel.READ_UNCOMMITTED),
            end=offsets(made.OffsetSpec.latest(), IsolationLevel.READ_COMMITTED),
            high=offsets(made.OffsetSpec.latest(), IsolationLevel.READ_UNCOMMITTED),
            first=offsets(made.OffsetSpec.for_timestamp(0), IsolationLevel.READ_UNCOMMITTED),
        )
        described = admin.describe_topics(TopicCollection(list(found)), request_timeout=_TIMEOUT_S)
        ids = {name: future.result().topic_id for name, future in described.items()}
        resources = [made.ConfigResource(made.ResourceType.TOPIC, name) for name in found]
        configured = {
            resource.name: future.result()
            for resource, future in admin.describe_configs(resources, request_timeout=_TIMEOUT_S).items()
        }
    except KafkaException as error:
        admin.poll(0)
        whole = KafkaError._ALL_BROKERS_DOWN  # noqa: SLF001 - the names of librdkafka's own errors begin with _
        reasons = [error.args[0].str(), *[one.str() for one in errors if one.code() != whole][-1:]]
        raise AccessError(f"Kafka at {access.bootstrap_servers} did not answer: {': '.join(reasons)}") from None
    pins = []
    for name, count in found.items():
        config = configured[name]
        cleanup = Cleanup(
            policy=str(config["cleanup.policy"].value),
            tombstones_kept_ms=int(config["delete.retention.ms"].value),
            kept_ms=int(config["retention.ms"].value),
        )
        of_topic = ids[name].get_most_significant_bits(), ids[name].get_least_significant_bits()
        pins.append(cleanup.pin(name, now, bounds.pins(name, count), of_topic))
    return pins
