"""The four scenarios, each with its raw limit."""

from __future__ import annotations

import argparse
from collections.abc import Iterable
from pathlib import Path

from rich.table import Table

from bench.plan import SCENARIOS
from bench.report import wide_console, write_json
from bench.rig import Rig
from bench.scenarios import Lengths, Line, run_scenarios


def add_to(parser: argparse.ArgumentParser) -> None:
    """Make it what is run where nothing else is asked for."""
    defaults = Lengths()
    parser.set_defaults(run=_bench)
    parser.add_argument("--json", type=Path, default=Path("build/bench.json"), help="where the figures go")
    parser.add_argument("--only", action="append", choices=[one.name for one in SCENARIOS], help="can be repeated")
    parser.add_argument("--warm-up", type=float, default=defaults.warm_up_s, help="seconds, once")
    parser.add_argument("--lead", type=float, default=defaults.lead_s, help="seconds before counting, each scenario")
    parser.add_argument("--seconds", type=float, default=defaults.run_s, help="that count, each scenario")
    parser.add_argument("--raw-seconds", type=float, default=defaults.raw_s, help="of the raw limit, each scenario")
    parser.add_argument("--kafka", metavar="HOST:PORT", help="a broker that runs already, for figures without its CPU")


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
