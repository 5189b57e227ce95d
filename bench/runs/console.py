"""What open consoles cost the callers."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from rich.table import Table

from bench.console import Slices, Watching, console
from bench.report import wide_console, write_json
from bench.runs.kinds import Kinds


def add(kinds: Kinds) -> None:
    """Add its command."""
    run = kinds.add_parser("console", help="open consoles beside callers, in slices; writes build/console.json")
    run.set_defaults(run=_console)
    run.add_argument("--json", type=Path, default=Path("build/console.json"), help="where the figures go")
    wanted = Watching()
    run.add_argument("--callers", type=int, default=wanted.callers, help="each with one transaction at a time")
    run.add_argument("--consoles", type=int, default=wanted.consoles, help="streams of events that are open")
    run.add_argument("--groups", type=int, default=wanted.groups, help="that the figures show")
    run.add_argument("--seconds", type=float, default=wanted.seconds, help="of each slice")
    run.add_argument("--slices", type=int, default=wanted.slices, help="of each kind")
    run.add_argument("--warm-up", type=float, default=wanted.warm_up_s, help="seconds")


def _console(given: argparse.Namespace) -> int:
    shown = wide_console()
    wanted = Watching(
        callers=given.callers,
        consoles=given.consoles,
        groups=given.groups,
        seconds=given.seconds,
        slices=given.slices,
        warm_up_s=given.warm_up,
    )
    found, idle = console(wanted, shown.print)
    shown.print(_table(f"{wanted.callers} callers, {wanted.slices} slices of {wanted.seconds:g} s each", found))
    table = Table(title="while nobody calls")
    for name in ("consoles", "CPU ms a second"):
        table.add_column(name, justify="right")
    for one in idle:
        table.add_row(str(one.consoles), f"{one.cpu_ms_per_s:.1f}")
    shown.print(table)
    write_json(given.json, {"slices": found, "idle": idle}, shown.print)
    return 0


def _table(title: str, found: Sequence[Slices]) -> Table:
    table = Table(title=title)
    for name in ("", "tx/s", "tx/s", "p50 ms", "p99 ms", "CPU us/tx", "CPU", "events", "KiB an event"):
        table.add_column(name, justify="left" if not name else "right")
    first = found[0]
    for one in found:
        table.add_row(
            one.name,
            f"{one.median_per_s:,.0f}",
            f"{one.median_per_s / first.median_per_s - 1:+.1%}" if first.median_per_s else "",
            f"{one.p50_ms:.1f}",
            f"{one.p99_ms:.1f}",
            f"{one.cpu_us:.0f}",
            f"{one.cpu_us / first.cpu_us - 1:+.1%}" if first.cpu_us else "",
            f"{one.events:,}",
            f"{one.event_bytes / one.events / 1024:.1f}" if one.events else "",
        )
    return table
