"""Checks a second to a fast endpoint."""

from __future__ import annotations

import argparse
from pathlib import Path

from rich.table import Table

from bench.checks import Checking, checks
from bench.report import wide_console, write_json
from bench.runs.kinds import Kinds


def add(kinds: Kinds) -> None:
    """Add its command."""
    run = kinds.add_parser("checks", help="check-backs to a fast endpoint; writes build/checks.json")
    run.set_defaults(run=_checks)
    run.add_argument("--json", type=Path, default=Path("build/checks.json"), help="where the figures go")
    wanted = Checking()
    run.add_argument("--transactions", type=int, default=wanted.transactions, help="that are checked, each verdict")
    run.add_argument("--concurrency", type=int, default=wanted.concurrency, help="checks in flight")
    run.add_argument("--warm-up", type=float, default=wanted.warm_up_s, help="seconds")


def _checks(given: argparse.Namespace) -> int:
    shown = wide_console()
    wanted = Checking(transactions=given.transactions, concurrency=given.concurrency, warm_up_s=given.warm_up)
    found = checks(wanted, say=shown.print)
    table = Table(title=f"checks, {wanted.concurrency} in flight; CPU in microseconds a check")
    table.add_column("verdict")
    for name in ("checks", "a second", "coordinator", "broker", "endpoint", "pending after"):
        table.add_column(name, justify="right")
    for one in found:
        table.add_row(
            one.verdict,
            f"{one.checks:,}",
            f"{one.checks_per_s:,.0f}",
            f"{one.coordinator_cpu_us:.0f}",
            "" if one.broker_cpu_us is None else f"{one.broker_cpu_us:.0f}",
            f"{one.endpoint_cpu_us:.0f}",
            f"{one.pending:,}",
        )
    shown.print(table)
    write_json(given.json, found, shown.print)
    return 0
