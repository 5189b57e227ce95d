"""How a job is run: with a Spark session, its source, and an exit status for whatever stops it."""

from __future__ import annotations

import logging
import signal
import sys
import traceback
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import click

from halfway.pipeline import access
from halfway.pipeline.errors import PipelineError
from halfway.pipeline.session import SparkOptions, prepared

if TYPE_CHECKING:
    from types import FrameType

    from pyspark.sql import SparkSession

    from halfway.pipeline.access import KafkaAccess
    from halfway.pipeline.pinned import Source

FAILED: Final = 2
INTERRUPTED: Final = 130
PARTS: Final = {"min_partitions": "minPartitions", "max_records_per_partition": "maxRecordsPerPartition"}
"""Options and what Spark's Kafka source calls them."""


class _Interruption:
    """Whether somebody has pressed Ctrl-C: while Python waits for the JVM that comes out as any error of py4j."""

    def __init__(self) -> None:
        self.seen = False

    def watch(self) -> None:
        """Notice it from now on, and do what was done on it before."""
        before = signal.getsignal(signal.SIGINT)
        if before is signal.SIG_IGN:
            return

        def notice(number: int, frame: FrameType | None) -> None:
            self.seen = True
            logging.disable()  # py4j would tell of a connection that was cut.
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
    with told(job) as interruption, ExitStack() as stack:
        if kafka:
            # What is wrong in the settings is told before Spark takes its time to start.
            access.load(file=config)
        access.times(file=config)
        start = prepared(f"halfway-{job}", options, kafka=kafka)
        with _held_back(signal.SIGINT):
            spark = start()
            stack.callback(spark.stop)
            interruption.watch()  # Spark has put its own handler there.
        yield spark


@contextmanager
def _held_back(number: signal.Signals) -> Iterator[None]:
    """Let a signal come only afterwards: a Spark that it met half started would go on without Python."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {number})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


@contextmanager
def told(job: str) -> Iterator[_Interruption]:
    """Say why a job could not be done, and exit as is documented."""
    interruption = _Interruption()
    interruption.watch()
    try:
        yield interruption
    except PipelineError as error:
        click.echo(f"halfway-pipeline {job}: {error}", err=True)
        sys.exit(FAILED)
    except (Exception, KeyboardInterrupt):  # noqa: BLE001 - the exit status that they would have is that of an anomaly
        if interruption.seen:
            click.echo(f"halfway-pipeline {job}: interrupted", err=True)
            sys.exit(INTERRUPTED)
        traceback.print_exc()
        sys.exit(FAILED)


def reached(config: Path | None, options: Mapping[str, Any]) -> KafkaAccess:
    """Return how to reach Kafka, and in how many parts Spark reads it (`PARTS`), of the command line's options."""
    reading = {name: str(options[option]) for option, name in PARTS.items() if options[option] is not None}
    return replace(access.load(file=config), reading=reading)


def source_of(
    spark: SparkSession, kafka: KafkaAccess | None, snapshot: str | None, offsets: str | None = None
) -> Source:
    """Return the archive, or the topics if there is none.

    Raises:
        AccessError: there is neither.

    """
    from halfway.pipeline.folders import Folder
    from halfway.pipeline.pins import Pins
    from halfway.pipeline.sources import KafkaSource, SnapshotSource

    if snapshot is not None:
        return SnapshotSource(spark, Folder(spark, snapshot))
    pins = None
    if offsets is not None:
        folder, _, name = offsets.rpartition("/")
        pins = Pins.from_json(Folder(spark, folder or ".").read(name))
    return KafkaSource(spark, kafka or access.load(), pins)
