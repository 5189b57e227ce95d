"""Several instances: their cost, takeovers as callers see them, and how long consumers are held back."""

from __future__ import annotations

import argparse
from collections.abc import Iterable
from pathlib import Path

from rich.table import Table

from bench.measures.frozen import FrozenLine, FrozenOptions, measure_frozen
from bench.measures.instances import Instances, InstancesOptions, measure_instances
from bench.measures.takeover import Takeover, TakeoverOptions, measure_takeovers
from bench.report import counts, wide_console, write_json
from bench.runs.kinds import Kinds
from bench.system.fleet import FleetRig


def add(kinds: Kinds) -> None:
    """Add their commands."""
    spread, taking, freezing = InstancesOptions(), TakeoverOptions(), FrozenOptions()
    several = kinds.add_parser("instances", help="one, two, three instances; writes build/instances.json")
    several.set_defaults(run=_instances)
    several.add_argument("--json", type=Path, default=Path("build/instances.json"), help="the file for the figures")
    several.add_argument("--warm-up", type=float, default=spread.warm_up_s, help="seconds, once")
    several.add_argument("--seconds", type=float, default=spread.run_s, help="measured seconds of each line")
    taken = kinds.add_parser("takeover", help="kill, stop and join under load; writes build/takeover.json")
    taken.set_defaults(run=_takeover)
    taken.add_argument("--json", type=Path, default=Path("build/takeover.json"), help="the file for the figures")
    taken.add_argument(
        "--sessions", type=float, nargs="+", default=taking.sessions_s, help="session time-outs, seconds"
    )
    taken.add_argument("--rate", type=float, default=taking.rate_per_s, help="transactions per second")
    held = kinds.add_parser("frozen", help="how long consumers are held back; writes build/frozen.json")
    held.set_defaults(run=_frozen)
    held.add_argument("--json", type=Path, default=Path("build/frozen.json"), help="the file for the figures")
    held.add_argument(
        "--sessions", type=float, nargs="*", default=freezing.sessions_s, help="session time-outs, seconds"
    )
    held.add_argument(
        "--timeouts",
        type=float,
        nargs="*",
        default=freezing.timeouts_s,
        help="transaction time-outs, seconds",
    )


def _instances(arguments: argparse.Namespace) -> int:
    console = wide_console()
    with FleetRig(say=console.print) as rig:
        result = measure_instances(
            rig, InstancesOptions(warm_up_s=arguments.warm_up, run_s=arguments.seconds), say=console.print
        )
    console.print(instances_table(result))
    for line in result.lines:
        if line.failed:
            console.print(f"{line.instances}, {line.asked}: the first that failed: {line.first_failure}", markup=False)
    write_json(arguments.json, result, console.print)
    return 0 if result.clean else 1


def _takeover(arguments: argparse.Namespace) -> int:
    console = wide_console()
    with FleetRig(say=console.print) as rig:
        taking = TakeoverOptions(sessions_s=tuple(arguments.sessions), rate_per_s=arguments.rate)
        result = measure_takeovers(rig, taking, say=console.print)
    console.print(takeover_table(result))
    write_json(arguments.json, result, console.print)
    return 0 if result.clean else 1


def _frozen(arguments: argparse.Namespace) -> int:
    console = wide_console()
    with FleetRig(say=console.print) as rig:
        freezing = FrozenOptions(sessions_s=tuple(arguments.sessions), timeouts_s=tuple(arguments.timeouts))
        lines = measure_frozen(rig, freezing, say=console.print)
    console.print(frozen_table(lines))
    write_json(arguments.json, lines, console.print)
    return 0 if all(line.copies == 1 for line in lines) else 1


def instances_table(result: Instances) -> Table:
    """Return the lines of several instances as a table, and below it the cost of a forwarded call."""
    table = Table(title=f"{result.callers} callers, requests of one transaction; CPU in microseconds per transaction")
    for name in ("instances", "asked"):
        table.add_column(name)
    for name in (
        *("tx/s", "p50 ms", "p99 ms", "of each", "coordinators", "broker", "load", "forwarded", "ends/Kafka tx"),
        *("missing", "doubled", "extra", "failed"),
    ):
        table.add_column(name, justify="right")
    for line in result.lines:
        table.add_row(
            *(str(line.instances), line.asked, f"{line.tx_per_s:,.0f}", f"{line.p50_ms:.1f}", f"{line.p99_ms:.1f}"),
            *(" + ".join(f"{used:.0f}" for used in line.each_cpu_us), f"{line.coordinators_cpu_us:.0f}"),
            *("" if line.broker_cpu_us is None else f"{line.broker_cpu_us:.0f}", f"{line.load_cpu_us:.0f}"),
            *(f"{line.forwarded_share:.0%}", f"{line.ends_per_kafka_transaction:.1f}"),
            *(str(line.missing), str(line.doubled), str(line.extra), str(line.failed)),
        )
    if result.forwarded is not None:
        table.caption = (
            f"a forwarded call: {result.forwarded.asker_cpu_us:.0f} us where it is forwarded, "
            f"{result.forwarded.owner_cpu_us:.0f} us at the owner; called directly the owner takes "
            f"{result.forwarded.direct_cpu_us:.0f} us; forwarding costs {result.forwarded.costs_cpu_us:.0f} us"
        )
    return table


def takeover_table(result: Takeover) -> Table:
    """Return the events as a table."""
    table = Table(
        title=f"{result.rate_per_s:g} tx/s begun, {result.transactions:,} in all: {result.missing} missing, "
        f"{result.doubled} doubled, {result.extra} extra"
    )
    table.add_column("event")
    for name in ("session s", "shards moved", "away s", "others s", "requests", "p50 ms", "longest s"):
        table.add_column(name, justify="right")
    for name in ("503 (without Retry-After)", "no answer", "other"):
        table.add_column(name)
    for line in result.lines:
        table.add_row(
            *(line.event, f"{line.session_s:g}", str(line.shards), f"{line.least_s:.1f} to {line.most_s:.1f}"),
            *(f"{line.others_s:.1f}", f"{line.requests:,}", f"{line.p50_ms:.1f}", f"{line.longest_s:.1f}"),
            f"{counts(line.refused)} ({line.without_retry_after})",
            *(counts(line.lost), counts(line.other)),
        )
    return table


def frozen_table(lines: Iterable[FrozenLine]) -> Table:
    """Return the freezes as a table."""
    table = Table(title="an instance is frozen in an open Kafka transaction")
    for name in (
        "instances",
        "session s",
        "transaction time-out s",
        "consumers held back s",
        "served again s",
        "copies",
    ):
        table.add_column(name, justify="right")
    for line in lines:
        table.add_row(
            *(str(line.instances), f"{line.session_s:g}", f"{line.transaction_timeout_s:g}"),
            f"{line.held_back_s:.1f}",
            *("" if line.served_again_s is None else f"{line.served_again_s:.1f}", str(line.copies)),
        )
    return table
