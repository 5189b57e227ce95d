"""The command line `halfway-pipeline`."""

from __future__ import annotations

import json
import sys
import time
from datetime import UTC, datetime
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final

import click

from halfway.pipeline import access
from halfway.pipeline.commands import alerts
from halfway.pipeline.commands.alerts import FOUND_ANOMALIES, print_table, write_sweep_metrics
from halfway.pipeline.commands.parameters import (
    AS_JSON,
    BETWEEN,
    CONFIG,
    ENGINE,
    HORIZON,
    KAFKA,
    METRICS,
    OBJECTIVE,
    OFFSETS,
    OUTPUT,
    SECONDS,
    SECONDS_OR_NONE,
    SNAPSHOT,
    SPARK,
    TOPICS,
    require_fitting,
    require_order,
    several,
)
from halfway.pipeline.commands.running import (
    PARTS,
    Name,
    Places,
    chosen,
    kafka_access,
    on_spark,
    opened,
    reporting_failures,
    running,
)
from halfway.pipeline.engines.spark_session import is_submitted
from halfway.pipeline.jobs import report as report_job
from halfway.pipeline.jobs.audit import AuditOptions, Summary
from halfway.pipeline.tables import ANOMALIES, DIFFERENCES, QUARANTINE, is_local
from halfway.pipeline.transforms.verdict import UNPROVED

_SHOWN_TOPICS: Final = 20


@click.command()
@several(CONFIG, OUTPUT, SNAPSHOT, OFFSETS, HORIZON, BETWEEN, TOPICS, ENGINE, METRICS, AS_JSON)
@click.option("--grace-s", type=SECONDS_OR_NONE, default=5, show_default=True, help="Judge no younger transactions.")
@click.option(
    "--clock-skew-s", type=SECONDS_OR_NONE, default=5, show_default=True, help="The largest difference between clocks."
)
@click.option(
    "--continue",
    "on",
    is_flag=True,
    help="Judge what is new since the last audit with --continue into the same folder.",
)
@click.option(
    "--cross-check",
    "against",
    metavar="FOLDER",
    help="Audit what the runs of --continue into this folder have read, and compare the verdicts.",
)
@click.option(
    "--fail-on",
    "fail_on",
    multiple=True,
    metavar="VERDICT[@GROUP][=COUNT]",
    help="Exit with 1 only if a verdict has this count; can be repeated.",
)
@click.option(
    "--webhook", metavar="URL", envvar="HALFWAY_PIPELINE_WEBHOOK", help="Post anomalies to this address as JSON."
)
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
    engine: Name,
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

    Exits with 1 if it finds an anomaly or a difference, with 2 if it fails, and with 3 if it finds none but there are
    outcomes that it cannot read.
    """
    require_fitting(
        on=on, archive=snapshot is not None, again=offsets is not None, between=(since, until) != (None, None)
    )
    if against is not None and (on or snapshot or offsets or since is not None or until is not None):
        raise click.UsageError(
            "--cross-check reads what the runs of --continue have read: give it without --continue, --snapshot, "
            "--offsets, --since and --until"
        )
    require_order(since, until)
    began = time.monotonic()
    with reporting_failures("audit"):
        failures = alerts.FailOn(fail_on)
        if webhook is not None:
            alerts.require_webhook(webhook)
        kafka = kafka_access(config, spark_options) if snapshot is None else None
        seconds = horizon_s or access.times(file=config).outcome_horizon_s
        places = Places(
            output=output,
            snapshot=snapshot,
            offsets=offsets,
            access=kafka,
            against=against,
            topics=topics,
            continued=on,
        )
        spark_asked = is_submitted() or any(spark_options[name] for name in ("master", "conf", *PARTS))
        choice = chosen(engine, places, spark_asked=spark_asked, memory=spark_options["memory"])
        if engine == "auto" and not spark_asked and choice.engine == "spark":
            click.echo(f"halfway-pipeline audit: runs on Spark: {choice.because}", err=True)
    options = AuditOptions(
        topics=topics,
        grace_ms=round(grace_s * 1000),
        horizon_ms=round(seconds * 1000),
        skew_ms=round(clock_skew_s * 1000),
        since_ms=since,
        until_ms=until,
        engine_because=choice.because,
    )
    with opened(
        "audit",
        quick=choice.engine == "duckdb",
        output=output,
        tables=[folder for folder in (output, against) if folder is not None],
        kafka=kafka is not None,
        config=config,
        **spark_options,
    ) as found:
        from halfway.pipeline.jobs import audit as job
        from halfway.pipeline.jobs import incremental

        parts = (found.engine, found.source(kafka, snapshot, offsets), found.folder(output))
        if against is not None:
            summary = incremental.compare(*parts, found.folder(against), options)
        else:
            summary = (incremental if on else job).run(*parts, options)
        if metrics is not None:
            at = parts[1].pins.at
            alerts.write_metrics(summary, metrics, at_ms=at, seconds=time.monotonic() - began)
        if webhook is not None and (summary.anomalies or summary.not_judged or summary.differences):
            shown = found.engine.query(
                f'select id, "group", verdict from $found limit {alerts.SHOWN}',  # noqa: S608
                found=summary.found,
            )
            alerts.call_webhook(webhook, summary, found.engine.rows(shown))
    if as_json:
        counts = {**summary.verdicts, "quarantined": summary.quarantined}
        click.echo(json.dumps(counts if against is None else {**counts, "differences": summary.differences}))
    else:
        say(summary, output)
    sys.exit(failures.status(summary))


def say(summary: Summary, output: str) -> None:
    print_table(["verdict", "transactions"], [[name, f"{count:,}"] for name, count in summary.verdicts.items()])
    if summary.quarantined:
        click.echo(f"{summary.quarantined:,} records could not be read: {output}/{QUARANTINE}")
    if summary.verdicts[UNPROVED]:
        click.echo(
            f"{summary.verdicts[UNPROVED]:,} may be lost or leaked, but logs have lost records: audit more often, "
            "into the same folder or with --continue"
        )
        since = [[topic, f"{datetime.fromtimestamp(at / 1000, UTC):%Y-%m-%d %H:%M:%S}"] for topic, at in _late(summary)]
        print_table(["topic", "any loss is proved since (UTC)"], since)
    if summary.not_judged:
        click.echo(f"{summary.not_judged:,} outcomes could not be read: is this release older than the coordinator?")
    if summary.anomalies:
        click.echo(f"{summary.anomalies:,} anomalies: {output}/{ANOMALIES}")
    if summary.differences is not None:
        click.echo(f"{summary.differences:,} differences from the audit with --continue: {output}/{DIFFERENCES}")
    if summary.differing:
        shown = [[str(each[name]) for name in ("id", "life", "whole", "continued")] for each in summary.differing]
        print_table(["id", "use", "whole", "continued"], shown)


def _late(summary: Summary) -> list[tuple[str, int]]:
    """Return the topics in which not every loss can be proved, the latest time first."""
    late = [(topic, at) for topic, at in summary.provable_since.items() if at]
    return sorted(late, key=lambda each: (-each[1], each[0]))[:_SHOWN_TOPICS]


@click.command()
@several(CONFIG, OUTPUT, SNAPSHOT, OFFSETS, HORIZON, METRICS, AS_JSON)
@click.option(
    "--due-after-s",
    type=SECONDS,
    help="First check of groups that chose none; HALFWAY_POLICY__FIRST_CHECK_AFTER_S, then that of --config, then 6.",
)
@click.option(
    "--fail-on-overdue", is_flag=True, help="Exit with 1 if a transaction is pending long after its group's max_age_s."
)
@KAFKA
def sweep(  # noqa: PLR0913 - one for each option
    config: Path | None,
    output: str,
    snapshot: str | None,
    offsets: str | None,
    horizon_s: float | None,
    due_after_s: float | None,
    metrics: str | None,
    *,
    as_json: bool,
    fail_on_overdue: bool,
    **spark_options: Any,
) -> None:
    """Count pending, due and overdue transactions, by group and age, without decoding payloads."""
    require_fitting(archive=snapshot is not None, again=offsets is not None)
    with running("sweep", kafka=snapshot is None, config=config, **spark_options) as spark:
        from halfway.pipeline.jobs import sweep as job
        from halfway.pipeline.tables import Folder

        times = access.times(file=config)
        options = job.SweepOptions(
            due_after_ms=round((due_after_s or times.first_check_after_s) * 1000),
            horizon_ms=round((horizon_s or times.outcome_horizon_s) * 1000),
            max_age_ms=round(times.max_age_s * 1000),
        )
        kafka = kafka_access(config, spark_options) if snapshot is None else None
        source = on_spark(spark).source(kafka, snapshot, offsets)
        rows = job.run(spark, source, Folder(spark, output), options)
        if metrics is not None:
            write_sweep_metrics(rows, metrics, at_ms=source.pins.at)
    if as_json:
        click.echo(json.dumps([{name: value for name, value in row.items() if name != "rank"} for row in rows]))
    else:
        counts = ("pending", "due", "overdue")
        table = [
            [row["group"], row["age"], *(f"{row[name]:,}" for name in counts), f"{row['oldest_ms'] / 1000:,.0f}"]
            for row in rows
        ]
        print_table(["group", "age", *counts, "oldest, s"], table)
    if fail_on_overdue and any(row["overdue"] for row in rows):
        sys.exit(FOUND_ANOMALIES)


@click.command()
@several(CONFIG, OUTPUT, TOPICS)
@KAFKA
def archive(config: Path | None, output: str, topics: tuple[str, ...], **spark_options: Any) -> None:
    """Write the topics as they are now to Parquet, to be audited or swept later with --snapshot."""
    with running("archive", kafka=True, config=config, **spark_options) as spark:
        from halfway.pipeline.jobs import archive as job

        found = on_spark(spark)
        pins = job.run(found.engine, found.source(kafka_access(config, spark_options)), found.folder(output), topics)
    for name, pin in sorted(pins.topics.items()):
        click.echo(f"{name}: {len(pin.partitions)} partitions up to {sum(each.end for each in pin.partitions):,}")


@click.command()
@several(CONFIG, OUTPUT, HORIZON)
@click.option("--once", is_flag=True, help="Read the present records, then end.")
@click.option("--every-s", type=SECONDS_OR_NONE, default=10, show_default=True, help="Time between batches.")
@click.option(
    "--max-records", type=click.IntRange(min=1), default=1_000_000, show_default=True, help="Most records of a batch."
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
    """Follow the topics and write a row for each transaction when it ends. It can be killed and started again."""
    with running("ledger", kafka=True, config=config, **spark_options) as spark:
        from halfway.pipeline.jobs import ledger as job
        from halfway.pipeline.tables import Folder

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

        kafka = kafka_access(config, spark_options)
        say(f"{', '.join(map(kafka.topic, job.KINDS))} into {output}")
        job.start(spark, kafka, Folder(spark, output), options, done=done, warn=say).awaitTermination()
        if once:
            say(f"{written:,} outcomes written")


@click.command()
@click.option("--ledger", "ledger_folder", required=True, metavar="FOLDER", help="What halfway-pipeline ledger wrote.")
@several(OUTPUT, SPARK)
def export(ledger_folder: str, output: str, **spark_options: Any) -> None:
    """Write a ledger's tables as of one batch as plain Parquet: `ended` by day, and `pending`."""
    with running("export", kafka=False, **spark_options) as spark:
        from halfway.pipeline.jobs import ledger as job
        from halfway.pipeline.tables import Folder

        job.export(spark, Folder(spark, ledger_folder), Folder(spark, output))


@click.command()
@several(CONFIG, OUTPUT, SNAPSHOT, BETWEEN, ENGINE)
@click.option("--ledger", "ledger_folder", metavar="FOLDER", help="What halfway-pipeline ledger has written.")
@click.option("--audit", "audit_folder", metavar="FOLDER", help="What halfway-pipeline audit has written.")
@click.option(
    "--trail",
    is_flag=True,
    help="Show manual changes and who made them: from Kafka, or from the archive of --snapshot.",
)
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
    engine: Name,
    *,
    since: int | None,
    until: int | None,
    trail: bool,
    **spark_options: Any,
) -> None:
    """Make one HTML page, which needs nothing else, and CSV files from the tables of ledger and audit."""
    if ledger_folder is None and audit_folder is None and not trail:
        raise click.UsageError("give --ledger, --audit, --trail or several of them")
    if snapshot is not None and not trail:
        raise click.UsageError("--snapshot is what --trail reads: give both or neither")
    require_order(since, until)
    folders = [folder for folder in (output, snapshot, ledger_folder, audit_folder) if folder is not None]
    wanted = report_job.Wanted(since_ms=since, until_ms=until, objectives=dict(objectives))
    reads_kafka = trail and snapshot is None
    with reporting_failures("report"):
        kafka = access.load(file=config) if reads_kafka else None
    asked = is_submitted() or any(spark_options[name] for name in ("master", "conf"))
    fits = all(map(is_local, folders)) and find_spec("duckdb") is not None
    quick = engine == "duckdb" or (engine == "auto" and not asked and fits)

    tables = [folder for folder in (ledger_folder, audit_folder) if folder is not None]
    with opened(
        "report", quick=quick, output=output, tables=tables, kafka=reads_kafka, config=config, **spark_options
    ) as found:
        sources = report_job.Sources(
            ledger=None if ledger_folder is None else found.folder(ledger_folder),
            audit=None if audit_folder is None else found.folder(audit_folder),
            trail=found.source(kafka, snapshot) if trail else None,
        )
        click.echo(report_job.run(found.engine, sources, found.folder(output), wanted))


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="halfway")
def pipeline() -> None:
    """Spark jobs over halfway's topics, to see whether every transaction ended the way its producer meant.

    Kafka is reached as the coordinator reaches it: HALFWAY_KAFKA__BOOTSTRAP_SERVERS and its like, or --config.
    """


for command in (audit, sweep, ledger, report, export, archive):
    pipeline.add_command(command)


def main() -> None:
    """Run the command line."""
    pipeline(prog_name="halfway-pipeline")
