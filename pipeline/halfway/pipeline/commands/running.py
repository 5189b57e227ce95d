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
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from shutil import disk_usage
from tempfile import gettempdir
from types import FrameType
from typing import Any, Final, Literal, NamedTuple

import click

from halfway.pipeline import access
from halfway.pipeline.access import KafkaAccess
from halfway.pipeline.engines.dialect import told
from halfway.pipeline.engines.duckdb import DuckEngine, duckdb_limit
from halfway.pipeline.engines.engine import Engine, SparkEngine
from halfway.pipeline.engines.spark_session import is_submitted, prepared
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
    """Where a job reads and writes."""

    output: str
    topics: bool = True
    """Whether it reads topics: those of an archive if `snapshot` is given, else Kafka's."""
    snapshot: str | None = None
    offsets: str | None = None
    tables: Sequence[str | None] = ()
    """Folders of tables that are read or written."""
    continued: bool = False
    """True if an audit reads only what is new since the last run into the same folder."""


@dataclass(frozen=True, kw_only=True)
class Opened:
    """An engine, and how it reads topics and opens folders."""

    engine: Engine
    reader: Reader
    folder: Callable[[str], Files]
    places: Places
    times: access.Times
    kafka: Any = None
    """How Kafka is reached, None if the job does not read it."""
    spark: Any = None
    """Spark's session, None on DuckDB."""
    because: str = ""
    """Why the job runs on this engine."""

    def source(self) -> Source:
        if self.places.snapshot is not None:
            return Archive(self.reader, self.folder(self.places.snapshot))
        pins = None
        if self.places.offsets is not None:
            folder, _, name = self.places.offsets.rpartition("/")
            pins = Pins.from_json(self.folder(folder or ".").read(name))
        return KafkaSource(self.reader, self.kafka, pins)


@contextmanager
def opened(job: str, name: Name, places: Places, options: Mapping[str, Any]) -> Iterator[Opened]:
    """Choose an engine as `engine_of` does, open it for a job, and report why the job could not be done.

    `options` are those that every command has.
    """
    with reporting_failures(job) as interruption, ExitStack() as stack:
        # Wrong settings are reported before Spark starts, which takes seconds.
        kafka = access.load(file=options["config"]) if places.topics and places.snapshot is None else None
        times = access.times(file=options["config"])
        choice = engine_of(job, name, places, options, kafka)
        engine: Engine
        reader: Reader
        folder: Callable[[str], Files] = LocalFolder
        spark = None
        if choice.engine == "duckdb":
            stack.enter_context(_explained(places))
            engine = DuckEngine(memory=options["memory"])
            reader = DuckReader(engine)
        else:
            jars = [jar for jar in options["jars"].split(",") if jar]
            start = prepared(f"halfway-{job}", _conf(options), connector=jars, few=choice.few)
            with _held_back(signal.SIGINT):
                spark = start()
                stack.callback(spark.stop)
                interruption.watch()  # Spark has installed its own handler.
            engine, reader, folder = SparkEngine(spark), SparkReader(spark), partial(Folder, spark)
        stack.callback(engine.close)
        if job != "ledger":  # which says what each batch has done
            stack.enter_context(told(job, engine.doing))
        yield Opened(
            engine=engine, reader=reader, folder=folder, places=places, kafka=kafka, times=times, spark=spark,
            because=choice.because,
        )  # fmt: skip


def _conf(options: Mapping[str, Any]) -> dict[str, str]:
    """Return what the options say to Spark. What starts the driver has given it its memory."""
    conf = {"spark.master": options["master"], "spark.driver.memory": None if is_submitted() else options["memory"]}
    return {name: value for name, value in conf.items() if value is not None} | dict(options["conf"])


class Chosen(NamedTuple):
    """An engine, and why it was chosen."""

    engine: Literal["duckdb", "spark"]
    because: str
    few: bool = False
    """Whether there are so few records that Spark's start and its plans take longest."""


def engine_of(
    job: str, name: Name, places: Places, options: Mapping[str, Any], kafka: KafkaAccess | None = None
) -> Chosen:
    """Return the engine of the command line, else DuckDB, unless it cannot reach a folder or Spark is asked for.

    For an audit the size of what is read matters too. PipelineError if the command line chooses DuckDB, which cannot do
    this job, or the disk is too small for DuckDB.
    """
    hindrance, submitted = _hindrance(places), is_submitted()
    if name == "duckdb" and hindrance is not None:
        raise PipelineError(f"--engine duckdb cannot be used: {hindrance}")
    records = _records(places, kafka) if job == "audit" and hindrance is None and not submitted else None
    because = "the command line chooses it"
    if name == "auto" and (submitted or options["master"] or options["conf"]):
        because = "spark-submit, or options or variables of Spark, ask for it"
    elif name == "auto" and hindrance is not None:
        because = hindrance
        click.echo(f"halfway-pipeline {job}: runs on Spark: {hindrance}", err=True)
    elif name != "spark":
        _require_disk(records or 0, options["memory"])
        return Chosen("duckdb", because if name == "duckdb" else "this machine has all folders")
    return Chosen("spark", because, few=records is not None and records <= FEW)


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


def _records(places: Places, kafka: KafkaAccess | None) -> int:
    """Return how many records of half and op have to be read."""
    kinds = ("half", "op")
    if kafka is None:
        folder = LocalFolder(str(places.snapshot))
        kept, prefix = Pins.from_json(folder.read("offsets.json")), json.loads(folder.read("archive.json"))["prefix"]
        pins = [kept.topics[name] for kind in kinds if (name := prefix + kind) in kept.topics]
    else:
        pins = Brokers(kafka).pin([kafka.topic(kind) for kind in kinds])
        if places.continued:
            with closing(DuckEngine()) as engine:
                state = State.of(Tables(engine, LocalFolder(places.output)), places.output)
            pins = [state.pins.followed_by(pin) for pin in pins]
    return sum(each.end - each.start for pin in pins for each in pin.partitions)


@contextmanager
def _explained(places: Places) -> Iterator[None]:
    """Raise PipelineError if memory or disk is not enough for DuckDB, or one of the tables cannot be used."""
    import duckdb
    from deltalake.exceptions import DeltaError

    try:
        yield
    except (OSError, duckdb.IOException) as error:
        if getattr(error, "errno", None) == errno.ENOSPC or "No space left" in str(error):
            raise PipelineError(
                f"the disk of {gettempdir()!r} or {places.output!r} is full: {_ROOM} ({error})"
            ) from error
        if not isinstance(error, OSError) or error.filename is None:
            raise
        raise PipelineError(f"{str(error.filename)!r} cannot be used: {error.strerror}") from error
    except DeltaError as error:
        tables = " or ".join(repr(folder) for folder in places.tables if folder is not None)
        raise PipelineError(f"a table in {tables} cannot be used: {error}") from error
    except duckdb.OutOfMemoryException as error:
        raise PipelineError(
            f"DuckDB has too little memory: give more with --memory, or --engine spark ({error})"
        ) from error
