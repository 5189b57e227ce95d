"""One scenario: slices of load, each followed by its raw limit and the audit."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from typing import Final

import msgspec

from bench.audit.load_audit import Audit, Findings
from bench.plan import GROUP, SCENARIOS, LoadPlan, LoadResult, RawPlan, RawResult, Scenario, Window
from bench.system.rig import Rig
from halfway.embedded.ports import HOST

WARM_UP: Final = [scenario for scenario in SCENARIOS if scenario.name in {"single-64", "batch-100"}]
SPARE_S: Final = 90.0
"""Time that a process may need besides its plan: start, connections, and the transactions under way at its end."""


class Lengths(msgspec.Struct, frozen=True, kw_only=True):
    """The lengths of the parts in seconds: the warm-up once, the others for each scenario.

    The measured time of a scenario and of its raw limit is cut into slices that take turns, because a machine's speed
    changes. The figures are medians over the slices.
    """

    warm_up_s: float = 40.0
    lead_s: float = 1.0
    run_s: float = 12.0
    raw_s: float = 4.5
    slices: int = 3


class Line(Findings, frozen=True, kw_only=True):
    """The result of a scenario; CPU is in microseconds per transaction."""

    scenario: str
    tx_per_s: float
    spread: tuple[float, float]
    """The lowest and the highest `tx_per_s` of a slice."""
    p50_ms: float
    p99_ms: float
    coordinator_cpu_us: float
    broker_cpu_us: float | None
    load_cpu_us: float
    raw_tx_per_s: float
    ratio: float
    ratio_spread: tuple[float, float]
    failed: int
    first_failure: str
    audited: int
    """Transactions that the checker judged, including the unmeasured ones of the lead and the end."""
    first_finding: str
    transactions: int
    callers: int
    ends_per_kafka_transaction: float
    lanes_lost: int

    @property
    def clean(self) -> bool:
        """Whether every transaction was answered, the topics contain what was acknowledged, and no lane was lost."""
        return not (self.found or self.failed or self.lanes_lost)


class Loaded(msgspec.Struct, frozen=True, kw_only=True):
    """The result of a load, its audit, and the mean number of ends in a Kafka transaction."""

    result: LoadResult
    audit: Audit
    ends: float
    lanes_lost: int
    """How often the coordinator lost its lane."""


def run_audited_load(rig: Rig, plan: LoadPlan, *, meanwhile: Callable[[], None] | None = None) -> Loaded:
    """Run a load and audit it; `meanwhile` is called every second."""
    auditor = rig.auditor()
    kafka_transactions, ends, lost = rig.lane()
    result = run_load(rig, plan, meanwhile=meanwhile)
    kafka_transactions_after, ends_after, lost_after = rig.lane()
    journal = Path(plan.journal_path)
    audit = auditor.audit([journal])
    journal.unlink()
    mean = (ends_after - ends) / max(1, kafka_transactions_after - kafka_transactions)
    return Loaded(result=result, audit=audit, ends=mean, lanes_lost=lost_after - lost)


def run_load(rig: Rig, plan: LoadPlan, *, meanwhile: Callable[[], None] | None = None) -> LoadResult:
    """Run a load without an audit."""
    within_s = plan.lead_s + plan.window_s * plan.windows + SPARE_S
    return rig.run("bench.load.load", plan, LoadResult, within_s=within_s, meanwhile=meanwhile)


def load_plan(
    rig: Rig, scenario: Scenario, *, lead_s: float, window_s: float, groups: Sequence[str] = (GROUP,)
) -> LoadPlan:
    """Return the plan of one window of a scenario's load."""
    return LoadPlan(
        host=HOST,
        port=rig.port,
        topic=rig.topic,
        callers=scenario.callers,
        batch=scenario.batch,
        client=scenario.client,
        stream=scenario.stream,
        oneway=scenario.oneway,
        groups=tuple(groups),
        lead_s=lead_s,
        window_s=window_s,
        pids=rig.pids,
        journal_path=str(rig.directory / f"{scenario.name}.journal"),
    )


def warm_up(rig: Rig, seconds: float, *, say: Callable[[str], None]) -> None:
    """Load the broker's JVM until its speed is steady; 0 skips this."""
    for scenario in WARM_UP if seconds else ():
        say(f"warm-up: {scenario.name}")
        run_load(rig, load_plan(rig, scenario, lead_s=0, window_s=seconds / len(WARM_UP)))


def run_scenarios(
    rig: Rig, scenarios: Sequence[Scenario], lengths: Lengths, *, say: Callable[[str], None], before: Rig | None = None
) -> list[Line]:
    """Warm up the broker's JVM, then measure each scenario.

    `before` runs an earlier version, whose slices take turns with those of `rig`, without streams and the raw limit.
    """
    warm_up(rig, lengths.warm_up_s, say=say)
    lines = []
    for scenario in scenarios:
        say(
            f"{scenario.name}: {lengths.slices} slices of {lengths.run_s / lengths.slices:g} s, each with its raw limit"
        )
        earlier = None if scenario.stream else before
        slices: list[Slice] = []
        slices_before: list[Slice] = []
        for _ in range(lengths.slices):
            if earlier is not None:
                slices_before.append(slice_of(earlier, scenario, lengths, raw=False))
            slices.append(slice_of(rig, scenario, lengths))
        if slices_before:
            lines.append(line_of(f"{scenario.name}, before", scenario, slices_before))
        lines.append(line_of(scenario.name, scenario, slices))
    return lines


class Slice(msgspec.Struct, frozen=True, kw_only=True):
    """One slice of a scenario and of its raw limit."""

    load: Loaded
    raw: RawResult | None

    @property
    def window(self) -> Window:
        return self.load.result.windows[-1]

    @property
    def rate(self) -> float:
        return self.window.transactions / self.window.seconds

    @property
    def raw_rate(self) -> float:
        return 0.0 if self.raw is None else self.raw.tx_per_s

    @property
    def ratio(self) -> float:
        return self.rate / self.raw_rate if self.raw_rate else 0.0

    def cpu_us(self, process: str) -> float | None:
        """Return the CPU time of a process per transaction."""
        used = self.window.cpu_us.get(process)
        return None if used is None else used / max(1, self.window.transactions)


def line_of(name: str, scenario: Scenario, slices: Sequence[Slice]) -> Line:
    """Summarise slices."""
    audits = [part.load.audit for part in slices]
    failures = [part.load.result.first_failure for part in slices]
    rates, ratios = [part.rate for part in slices], [part.ratio for part in slices]
    return Line(
        scenario=name,
        tx_per_s=round(median(rates), 1),
        spread=(round(min(rates), 1), round(max(rates), 1)),
        p50_ms=round(median([part.window.p50_ms for part in slices]), 2),
        p99_ms=round(median([part.window.p99_ms for part in slices]), 2),
        coordinator_cpu_us=_median_cpu(slices, "coordinator") or 0.0,
        broker_cpu_us=_median_cpu(slices, "broker"),
        load_cpu_us=_median_cpu(slices, "load") or 0.0,
        raw_tx_per_s=round(median([part.raw_rate for part in slices]), 1),
        ratio=round(median(ratios), 3),
        ratio_spread=(round(min(ratios), 3), round(max(ratios), 3)),
        **{kind: sum(audit.counts[kind] for audit in audits) for kind in Findings.__struct_fields__},
        failed=sum(part.load.result.failed for part in slices),
        first_failure=next(filter(None, failures), ""),
        audited=sum(audit.transactions for audit in audits),
        first_finding=next((first for audit in audits for first in audit.first), ""),
        transactions=sum(part.window.transactions for part in slices),
        callers=scenario.callers,
        ends_per_kafka_transaction=round(median([part.load.ends for part in slices]), 1),
        lanes_lost=sum(part.load.lanes_lost for part in slices),
    )


def slice_of(
    rig: Rig, scenario: Scenario, lengths: Lengths, *, raw: bool = True, groups: Sequence[str] = (GROUP,)
) -> Slice:
    """Measure and audit a scenario, then its raw limit with Kafka transactions of the same size."""
    window_s, raw_s = lengths.run_s / lengths.slices, lengths.raw_s / lengths.slices
    load = run_audited_load(rig, load_plan(rig, scenario, lead_s=lengths.lead_s, window_s=window_s, groups=groups))
    if not raw or not raw_s:
        return Slice(load=load, raw=None)
    plan = RawPlan(
        bootstrap_servers=rig.bootstrap_servers,
        topic=f"{rig.topic}.raw",
        ends=max(1, round(load.ends)),
        ahead=scenario.callers > 1,
        lead_s=min(0.5, raw_s / 2),
        run_s=raw_s,
    )
    return Slice(load=load, raw=run_raw(rig, plan))


def run_raw(rig: Rig, plan: RawPlan) -> RawResult:
    """Measure the raw limit."""
    return rig.run("bench.load.raw", plan, RawResult, within_s=plan.lead_s + plan.run_s + SPARE_S)


def _median_cpu(slices: Sequence[Slice], process: str) -> float | None:
    used = [cpu for part in slices if (cpu := part.cpu_us(process)) is not None]
    return round(median(used), 1) if used else None
