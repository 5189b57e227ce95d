"""The commands `ledger` and `export`."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

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
from halfway.pipeline.commands.running import kafka_access, reporting_failures, running

if TYPE_CHECKING:
    from halfway.pipeline.tables.folders import Folder, LocalFolder


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
@click.option(
    "--format",
    "form",
    type=click.Choice(["parquet", "iceberg"]),
    default="parquet",
    show_default=True,
    help="parquet: files in --output; iceberg: tables in --catalog.",
)
@click.option("--output", metavar="FOLDER", help="Where the files of Parquet go: a path or a URI.")
@click.option("--catalog", metavar="NAME", help="Iceberg: a catalog of PyIceberg's configuration; default: default.")
@click.option("--namespace", metavar="NAME", help="Iceberg: where the tables are in the catalog; default: halfway.")
@SPARK
def export(
    ledger_folder: str,
    form: str,
    output: str | None,
    catalog: str | None,
    namespace: str | None,
    **spark_options: Any,
) -> None:
    """Write a ledger's tables as of one batch for what reads no Delta: `ended` by day, and `pending`."""
    if form == "parquet":
        if output is None:
            raise click.UsageError("give --output, the folder for the files")
        if catalog is not None or namespace is not None:
            raise click.UsageError("--catalog and --namespace are for --format iceberg")
    elif output is not None:
        raise click.UsageError("--format iceberg writes into a catalog: give --catalog in place of --output")
    from halfway.pipeline.jobs import export as job

    if output is not None:
        from halfway.pipeline.tables.folders import Folder

        with running("export", kafka=False, packages=False, **spark_options) as spark:
            job.to_parquet(spark, Folder(spark, ledger_folder), Folder(spark, output))
        return
    with _opened(ledger_folder, **spark_options) as source:
        from halfway.pipeline.tables.iceberg import Tables

        written = job.to_iceberg(source, Tables(catalog or "default", namespace or "halfway"))
    click.echo(f"batch {written.batch}: {written.appended:,} rows into ended, {written.pending:,} in pending")


@contextmanager
def _opened(folder: str, **spark_options: Any) -> Iterator[Folder | LocalFolder]:
    """Open the folder of a ledger, without Spark if it is on this machine."""
    from halfway.pipeline.tables.folders import Folder, LocalFolder, is_local

    if is_local(folder):
        with reporting_failures("export"):
            yield LocalFolder(folder)
    else:
        with running("export", kafka=False, packages=False, **spark_options) as spark:
            yield Folder(spark, folder)
