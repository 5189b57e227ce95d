"""The scenarios, each with its raw limit."""

from __future__ import annotations

import argparse
import platform
import sysconfig
from collections.abc import Iterable
from contextlib import ExitStack
from pathlib import Path

from rich.table import Table

from bench.audit.load_audit import Findings
from bench.measures.scenarios import Lengths, Line, run_scenarios
from bench.plan import SCENARIOS
from bench.report import wide_console, write_json
from bench.system.rig import Rig


def add_to(parser: argparse.ArgumentParser) -> None:
    """Make this the default run."""
    defaults = Lengths()
    parser.set_defaults(run=_bench)
    parser.add_argument("--json", type=Path, default=Path("build/bench.json"), help="the file for the figures")
    parser.add_argument(
        "--only",
        action="append",
        choices=[scenario.name for scenario in SCENARIOS],
        help="a scenario to run; repeatable",
    )
    parser.add_argument("--warm-up", type=float, default=defaults.warm_up_s, help="seconds, once")
    parser.add_argument("--lead", type=float, default=defaults.lead_s, help="seconds before counting, each scenario")
    parser.add_argument("--seconds", type=float, default=defaults.run_s, help="measured seconds of each scenario")
    parser.add_argument("--raw-seconds", type=float, default=defaults.raw_s, help="of the raw limit of each scenario")
    parser.add_argument("--slices", type=int, default=defaults.slices, help="slices of those seconds")
    parser.add_argument(
        "--before", type=Path, metavar="PYTHON", help="the interpreter of an earlier version, which takes turns"
    )
    parser.add_argument("--kafka", metavar="HOST:PORT", help="a running broker, for figures without its CPU")


def _bench(arguments: argparse.Namespace) -> int:
    console = wide_console()
    lengths = Lengths(
        warm_up_s=arguments.warm_up,
        lead_s=arguments.lead,
        run_s=arguments.seconds,
        raw_s=arguments.raw_seconds,
        slices=arguments.slices,
    )
    chosen = tuple(scenario for scenario in SCENARIOS if arguments.only is None or scenario.name in arguments.only)
    with ExitStack() as stack:
        rig = stack.enter_context(Rig(say=console.print, bootstrap_servers=arguments.kafka))
        before = None
        if arguments.before is not None:
            before = stack.enter_context(
                Rig(
                    say=console.print,
                    bootstrap_servers=rig.bootstrap_servers,
                    name="bench-before",
                    python=arguments.before.absolute(),
                )
            )
            before.broker_pid = rig.broker_pid
        console.print(python_build())
        lines = run_scenarios(rig, chosen, lengths, say=console.print, before=before)
    console.print(lines_table(lines))
    for line in lines:
        if line.lanes_lost:
            console.print(f"{line.scenario}: the coordinator lost its lane {line.lanes_lost} times; see its log")
        if line.first_finding:
            console.print(f"{line.scenario}: the checker's first finding: {line.first_finding}", markup=False)
        if line.failed:
            console.print(f"{line.scenario}: the first that failed: {line.first_failure}", markup=False)
    write_json(arguments.json, lines, console.print)
    return 0 if all(line.clean for line in lines) else 1


def lines_table(lines: Iterable[Line]) -> Table:
    """Return the scenarios as a table."""
    table = Table(title="prepare to commit confirmed; CPU in microseconds a transaction")
    table.add_column("scenario")
    for name in (
        *("tx/s", "from", "to", "p50 ms", "p99 ms", "coordinator", "broker", "load"),
        *("raw tx/s", "ratio", "from", "to", "ends/Kafka tx"),
        *(*Findings.__struct_fields__, "failed"),
    ):
        table.add_column(name, justify="right")
    for line in lines:
        table.add_row(
            line.scenario,
            *(f"{line.tx_per_s:,.0f}", *(f"{rate:,.0f}" for rate in line.spread)),
            *(f"{line.p50_ms:.1f}", f"{line.p99_ms:.1f}", f"{line.coordinator_cpu_us:.0f}"),
            *("" if line.broker_cpu_us is None else f"{line.broker_cpu_us:.0f}", f"{line.load_cpu_us:.0f}"),
            *_limit(line),
            f"{line.ends_per_kafka_transaction:.1f}",
            *map(str, (*line.counts.values(), line.failed)),
        )
    return table


def _limit(line: Line) -> tuple[str, ...]:
    if not line.raw_tx_per_s:
        return ("", "", "", "")
    return (f"{line.raw_tx_per_s:,.0f}", f"{line.ratio:.2f}", *(f"{ratio:.2f}" for ratio in line.ratio_spread))


def python_build() -> str:
    """Return which Python runs everything: a build without profile-guided optimisation is slower."""
    arguments = str(sysconfig.get_config_var("CONFIG_ARGS") or "")
    profiled = "with" if "--enable-optimizations" in arguments else "without"
    return (
        f"{platform.python_implementation()} {platform.python_version()}, built {profiled} profile-guided optimisation"
    )
