"""The time and memory of a start."""

from __future__ import annotations

import argparse
import logging
from collections.abc import Iterable
from pathlib import Path

import structlog
from rich.table import Table

from bench.measures.recovery import ENDED, FEW, LATELY, PENDING, Bench, Cell
from bench.measures.recovery_figures import RecoveryResult
from bench.plan import VALUE_BYTES
from bench.report import wide_console, write_json
from bench.runs.kinds import Kinds


def add(kinds: Kinds) -> None:
    """Add its command."""
    starts = kinds.add_parser("recovery", help="starts with a backlog, or a history; writes build/recovery.json")
    starts.set_defaults(run=_recovery)
    starts.add_argument("--json", type=Path, default=Path("build/recovery.json"), help="the file for the figures")
    starts.add_argument("--pending", type=int, action="append", help="repeatable; 0 to 1,000,000 by default")
    starts.add_argument(
        "--ended",
        type=int,
        action="append",
        help="after 10 pending; 0 to 10,000,000 by default",
    )
    starts.add_argument("--lately", type=int, action="append", help="like --ended, within the outcome horizon")
    starts.add_argument("--value-bytes", type=int, default=VALUE_BYTES, help="bytes of each transaction's message")
    starts.add_argument("--rate", type=float, default=2_000, help="transactions per second in the log")
    starts.add_argument("--watch", type=float, default=60, help="seconds after each start")
    starts.add_argument("--starts", type=int, default=1, help="starts on each log")
    starts.add_argument(
        "--before",
        type=Path,
        metavar="PYTHON",
        help="the interpreter of an earlier version: only starts, in turn",
    )
    starts.add_argument("--kafka", metavar="HOST:PORT", help="a running broker")


def _recovery(arguments: argparse.Namespace) -> int:
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.ERROR))
    console = wide_console()
    chosen = (arguments.pending, arguments.ended, arguments.lately) != (None, None, None)
    cells = [
        *(Cell(pending=count) for count in arguments.pending or (() if chosen else PENDING)),
        *(Cell(pending=FEW, ended=count) for count in arguments.ended or (() if chosen else ENDED)),
        *(Cell(pending=FEW, ended=count, lately=True) for count in arguments.lately or (() if chosen else LATELY)),
    ]
    with Bench(
        say=console.print,
        bootstrap_servers=arguments.kafka,
        value_bytes=arguments.value_bytes,
        rate_per_s=arguments.rate,
        watch_s=arguments.watch,
    ) as bench:
        result = bench.run(
            cells, before=None if arguments.before is None else arguments.before.absolute(), starts=arguments.starts
        )
    console.print(recovery_table(result))
    for line in recovery_lines(result):
        console.print(line)
    write_json(arguments.json, result, console.print)
    return 0 if result.clean else 1


def recovery_table(result: RecoveryResult) -> Table:
    """Return the starts as a table."""
    table = Table(title=f"starts: {result.shards} shards, one message of {result.value_bytes} bytes each")
    table.add_column("the log holds")
    for name in (
        *("ready s", "last GET s", "commit s", "records", "records/s", "CPU s", "RSS MiB", "peak MiB", "bytes each"),
        *("health worst ms", "after: health", "prepare p50", "p99", "worst"),
    ):
        table.add_column(name, justify="right")
    for start in result.starts:
        after = start.prepare_after
        table.add_row(
            start.cell,
            f"{start.ready_s:.1f}",
            "" if start.get_s is None else f"{start.get_s:.1f}",
            f"{start.commit_s:.1f}",
            *(f"{start.records:,}", f"{start.records_per_s:,.0f}", f"{start.cpu_s:.1f}"),
            *(
                f"{start.rss_mib:.0f}",
                f"{start.peak_mib:.0f}",
                "" if start.bytes_each is None else f"{start.bytes_each:.0f}",
            ),
            *(f"{start.health.worst_ms:.0f}", f"{start.health_after.worst_ms:.0f}"),
            *(f"{after.p50_ms:.0f}", f"{after.p99_ms:.0f}", f"{after.worst_ms:.0f}"),
        )
    return table


def recovery_lines(result: RecoveryResult) -> Iterable[str]:
    """Print the figures that are not in the table."""
    if (taken := result.takeover) is not None:
        prepares = taken.prepare
        yield (
            f"takeover, {taken.pending:,} pending: a second instance had its half {taken.joined_s:.1f} s after its "
            f"start (a shard was away for {taken.join_away_s:.1f} s), and all of it {taken.taken_s:.1f} s after the "
            f"kill of the first (session {taken.session_s:g} s); RSS {taken.rss_mib:.0f} MiB, "
            f"peak {taken.peak_mib:.0f}; prepares "
            f"meanwhile: p50 {prepares.p50_ms:.0f} ms, worst {prepares.worst_ms:.0f}, failed {prepares.failed}"
        )
    if (due := result.all_due) is not None:
        prepares = due.prepare_after
        yield (
            f"{due.pending:,} due at once: ready after {due.ready_s:.1f} s, {due.checks_per_s:.0f} checks/s; "
            f"RSS {due.rss_mib:.0f} MiB, peak {due.peak_mib:.0f}; health worst {due.health_after.worst_ms:.0f} ms; "
            f"prepares: p50 {prepares.p50_ms:.0f} ms, worst {prepares.worst_ms:.0f}, failed {prepares.failed}"
        )
