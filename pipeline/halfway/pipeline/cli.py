"""The command line `halfway-pipeline`."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import click

from halfway.pipeline import access, choice, telling
from halfway.pipeline.jobs.audit import ANOMALIES, DIFFERENCES, QUARANTINE, AuditOptions, Summary
from halfway.pipeline.parameters import (
    BETWEEN,
    CONFIG,
    HORIZON,
    KAFKA,
    OBJECTIVE,
    OFFSETS,
    OUTPUT,
    SECONDS,
    SECONDS_OR_NONE,
    SNAPSHOT,
    SPARK,
    demand_order,
    several,
)
from halfway.pipeline.running import PARTS, reached, running, source_of, told


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="halfway")
def pipeline() -> None:
    """Spark jobs over halfway's topics, to see whether every transaction ended the way its producer meant.

    Kafka is reached as the coordinator reaches it: HALFWAY_KAFKA__BOOTSTRAP_SERVERS and its like, or --config.
    """


@pipeline.command()
@several(CONFIG, OUTPUT, SNAPSHOT, OFFSETS, HORIZON, BETWEEN)
@click.option(
    "--topic", "topics", multiple=True, help="Read this real topic too; those of ops and groups are read anyway."
)
@click.option("--grace-s", type=SECONDS_OR_NONE, default=5, show_default=True, help="Judge nothing that is younger.")
@click.option(
    "--clock-skew-s", type=SECONDS_OR_NONE, default=5, show_default=True, help="By how much clocks may differ."
)
@click.option(
    "--engine",
    type=click.Choice(["auto", "duckdb", "spark"]),
    default="auto",
    show_default=True,
    envvar="HALFWAY_PIPELINE_ENGINE",
    help="auto: DuckDB for up to ten million records of half and op that the free memory can hold, Spark for more, "
    "and where it is told how to run.",
)
@click.option(
    "--continue",
    "on",
    is_flag=True,
    help="Judge what is new since the last audit into the same folder with --continue.",
)
@click.option(
    "--cross-check",
    "against",
    metavar="FOLDER",
    help="Read what the runs of --continue into this folder have read, and compare with their verdicts.",
)
@click.option(
    "--fail-on",
    "fail_on",
    multiple=True,
    metavar="VERDICT[@GROUP][=COUNT]",
    help="Exit 1 only from so many of a verdict on; can be repeated.",
)
@click.option("--metrics", metavar="FILE", help="Write figures for Prometheus' textfile collector.")
@click.option("--webhook", metavar="URL", envvar="HALFWAY_PIPELINE_WEBHOOK", help="Post anomalies there, as JSON.")
@click.option("--json", "as_json", is_flag=True, help="Print one line: counts by verdict.")
@KAFKA
def audit(  # noqa: PLR0913, PLR0917 - one for each option
    config: Path | None,
    output: str,
    snapshot: str | None,
    offsets: str | None,
    horizon_s: float | None,
    topics: tuple[str, ...],
    grace_s: float,
    clock_skew_s: float,
    engine: choice.Name,
    against: str | None,
    fail_on: tuple[str, ...],
    metrics: str | None,
    webhook: str | None,
    *,
    since: int | None,
    until: int | None,
    on: bool,
    as_json: bool,
    **spark_options: Any,
) -> None:
    """Judge every transaction.

    Exits 1 if an anomaly or a difference is found, 2 if it could not be done, 3 if there is none, but outcomes cannot
    be read.
    """
    _demand_fitting(
        on=on, archive=snapshot is not None, again=offsets is not None, between=(since, until) != (None, None)
    )
    if against is not None and (on or snapshot or offsets or since is not None or until is not None):
        raise click.UsageError(
            "--cross-check reads what the runs of --continue have read: give it without --continue, --snapshot, "
            "--offsets, --since and --until"
        )
    demand_order(since, until)
    began = time.monotonic()
    with told("audit"):
        failures = telling.FailOn(fail_on)
        if webhook is not None:
            telling.demand_webhook(webhook)
        kafka = reached(config, spark_options) if snapshot is None else None
        seconds = horizon_s or access.times(file=config).outcome_horizon_s
        places = choice.Places(output=output, snapshot=snapshot, offsets=offsets, access=kafka, against=against)
        asked = any(spark_options[name] for name in ("master", "conf", *PARTS))
        chosen = choice.chosen(engine, places, spark_asked=asked, memory=spark_options["memory"])
        if engine == "auto" and not asked and chosen.engine == "spark":
            click.echo(f"halfway-pipeline audit: runs on Spark: {chosen.because}", err=True)
    options = AuditOptions(
        topics=topics,
        grace_ms=round(grace_s * 1000),
        horizon_ms=round(seconds * 1000),
        skew_ms=round(clock_skew_s * 1000),
        since_ms=since,
        until_ms=until,
        engine_because=chosen.because,
    )
    with (
        _quick(places, spark_options["memory"])
        if chosen.engine == "duckdb"
        else _on_spark(places, config=config, **spark_options) as parts
    ):
        from halfway.pipeline.jobs import audit as job
        from halfway.pipeline.jobs import cross_check, incremental

        if parts.against is not None:
            summary = cross_check.run(parts.engine, parts.source, parts.output, parts.against, options)
        else:
            run = incremental.run if on else job.run
            summary = run(parts.engine, parts.source, parts.output, options)
        if metrics is not None:
            at = parts.source.pins.at
            telling.write_metrics(summary, metrics, at_ms=at, seconds=time.monotonic() - began)
        if webhook is not None and (summary.anomalies or summary.not_judged or summary.differences):
            found = parts.engine.query(
                f'select id, "group", verdict from $found limit {telling.SHOWN}',  # noqa: S608
                found=parts.engine.read(summary.found),
            )
            telling.call_webhook(webhook, summary, parts.engine.rows(found))
    if as_json:
        counts = {**summary.verdicts, "quarantined": summary.quarantined}
        click.echo(json.dumps(counts if against is None else {**counts, "differences": summary.differences}))
    else:
        _say(summary, output)
    sys.exit(failures.status(summary))


def _demand_fitting(*, archive: bool, again: bool, on: bool = False, between: bool = False) -> None:
    if archive and again:
        raise click.UsageError("--offsets is about Kafka's topics, and --snapshot about an archive: give one of them")
    if on and (archive or again):
        raise click.UsageError("--continue reads what is new in Kafka: give it without --snapshot and --offsets")
    if on and between:
        raise click.UsageError("--continue judges what is new: give it without --since and --until")


def _say(summary: Summary, output: str) -> None:
    say_table(["verdict", "transactions"], [[name, f"{count:,}"] for name, count in summary.verdicts.items()])
    if summary.quarantined:
        click.echo(f"{summary.quarantined:,} records could not be read: {output}/{QUARANTINE}")
    if summary.not_judged:
        click.echo(f"{summary.not_judged:,} outcomes could not be read: is this release older than the coordinator?")
    if summary.anomalies:
        click.echo(f"{summary.anomalies:,} anomalies: {output}/{ANOMALIES}")
    if summary.differences is not None:
        click.echo(f"{summary.differences:,} differences from the audit with --continue: {output}/{DIFFERENCES}")
    if summary.differing:
        shown = [[str(each[name]) for name in ("id", "life", "whole", "continued")] for each in summary.differing]
        say_table(["id", "use", "whole", "continued"], shown)


@contextmanager
def _quick(places: choice.Places, memory: str | None) -> Iterator[choice.Parts]:
    with told("audit"), choice.quick(places, memory=memory) as parts:
        yield parts


@contextmanager
def _on_spark(places: choice.Places, *, config: Path | None, **spark_options: Any) -> Iterator[choice.Parts]:
    with running("audit", kafka=places.access is not None, config=config, **spark_options) as spark:
        from halfway.pipeline.engines import SparkEngine
        from halfway.pipeline.folders import Folder

        engine = SparkEngine(spark)
        source = source_of(spark, places.access, places.snapshot, places.offsets)
        try:
            against = None if places.against is None else Folder(spark, places.against)
            yield choice.Parts(engine=engine, source=source, output=Folder(spark, places.output), against=against)
        finally:
            engine.close()


@pipeline.command()
@several(CONFIG, OUTPUT, SNAPSHOT, OFFSETS, HORIZON)
@click.option(
    "--due-after-s",
    type=SECONDS,
    help="First check of groups that chose none; HALFWAY_POLICY__FIRST_CHECK_AFTER_S, then that of --config, then 6.",
)
@click.option("--json", "as_json", is_flag=True, help="Print one line: a list of counts by group and age.")
@KAFKA
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
    _demand_fitting(archive=snapshot is not None, again=offsets is not None)
    with running("sweep", kafka=snapshot is None, config=config, **spark_options) as spark:
        from halfway.pipeline.folders import Folder
        from halfway.pipeline.jobs import sweep as job

        times = access.times(file=config)
        options = job.SweepOptions(
            due_after_ms=round((due_after_s or times.first_check_after_s) * 1000),
            horizon_ms=round((horizon_s or times.outcome_horizon_s) * 1000),
        )
        kafka = reached(config, spark_options) if snapshot is None else None
        rows = job.run(spark, source_of(spark, kafka, snapshot, offsets), Folder(spark, output), options)
    if as_json:
        click.echo(json.dumps([{name: value for name, value in row.items() if name != "rank"} for row in rows]))
        return
    table = [
        [row["group"], row["age"], f"{row['pending']:,}", f"{row['due']:,}", f"{row['oldest_ms'] / 1000:,.0f}"]
        for row in rows
    ]
    say_table(["group", "age", "pending", "due", "oldest, s"], table)


@pipeline.command()
@several(CONFIG, OUTPUT, HORIZON)
@click.option("--once", is_flag=True, help="Read what is there now, then end.")
@click.option("--every-s", type=SECONDS_OR_NONE, default=10, show_default=True, help="Time between batches.")
@click.option(
    "--max-records", type=click.IntRange(min=1), default=1_000_000, show_default=True, help="Of one batch at most."
)
@KAFKA
def ledger(
    config: Path | None,
    output: str,
    horizon_s: float | None,
    *,
    once: bool,
    every_s: float,
    max_records: int,
    **spark_options: Any,
) -> None:
    """Follow the topics and write a row for each transaction when it ends; can be killed and started again."""
    with running("ledger", kafka=True, config=config, **spark_options) as spark:
        from halfway.pipeline.folders import Folder
        from halfway.pipeline.jobs import ledger as job

        horizon_s = horizon_s or access.times(file=config).outcome_horizon_s
        options = job.LedgerOptions(
            once=once,
            every_s=every_s,
            max_records=max_records,
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

        kafka = reached(config, spark_options)
        say(f"{', '.join(map(kafka.topic, job.KINDS))} into {output}")
        job.start(spark, kafka, Folder(spark, output), options, done=done, warn=say).awaitTermination()
        if once:
            say(f"{written:,} outcomes written")


@pipeline.command()
@several(CONFIG, OUTPUT, SNAPSHOT, BETWEEN)
@click.option("--ledger", "ledger_folder", metavar="FOLDER", help="What halfway-pipeline ledger has written.")
@click.option("--audit", "audit_folder", metavar="FOLDER", help="What halfway-pipeline audit has written.")
@click.option("--trail", is_flag=True, help="Show who did what by hand: from Kafka, or from the archive of --snapshot.")
@click.option(
    "--objective",
    "objectives",
    type=OBJECTIVE,
    multiple=True,
    metavar="[GROUP=]SECONDS",
    help="Within what 99 of 100 of a group's transactions must end, or of all other groups'; can be repeated.",
)
@SPARK
def report(  # noqa: PLR0913 - one for each option
    config: Path | None,
    output: str,
    snapshot: str | None,
    ledger_folder: str | None,
    audit_folder: str | None,
    objectives: tuple[tuple[str | None, int], ...],
    *,
    since: int | None,
    until: int | None,
    trail: bool,
    **spark_options: Any,
) -> None:
    """Make one HTML page, to be opened anywhere, and CSV files from the tables of ledger and audit."""
    if ledger_folder is None and audit_folder is None and not trail:
        raise click.UsageError("give --ledger, --audit, --trail or several of them")
    if snapshot is not None and not trail:
        raise click.UsageError("--snapshot is what --trail reads: give both or neither")
    demand_order(since, until)
    with running("report", kafka=trail and snapshot is None, config=config, **spark_options) as spark:
        from halfway.pipeline.folders import Folder
        from halfway.pipeline.jobs import report as job

        kafka = access.load(file=config) if trail and snapshot is None else None
        sources = job.Sources(
            ledger=None if ledger_folder is None else Folder(spark, ledger_folder),
            audit=None if audit_folder is None else Folder(spark, audit_folder),
            trail=source_of(spark, kafka, snapshot) if trail else None,
        )
        wanted = job.Wanted(since_ms=since, until_ms=until, objectives=dict(objectives))
        click.echo(job.run(spark, sources, Folder(spark, output), wanted))


@pipeline.command()
@OUTPUT
@click.option("--ledger", "ledger_folder", required=True, metavar="FOLDER", help="What halfway-pipeline ledger wrote.")
@SPARK
def export(output: str, ledger_folder: str, **spark_options: Any) -> None:
    """Write a ledger's tables as of one batch as plain Parquet, `ended` by day, for what reads no Delta."""
    with running("export", kafka=False, **spark_options) as spark:
        from halfway.pipeline.folders import Folder
        from halfway.pipeline.jobs import ledger as job

        job.export(spark, Folder(spark, ledger_folder), Folder(spark, output))


@pipeline.command()
@several(CONFIG, OUTPUT)
@click.option(
    "--topic", "topics", multiple=True, help="Archive this real topic too; those of ops and groups are anyway."
)
@KAFKA
def archive(config: Path | None, output: str, topics: tuple[str, ...], **spark_options: Any) -> None:
    """Write the topics as they are now to Parquet, to be audited or swept later with --snapshot."""
    with running("archive", kafka=True, config=config, **spark_options) as spark:
        from halfway.pipeline.engines import SparkEngine
        from halfway.pipeline.folders import Folder
        from halfway.pipeline.jobs import archive as job

        pins = job.run(
            SparkEngine(spark), source_of(spark, reached(config, spark_options), None), Folder(spark, output), topics
        )
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
