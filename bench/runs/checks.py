"""Checks per second to a fast endpoint."""

from __future__ import annotations

import argparse
from pathlib import Path

from rich.table import Table

from bench.measures.checks import ChecksOptions, checks
from bench.report import wide_console, write_json
from bench.runs.kinds import Kinds


def add(kinds: Kinds) -> None:
    """Add its command."""
    run = kinds.add_parser("checks", help="check-backs to a fast endpoint; writes build/checks.json")
    run.set_defaults(run=_checks)
    run.add_argument("--json", type=Path, default=Path("build/checks.json"), help="the file for the figures")
    options = ChecksOptions()
    run.add_argument("--transactions", type=int, default=options.transactions, help="transactions of each verdict")
    run.add_argument("--concurrency", type=int, default=options.concurrency, help="checks in flight")
    run.add_argument("--warm-up", type=float, default=options.warm_up_s, help="seconds")


def _checks(arguments: argparse.Namespace) -> int:
    shown = wide_console()
    options = ChecksOptions(
        transactions=arguments.transactions, concurrency=arguments.concurrency, warm_up_s=arguments.warm_up
    )
    lines = checks(options, say=shown.print)
    table = Table(title=f"checks, {options.concurrency} in flight; CPU in microseconds a check")
    table.add_column("verdict")
    for name in ("checks", "a second", "coordinator", "broker", "endpoint", "pending after"):
        table.add_column(name, justify="right")
    for line in lines:
        table.add_row(
            line.verdict,
            f"{line.checks:,}",
            f"{line.checks_per_s:,.0f}",
            f"{line.coordinator_cpu_us:.0f}",
            "" if line.broker_cpu_us is None else f"{line.broker_cpu_us:.0f}",
            f"{line.endpoint_cpu_us:.0f}",
            f"{line.pending:,}",
        )
    shown.print(table)
    write_json(arguments.json, lines, shown.print)
    return 0
