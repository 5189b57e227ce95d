"""`python -m bench [RUN]`: measures, prints a table and writes build/RUN.json (build/bench.json without a RUN).

The exit status is 1 if the checker finds anything, if a request failed, or if a lane was lost. `RUN --help` lists the
options of a run.
"""

from __future__ import annotations

import argparse
import logging
import sys
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any, Final, NamedTuple, get_args

import msgspec
import structlog

from bench import checks, frozen, overload, pipeline, recovery, scenarios, takeover
from bench.figures import Record, wide_console
from bench.system import RigError, broker


class Run(NamedTuple):
    """A run: its help, its options with their defaults, and what it does on a broker."""

    help: str
    options: Any
    measure: Callable[..., Record]
    needs_broker: bool = True


RUNS: Final[dict[str, Run]] = {
    "bench": Run("the main scenarios, each with its raw limit", scenarios.Options(), scenarios.run),
    **{
        rows: Run(text, scenarios.Options(seconds=seconds, lead=lead, turns=turns), partial(scenarios.run, rows=rows))
        for rows, seconds, lead, turns, text in (
            ("client", 20.0, 1.0, 4, "the Python client beside bare REST"),
            ("beside", 24.0, 1.0, 4, "a load beside 1,000 groups, and beside 1,000,000 pending transactions"),
            ("instances", 15.0, 2.0, 1, "one, two and three instances, and what a forwarded call costs"),
            ("workers", 40.0, 1.0, 8, "one worker and two"),
        )
    },
    "overload": Run("many times the maximum, or a steady load", overload.Options(), overload.run),
    "checks": Run("check-backs to a fast endpoint", checks.Options(), checks.run),
    "recovery": Run("starts with a backlog, or a history", recovery.Options(), recovery.run),
    "takeover": Run("instances that join, stop and die under load", takeover.Options(), takeover.run),
    "frozen": Run("how long a frozen instance holds consumers back", frozen.Options(), frozen.run),
    "pipeline": Run(
        "audit and sweep over archives, on Spark and DuckDB", pipeline.Options(), pipeline.run, needs_broker=False
    ),
}


def main(arguments: list[str] | None = None) -> int:
    """Carry out the run that the command line selects, and return the exit status."""
    given, options = parsed(arguments)
    run = RUNS[given["run"]]
    path = Path(given.get("json") or f"build/{given['run']}.json")
    console = wide_console()
    say = partial(console.print, markup=False)
    try:
        with broker(say, given.get("kafka"), three="three" in given) if run.needs_broker else nullcontext() as kafka:
            record = run.measure(kafka, options, say)
    except RigError as error:
        print(f"bench: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    record.show(console)
    record.write(path)
    console.print(f"written to {path}", markup=False)
    return 0 if record.clean else 1


def parsed(arguments: list[str] | None) -> tuple[dict[str, Any], Any]:
    """Return what the command line gives, and the options of the run that it selects."""
    given = vars(_parser().parse_args(arguments))
    options = RUNS[given["run"]].options
    chosen = {name: given[name] for name in options.__struct_fields__ if name in given}
    lists = {name: tuple(value) for name, value in chosen.items() if isinstance(value, list)}
    return given, msgspec.structs.replace(options, **chosen | lists)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m bench", description=__doc__, argument_default=argparse.SUPPRESS)
    _add_options(parser, "bench")
    kinds = parser.add_subparsers(title="other runs")
    for name, run in RUNS.items():
        if name != "bench":
            _add_options(kinds.add_parser(name, help=run.help, argument_default=argparse.SUPPRESS), name)
    return parser


def _add_options(parser: argparse.ArgumentParser, name: str) -> None:
    """Add an option for each field; one of several values can be repeated."""
    options = RUNS[name].options
    parser.set_defaults(run=name)
    parser.add_argument("--json", help=f"the file for the figures (build/{name}.json)")
    parser.add_argument("--kafka", metavar="HOST:PORT", help="a running broker, for figures without its CPU")
    parser.add_argument("--three", action="store_true", help="three brokers: replication 3, min.insync.replicas 2")
    for field in msgspec.structs.fields(options):
        value = getattr(options, field.name)
        kind, meta = get_args(field.type)
        flag, text = f"--{field.name.replace('_', '-')}", f"{meta.description} ({value!r})".replace("%", "%%")
        if isinstance(value, bool):
            parser.add_argument(flag, action="store_true", help=text)
        elif isinstance(value, tuple):
            parser.add_argument(flag, type=get_args(kind)[0], action="append", help=f"{text}; repeatable")
        else:
            parser.add_argument(flag, type=kind, help=text)


if __name__ == "__main__":
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.ERROR))
    sys.exit(main())
