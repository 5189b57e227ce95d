"""The commands `ledger` and `export`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from halfway.pipeline import access
from halfway.pipeline.commands.parameters import (
    CONFIG,
    HORIZON,
    KAFKA,
    OUTPUT,
    SECONDS_OR_NONE,
    SPARK,
    several,
)
from halfway.pipeline.commands.running import kafka_access, running


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
        from halfway.pipeline.tables.folders import Folder

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
        from halfway.pipeline.tables.folders import Folder

        job.export(spark, Folder(spark, ledger_folder), Folder(spark, output))
