"""What many groups and many pending transactions cost the path."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from rich.table import Table

from bench.beside import Beside, BesideLine, beside
from bench.report import wide_console, write_json
from bench.runs.kinds import Kinds


def add(kinds: Kinds) -> None:
    """Add its command."""
    run = kinds.add_parser("beside", help="many groups, many pending beside the path; writes build/beside.json")
    run.set_defaults(run=_beside)
    run.add_argument("--json", type=Path, default=Path("build/beside.json"), help="where the figures go")
    wanted = Beside()
    run.add_argument("--groups", type=int, default=wanted.groups, help="whose transactions come in turn")
    run.add_argument("--pending", type=int, default=wanted.pending, help="transactions that nobody ends")
    run.add_argument("--seconds", type=float, default=wanted.run_s, help="that count, each row")
    run.add_argument("--slices", type=int, default=wanted.slices, help="into which those seconds are cut")
    run.add_argument("--warm-up", type=float, default=wanted.warm_up_s, help="seconds")


def _beside(given: argparse.Namespace) -> int:
    shown = wide_console()
    wanted = Beside(
        groups=given.groups,
        pending=given.pending,
        run_s=given.seconds,
        slices=given.slices,
        warm_up_s=given.warm_up,
    )
    found = beside(wanted, say=shown.print)
    shown.print(_table(found))
    write_json(given.json, found, shown.print)
    return 0 if all(one.line.clean for one in found) else 1


def _table(found: Sequence[BesideLine]) -> Table:
    table = Table(title="the path, and what stands beside it; CPU in microseconds a transaction")
    for name in ("scenario", "beside it"):
        table.add_column(name)
    for name in ("tx/s", "from", "to", "p50 ms", "p99 ms", "coordinator", "", "broker", "findings", "failed"):
        table.add_column(name, justify="right")
    first: dict[str, float] = {}
    for one in found:
        line = one.line
        alone = first.setdefault(line.scenario, line.coordinator_cpu_us)
        table.add_row(
            *(line.scenario, one.beside),
            *(f"{rate:,.0f}" for rate in (line.tx_per_s, *line.spread)),
            *(f"{line.p50_ms:.1f}", f"{line.p99_ms:.1f}", f"{line.coordinator_cpu_us:.0f}"),
            f"{line.coordinator_cpu_us / alone - 1:+.1%}" if alone else "",
            "" if line.broker_cpu_us is None else f"{line.broker_cpu_us:.0f}",
            str(line.found),
            str(line.failed),
        )
    return table
