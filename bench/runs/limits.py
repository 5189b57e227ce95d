"""The cost of a flooding group for the others, and the cost of keys."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from rich.table import Table

from bench.measures.limits import Cost, LimitsOptions, limits, verifying_us
from bench.report import wide_console, write_json
from bench.runs.kinds import Kinds


def add(kinds: Kinds) -> None:
    """Add its command."""
    run = kinds.add_parser("limits", help="a flood beside working groups, and keys; writes build/limits.json")
    run.set_defaults(run=_limits)
    run.add_argument("--json", type=Path, default=Path("build/limits.json"), help="the file for the figures")
    options = LimitsOptions()
    run.add_argument("--groups", type=int, default=options.groups, help="working groups")
    run.add_argument("--rate", type=float, default=options.rate_per_s, help="transactions per second of them all")
    run.add_argument("--limit", type=float, default=options.limit_per_s, help="prepares per second of a group")
    run.add_argument("--flood", type=int, default=options.flood, help="callers of the flooding group")
    run.add_argument("--seconds", type=float, default=options.seconds, help="seconds of each turn")
    run.add_argument("--turns", type=int, default=options.turns, help="turns of each kind")
    run.add_argument("--warm-up", type=float, default=options.warm_up_s, help="seconds")


def _limits(arguments: argparse.Namespace) -> int:
    console = wide_console()
    options = LimitsOptions(
        groups=arguments.groups,
        rate_per_s=arguments.rate,
        limit_per_s=arguments.limit,
        flood=arguments.flood,
        seconds=arguments.seconds,
        turns=arguments.turns,
        warm_up_s=arguments.warm_up,
    )
    flooded, keys = limits(options, console.print)
    console.print(_table("the working groups beside a flooding one", flooded))
    console.print(_table("without and with keys", keys))
    first, again = verifying_us()
    console.print(f"to verify a key and to decide takes {first:.1f} µs of CPU the first time, {again:.1f} µs again")
    result = {"flood": flooded, "keys": keys, "verifying_us": {"first": first, "again": again}}
    write_json(arguments.json, result, console.print)
    return 0


def _table(title: str, costs: Sequence[Cost]) -> Table:
    table = Table(title=title)
    for name in ("", "tx", "p50 ms", "p99 ms", "p99", "flood committed", "flood refused", "CPU us/tx", "CPU"):
        table.add_column(name, justify="left" if not name else "right")
    first = costs[0]
    for cost in costs:
        table.add_row(
            cost.name,
            *(f"{cost.transactions or cost.flooded:,}", f"{cost.p50_ms:.1f}", f"{cost.p99_ms:.1f}"),
            f"{cost.p99_ms / first.p99_ms - 1:+.0%}" if first.p99_ms else "",
            *(f"{cost.flooded if cost.transactions else 0:,}", f"{cost.refused:,}", f"{cost.cpu_us:.0f}"),
            f"{cost.cpu_us / first.cpu_us - 1:+.1%}",
        )
    return table
