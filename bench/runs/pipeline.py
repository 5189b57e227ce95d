"""The Spark jobs: by the size of the topics, and under a stream."""

from __future__ import annotations

import argparse
from pathlib import Path

import msgspec
from rich.table import Table

from bench.pipeline.scale import JOBS, Costs, Scale, scale
from bench.pipeline.stream import Stream, Streaming, stream
from bench.report import wide_console, write_json
from bench.runs.kinds import Kinds


def add(kinds: Kinds) -> None:
    """Add its commands."""
    sizes = kinds.add_parser("pipeline", help="audit and sweep over archives, beside DuckDB; see build/pipeline.json")
    sizes.set_defaults(run=_scale)
    wanted = Scale(folder=Path("build/bench-pipeline"))
    sizes.add_argument("--json", type=Path, default=Path("build/pipeline.json"), help="where the figures go")
    sizes.add_argument("--halves", type=int, action="append", help="can be repeated; 100,000 and 1,000,000 by default")
    sizes.add_argument("--job", action="append", choices=JOBS, help="can be repeated; all by default")
    sizes.add_argument("--folder", type=Path, default=wanted.folder, help="where there is room for the archives")
    sizes.add_argument("--memory", default=wanted.memory, help="of Spark")
    sizes.add_argument("--duckdb-memory", help="the memory limit of DuckDB, such as 1GB; by default all that is free")
    sizes.add_argument("--seed", type=int, default=wanted.seed)
    sizes.add_argument("--keep", action="store_true", help="keep the archives, and take those that are there")
    steady = kinds.add_parser("ledger", help="the ledger under a steady stream; writes build/ledger.json")
    steady.set_defaults(run=_stream)
    even = Streaming()
    steady.add_argument("--json", type=Path, default=Path("build/ledger.json"), help="where the figures go")
    steady.add_argument("--rate", type=int, default=even.events_per_s, help="records a second, three a transaction")
    steady.add_argument("--minutes", type=float, default=even.minutes)
    steady.add_argument("--every", type=float, default=even.every_s, help="seconds between two batches")
    steady.add_argument("--pending", type=int, default=even.pending, help="transactions that are pending all the time")
    steady.add_argument("--memory", default=even.memory, help="of Spark")
    steady.add_argument("--seed", type=int, default=even.seed)


def _scale(given: argparse.Namespace) -> int:
    console = wide_console()
    defaults = Scale(folder=given.folder)
    wanted = msgspec.structs.replace(
        defaults,
        halves=tuple(given.halves or defaults.halves),
        jobs=tuple(given.job or defaults.jobs),
        memory=given.memory,
        duckdb_memory=given.duckdb_memory,
        seed=given.seed,
        keep=given.keep,
    )
    found = scale(wanted, console.print)
    console.print(costs_table(found))
    for job, factors in found.growth.items():
        if factors:
            console.print(f"{job}: ten times the work takes {', '.join(map(str, factors))} times as long")
    write_json(given.json, found, console.print)
    return 0


def costs_table(found: Costs) -> Table:
    """Return what the runs took as a table."""
    table = Table()
    for name in ("job", "halves", "seconds", "CPU s", "memory MiB", "shuffle MiB", "spilled MiB"):
        table.add_column(name, justify="left" if name == "job" else "right")
    for one in found.costs:
        table.add_row(
            *(one.job, f"{one.halves:,}", f"{one.seconds:,.1f}", f"{one.cpu_s:,.1f}", f"{one.memory_mib:,}"),
            *("" if size is None else f"{size:,}" for size in (one.shuffle_mib, one.spilled_mib)),
        )
    return table


def _stream(given: argparse.Namespace) -> int:
    console = wide_console()
    wanted = Streaming(
        events_per_s=given.rate,
        minutes=given.minutes,
        every_s=given.every,
        memory=given.memory,
        seed=given.seed,
        pending=given.pending,
    )
    found = stream(wanted, console.print)
    console.print(stream_table(found))
    write_json(given.json, found, console.print)
    return 0 if found.clean else 1


def stream_table(found: Stream) -> Table:
    """Return a stream's minutes as a table."""
    table = Table(
        title=f"{found.offered_per_s:,} records/s offered for {found.seconds:.0f} s ({found.offered_behind_s} s late): "
        f"{found.transactions:,} transactions ended, {found.rows:,} rows of {found.distinct:,}, "
        f"{found.pending_at_end:,} pending; caught up {found.caught_up_s} s after; {found.ledger_cores} cores"
    )
    for name in ("minute", "batches", "records/s", "behind", "pending", "memory MiB", "checkpoint MiB"):
        table.add_column(name, justify="right")
    for line in found.lines:
        table.add_row(
            *(str(line.minute), str(line.batches), f"{line.records_per_s:,}", f"{line.behind_at_most:,}"),
            *(f"{line.pending_at_most:,}", f"{line.memory_mib:,}", f"{line.checkpoint_mib}"),
        )
    return table
