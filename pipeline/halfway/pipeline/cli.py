"""The command line `halfway-pipeline`."""

from __future__ import annotations

import json
import sys
import time
from datetime import UTC, datetime
from typing import Any

import click

from halfway.pipeline.commands import alerts
from halfway.pipeline.commands.alerts import FOUND_ANOMALIES, print_table, write_sweep_metrics
from halfway.pipeline.commands.parameters import command, require_fitting, require_order
from halfway.pipeline.commands.running import Name, Places, opened
from halfway.pipeline.jobs import archive as archive_job
from halfway.pipeline.jobs import audit as audit_job
from halfway.pipeline.jobs import incremental
from halfway.pipeline.jobs import ledger as ledger_job
from halfway.pipeline.jobs import report as report_job
from halfway.pipeline.jobs import sweep as sweep_job
from halfway.pipeline.tables import ANOMALIES, DIFFERENCES, QUARANTINE
from halfway.pipeline.transforms.verdict import UNPROVED


@command
def audit(  # noqa: PLR0913, PLR0917 - one for each option
    output: str,
    snapshot: str | None,
    offsets: str | None,
    topics: tuple[str, ...],
    grace_s: float,
    clock_skew_s: float,
    engine: Name,
    against: str | None,
    fail_on: tuple[alerts.Rule, ...],
    metrics: str | None,
    webhook: str | None,
    *,
    since: int | None,
    until: int | None,
    on: bool,
    as_json: bool,
    **options: Any,
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
    places = Places(output=output, snapshot=snapshot, offsets=offsets, tables=[output, against], continued=on)
    with opened("audit", engine, places, options) as found:
        how = audit_job.AuditOptions(
            topics=topics,
            grace_ms=round(grace_s * 1000),
            horizon_ms=round(found.times.outcome_horizon_s * 1000),
            skew_ms=round(clock_skew_s * 1000),
            since_ms=since,
            until_ms=until,
            engine_because=found.because,
        )
        parts = (found.engine, found.source(), found.folder(output))
        if against is not None:
            summary = incremental.compare(*parts, found.folder(against), how)
        else:
            summary = (incremental if on else audit_job).run(*parts, how)
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
    sys.exit(alerts.status(fail_on, summary))


def say(summary: audit_job.Summary, output: str) -> None:
    print_table(["verdict", "transactions"], [[name, f"{count:,}"] for name, count in summary.verdicts.items()])
    if summary.quarantined:
        click.echo(f"{summary.quarantined:,} records could not be read: {output}/{QUARANTINE}")
    if summary.verdicts[UNPROVED]:
        click.echo(
            f"{summary.verdicts[UNPROVED]:,} may be lost or leaked, but logs have lost records: audit more often, "
            "into the same folder or with --continue"
        )
        late = audit_job.latest_proofs(summary.provable_since)
        since = [[topic, f"{datetime.fromtimestamp(at / 1000, UTC):%Y-%m-%d %H:%M:%S}"] for topic, at in late]
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


@command
def sweep(
    output: str,
    snapshot: str | None,
    offsets: str | None,
    metrics: str | None,
    *,
    as_json: bool,
    fail_on_overdue: bool,
    **options: Any,
) -> None:
    """Count pending, due and overdue transactions, by group and age, without decoding payloads."""
    require_fitting(archive=snapshot is not None, again=offsets is not None)
    places = Places(output=output, snapshot=snapshot, offsets=offsets)
    with opened("sweep", "spark", places, options) as found:
        how = sweep_job.SweepOptions(
            due_after_ms=round(found.times.first_check_after_s * 1000),
            horizon_ms=round(found.times.outcome_horizon_s * 1000),
            max_age_ms=round(found.times.max_age_s * 1000),
        )
        source = found.source()
        rows = sweep_job.run(found.spark, source, found.folder(output), how)
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


@command
def archive(output: str, topics: tuple[str, ...], **options: Any) -> None:
    """Write the topics as they are now to Parquet, to be audited or swept later with --snapshot."""
    with opened("archive", "spark", Places(output=output), options) as found:
        pins = archive_job.run(found.engine, found.source(), found.folder(output), topics)
    for name, pin in sorted(pins.topics.items()):
        click.echo(f"{name}: {len(pin.partitions)} partitions up to {sum(each.end for each in pin.partitions):,}")


@command
def ledger(output: str, *, once: bool, every_s: float, max_records: int, **options: Any) -> None:
    """Follow the topics and write a row for each transaction when it ends. It can be killed and started again."""
    with opened("ledger", "spark", Places(output=output), options) as found:
        how = ledger_job.LedgerOptions(
            once=once, every_s=every_s, max_records=max_records, horizon_ms=round(found.times.outcome_horizon_s * 1000)
        )

        def say(line: str) -> None:
            click.echo(f"halfway-pipeline ledger: {line}", err=True)

        written = 0

        def done(batch: ledger_job.Progress) -> None:
            nonlocal written
            written += batch.ended
            rate = batch.records / batch.seconds
            say(
                f"batch {batch.batch}: {batch.records:,} records, {rate:,.0f} a second; "
                f"{batch.ended:,} ended, {batch.pending:,} pending"
            )

        say(f"{', '.join(map(found.kafka.topic, ledger_job.KINDS))} into {output}")
        ledger_job.start(found.spark, found.kafka, found.folder(output), how, done=done, warn=say).awaitTermination()
        if once:
            say(f"{written:,} outcomes written")


@command
def export(exported: str, output: str, **options: Any) -> None:
    """Write a ledger's tables as of one batch as plain Parquet: `ended` by day, and `pending`."""
    with opened("export", "spark", Places(output=output, topics=False), options) as found:
        ledger_job.export(found.spark, found.folder(exported), found.folder(output))


@command
def report(  # noqa: PLR0913 - one for each option
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
    **options: Any,
) -> None:
    """Make one HTML page, which needs nothing else, from the tables of ledger and audit."""
    if ledger_folder is None and audit_folder is None and not trail:
        raise click.UsageError("give --ledger, --audit, --trail or several of them")
    if snapshot is not None and not trail:
        raise click.UsageError("--snapshot is what --trail reads: give both or neither")
    require_order(since, until)
    wanted = report_job.Wanted(since_ms=since, until_ms=until, objectives=dict(objectives))
    places = Places(output=output, topics=trail, snapshot=snapshot, tables=[ledger_folder, audit_folder])
    with opened("report", engine, places, options) as found:
        sources = report_job.Sources(
            ledger=None if ledger_folder is None else found.folder(ledger_folder),
            audit=None if audit_folder is None else found.folder(audit_folder),
            trail=found.source() if trail else None,
        )
        click.echo(report_job.run(found.engine, sources, found.folder(output), wanted))


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="halfway")
def pipeline() -> None:
    """Spark jobs over halfway's topics, to see whether every transaction ended the way its producer meant.

    Kafka is reached as the coordinator reaches it: HALFWAY_KAFKA__BOOTSTRAP_SERVERS and its like, or --config.
    """


for each in (audit, sweep, ledger, report, export, archive):
    pipeline.add_command(each)


def main() -> None:
    pipeline(prog_name="halfway-pipeline")
