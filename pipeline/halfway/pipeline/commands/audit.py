"""The command `audit`."""

from __future__ import annotations

import json
import sys
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

import click

from halfway.pipeline import access
from halfway.pipeline.commands import alerts, engine_choice
from halfway.pipeline.commands.parameters import (
    AS_JSON,
    BETWEEN,
    CONFIG,
    ENGINE,
    HORIZON,
    KAFKA,
    METRICS,
    OFFSETS,
    OUTPUT,
    SECONDS_OR_NONE,
    SNAPSHOT,
    TOPICS,
    require_fitting,
    require_order,
    several,
)
from halfway.pipeline.commands.printing import print_table
from halfway.pipeline.commands.running import PARTS, kafka_access, reporting_failures
from halfway.pipeline.engines.spark_session import is_submitted
from halfway.pipeline.jobs.audit import AuditOptions, Summary
from halfway.pipeline.jobs.runs import ANOMALIES, DIFFERENCES, QUARANTINE
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
    engine: engine_choice.Name,
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
        places = engine_choice.Places(
            output=output,
            snapshot=snapshot,
            offsets=offsets,
            access=kafka,
            against=against,
            topics=topics,
            continued=on,
        )
        spark_asked = is_submitted() or any(spark_options[name] for name in ("master", "conf", *PARTS))
        chosen = engine_choice.chosen(engine, places, spark_asked=spark_asked, memory=spark_options["memory"])
        if engine == "auto" and not spark_asked and chosen.engine == "spark":
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
    with engine_choice.opened(
        "audit",
        quick=chosen.engine == "duckdb",
        output=output,
        tables=[folder for folder in (output, against) if folder is not None],
        kafka=kafka is not None,
        config=config,
        **spark_options,
    ) as opened:
        from halfway.pipeline.jobs import audit as job
        from halfway.pipeline.jobs import cross_check, incremental

        parts = (opened.engine, opened.source(kafka, snapshot, offsets), opened.folder(output))
        if against is not None:
            summary = cross_check.run(*parts, opened.folder(against), options)
        else:
            summary = (incremental if on else job).run(*parts, options)
        if metrics is not None:
            at = parts[1].pins.at
            alerts.write_metrics(summary, metrics, at_ms=at, seconds=time.monotonic() - began)
        if webhook is not None and (summary.anomalies or summary.not_judged or summary.differences):
            found = opened.engine.query(
                f'select id, "group", verdict from $found limit {alerts.SHOWN}',  # noqa: S608
                found=summary.found,
            )
            alerts.call_webhook(webhook, summary, opened.engine.rows(found))
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
