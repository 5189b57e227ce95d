"""`python -m bench`: measures, prints a table and writes build/bench.json.

`python -m bench soak` is a long, even load; `python -m bench overload` is many times what can be served; `python -m
bench recovery` tells how long a start takes, and its memory.

Exit status 1 when the checker finds anything, or when a request failed.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from bench.overload import Overloading, overload
from bench.plan import SCENARIOS, VALUE_BYTES
from bench.recovery import ENDED, FEW, JUST_NOW, PENDING, Bench, Cell
from bench.report import (
    lines_table,
    overload_table,
    recovery_lines,
    recovery_table,
    soak_table,
    wide_console,
    write_json,
)
from bench.rig import Rig, RigError
from bench.scenarios import Lengths, run_scenarios
from bench.soak import Lasting, soak


def main(arguments: list[str] | None = None) -> int:
    """Run what the command line asks for and return the exit status."""
    given = _parser().parse_args(arguments)
    try:
        return int(given.run(given))
    except RigError as error:
        print(f"bench: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130


def _parser() -> argparse.ArgumentParser:
    defaults = Lengths()
    parser = argparse.ArgumentParser(prog="python -m bench", description=__doc__)
    parser.set_defaults(run=_bench)
    parser.add_argument("--json", type=Path, default=Path("build/bench.json"), help="where the figures go")
    parser.add_argument("--only", action="append", choices=[one.name for one in SCENARIOS], help="can be repeated")
    parser.add_argument("--warm-up", type=float, default=defaults.warm_up_s, help="seconds, once")
    parser.add_argument("--lead", type=float, default=defaults.lead_s, help="seconds before counting, each scenario")
    parser.add_argument("--seconds", type=float, default=defaults.run_s, help="that count, each scenario")
    parser.add_argument("--raw-seconds", type=float, default=defaults.raw_s, help="of the raw limit, each scenario")
    parser.add_argument("--kafka", metavar="HOST:PORT", help="a broker that runs already, for figures without its CPU")
    kinds = parser.add_subparsers(title="other runs")
    lasting = Lasting()
    long = kinds.add_parser("soak", help="a long, even load; writes build/soak.json")
    long.set_defaults(run=_soak)
    long.add_argument("--json", type=Path, default=Path("build/soak.json"), help="where the figures go")
    long.add_argument("--minutes", type=float, default=lasting.minutes)
    long.add_argument("--share", type=float, default=lasting.share, help="of the maximum, which is measured first")
    long.add_argument("--warm-up", type=float, default=lasting.warm_up_s, help="seconds")
    long.add_argument("--horizon", type=int, default=120, help="seconds that outcomes are remembered")
    many = kinds.add_parser("overload", help="many times the maximum; writes build/overload.json")
    many.set_defaults(run=_overload)
    many.add_argument("--json", type=Path, default=Path("build/overload.json"), help="where the figures go")
    wanted = Overloading()
    many.add_argument("--times", type=float, default=wanted.times, help="of the maximum, which is measured first")
    many.add_argument("--seconds", type=float, default=wanted.seconds, help="of the load")
    many.add_argument("--connections", type=int, default=wanted.connections, help="of all callers")
    many.add_argument("--patience", type=float, default=wanted.patience_s, help="seconds a caller waits for an answer")
    many.add_argument("--processes", type=int, default=wanted.processes, help="that make the load")
    many.add_argument("--warm-up", type=float, default=wanted.warm_up_s, help="seconds")
    many.add_argument("--set", action="append", default=[], metavar="NAME=VALUE", help="a setting of the coordinator")
    starts = kinds.add_parser("recovery", help="starts with a backlog, or a history; writes build/recovery.json")
    starts.set_defaults(run=_recovery)
    starts.add_argument("--json", type=Path, default=Path("build/recovery.json"), help="where the figures go")
    starts.add_argument("--pending", type=int, action="append", help="can be repeated; 0 to 1,000,000 by default")
    starts.add_argument("--ended", type=int, action="append", help="behind 10 pending; 0 to 10,000,000 by default")
    starts.add_argument("--just-now", type=int, action="append", help="as --ended, up to the very start")
    starts.add_argument("--value-bytes", type=int, default=VALUE_BYTES, help="of the message of each transaction")
    starts.add_argument("--rate", type=float, default=2_000, help="transactions a second that the log tells of")
    starts.add_argument("--watch", type=float, default=60, help="seconds after each start")
    starts.add_argument("--kafka", metavar="HOST:PORT", help="a broker that runs already")
    return parser


def _recovery(given: argparse.Namespace) -> int:
    console = wide_console()
    chosen = (given.pending, given.ended, given.just_now) != (None, None, None)
    cells = [
        *(Cell(pending=count) for count in given.pending or (() if chosen else PENDING)),
        *(Cell(pending=FEW, ended=count) for count in given.ended or (() if chosen else ENDED)),
        *(Cell(pending=FEW, ended=count, quiet_s=0) for count in given.just_now or (() if chosen else JUST_NOW)),
    ]
    with Bench(
        say=console.print,
        bootstrap_servers=given.kafka,
        value_bytes=given.value_bytes,
        rate_per_s=given.rate,
        watch_s=given.watch,
    ) as bench:
        found = bench.run(cells)
    console.print(recovery_table(found))
    for line in recovery_lines(found):
        console.print(line)
    write_json(given.json, found)
    console.print(f"written to {given.json}")
    return 0 if found.clean else 1


def _soak(given: argparse.Namespace) -> int:
    console = wide_console()
    # Outcomes are held in memory as long as the horizon: only past it can memory be flat.
    settings = {"HALFWAY_OUTCOME_HORIZON_S": str(given.horizon)}
    with Rig(say=console.print, settings=settings) as rig:
        console.print(f"{given.minutes:g} minutes at {given.share:.0%} of the maximum, which is measured first")
        found = soak(rig, Lasting(minutes=given.minutes, share=given.share, warm_up_s=given.warm_up))
    console.print(soak_table(found))
    if found.first_finding:
        console.print(f"the checker's first finding: {found.first_finding}", markup=False)
    if found.failed:
        console.print(f"the first that failed: {found.first_failure}", markup=False)
    write_json(given.json, found)
    console.print(f"written to {given.json}")
    return 0 if found.clean else 1


def _overload(given: argparse.Namespace) -> int:
    console = wide_console()
    wanted = Overloading(
        times=given.times,
        seconds=given.seconds,
        connections=given.connections,
        patience_s=given.patience,
        processes=given.processes,
        warm_up_s=given.warm_up,
    )
    with Rig(say=console.print, settings=dict(one.split("=", 1) for one in given.set)) as rig:
        console.print(f"{given.seconds:g} s of {given.times:g} times the maximum, which is measured first")
        found = overload(rig, wanted)
    console.print(overload_table(found))
    for what in (found.first_finding, found.first_unlike):
        if what:
            console.print(f"the first that is wrong: {what}", markup=False)
    write_json(given.json, found)
    console.print(f"written to {given.json}")
    return 0 if found.clean else 1


def _bench(given: argparse.Namespace) -> int:
    console = wide_console()
    lengths = Lengths(warm_up_s=given.warm_up, lead_s=given.lead, run_s=given.seconds, raw_s=given.raw_seconds)
    chosen = tuple(one for one in SCENARIOS if given.only is None or one.name in given.only)
    with Rig(say=console.print, bootstrap_servers=given.kafka) as rig:
        lines = run_scenarios(rig, chosen, lengths, say=console.print)
    console.print(lines_table(lines))
    for line in lines:
        if line.first_finding:
            console.print(f"{line.scenario}: the checker's first finding: {line.first_finding}", markup=False)
        if line.failed:
            console.print(f"{line.scenario}: the first that failed: {line.first_failure}", markup=False)
    write_json(given.json, lines)
    console.print(f"written to {given.json}")
    return 0 if all(line.clean for line in lines) else 1


if __name__ == "__main__":
    sys.exit(main())
