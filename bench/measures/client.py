"""Compares the Python client with plain REST: what it adds for one caller, and what it saves for many."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from statistics import median
from typing import Final

import msgspec

from bench.measures.scenarios import WARM_UP, Lengths, load_plan, run_audited_load, run_load
from bench.plan import Scenario
from bench.system.rig import Rig

COMPARED: Final = (
    Scenario(name="rest-1", callers=1),
    Scenario(name="client-1", callers=1, client=True),
    Scenario(name="rest-64", callers=64),
    Scenario(name="client-64", callers=64, client=True),
)


class ClientLine(msgspec.Struct, frozen=True, kw_only=True):
    """The result for one way to call, as medians of its slices; CPU is in microseconds for one transaction."""

    scenario: str
    tx_per_s: float
    p50_ms: float
    p99_ms: float
    cpu_us: Mapping[str, float]
    failed: int
    first_failure: str
    found: Mapping[str, int]
    """The checker's findings: missing, doubled, extra, contradicted, stuck."""
    audited: int

    @property
    def clean(self) -> bool:
        """Whether every transaction was answered, and the topics contain exactly what was acknowledged."""
        return not (self.failed or any(self.found.values()))


class Compared(msgspec.Struct, frozen=True, kw_only=True):
    """The lines, and the comparison."""

    lines: list[ClientLine]
    client_adds_ms: float
    """Added to the p50 of one caller."""
    coordinator_cpu_ratio: float
    """For 64 callers: the coordinator's CPU for a transaction through one client, relative to plain REST."""

    @property
    def clean(self) -> bool:
        """Whether all lines are clean."""
        return all(line.clean for line in self.lines)


def compare(rig: Rig, lengths: Lengths, *, say: Callable[[str], None]) -> Compared:
    """Warm up the broker's JVM, then measure the ways in turn, because a machine's speed changes within minutes."""
    for scenario in WARM_UP if lengths.warm_up_s else ():
        say(f"warm-up: {scenario.name}")
        run_load(rig, load_plan(rig, scenario, lead_s=0, window_s=lengths.warm_up_s / len(WARM_UP)))
    measured: dict[str, list[ClientLine]] = {scenario.name: [] for scenario in COMPARED}
    for turn in range(lengths.slices):
        for scenario in COMPARED[:: -1 if turn % 2 else 1]:
            say(f"{scenario.name}: {lengths.lead_s + lengths.run_s / lengths.slices:g} s, then the audit")
            measured[scenario.name].append(_measure(rig, scenario, lengths))
    lines = {name: _merge(of_slices) for name, of_slices in measured.items()}
    cpu = {name: line.cpu_us["coordinator"] for name, line in lines.items()}
    return Compared(
        lines=list(lines.values()),
        client_adds_ms=round(lines["client-1"].p50_ms - lines["rest-1"].p50_ms, 2),
        coordinator_cpu_ratio=round(cpu["client-64"] / cpu["rest-64"], 3) if cpu["rest-64"] else 0.0,
    )


def _merge(lines: Sequence[ClientLine]) -> ClientLine:
    """Return the medians of the slices, and the sums of failures and findings."""
    first = lines[0]
    return ClientLine(
        scenario=first.scenario,
        tx_per_s=median(line.tx_per_s for line in lines),
        p50_ms=median(line.p50_ms for line in lines),
        p99_ms=median(line.p99_ms for line in lines),
        cpu_us={name: median(line.cpu_us[name] for line in lines) for name in first.cpu_us},
        failed=sum(line.failed for line in lines),
        first_failure=next((line.first_failure for line in lines if line.failed), ""),
        found={name: sum(line.found[name] for line in lines) for name in first.found},
        audited=sum(line.audited for line in lines),
    )


def _measure(rig: Rig, scenario: Scenario, lengths: Lengths) -> ClientLine:
    load = run_audited_load(
        rig, load_plan(rig, scenario, lead_s=lengths.lead_s, window_s=lengths.run_s / lengths.slices)
    )
    window, audit = load.result.windows[-1], load.audit
    return ClientLine(
        scenario=scenario.name,
        tx_per_s=round(window.transactions / window.seconds, 1),
        p50_ms=round(window.p50_ms, 2),
        p99_ms=round(window.p99_ms, 2),
        cpu_us={name: round(used / max(1, window.transactions), 1) for name, used in window.cpu_us.items()},
        failed=load.result.failed,
        first_failure=load.result.first_failure,
        found=audit.counts,
        audited=audit.transactions,
    )
