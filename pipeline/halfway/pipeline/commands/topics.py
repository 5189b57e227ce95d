"""The commands `sweep` and `archive`."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import click

from halfway.pipeline import access
from halfway.pipeline.commands.alerts import FOUND_ANOMALIES, write_sweep_metrics
from halfway.pipeline.commands.parameters import (
    AS_JSON,
    CONFIG,
    HORIZON,
    KAFKA,
    METRICS,
    OFFSETS,
    OUTPUT,
    SECONDS,
    SNAPSHOT,
    TOPICS,
    require_fitting,
    several,
)
from halfway.pipeline.commands.printing import print_table
from halfway.pipeline.commands.running import kafka_access, on_spark, running


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
        from halfway.pipeline.tables.folders import Folder

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

        opened = on_spark(spark)
        pins = job.run(opened.engine, opened.source(kafka_access(config, spark_options)), opened.folder(output), topics)
    for name, pin in sorted(pins.topics.items()):
        click.echo(f"{name}: {len(pin.partitions)} partitions up to {sum(each.end for each in pin.partitions):,}")
