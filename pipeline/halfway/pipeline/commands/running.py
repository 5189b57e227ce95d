"""How a job is run: its engine (DuckDB if one machine is enough, else Spark), its source, and its exit status."""

from __future__ import annotations

import errno
import json
import logging
import signal
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from shutil import disk_usage
from tempfile import gettempdir
from types import FrameType
from typing import Any, Final, Literal

import click
from pyspark.sql import SparkSession

from halfway.pipeline import access
from halfway.pipeline.access import KafkaAccess
from halfway.pipeline.engines.dialect import told
from halfway.pipeline.engines.duckdb import DuckEngine, duckdb_limit
from halfway.pipeline.engines.engine import Engine, SparkEngine
from halfway.pipeline.engines.spark_session import SparkOptions, is_submitted, prepared
from halfway.pipeline.errors import PipelineError
from halfway.pipeline.jobs.incremental import State
from halfway.pipeline.sources.duckdb import DuckReader
from halfway.pipeline.sources.pinned import Archive, KafkaSource, Reader, Source
from halfway.pipeline.sources.pins import Brokers, Pins
from halfway.pipeline.sources.spark import SparkReader
from halfway.pipeline.tables import Files, Folder, LocalFolder, Tables, is_local

FAILED: Final = 2
INTERRUPTED: Final = 130


class _Interruption:
    """Whether the user has pressed Ctrl-C. While Python waits for the JVM, py4j can raise any error for it."""

    def __init__(self) -> None:
        self.seen = False

    def watch(self) -> None:
        """Notice it from now on, and call the earlier handler too."""
        before = signal.getsignal(signal.SIGINT)
        if before is signal.SIG_IGN:
            return

        def notice(number: int, frame: FrameType | None) -> None:
            self.seen = True
            logging.disable()  # py4j would log the connection that breaks.
            if callable(before):
                before(number, frame)

        signal.signal(signal.SIGINT, notice)


@contextmanager
def running(
    job: str,
    *,
    kafka: bool,
    config: Path | None = None,
    master: str | None,
    memory: str | None,
    conf: tuple[str, ...],
    jars: str,
    few: bool = False,
) -> Iterator[Opened]:
    """Open Spark for a job, and report why the job could not be done."""
    pairs = [pair.partition("=") for pair in conf]
    if wrong := [name for name, sign, _ in pairs if not sign]:
        raise click.UsageError(f"--conf {wrong[0]}: give it as KEY=VALUE")
    options = SparkOptions(
        master=master,
        memory=memory,
        jars=[jar for jar in jars.split(",") if jar],
        conf={name: value for name, _, value in pairs},
        few=few,
    )
    with reporting_failures(job) as interruption, ExitStack() as stack:
        if kafka:
            # Wrong settings are reported before Spark starts, which takes seconds.
            access.load(file=config)
        access.times(file=config)
        start = prepared(f"halfway-{job}", options)
        with _held_back(signal.SIGINT):
            spark = start()
            stack.callback(spark.stop)
            interruption.watch()  # Spark has installed its own handler.
        found = on_spark(spark)
        stack.callback(found.engine.close)
        if job != "ledger":  # which says what each batch has done
            stack.enter_context(told(job, found.engine.doing))
        yield found


@contextmanager
def _held_back(number: signal.Signals) -> Iterator[None]:
    """Hold a signal back. A Spark that is interrupted while it starts would keep running without Python."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {number})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


@contextmanager
def reporting_failures(job: str) -> Iterator[_Interruption]:
    """Report why a job could not be done, and exit with the documented status."""
    interruption = _Interruption()
    interruption.watch()
    try:
        yield interruption
    except PipelineError as error:
        click.echo(f"halfway-pipeline {job}: {error}", err=True)
        sys.exit(FAILED)
    except (Exception, KeyboardInterrupt):  # noqa: BLE001 - Python would exit with 1, which means an anomaly
        if interruption.seen:
            click.echo(f"halfway-pipeline {job}: interrupted", err=True)
            sys.exit(INTERRUPTED)
        traceback.print_exc()
        sys.exit(FAILED)


@dataclass(frozen=True, kw_only=True)
class Opened:
    """An engine, and how it reads topics and opens folders."""

    engine: Engine
    reader: Reader
    folder: Callable[[str], Files]
    spark: Any = None
    """Spark's session, None on DuckDB."""
    because: str = ""
    """Why the job runs on this engine."""

    def source(self, kafka: KafkaAccess | None, snapshot: str | None = None, offsets: str | None = None) -> Source:
        if snapshot is not None:
            return Archive(self.reader, self.folder(snapshot))
        pins = None
        if offsets is not None:
            folder, _, name = offsets.rpartition("/")
            pins = Pins.from_json(self.folder(folder or ".").read(name))
        return KafkaSource(self.reader, kafka or access.load(), pins)


def on_spark(spark: SparkSession) -> Opened:
    engine, reader = SparkEngine(spark), SparkReader(spark)
    return Opened(engine=engine, reader=reader, folder=partial(Folder, spark), spark=spark)


Name = Literal["auto", "duckdb", "spark"]
FEW: Final = 100_000
"""Records of half and op up to which Spark compiles less."""
_BYTES_EACH: Final = 1_600
"""Memory that DuckDB needs for a record of half or op and everything that belongs to it.

2.9 million records (a million transactions) took 3,573 MiB, which is 1,290 bytes each, and 29 million took 18,560 MiB,
which is 670 (docs/pipeline.md#what-they-cost). This is a quarter more than the first.
"""
_DISK_EACH: Final = 250
"""Disk for the rows of such a record and of its messages, a quarter more than was measured: 165 bytes for an op, as
much for what is decoded of it, 34 for each record of half, 82 for each message."""
_ROOM: Final = "make room, name a folder with more room in TMPDIR, or give more --memory"


@dataclass(frozen=True, kw_only=True)
class Places:
    """Where an audit reads and writes. `access` is None for an archive."""

    output: str
    snapshot: str | None
    offsets: str | None
    access: KafkaAccess | None
    tables: Sequence[str | None] = ()
    """Folders of tables that are read or written."""
    continued: bool = False
    """True if the audit reads only what is new since the last run into the same folder."""


@dataclass(frozen=True, kw_only=True)
class Chosen:
    """An engine, and why it was chosen."""

    engine: Literal["duckdb", "spark"]
    because: str
    few: bool = False
    """Whether there are so few records that Spark's start and its plans take longest."""


def engine_of(job: str, name: Name, places: Places, options: Mapping[str, Any], *, sized: bool = True) -> Chosen:
    """Return the engine of the command line, else DuckDB, unless it cannot reach a folder or Spark is asked for.

    The size of what is read matters only if the job is `sized`. PipelineError if the command line chooses DuckDB, which
    cannot do this job, or the disk is too small for DuckDB.
    """
    hindrance, submitted = _hindrance(places), is_submitted()
    if name == "duckdb" and hindrance is not None:
        raise PipelineError(f"--engine duckdb cannot be used: {hindrance}")
    records = _records(places) if sized and hindrance is None and not submitted else None
    because = "the command line chooses it"
    if name == "auto" and (submitted or options.get("master") or options.get("conf")):
        because = "spark-submit, or options or variables of Spark, ask for it"
    elif name == "auto" and hindrance is not None:
        because = hindrance
        click.echo(f"halfway-pipeline {job}: runs on Spark: {hindrance}", err=True)
    elif name != "spark":
        _require_disk(records or 0, options["memory"])
        return Chosen(engine="duckdb", because=because if name == "duckdb" else "this machine has all folders")
    return Chosen(engine="spark", because=because, few=records is not None and records <= FEW)


def _require_disk(records: int, memory: str | None) -> None:
    """Raise PipelineError if the temporary folder has not room for what is read and for what the memory cannot hold."""
    limit = duckdb_limit(memory)
    needed = records * _DISK_EACH + (0 if limit is None else max(0, records * _BYTES_EACH - limit))
    folder = gettempdir()
    there = disk_usage(folder).free
    if needed > there:
        takes, free = (f"{size / (1 << 30):.1f} GiB" for size in (needed, there))
        raise PipelineError(
            f"half and op have {records:,} records, for which DuckDB takes about {takes} in {folder!r}, and "
            f"{free} are free: {_ROOM}"
        )


def _hindrance(places: Places) -> str | None:
    if find_spec("duckdb") is None:
        return "there is no duckdb"
    for folder in (places.output, places.snapshot, places.offsets, *places.tables):
        if not is_local(folder or ""):
            return f"{folder!r} is not on this machine"
    return None


def _records(places: Places) -> int:
    """Return how many records of half and op have to be read."""
    kinds = ("half", "op")
    if places.access is None:
        folder = LocalFolder(str(places.snapshot))
        kept, prefix = Pins.from_json(folder.read("offsets.json")), json.loads(folder.read("archive.json"))["prefix"]
        pins = [kept.topics[name] for kind in kinds if (name := prefix + kind) in kept.topics]
    else:
        pins = Brokers(places.access).pin([places.access.topic(kind) for kind in kinds])
        if places.continued:
            with closing(DuckEngine()) as engine:
                state = State.of(Tables(engine, LocalFolder(places.output)), places.output)
            pins = [state.pins.followed_by(pin) for pin in pins]
    return sum(each.end - each.start for pin in pins for each in pin.partitions)


@contextmanager
def opened(
    job: str, name: Name, places: Places, options: Mapping[str, Any], *, config: Path | None, sized: bool = True
) -> Iterator[Opened]:
    """Choose an engine as `engine_of` does, open it, and report why the job could not be done."""
    with reporting_failures(job):
        choice = engine_of(job, name, places, options, sized=sized)
    with ExitStack() as stack:
        if choice.engine == "duckdb":
            stack.enter_context(reporting_failures(job))
            tables = [folder for folder in places.tables if folder is not None]
            found = stack.enter_context(on_duckdb(job, options["memory"], places.output, tables))
        else:
            spark = running(job, kafka=places.access is not None, config=config, few=choice.few, **options)
            found = stack.enter_context(spark)
        yield replace(found, because=choice.because)


@contextmanager
def on_duckdb(job: str, memory: str | None, output: str, tables: Sequence[str]) -> Iterator[Opened]:
    """Open DuckDB, and close it with its temporary files at the end.

    PipelineError if memory or disk is not enough, or one of the `tables` (folders of them) cannot be used.
    """
    import duckdb
    from deltalake.exceptions import DeltaError

    engine = DuckEngine(memory=memory)
    try:
        with told(job, engine.doing):
            yield Opened(engine=engine, reader=DuckReader(engine), folder=LocalFolder)
    except (OSError, duckdb.IOException) as error:
        if getattr(error, "errno", None) == errno.ENOSPC or "No space left" in str(error):
            raise PipelineError(f"the disk of {gettempdir()!r} or {output!r} is full: {_ROOM} ({error})") from error
        if not isinstance(error, OSError) or error.filename is None:
            raise
        raise PipelineError(f"{str(error.filename)!r} cannot be used: {error.strerror}") from error
    except DeltaError as error:
        raise PipelineError(f"a table in {' or '.join(map(repr, tables))} cannot be used: {error}") from error
    except duckdb.OutOfMemoryException as error:
        raise PipelineError(
            f"DuckDB has too little memory: give more with --memory, or --engine spark ({error})"
        ) from error
    finally:
        engine.close()
