"""The command `report`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from halfway.pipeline import access
from halfway.pipeline.commands.parameters import (
    BETWEEN,
    CONFIG,
    OBJECTIVE,
    OUTPUT,
    SNAPSHOT,
    SPARK,
    require_order,
    several,
)
from halfway.pipeline.commands.running import running, source_of


@click.command()
@several(CONFIG, OUTPUT, SNAPSHOT, BETWEEN)
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
    reads_kafka = trail and snapshot is None
    with running("report", kafka=reads_kafka, packages=trail, config=config, **spark_options) as spark:
        from halfway.pipeline.jobs import report as job
        from halfway.pipeline.tables.folders import Folder

        kafka = access.load(file=config) if reads_kafka else None
        sources = job.Sources(
            ledger=None if ledger_folder is None else Folder(spark, ledger_folder),
            audit=None if audit_folder is None else Folder(spark, audit_folder),
            trail=source_of(spark, kafka, snapshot) if trail else None,
        )
        wanted = job.Wanted(since_ms=since, until_ms=until, objectives=dict(objectives))
        click.echo(job.run(spark, sources, Folder(spark, output), wanted))
