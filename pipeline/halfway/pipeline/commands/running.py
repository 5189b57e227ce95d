"""How a job is run: its Spark session, its source, and its exit status if it fails."""

from __future__ import annotations

import logging
import signal
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import click

from halfway.pipeline import access
from halfway.pipeline.engines.progress import told
from halfway.pipeline.engines.spark_session import SparkOptions, prepared
from halfway.pipeline.errors import PipelineError

if TYPE_CHECKING:
    from types import FrameType

    from pyspark.sql import SparkSession

    from halfway.pipeline.access import KafkaAccess
    from halfway.pipeline.engines.engine import Engine
    from halfway.pipeline.sources.pinned import Reader, Source
    from halfway.pipeline.tables.folders import Files

FAILED: Final = 2
INTERRUPTED: Final = 130
PARTS: Final = {"min_partitions": "minPartitions", "max_records_per_partition": "maxRecordsPerPartition"}
"""Options, and their names in Spark's Kafka source."""


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
    **connection: Any,
) -> Iterator[SparkSession]:
    pairs = [pair.partition("=") for pair in conf]
    if wrong := [name for name, sign, _ in pairs if not sign]:
        raise click.UsageError(f"--conf {wrong[0]}: give it as KEY=VALUE")
    options = SparkOptions(
        master=master,
        memory=memory,
        connector_version=connection["connector_version"],
        jars=[jar for jar in connection["jars"].split(",") if jar],
        conf={name: value for name, _, value in pairs},
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
        if job != "ledger":  # which says what each batch has done
            stack.enter_context(told(job, on_spark(spark).engine.doing))
        yield spark


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


def kafka_access(config: Path | None, options: Mapping[str, Any]) -> KafkaAccess:
    """Return how to reach Kafka, with the options of the command line for Spark's Kafka source (`PARTS`)."""
    reading = {name: str(options[option]) for option, name in PARTS.items() if options[option] is not None}
    return replace(access.load(file=config), reading=reading)


@dataclass(frozen=True, kw_only=True)
class Opened:
    """An engine, and how it reads topics and opens folders."""

    engine: Engine
    reader: Reader
    folder: Callable[[str], Files]

    def source(self, kafka: KafkaAccess | None, snapshot: str | None = None, offsets: str | None = None) -> Source:
        """Return the archive, or the topics if no archive is given."""
        from halfway.pipeline.sources.pinned import Archive, KafkaSource
        from halfway.pipeline.sources.pins import Pins

        if snapshot is not None:
            return Archive(self.reader, self.folder(snapshot))
        pins = None
        if offsets is not None:
            folder, _, name = offsets.rpartition("/")
            pins = Pins.from_json(self.folder(folder or ".").read(name))
        return KafkaSource(self.reader, kafka or access.load(), pins)


def on_spark(spark: SparkSession) -> Opened:
    from halfway.pipeline.engines.engine import SparkEngine
    from halfway.pipeline.sources.spark import SparkReader
    from halfway.pipeline.tables.folders import Folder

    return Opened(engine=SparkEngine(spark), reader=SparkReader(spark), folder=partial(Folder, spark))
