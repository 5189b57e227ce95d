"""The command line `halfway-pipeline`."""

from __future__ import annotations

import json
import logging
import signal
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal, TypeVar

import click

from halfway.pipeline import access, connector
from halfway.pipeline.errors import PipelineError
from halfway.pipeline.session import SparkOptions, session

if TYPE_CHECKING:
    from types import FrameType

    from pyspark.sql import SparkSession

    from halfway.pipeline.sources import Source

FOUND_ANOMALIES: Final = 1
FAILED: Final = 2
INTERRUPTED: Final = 130
_COMMAND = TypeVar("_COMMAND", bound=Callable[..., Any])


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="halfway")
def pipeline() -> None:
    """Spark jobs over halfway's topics, to see whether every transaction ended the way its producer meant.

    Kafka is reached as the coordinator reaches it: HALFWAY_KAFKA__BOOTSTRAP_SERVERS and its like, or --config.
    """


def _options(*options: Callable[[_COMMAND], _COMMAND]) -> Callable[[_COMMAND], _COMMAND]:
    def add(command: _COMMAND) -> _COMMAND:
        for option in reversed(options):
            command = option(command)
        return command

    return add


_SECONDS: Final = click.FloatRange(min=0, min_open=True, max=access.LONGEST_S)
_spark = _options(
    click.option("--master", envvar="HALFWAY_PIPELINE_MASTER", help="Spark master; local[*] where not submitted."),
    click.option("--memory", envvar="HALFWAY_PIPELINE_MEMORY", help="Memory of a local Spark; 2g."),
    click.option("--conf", multiple=True, metavar="KEY=VALUE", help="Any Spark setting; can be repeated."),
    click.option(
        "--connector-version",
        envvar="HALFWAY_PIPELINE_CONNECTOR_VERSION",
        default=connector.DEFAULT_VERSION,
        show_default=True,
        help="Of Spark's Kafka connector.",
    ),
    click.option("--jars", envvar="HALFWAY_PIPELINE_JARS", default="", help="Its jars, with commas, in place of that."),
)
_config = click.option(
    "--config",
    type=click.Path(path_type=Path, dir_okay=False),
    help="A TOML file of settings, the coordinator's; the environment (HALFWAY_…) is above it.",
)
_output = click.option("--output", required=True, metavar="FOLDER", help="Where the tables go: a path or a URI.")
_snapshot = click.option("--snapshot", metavar="FOLDER", help="Read an archive in place of Kafka.")
_offsets = click.option("--offsets", metavar="FILE", help="Read exactly what an earlier run read: its offsets.json.")
_horizon = click.option(
    "--horizon-s",
    type=_SECONDS,
    help="The coordinator's outcome horizon; HALFWAY_OUTCOME_HORIZON_S, then that of --config, then 900.",
)


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
def _running(
    job: str,
    *,
    kafka: bool,
    config: Path | None = None,
    master: str | None,
    memory: str | None,
    conf: tuple[str, ...],
    **connection: str,
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
    interruption = _Interruption()
    interruption.watch()
    try:
        if kafka:
            # What is wrong in the settings is told before Spark takes its time to start.
            access.load(file=config)
        access.times(file=config)
        spark = session(f"halfway-{job}", options, kafka=kafka)
        interruption.watch()  # Spark has put its own handler there.
        try:
            yield spark
        finally:
            spark.stop()
    except PipelineError as error:
        click.echo(f"halfway-pipeline {job}: {error}", err=True)
        sys.exit(FAILED)
    except (Exception, KeyboardInterrupt):  # noqa: BLE001 - the exit status that they would have is that of an anomaly
        if interruption.seen:
            click.echo(f"halfway-pipeline {job}: interrupted", err=True)
            sys.exit(INTERRUPTED)
        traceback.print_exc()
        sys.exit(FAILED)


def _source(spark: SparkSession, config: Path | None, snapshot: str | None, offsets: str | None) -> Source:
    from halfway.pipeline.folders import Folder
    from halfway.pipeline.pins import Pins
    from halfway.pipeline.sources import KafkaSource, SnapshotSource

    if snapshot is not None:
        return SnapshotSource(spark, Folder(spark, snapshot))
    pins = None
    if offsets is not None:
        folder, _, name = offsets.rpartition("/")
        pins = Pins.from_json(Folder(spark, folder or ".").read(name))
    return KafkaSource(spark, access.load(file=config), pins)


@pipeline.command()
@_options(_config, _output, _snapshot, _offsets, _horizon)
@click.option(
    "--topic", "topics", multiple=True, help="Read this real topic too; those of ops and groups are read anyway."
)
@click.option(
    "--grace-s", type=click.FloatRange(min=0), default=5, show_default=True, help="Judge nothing that is younger."
)
@click.option("--json", "as_json", is_flag=True, help="Print one line: counts by verdict.")
@_spark
def audit(
    config: Path | None,
    output: str,
    snapshot: str | None,
    offsets: str | None,
    horizon_s: float | None,
    topics: tuple[str, ...],
    grace_s: float,
    *,
    as_json: bool,
    **spark_options: Any,
) -> None:
    """Judge every transaction; exit 1 where an anomaly is found, 2 where the job could not be done."""
    with _running("audit", kafka=snapshot is None, config=config, **spark_options) as spark:
        from halfway.pipeline.folders import Folder
        from halfway.pipeline.jobs import audit as job

        horizon_s = horizon_s or access.times(file=config).outcome_horizon_s
        options = job.AuditOptions(topics=topics, grace_ms=round(grace_s * 1000), horizon_ms=round(horizon_s * 1000))
        summary = job.run(spark, _source(spark, config, snapshot, offsets), Folder(spark, output), options)
    if as_json:
        click.echo(json.dumps({**summary.verdicts, "quarantined": summary.quarantined}))
    else:
        say_table(["verdict", "transactions"], [[name, f"{count:,}"] for name, count in summary.verdicts.items()])
        if summary.quarantined:
            click.echo(f"{summary.quarantined:,} records could not be read: {output}/{job.QUARANTINE}")
        if summary.anomalies:
            click.echo(f"{summary.anomalies:,} anomalies: {output}/{job.ANOMALIES}")
    sys.exit(FOUND_ANOMALIES if summary.anomalies else 0)


@pipeline.command()
@_options(_config, _output, _snapshot, _offsets, _horizon)
@click.option(
    "--due-after-s",
    type=_SECONDS,
    help="First check of groups that chose none; HALFWAY_POLICY__FIRST_CHECK_AFTER_S, then that of --config, then 6.",
)
@click.option("--json", "as_json", is_flag=True, help="Print one line: a list of counts by group and age.")
@_spark
def sweep(
    config: Path | None,
    output: str,
    snapshot: str | None,
    offsets: str | None,
    horizon_s: float | None,
    due_after_s: float | None,
    *,
    as_json: bool,
    **spark_options: Any,
) -> None:
    """Count what is pending and due, by group and age, without decoding payloads."""
    with _running("sweep", kafka=snapshot is None, config=config, **spark_options) as spark:
        from halfway.pipeline.folders import Folder
        from halfway.pipeline.jobs import sweep as job

        times = access.times(file=config)
        options = job.SweepOptions(
            due_after_ms=round((due_after_s or times.first_check_after_s) * 1000),
            horizon_ms=round((horizon_s or times.outcome_horizon_s) * 1000),
        )
        rows = job.run(spark, _source(spark, config, snapshot, offsets), Folder(spark, output), options)
    if as_json:
        click.echo(json.dumps([{name: value for name, value in row.items() if name != "rank"} for row in rows]))
        return
    table = [
        [row["group"], row["age"], f"{row['pending']:,}", f"{row['due']:,}", f"{row['oldest_ms'] / 1000:,.0f}"]
        for row in rows
    ]
    say_table(["group", "age", "pending", "due", "oldest, s"], table)


@pipeline.command()
@_options(_config, _output, _horizon)
@click.option("--once", is_flag=True, help="Read what is there now, then end.")
@click.option("--every-s", type=click.FloatRange(min=0), default=10, show_default=True, help="Time between batches.")
@click.option(
    "--max-records", type=click.IntRange(min=1), default=1_000_000, show_default=True, help="Of one batch at most."
)
@click.option(
    "--format",
    "table_format",
    type=click.Choice(["parquet", "delta"]),
    default="parquet",
    show_default=True,
    help="Of the tables of what has ended and of what could not be read.",
)
@_spark
def ledger(
    config: Path | None,
    output: str,
    horizon_s: float | None,
    *,
    once: bool,
    every_s: float,
    max_records: int,
    table_format: Literal["parquet", "delta"],
    **spark_options: Any,
) -> None:
    """Follow the topics and write a row for each transaction when it ends; can be killed and started again."""
    with _running("ledger", kafka=True, config=config, **spark_options) as spark:
        from halfway.pipeline.folders import Folder
        from halfway.pipeline.jobs import ledger as job

        horizon_s = horizon_s or access.times(file=config).outcome_horizon_s
        options = job.LedgerOptions(
            once=once,
            every_s=every_s,
            max_records=max_records,
            format=table_format,
            horizon_ms=round(horizon_s * 1000),
        )

        def say(line: str) -> None:
            click.echo(f"halfway-pipeline ledger: {line}", err=True)

        written = 0

        def done(batch: job.Progress) -> None:
            nonlocal written
            written += batch.ended
            rate = batch.records / batch.seconds
            say(
                f"batch {batch.batch}: {batch.records:,} records, {rate:,.0f} a second; "
                f"{batch.ended:,} ended, {batch.pending:,} pending"
            )

        kafka = access.load(file=config)
        say(f"{', '.join(map(kafka.topic, job.KINDS))} into {output}")
        job.start(spark, kafka, Folder(spark, output), options, done=done, warn=say).awaitTermination()
        if once:
            say(f"{written:,} outcomes written")


@pipeline.command()
@_output
@click.option("--ledger", "ledger_folder", metavar="FOLDER", help="What halfway-pipeline ledger has written.")
@click.option("--audit", "audit_folder", metavar="FOLDER", help="What halfway-pipeline audit has written.")
@_spark
def report(output: str, ledger_folder: str | None, audit_folder: str | None, **spark_options: Any) -> None:
    """Make one HTML page, to be opened anywhere, and CSV files from the tables of ledger and audit."""
    if ledger_folder is None and audit_folder is None:
        raise click.UsageError("give --ledger, --audit or both")
    with _running("report", kafka=False, **spark_options) as spark:
        from halfway.pipeline.folders import Folder
        from halfway.pipeline.jobs import report as job

        of_ledger = None if ledger_folder is None else Folder(spark, ledger_folder)
        of_audit = None if audit_folder is None else Folder(spark, audit_folder)
        click.echo(job.run(spark, of_ledger, of_audit, Folder(spark, output)))


@pipeline.command()
@_options(_config, _output)
@click.option(
    "--topic", "topics", multiple=True, help="Archive this real topic too; those of ops and groups are anyway."
)
@_spark
def archive(config: Path | None, output: str, topics: tuple[str, ...], **spark_options: Any) -> None:
    """Write the topics as they are now to Parquet, to be audited or swept later with --snapshot."""
    with _running("archive", kafka=True, config=config, **spark_options) as spark:
        from halfway.pipeline.folders import Folder
        from halfway.pipeline.jobs import archive as job

        pins = job.run(_source(spark, config, None, None), Folder(spark, output), topics)
    for name, pin in sorted(pins.topics.items()):
        click.echo(f"{name}: {len(pin.partitions)} partitions up to {sum(each.end for each in pin.partitions):,}")


def say_table(header: list[str], rows: list[list[str]]) -> None:
    """Print rows in columns, the first of text and the others of numbers."""
    # Names come from the topics, where others may have written: a terminal must not obey them.
    lines = [[cell if cell.isprintable() else repr(cell)[1:-1] for cell in row] for row in [header, *rows]]
    widths = [max(len(line[column]) for line in lines) for column in range(len(header))]
    for row in lines:
        first, *others = row
        cells = [first.ljust(widths[0]), *(cell.rjust(width) for cell, width in zip(others, widths[1:], strict=True))]
        click.echo("  ".join(cells).rstrip())


def main() -> None:
    """Run the command line."""
    pipeline(prog_name="halfway-pipeline")
