"""`python -m bench`: measures, prints a table and writes build/bench.json.

`python -m bench soak` is a long, even load; `python -m bench overload` is many times what can be served.

Exit status 1 when the checker finds anything, or when a request failed.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from bench.overload import Overloading, overload
from bench.plan import SCENARIOS
from bench.report import lines_table, overload_table, soak_table, wide_console, write_json
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
    return parser


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
