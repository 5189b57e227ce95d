"""The Python client compared with plain REST."""

from __future__ import annotations

import argparse
from pathlib import Path

from rich.table import Table

from bench.measures.client import Compared, compare
from bench.measures.scenarios import Lengths
from bench.report import counts, wide_console, write_json
from bench.runs.kinds import Kinds
from bench.system.rig import Rig


def add(kinds: Kinds) -> None:
    """Add its command."""
    defaults = Lengths()
    beside = kinds.add_parser("client", help="the Python client compared with plain REST; writes build/client.json")
    beside.set_defaults(run=_client)
    beside.add_argument("--json", type=Path, default=Path("build/client.json"), help="the file for the figures")
    beside.add_argument("--warm-up", type=float, default=defaults.warm_up_s, help="seconds, once")
    beside.add_argument("--lead", type=float, default=defaults.lead_s, help="seconds before counting, each slice")
    beside.add_argument("--slices", type=int, default=4, help="slices of each way, in turn")
    beside.add_argument("--seconds", type=float, default=20.0, help="measured seconds over all slices of a way")
    beside.add_argument("--kafka", metavar="HOST:PORT", help="a running broker, for figures without its CPU")


def _client(arguments: argparse.Namespace) -> int:
    console = wide_console()
    lengths = Lengths(
        warm_up_s=arguments.warm_up, lead_s=arguments.lead, run_s=arguments.seconds, slices=arguments.slices
    )
    with Rig(say=console.print, bootstrap_servers=arguments.kafka) as rig:
        compared = compare(rig, lengths, say=console.print)
    console.print(client_table(compared))
    for line in compared.lines:
        if line.failed:
            console.print(f"{line.scenario}: the first that failed: {line.first_failure}", markup=False)
    console.print(f"one caller waits {compared.client_adds_ms:+.2f} ms longer (p50) through the client")
    console.print(
        f"64 callers through one client need {compared.coordinator_cpu_ratio:.0%} of the coordinator's CPU for each"
    )
    write_json(arguments.json, compared, console.print)
    return 0 if compared.clean else 1


def client_table(compared: Compared) -> Table:
    """Return the ways as a table."""
    table = Table(title="prepare to commit confirmed; CPU in microseconds a transaction")
    table.add_column("callers")
    for name in ("tx/s", "p50 ms", "p99 ms", "coordinator", "broker", "load", "failed", "the checker found"):
        table.add_column(name, justify="right")
    for line in compared.lines:
        cpu = (f"{line.cpu_us[name]:.0f}" if name in line.cpu_us else "" for name in ("coordinator", "broker", "load"))
        table.add_row(
            *(line.scenario, f"{line.tx_per_s:,.0f}", f"{line.p50_ms:.1f}", f"{line.p99_ms:.1f}", *cpu),
            *(str(line.failed), counts({name: count for name, count in line.found.items() if count})),
        )
    return table
