"""`python -m bench pipeline`: what the audit and the sweep cost by the size of the topics, on Spark and on DuckDB.

Each job, as a process of its own, reads an archive as `halfway-pipeline archive` writes it, in which some transactions
have an anomaly. CPU time is that of all processes, memory the most of one, shuffle what Spark wrote between its stages.
"""

from __future__ import annotations

import ctypes
import json
import os
import random
import shutil
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any, Final
from uuid import UUID

import msgspec
import pyarrow as pa
import pyarrow.parquet as pq
from msgspec import Meta

from bench.figures import Record, Row, Say
from bench.system import RigError
from halfway.kafka.records import codec
from halfway.pipeline.sources.duckdb import RECORD
from halfway.pipeline.sources.pins import PartitionPin, Pins, TopicPin
from halfway.protocol.ids import partition_for_key
from halfway.protocol.records import Half, Message, MessageDigest, Op, OpKind
from halfway.protocol.transactions import Cause

JOBS: Final = ("audit", "duckdb", "sweep")
PREFIX: Final = "_halfway."
TOPICS: Final = ("orders", "payments")
GROUP: Final = "shop"
SHARDS: Final = 8
PLANTED: Final = 10
"""The number of transactions of each anomaly; they are the first ones."""
ANOMALIES: Final = ("lost", "torn", "doubled", "payload_changed", "leaked", "contradicted")
_VERDICTS: Final = ["committed_ok"] * 85 + ["rolled_back_ok"] * 10 + ["pending"] * 5
"""Of a hundred others."""
_CONTENTS: Final = 1_024
_VALUE_BYTES: Final = 200
_BLOCK: Final = 50_000
_START: Final = 1_750_000_000_000
_PER_MS: Final = 10
_ENDED_AFTER_MS: Final = 20
_MIB: Final = 1 << 20
_SET_CHILD_SUBREAPER: Final = 36
"""Of prctl(2)."""


class Options(msgspec.Struct, frozen=True, kw_only=True):
    """The jobs and sizes to run."""

    halves: Annotated[tuple[int, ...], Meta(description="transactions of an archive")] = (100_000, 1_000_000)
    job: Annotated[tuple[str, ...], Meta(description="audit, duckdb (the audit on DuckDB) or sweep")] = JOBS
    before: Annotated[str, Meta(description="the Python of an earlier release, which does the same in turn")] = ""
    folder: Annotated[str, Meta(description="where there is room for the archives")] = "build/bench-pipeline"
    memory: Annotated[str, Meta(description="of Spark")] = "4g"
    duckdb_memory: Annotated[str, Meta(description="limit of DuckDB, such as 1GB; by default all that is free")] = ""
    seed: Annotated[int, Meta(description="of the made-up transactions")] = 1
    keep: Annotated[bool, Meta(description="keep the archives, and take those that are there")] = False


def run(_: None, options: Options, say: Say) -> Record:
    """Write archives of made-up topics and run the jobs over them."""
    folder = Path(options.folder).resolve()
    rows = []
    for count in sorted(options.halves):
        archive = folder / str(count)
        if not (options.keep and (archive / "offsets.json").exists()):
            shutil.rmtree(archive, ignore_errors=True)
            say(f"{count:,} halves (seed {options.seed}) are written")
            write(archive, count, seed=options.seed)
        for job in options.job:
            for python in filter(None, (sys.executable, options.before)):
                say(f"{job} of {count:,} halves with {python}")
                rows.append(measure(python, job, count, archive, folder / "scratch", options))
        if not options.keep:
            shutil.rmtree(archive)
    shutil.rmtree(folder / "scratch", ignore_errors=True)
    return Record(title="jobs over archives; bytes in MiB", rows=rows)


def measure(python: str, job: str, halves: int, archive: Path, scratch: Path, options: Options) -> Row:
    """Run one job over an archive and check its result."""
    # The JVM outlives the process that started it by a moment. It then becomes a child of this one.
    ctypes.CDLL(None).prctl(_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    output, events = scratch / job, scratch / f"{job}-events"
    for folder in (output, events):
        shutil.rmtree(folder, ignore_errors=True)
    events.mkdir(parents=True)
    command = ["halfway.pipeline", "audit" if job == "duckdb" else job]
    command += ["--snapshot", str(archive), "--output", str(output), "--json"]
    if job == "duckdb":
        command += ["--engine", "duckdb", *(["--memory", options.duckdb_memory] if options.duckdb_memory else [])]
    else:
        log = {"enabled": "true", "dir": events.as_uri(), "rolling.enabled": "false", "compress": "false"}
        conf = [part for name, value in log.items() for part in ("--conf", f"spark.eventLog.{name}={value}")]
        command += ["--memory", options.memory, "--conf", f"spark.local.dir={scratch / 'local'}", *conf]
    began = time.monotonic()
    command = [python, "-m", *command]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True) as process:  # noqa: S603 - commands of this file
        printed = process.stdout.read() if process.stdout else ""
        _, status, used = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
    seconds, spent = time.monotonic() - began, [used]
    with suppress(ChildProcessError):
        while True:
            spent.append(os.wait4(-process.pid, 0)[2])
    if process.returncode not in (0, 1):
        raise RigError(f"{' '.join(command)} failed")
    _require(job, halves, json.loads(printed))
    shuffled, spilled = _shuffled(events)
    shutil.rmtree(output, ignore_errors=True)
    return {
        "job": job if python == sys.executable else f"{job}, before",
        "halves": halves,
        "seconds": seconds,
        "CPU s": sum(each.ru_utime + each.ru_stime for each in spent),
        "memory": 1024 * max(each.ru_maxrss for each in spent) // _MIB,
        "shuffled": None if job == "duckdb" else shuffled // _MIB,
        "spilled": None if job == "duckdb" else spilled // _MIB,
    }


def _shuffled(events: Path) -> tuple[int, int]:
    """Return the bytes that Spark has shuffled, and those that it has spilled to disk."""
    written = spilled = 0
    for log in [path for path in events.rglob("*") if path.is_file() and not path.name.startswith(".")]:
        with log.open(encoding="utf-8") as lines:
            for line in lines:
                if line.startswith('{"Event":"SparkListenerTaskEnd"'):
                    metrics: dict[str, Any] = json.loads(line).get("Task Metrics") or {}
                    written += metrics.get("Shuffle Write Metrics", {}).get("Shuffle Bytes Written", 0)
                    spilled += metrics.get("Disk Bytes Spilled", 0)
    return written, spilled


def _require(job: str, halves: int, printed: Any) -> None:
    wanted = expected(halves)
    if job == "sweep":
        found, wanted = {"pending": sum(row["pending"] for row in printed)}, {"pending": wanted["pending"]}
    else:
        found = {name: count for name, count in printed.items() if count}
    if found != wanted:
        raise RigError(f"{job} of {halves:,} halves says {found}, which should be {wanted}")


# --- made-up topics


def verdict_of(number: int) -> str:
    """Return the verdict that an audit must give the transaction with this number."""
    planted = number // PLANTED
    return ANOMALIES[planted] if planted < len(ANOMALIES) else _VERDICTS[number % len(_VERDICTS)]


def expected(halves: int) -> dict[str, int]:
    """Return the verdicts that an audit of so many transactions must give."""
    return dict(Counter(verdict_of(number) for number in range(halves)))


def write(folder: Path, halves: int, *, seed: int) -> None:
    """Write an archive of so many transactions, with the bytes and headers that the coordinator writes."""
    topics = {name: _Topic(name) for name in (PREFIX + "half", PREFIX + "op", *TOPICS)}
    writer = _Writer(topics, random.Random(seed))
    for number in range(halves):
        writer.transaction(number)
        if (number + 1) % _BLOCK == 0 or number + 1 == halves:
            for topic in topics.values():
                topic.flush(folder)
    now = _START + halves // _PER_MS + 60_000
    counts = {**{name: topic.written for name, topic in topics.items()}, PREFIX + "parked": 0}
    ends = {n: PartitionPin(partition=0, start=0, end=end, high=end, first_at=_START) for n, end in counts.items()}
    pins = {name: TopicPin(topic=name, at=now, partitions=(end,)) for name, end in ends.items()}
    (folder / "archive.json").write_text(json.dumps({"prefix": PREFIX}) + "\n", encoding="utf-8")
    (folder / "offsets.json").write_text(Pins(at=now, topics=pins).to_json(), encoding="utf-8")


class _Topic:
    """The records of a topic that are not written yet."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.written = 0
        self._rows: list[tuple[Any, ...]] = []

    def add(self, key: bytes | None, value: bytes | None, shard: int, at: int, headers: codec.Headers) -> None:
        """Append a record."""
        pairs = [{"key": name, "value": text.encode() if isinstance(text, str) else text} for name, text in headers]
        self._rows.append((key, value, self.name, shard, self.written, at * 1000, pairs))
        self.written += 1

    def flush(self, folder: Path) -> None:
        """Write a file of the archive."""
        if self._rows:
            columns = zip(RECORD, zip(*self._rows, strict=True), strict=True)
            table = pa.table([pa.array(values, field.type) for field, values in columns], RECORD)
            place = folder / "committed" / f"topic={self.name}" / f"part-{self.written:010}.parquet"
            place.parent.mkdir(parents=True, exist_ok=True)
            pq.write_table(table.drop_columns("topic"), place, compression="zstd", compression_level=1)
            self._rows = []


class _Writer:
    """Writes transactions of two messages each."""

    def __init__(self, topics: dict[str, _Topic], rng: random.Random) -> None:
        self._topics = topics
        self._rng = rng
        self._contents = [
            [Message(topic=topic, key=rng.randbytes(12), value=rng.randbytes(_VALUE_BYTES)) for topic in TOPICS]
            for _ in range(_CONTENTS)
        ]
        self._digests = [tuple(map(MessageDigest.of, messages)) for messages in self._contents]
        messages, print_ = tuple(self._contents[0]), bytes(range(16))
        half = Half(id="x", group=GROUP, messages=messages, prepared_at=_START, since=_START, fingerprint=print_)
        self._half = codec.encode_half(half)  # its id does not matter, because no job decodes it

    def transaction(self, number: int) -> None:
        """Write what there is of a transaction: half records, op markers, messages."""
        verdict, at = verdict_of(number), _START + number // _PER_MS
        made = UUID(int=at << 80 | 0x7 << 76 | self._rng.getrandbits(12) << 64 | 0x2 << 62 | self._rng.getrandbits(62))
        name, content = str(made), self._rng.randrange(_CONTENTS)
        shard = partition_for_key(name.encode(), SHARDS)
        self._internal("half", name, self._half, shard, at, "prepared")
        if verdict == "pending":
            return
        rolled_back = verdict in {"rolled_back_ok", "leaked"}
        ended_at = at + _ENDED_AFTER_MS
        contradicted = [OpKind.ROLLED_BACK] * (verdict == "contradicted")
        for kind in [OpKind.ROLLED_BACK if rolled_back else OpKind.COMMITTED, *contradicted]:
            op = Op(
                kind=kind,
                id=name,
                group=GROUP,
                half_offset=0,
                cause=Cause.PRODUCER,
                prepared_at=at,
                at=ended_at,
                messages=self._digests[content],
            )
            state = "committed" if kind is OpKind.COMMITTED else "rolled_back"
            self._internal("op", name, codec.encode_op(op), shard, ended_at, state)
            self._internal("half", name, None, shard, ended_at, state)
        if rolled_back and verdict != "leaked":
            return
        changed = (content + (verdict == "payload_changed")) % _CONTENTS
        self._real(name, verdict, self._contents[changed], shard, at)

    def _internal(self, kind: str, name: str, value: bytes | None, shard: int, at: int, state: str) -> None:
        self._topics[PREFIX + kind].add(name.encode(), value, shard, at, codec.record_headers(kind, GROUP, state))

    def _real(self, name: str, verdict: str, messages: Sequence[Message], shard: int, at: int) -> None:
        for slot, message in enumerate(messages, 1):
            headers: codec.Headers = [
                ("halfway-transaction-id", name.encode()),
                ("halfway-message", f"{slot}/{len(messages)}".encode()),
                ("halfway-prefix", PREFIX.encode()),
                ("halfway-prepared-at", str(at).encode()),
            ]
            copies = 2 if verdict == "doubled" else 0 if verdict == "lost" or (verdict, slot) == ("torn", 2) else 1
            for _ in range(copies):
                self._topics[message.topic].add(message.key, message.value, shard, at + _ENDED_AFTER_MS, headers)
