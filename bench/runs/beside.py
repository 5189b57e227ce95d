"""The cost of many groups and many pending transactions."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from rich.table import Table

from bench.measures.beside import BesideLine, BesideOptions, beside
from bench.report import wide_console, write_json
from bench.runs.kinds import Kinds


def add(kinds: Kinds) -> None:
    """Add its command."""
    run = kinds.add_parser("beside", help="a load beside many groups or pending transactions; writes build/beside.json")
    run.set_defaults(run=_beside)
    run.add_argument("--json", type=Path, default=Path("build/beside.json"), help="the file for the figures")
    options = BesideOptions()
    run.add_argument("--groups", type=int, default=options.groups, help="groups, whose transactions take turns")
    run.add_argument("--pending", type=int, default=options.pending, help="pending transactions")
    run.add_argument("--seconds", type=float, default=options.run_s, help="measured seconds of each row")
    run.add_argument("--slices", type=int, default=options.slices, help="slices of those seconds")
    run.add_argument("--warm-up", type=float, default=options.warm_up_s, help="seconds")


def _beside(arguments: argparse.Namespace) -> int:
    shown = wide_console()
    options = BesideOptions(
        groups=arguments.groups,
        pending=arguments.pending,
        run_s=arguments.seconds,
        slices=arguments.slices,
        warm_up_s=arguments.warm_up,
    )
    rows = beside(options, say=shown.print)
    shown.print(_table(rows))
    write_json(arguments.json, rows, shown.print)
    return 0 if all(row.line.clean for row in rows) else 1


def _table(rows: Sequence[BesideLine]) -> Table:
    table = Table(title="the load, by what exists beside it; CPU in microseconds per transaction")
    for name in ("scenario", "beside it"):
        table.add_column(name)
    for name in ("tx/s", "from", "to", "p50 ms", "p99 ms", "coordinator", "", "broker", "findings", "failed"):
        table.add_column(name, justify="right")
    first: dict[str, float] = {}
    for row in rows:
        line = row.line
        alone = first.setdefault(line.scenario, line.coordinator_cpu_us)
        table.add_row(
            *(line.scenario, row.beside),
            *(f"{rate:,.0f}" for rate in (line.tx_per_s, *line.spread)),
            *(f"{line.p50_ms:.1f}", f"{line.p99_ms:.1f}", f"{line.coordinator_cpu_us:.0f}"),
            f"{line.coordinator_cpu_us / alone - 1:+.1%}" if alone else "",
            "" if line.broker_cpu_us is None else f"{line.broker_cpu_us:.0f}",
            str(line.found),
            str(line.failed),
        )
    return table
