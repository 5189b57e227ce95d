"""What a group that floods costs the others, and what keys cost."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from rich.table import Table

from bench.limits import Cost, Flooding, limits, verifying_us
from bench.report import wide_console, write_json
from bench.runs.kinds import Kinds


def add(kinds: Kinds) -> None:
    """Add its command."""
    run = kinds.add_parser("limits", help="a flood beside groups that work, and keys; writes build/limits.json")
    run.set_defaults(run=_limits)
    run.add_argument("--json", type=Path, default=Path("build/limits.json"), help="where the figures go")
    wanted = Flooding()
    run.add_argument("--groups", type=int, default=wanted.groups, help="that work")
    run.add_argument("--rate", type=float, default=wanted.rate_per_s, help="their transactions a second, together")
    run.add_argument("--limit", type=float, default=wanted.limit_per_s, help="prepares a second that a group may send")
    run.add_argument("--flood", type=int, default=wanted.flood, help="callers that flood")
    run.add_argument("--seconds", type=float, default=wanted.seconds, help="of each turn")
    run.add_argument("--turns", type=int, default=wanted.turns, help="of each kind")
    run.add_argument("--warm-up", type=float, default=wanted.warm_up_s, help="seconds")


def _limits(given: argparse.Namespace) -> int:
    console = wide_console()
    wanted = Flooding(
        groups=given.groups,
        rate_per_s=given.rate,
        limit_per_s=given.limit,
        flood=given.flood,
        seconds=given.seconds,
        turns=given.turns,
        warm_up_s=given.warm_up,
    )
    flooded, keys = limits(wanted, console.print)
    console.print(_table("the groups that work, beside one that floods", flooded))
    console.print(_table("without and with keys", keys))
    first, again = verifying_us()
    console.print(f"to verify a key and to decide takes {first:.1f} µs of CPU the first time, {again:.1f} µs again")
    found = {"flood": flooded, "keys": keys, "verifying_us": {"first": first, "again": again}}
    write_json(given.json, found, console.print)
    return 0


def _table(title: str, costs: Sequence[Cost]) -> Table:
    table = Table(title=title)
    for name in ("", "tx", "p50 ms", "p99 ms", "p99", "flood committed", "flood refused", "CPU us/tx", "CPU"):
        table.add_column(name, justify="left" if not name else "right")
    first = costs[0]
    for one in costs:
        table.add_row(
            one.name,
            *(f"{one.transactions or one.flooded:,}", f"{one.p50_ms:.1f}", f"{one.p99_ms:.1f}"),
            f"{one.p99_ms / first.p99_ms - 1:+.0%}" if first.p99_ms else "",
            *(f"{one.flooded if one.transactions else 0:,}", f"{one.refused:,}", f"{one.cpu_us:.0f}"),
            f"{one.cpu_us / first.cpu_us - 1:+.1%}",
        )
    return table
