"""The command `report`."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import click

from halfway.pipeline import access
from halfway.pipeline.commands.engine_choice import Name, opened
from halfway.pipeline.commands.parameters import (
    BETWEEN,
    CONFIG,
    ENGINE,
    OBJECTIVE,
    OUTPUT,
    SNAPSHOT,
    SPARK,
    require_order,
    several,
)
from halfway.pipeline.commands.running import reporting_failures
from halfway.pipeline.engines.spark_session import is_submitted
from halfway.pipeline.jobs import report as job
from halfway.pipeline.tables.folders import is_local


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
    wanted = job.Wanted(since_ms=since, until_ms=until, objectives=dict(objectives))
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
        sources = job.Sources(
            ledger=None if ledger_folder is None else found.folder(ledger_folder),
            audit=None if audit_folder is None else found.folder(audit_folder),
            trail=found.source(kafka, snapshot) if trail else None,
        )
        click.echo(job.run(found.engine, sources, found.folder(output), wanted))
