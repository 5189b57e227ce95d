"""The cost of open consoles for callers."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from rich.table import Table

from bench.measures.console import ConsoleOptions, Slices, console
from bench.report import wide_console, write_json
from bench.runs.kinds import Kinds


def add(kinds: Kinds) -> None:
    """Add its command."""
    run = kinds.add_parser("console", help="open consoles beside callers, in slices; writes build/console.json")
    run.set_defaults(run=_console)
    run.add_argument("--json", type=Path, default=Path("build/console.json"), help="the file for the figures")
    options = ConsoleOptions()
    run.add_argument("--callers", type=int, default=options.callers, help="each with one transaction at a time")
    run.add_argument("--consoles", type=int, default=options.consoles, help="open event streams")
    run.add_argument("--groups", type=int, default=options.groups, help="groups in the statistics")
    run.add_argument("--seconds", type=float, default=options.seconds, help="seconds of each slice")
    run.add_argument("--slices", type=int, default=options.slices, help="slices of each kind")
    run.add_argument("--warm-up", type=float, default=options.warm_up_s, help="seconds")


def _console(arguments: argparse.Namespace) -> int:
    shown = wide_console()
    options = ConsoleOptions(
        callers=arguments.callers,
        consoles=arguments.consoles,
        groups=arguments.groups,
        seconds=arguments.seconds,
        slices=arguments.slices,
        warm_up_s=arguments.warm_up,
    )
    slices, idle = console(options, shown.print)
    shown.print(_table(f"{options.callers} callers, {options.slices} slices of {options.seconds:g} s each", slices))
    table = Table(title="without callers")
    for name in ("consoles", "CPU ms a second"):
        table.add_column(name, justify="right")
    for result in idle:
        table.add_row(str(result.consoles), f"{result.cpu_ms_per_s:.1f}")
    shown.print(table)
    write_json(arguments.json, {"slices": slices, "idle": idle}, shown.print)
    return 0


def _table(title: str, slices: Sequence[Slices]) -> Table:
    table = Table(title=title)
    for name in ("", "tx/s", "tx/s", "p50 ms", "p99 ms", "CPU us/tx", "CPU", "events", "KiB an event"):
        table.add_column(name, justify="left" if not name else "right")
    first = slices[0]
    for result in slices:
        table.add_row(
            result.name,
            f"{result.median_per_s:,.0f}",
            f"{result.median_per_s / first.median_per_s - 1:+.1%}" if first.median_per_s else "",
            f"{result.p50_ms:.1f}",
            f"{result.p99_ms:.1f}",
            f"{result.cpu_us:.0f}",
            f"{result.cpu_us / first.cpu_us - 1:+.1%}" if first.cpu_us else "",
            f"{result.events:,}",
            f"{result.event_bytes / result.events / 1024:.1f}" if result.events else "",
        )
    return table
