"""Tables for the terminal, and the JSON beside them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import msgspec
from rich.console import Console
from rich.table import Table

from bench.overload import Overload
from bench.recovery import Found
from bench.scenarios import Line
from bench.soak import Soak


def lines_table(lines: Iterable[Line]) -> Table:
    """Return the scenarios as a table."""
    table = Table(title="prepare to commit confirmed; CPU in microseconds a transaction")
    table.add_column("scenario")
    for name in (
        *("tx/s", "p50 ms", "p99 ms", "coordinator", "broker", "load", "raw tx/s", "ratio", "ends/Kafka tx"),
        *("missing", "doubled", "extra", "contradicted", "stuck", "failed"),
    ):
        table.add_column(name, justify="right")
    for line in lines:
        table.add_row(
            line.scenario,
            *(f"{line.tx_per_s:,.0f}", f"{line.p50_ms:.1f}", f"{line.p99_ms:.1f}", f"{line.coordinator_cpu_us:.0f}"),
            *("" if line.broker_cpu_us is None else f"{line.broker_cpu_us:.0f}", f"{line.load_cpu_us:.0f}"),
            *(f"{line.raw_tx_per_s:,.0f}", f"{line.ratio:.2f}", f"{line.ends_per_kafka_transaction:.1f}"),
            *map(str, (line.missing, line.doubled, line.extra, line.contradicted, line.stuck, line.failed)),
        )
    return table


def soak_table(found: Soak) -> Table:
    """Return a soak's windows as a table."""
    table = Table(
        title=f"{found.rate_per_s:,.0f} tx/s of at most {found.maximum_tx_per_s:,.0f}, {found.transactions:,} in all: "
        f"{found.missing} missing, {found.doubled} doubled, {found.extra} extra, {found.contradicted} contradicted, "
        f"{found.stuck} stuck, {found.failed} failed"
    )
    for name in ("until s", "tx/s", "p50 ms", "p99 ms", "coordinator CPU us/tx", "RSS MiB", "threads", "fds"):
        table.add_column(name, justify="right")
    for line in found.lines:
        table.add_row(
            *(f"{line.until_s:.0f}", f"{line.tx_per_s:,.0f}", f"{line.p50_ms:.1f}", f"{line.p99_ms:.1f}"),
            *(f"{line.coordinator_cpu_us:.0f}", f"{line.rss_mib:.0f}", str(line.threads), str(line.fds)),
        )
    return table


def overload_table(found: Overload) -> Table:
    """Return an overload as a table of two columns."""
    table = Table(
        title=f"{found.rate_per_s:,.0f} tx/s offered, of at most {found.maximum_tx_per_s:,.0f}: "
        f"{found.missing} missing, {found.doubled} doubled, {found.extra} extra, {found.contradicted} contradicted, "
        f"{found.stuck} stuck"
    )
    table.add_column("")
    table.add_column("", justify="right")
    for name, value in (
        ("committed tx/s", f"{found.committed_tx_per_s:,.0f} ({found.share_of_maximum:.0%} of the maximum)"),
        ("p50, p99 of what is committed", f"{found.p50_ms:,.0f} ms, {found.p99_ms:,.0f} ms"),
        ("requests/s", f"{found.requests_per_s:,.0f}"),
        ("offered, found no connection", f"{found.offered:,}, {found.without_connection:,}"),
        ("prepares by status", _counts(found.prepares)),
        ("ends by status", _counts(found.ends)),
        ("refusals without Retry-After", str(found.refused_without_retry_after)),
        ("other answers, broken connections", str(found.unlike)),
        ("connections", f"{found.connections:,}"),
        *(
            (f"RSS MiB, threads, descriptors {when}", f"{held.rss_mib:.0f}, {held.threads}, {held.fds}")
            for when, held in (("before", found.held_before), ("at most", found.held), ("after", found.held_after))
        ),
        *(
            (one.path, f"{_counts(one.answers)}; p50 {one.p50_ms:.0f} ms, worst {one.worst_ms:.0f} ms")
            for one in found.health
        ),
        ("cores", ", ".join(f"{name} {used:.2f}" for name, used in found.cpu.items())),
        ("small load before, recovered after", f"p50 {found.p50_before_ms:.1f} ms, {found.recovered_after_s} s"),
        ("left over and rolled back", f"{found.left_over:,} of {found.transactions:,}"),
    ):
        table.add_row(name, value)
    return table


def _counts(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{name}: {count:,}" for name, count in counts.items())


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


def write_json(path: Path, found: Any) -> None:
    """Write what was found, indented for a person, in whole."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(msgspec.json.format(msgspec.json.encode(found), indent=2) + b"\n")


def wide_console() -> Console:
    """Return a console that does not fold a table where it writes to a file."""
    console = Console()
    return console if console.is_terminal else Console(width=180)
