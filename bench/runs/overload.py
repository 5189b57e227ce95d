"""Many times the maximum load."""

from __future__ import annotations

import argparse
from pathlib import Path

from rich.table import Table

from bench.measures.overload import Overload, OverloadOptions, overload
from bench.report import counts, wide_console, write_json
from bench.runs.kinds import Kinds
from bench.system.rig import Rig


def add(kinds: Kinds) -> None:
    """Add its command."""
    many = kinds.add_parser("overload", help="many times the maximum; writes build/overload.json")
    many.set_defaults(run=_overload)
    many.add_argument("--json", type=Path, default=Path("build/overload.json"), help="the file for the figures")
    options = OverloadOptions()
    many.add_argument(
        "--times",
        type=float,
        default=options.times,
        help="the load as a multiple of the maximum",
    )
    many.add_argument("--seconds", type=float, default=options.seconds, help="seconds of load")
    many.add_argument("--connections", type=int, default=options.connections, help="connections of all callers")
    many.add_argument("--patience", type=float, default=options.patience_s, help="seconds to wait for an answer")
    many.add_argument("--processes", type=int, default=options.processes, help="processes of the load")
    many.add_argument("--warm-up", type=float, default=options.warm_up_s, help="seconds")
    many.add_argument("--set", action="append", default=[], metavar="NAME=VALUE", help="a setting of the coordinator")


def _overload(arguments: argparse.Namespace) -> int:
    console = wide_console()
    options = OverloadOptions(
        times=arguments.times,
        seconds=arguments.seconds,
        connections=arguments.connections,
        patience_s=arguments.patience,
        processes=arguments.processes,
        warm_up_s=arguments.warm_up,
    )
    with Rig(say=console.print, settings=dict(part.split("=", 1) for part in arguments.set)) as rig:
        console.print(f"{arguments.seconds:g} s of {arguments.times:g} times the maximum, which is measured first")
        result = overload(rig, options)
    console.print(overload_table(result))
    for what in (result.first_finding, result.first_unlike):
        if what:
            console.print(f"the first that is wrong: {what}", markup=False)
    write_json(arguments.json, result, console.print)
    return 0 if result.clean else 1


def overload_table(result: Overload) -> Table:
    """Return an overload as a table of two columns."""
    table = Table(
        title=f"{result.rate_per_s:,.0f} tx/s offered, of at most {result.maximum_tx_per_s:,.0f}: {result.shown}"
    )
    table.add_column("")
    table.add_column("", justify="right")
    for name, value in (
        ("committed tx/s", f"{result.committed_tx_per_s:,.0f} ({result.share_of_maximum:.0%} of the maximum)"),
        ("p50, p99 of what is committed", f"{result.p50_ms:,.0f} ms, {result.p99_ms:,.0f} ms"),
        ("requests/s", f"{result.requests_per_s:,.0f}"),
        ("offered, found no connection", f"{result.offered:,}, {result.without_connection:,}"),
        ("prepares by status", counts(result.prepares)),
        ("ends by status", counts(result.ends)),
        ("refusals without Retry-After", str(result.refused_without_retry_after)),
        ("other answers, broken connections", str(result.unlike)),
        ("connections", f"{result.connections:,}"),
        *(
            (f"RSS MiB, threads, descriptors {when}", f"{held.rss_mib:.0f}, {held.threads}, {held.fds}")
            for when, held in (("before", result.held_before), ("at most", result.held), ("after", result.held_after))
        ),
        *(
            (part.path, f"{counts(part.answers)}; p50 {part.p50_ms:.0f} ms, worst {part.worst_ms:.0f} ms")
            for part in result.health
        ),
        ("cores", ", ".join(f"{name} {used:.2f}" for name, used in result.cpu.items())),
        ("small load before, recovered after", f"p50 {result.p50_before_ms:.1f} ms, {result.recovered_after_s} s"),
        ("left over and rolled back", f"{result.left_over:,} of {result.transactions:,}"),
    ):
        table.add_row(name, value)
    return table
