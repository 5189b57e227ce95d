"""The ledger under a steady stream: its lag, its memory, and whether its table is complete at the end."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final

import duckdb
import msgspec
from confluent_kafka import TopicPartition
from confluent_kafka.admin import AdminClient, NewTopic, OffsetSpec  # type: ignore[attr-defined] # they are there
from deltalake import DeltaTable

from bench.pipeline.load import Load, LoadPlan, LoadResult
from bench.pipeline.transactions import PREFIX, SHARDS
from bench.system.processes import Watch
from bench.system.rig import RigError
from halfway.embedded import EmbeddedConfig, EmbeddedKafka
from halfway.pipeline.jobs import ledger
from halfway.pipeline.tables import delta

_LOOK_S: Final = 0.2
_CATCH_UP_S: Final = 600.0
_ASK_S: Final = 30.0
_MIB: Final = 1 << 20


class Streaming(msgspec.Struct, frozen=True, kw_only=True):
    """How much for how long."""

    events_per_s: int = 33_000
    minutes: float = 10.0
    every_s: float = 10.0
    memory: str = "2g"
    seed: int = 1
    pending: int = 0
    """Transactions that are prepared before, and never end."""


class Batch(msgspec.Struct, frozen=True, kw_only=True):
    """What was seen when a batch was done: seconds from the first one, records that the topics held beyond it."""

    at_s: float
    records: int
    behind: int
    pending: int
    memory_mib: int
    checkpoint_mib: float


class StreamLine(msgspec.Struct, frozen=True, kw_only=True):
    """A minute. What the ledger keeps from batch to batch: its pending table, its memory, its checkpoint."""

    minute: int
    batches: int
    records_per_s: int
    behind_at_most: int
    pending_at_most: int
    memory_mib: int
    checkpoint_mib: float


class Stream(msgspec.Struct, frozen=True, kw_only=True):
    """What a stream showed."""

    offered_per_s: int
    offered_behind_s: float
    seconds: float
    transactions: int
    rows: int
    distinct: int
    pending_at_end: int
    caught_up_s: float
    ledger_cores: float
    lines: list[StreamLine]
    pending_wanted: int = 0

    @property
    def clean(self) -> bool:
        """Return whether each transaction that has ended has one row, and the others are pending."""
        return self.rows == self.distinct == self.transactions and self.pending_at_end == self.pending_wanted


def stream(wanted: Streaming, say: Callable[[str], None]) -> Stream:
    """Load the topics of a broker at a rate, run the ledger, and compare its table with the load."""
    with ExitStack() as stack:
        directory = Path(stack.enter_context(TemporaryDirectory(prefix="halfway-ledger-")))
        say("the broker starts")
        kafka = stack.enter_context(EmbeddedKafka(EmbeddedConfig(heap="1g", progress=say)))
        topics = _Topics(kafka.bootstrap_servers)
        output = directory / "ledger"
        process = stack.enter_context(_ledger(kafka.bootstrap_servers, output, directory / "ledger.log", wanted))
        stack.callback(_end, process)
        follower = _Follower(process, topics, output)
        used = stack.enter_context(Watch(process.pid))
        if wanted.pending:
            say(f"{wanted.pending:,} transactions are prepared that stay pending")
            before = LoadPlan(
                bootstrap_servers=kafka.bootstrap_servers, prefix=PREFIX, events_per_s=0, seconds=0,
                pending=wanted.pending, seed=wanted.seed + 1,
            )  # fmt: skip
            Load(before).run()
            follower.catch_up(used)
            follower.forget()
        say(f"the ledger starts; then {wanted.events_per_s:,} records a second for {wanted.minutes:g} minutes")
        plan = LoadPlan(
            bootstrap_servers=kafka.bootstrap_servers,
            prefix=PREFIX,
            events_per_s=wanted.events_per_s,
            seconds=wanted.minutes * 60,
            seed=wanted.seed,
        )
        given, result = directory / "load.json", directory / "loaded.json"
        given.write_bytes(msgspec.json.encode(plan))
        command = [sys.executable, "-m", "bench.pipeline.load", str(given), str(result)]
        began, cpu_s = time.monotonic(), used.cpu_s
        with subprocess.Popen(command) as load:  # noqa: S603 - commands of this file
            while load.poll() is None:
                follower.look(used)
            if load.returncode:
                raise RigError("the load has failed")
        loaded = msgspec.json.decode(result.read_bytes(), type=LoadResult)
        over = time.monotonic()
        cores = (used.cpu_s - cpu_s) / (over - began)
        say("the load is over, the ledger catches up")
        follower.catch_up(used)
        caught_up_s = time.monotonic() - over
        _end(process)
        rows, distinct = _rows(output)
        return Stream(
            offered_per_s=round(loaded.events_per_s),
            offered_behind_s=loaded.behind_s,
            seconds=round(loaded.seconds, 1),
            transactions=loaded.transactions,
            rows=rows,
            distinct=distinct,
            pending_at_end=follower.batches[-1].pending,
            caught_up_s=round(caught_up_s, 1),
            ledger_cores=round(cores, 2),
            lines=by_minute([one for one in follower.batches if one.at_s <= over - began]),
            pending_wanted=wanted.pending,
        )


def by_minute(batches: Sequence[Batch]) -> list[StreamLine]:
    """Sum batches up by the minute in which they were done; a minute without one is left out."""
    minutes: dict[int, list[Batch]] = {}
    for one in batches:
        minutes.setdefault(int(one.at_s // 60), []).append(one)
    lines, before = [], Batch(at_s=0, records=0, behind=0, pending=0, memory_mib=0, checkpoint_mib=0)
    for minute, done in sorted(minutes.items()):
        last = done[-1]
        lines.append(
            StreamLine(
                minute=minute + 1,
                batches=len(done),
                records_per_s=round((last.records - before.records) / (last.at_s - before.at_s)),
                behind_at_most=max(one.behind for one in done),
                pending_at_most=max(one.pending for one in done),
                memory_mib=max(one.memory_mib for one in done),
                checkpoint_mib=last.checkpoint_mib,
            )
        )
        before = last
    return lines


class _Topics:
    """halfway's own topics, as a ledger reads them."""

    def __init__(self, bootstrap_servers: str) -> None:
        self._admin = AdminClient({"bootstrap.servers": bootstrap_servers})
        new = [NewTopic(PREFIX + kind, SHARDS, 1, config={"cleanup.policy": "compact"}) for kind in ledger.KINDS]
        for made in self._admin.create_topics(new).values():
            made.result(_ASK_S)

    def ends(self) -> int:
        """Return how many records and markers there are."""
        asked = {
            TopicPartition(PREFIX + kind, partition): OffsetSpec.latest()  # type: ignore[no-untyped-call]
            for kind in ledger.KINDS
            for partition in range(SHARDS)
        }
        return sum(reply.result(_ASK_S).offset for reply in self._admin.list_offsets(asked).values())


class _Follower:
    """Looks at the batches of a ledger that runs, from outside."""

    def __init__(self, process: subprocess.Popen[bytes], topics: _Topics, output: Path) -> None:
        self._process = process
        self._topics = topics
        self._output = output
        self._checkpoint = output / ledger.CHECKPOINT
        self._last = -1
        self.batches: list[Batch] = []
        self._began = time.monotonic()

    def look(self, used: Watch) -> None:
        """Wait a moment, and record a batch that was done in the meantime."""
        time.sleep(_LOOK_S)
        if self._process.poll() is not None:
            raise RigError(f"the ledger has ended with {self._process.returncode}")
        done = max((int(each.name) for each in _names(self._checkpoint / "commits") if each.name.isdigit()), default=-1)
        if done == self._last:
            return
        self._last = done
        read = self._read(done)
        self.batches.append(
            Batch(
                at_s=round(time.monotonic() - self._began, 1),
                records=read,
                behind=self._topics.ends() - read,
                pending=delta.count(DeltaTable(str(self._output / ledger.PENDING))),
                memory_mib=used.memory_bytes // _MIB,
                checkpoint_mib=round(_size(self._checkpoint) / _MIB, 1),
            )
        )

    def forget(self) -> None:
        """Start counting minutes."""
        self.batches.clear()
        self._began = time.monotonic()

    def catch_up(self, used: Watch) -> None:
        """Wait until everything has been read."""
        deadline = time.monotonic() + _CATCH_UP_S
        while self._last < 0 or self._read(self._last) < self._topics.ends():
            if time.monotonic() > deadline:
                raise RigError(f"the ledger is still behind after {_CATCH_UP_S:g} s")
            self.look(used)

    def _read(self, batch: int) -> int:
        """Return how many records and markers were read until the end of a batch."""
        last = (self._checkpoint / "offsets" / str(batch)).read_text(encoding="utf-8").splitlines()[-1]
        offsets: Mapping[str, Mapping[str, int]] = json.loads(last)
        return sum(sum(partitions.values()) for partitions in offsets.values())


def _ledger(servers: str, output: Path, log: Path, wanted: Streaming) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "halfway.pipeline", "ledger", "--output", str(output)]
    command += ["--every-s", f"{wanted.every_s:g}", "--memory", wanted.memory]
    settings: dict[str, Any] = {"HALFWAY_KAFKA__BOOTSTRAP_SERVERS": servers, "HALFWAY_KAFKA_PREFIX": PREFIX}
    with log.open("wb") as into:
        return subprocess.Popen(  # noqa: S603 - commands of this file
            command, env=os.environ | settings, stdout=into, stderr=into, start_new_session=True
        )


def _end(process: subprocess.Popen[bytes]) -> None:
    """Kill it, which it must bear, and Spark's JVM with it."""
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _rows(output: Path) -> tuple[int, int]:
    """Return how many rows the ledger has, and how many transactions."""
    files = DeltaTable(str(output / ledger.ENDED)).file_uris()
    found = duckdb.execute("select count(*), count(distinct id) from read_parquet(?)", [files]).fetchone()
    return (0, 0) if found is None else (int(found[0]), int(found[1]))


def _names(folder: Path) -> list[Path]:
    return list(folder.iterdir()) if folder.is_dir() else []


def _size(folder: Path) -> int:
    size = 0
    for file in folder.rglob("*"):
        try:
            size += file.stat().st_size
        except FileNotFoundError:  # Spark removes what it needs no longer
            continue
    return size
