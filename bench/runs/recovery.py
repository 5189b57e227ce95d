"""How long a start takes, and its memory."""

from __future__ import annotations

import argparse
import logging
from collections.abc import Iterable
from pathlib import Path

import structlog
from rich.table import Table

from bench.plan import VALUE_BYTES
from bench.recovery import ENDED, FEW, LATELY, PENDING, Bench, Cell
from bench.recovery_figures import Found
from bench.report import wide_console, write_json
from bench.runs.kinds import Kinds


def add(kinds: Kinds) -> None:
    """Add its command."""
    starts = kinds.add_parser("recovery", help="starts with a backlog, or a history; writes build/recovery.json")
    starts.set_defaults(run=_recovery)
    starts.add_argument("--json", type=Path, default=Path("build/recovery.json"), help="where the figures go")
    starts.add_argument("--pending", type=int, action="append", help="can be repeated; 0 to 1,000,000 by default")
    starts.add_argument("--ended", type=int, action="append", help="behind 10 pending; 0 to 10,000,000 by default")
    starts.add_argument("--lately", type=int, action="append", help="as --ended, within the outcome horizon")
    starts.add_argument("--value-bytes", type=int, default=VALUE_BYTES, help="of the message of each transaction")
    starts.add_argument("--rate", type=float, default=2_000, help="transactions a second that the log tells of")
    starts.add_argument("--watch", type=float, default=60, help="seconds after each start")
    starts.add_argument("--starts", type=int, default=1, help="on each log")
    starts.add_argument(
        "--before", type=Path, metavar="PYTHON", help="the interpreter of an earlier version: only starts, in turn"
    )
    starts.add_argument("--kafka", metavar="HOST:PORT", help="a broker that runs already")


def _recovery(given: argparse.Namespace) -> int:
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.ERROR))
    console = wide_console()
    chosen = (given.pending, given.ended, given.lately) != (None, None, None)
    cells = [
        *(Cell(pending=count) for count in given.pending or (() if chosen else PENDING)),
        *(Cell(pending=FEW, ended=count) for count in given.ended or (() if chosen else ENDED)),
        *(Cell(pending=FEW, ended=count, lately=True) for count in given.lately or (() if chosen else LATELY)),
    ]
    with Bench(
        say=console.print,
        bootstrap_servers=given.kafka,
        value_bytes=given.value_bytes,
        rate_per_s=given.rate,
        watch_s=given.watch,
    ) as bench:
        found = bench.run(cells, before=None if given.before is None else given.before.absolute(), starts=given.starts)
    console.print(recovery_table(found))
    for line in recovery_lines(found):
        console.print(line)
    write_json(given.json, found, console.print)
    return 0 if found.clean else 1


def recovery_table(found: Found) -> Table:
    """Return the starts as a table."""
    table = Table(title=f"starts: {found.shards} shards, one message of {found.value_bytes} bytes each")
    table.add_column("the log holds")
    for name in (
        *("ready s", "last GET s", "commit s", "records", "records/s", "CPU s", "RSS MiB", "peak MiB", "bytes each"),
        *("health worst ms", "after: health", "prepare p50", "p99", "worst"),
    ):
        table.add_column(name, justify="right")
    for one in found.starts:
        after = one.prepare_after
        table.add_row(
            one.cell,
            f"{one.ready_s:.1f}",
            "" if one.get_s is None else f"{one.get_s:.1f}",
            f"{one.commit_s:.1f}",
            *(f"{one.records:,}", f"{one.records_per_s:,.0f}", f"{one.cpu_s:.1f}"),
            *(f"{one.rss_mib:.0f}", f"{one.peak_mib:.0f}", "" if one.bytes_each is None else f"{one.bytes_each:.0f}"),
            *(f"{one.health.worst_ms:.0f}", f"{one.health_after.worst_ms:.0f}"),
            *(f"{after.p50_ms:.0f}", f"{after.p99_ms:.0f}", f"{after.worst_ms:.0f}"),
        )
    return table


def recovery_lines(found: Found) -> Iterable[str]:
    """Say what the table does not hold."""
    if (taken := found.takeover) is not None:
        asked = taken.prepare
        yield (
            f"takeover, {taken.pending:,} pending: a second instance had its half {taken.joined_s:.1f} s after its "
            f"start (a shard was away for {taken.join_away_s:.1f} s), and all of it {taken.taken_s:.1f} s after the "
            f"kill of the first (session {taken.session_s:g} s); RSS {taken.rss_mib:.0f} MiB, "
            f"peak {taken.peak_mib:.0f}; prepares "
            f"meanwhile: p50 {asked.p50_ms:.0f} ms, worst {asked.worst_ms:.0f}, failed {asked.failed}"
        )
    if (due := found.all_due) is not None:
        asked = due.prepare_after
        yield (
            f"{due.pending:,} due at once: ready after {due.ready_s:.1f} s, {due.checks_per_s:.0f} checks/s; "
            f"RSS {due.rss_mib:.0f} MiB, peak {due.peak_mib:.0f}; health worst {due.health_after.worst_ms:.0f} ms; "
            f"prepares: p50 {asked.p50_ms:.0f} ms, worst {asked.worst_ms:.0f}, failed {asked.failed}"
        )
