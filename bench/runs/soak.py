"""A long, even load."""

from __future__ import annotations

import argparse
from pathlib import Path

from rich.table import Table

from bench.measures.soak import Soak, SoakOptions, soak
from bench.report import wide_console, write_json
from bench.runs.kinds import Kinds
from bench.system.rig import Rig


def add(kinds: Kinds) -> None:
    """Add its command."""
    options = SoakOptions()
    long = kinds.add_parser("soak", help="a long, even load; writes build/soak.json")
    long.set_defaults(run=_soak)
    long.add_argument("--json", type=Path, default=Path("build/soak.json"), help="the file for the figures")
    long.add_argument("--minutes", type=float, default=options.minutes)
    long.add_argument(
        "--share", type=float, default=options.share, help="share of the maximum, which is measured first"
    )
    long.add_argument("--warm-up", type=float, default=options.warm_up_s, help="seconds")
    long.add_argument("--horizon", type=int, default=120, help="seconds that outcomes are remembered")


def _soak(arguments: argparse.Namespace) -> int:
    console = wide_console()
    # Outcomes stay in memory until the horizon, so memory can only be flat after it.
    settings = {"HALFWAY_OUTCOME_HORIZON_S": str(arguments.horizon)}
    with Rig(say=console.print, settings=settings) as rig:
        console.print(f"{arguments.minutes:g} minutes at {arguments.share:.0%} of the maximum, which is measured first")
        result = soak(rig, SoakOptions(minutes=arguments.minutes, share=arguments.share, warm_up_s=arguments.warm_up))
    console.print(soak_table(result))
    if result.first_finding:
        console.print(f"the checker's first finding: {result.first_finding}", markup=False)
    if result.failed:
        console.print(f"the first that failed: {result.first_failure}", markup=False)
    write_json(arguments.json, result, console.print)
    return 0 if result.clean else 1


def soak_table(result: Soak) -> Table:
    """Return a soak's windows as a table."""
    table = Table(
        title=f"{result.rate_per_s:,.0f} tx/s of at most {result.maximum_tx_per_s:,.0f}, "
        f"{result.transactions:,} in all: {result.shown}, {result.failed} failed"
    )
    for name in ("until s", "tx/s", "p50 ms", "p99 ms", "coordinator CPU us/tx", "RSS MiB", "threads", "fds"):
        table.add_column(name, justify="right")
    for line in result.lines:
        table.add_row(
            *(f"{line.until_s:.0f}", f"{line.tx_per_s:,.0f}", f"{line.p50_ms:.1f}", f"{line.p99_ms:.1f}"),
            *(f"{line.coordinator_cpu_us:.0f}", f"{line.rss_mib:.0f}", str(line.threads), str(line.fds)),
        )
    return table
