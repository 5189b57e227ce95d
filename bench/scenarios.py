"""One scenario: load, then the raw limit and the audit."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Final

import msgspec

from bench.audit import Audit
from bench.plan import SCENARIOS, LoadPlan, LoadResult, RawPlan, RawResult, Scenario
from bench.rig import Rig
from halfway.embedded.ports import HOST

WARM_UP: Final = [one for one in SCENARIOS if one.name in {"single-64", "batch-100"}]
SPARE_S: Final = 90.0
"""What a process may take beyond its plan: start, connections, and what is under way at its end."""


class Lengths(msgspec.Struct, frozen=True, kw_only=True):
    """How long each part takes; seconds. The warm-up is once, the others are for each scenario."""

    warm_up_s: float = 50.0
    lead_s: float = 3.0
    run_s: float = 20.0
    raw_s: float = 6.0


class Line(msgspec.Struct, frozen=True, kw_only=True):
    """What is told of a scenario; microseconds of CPU are for one transaction."""

    scenario: str
    tx_per_s: float
    p50_ms: float
    p99_ms: float
    coordinator_cpu_us: float
    broker_cpu_us: float | None
    load_cpu_us: float
    raw_tx_per_s: float
    ratio: float
    missing: int
    doubled: int
    extra: int
    failed: int
    first_failure: str
    contradicted: int
    stuck: int
    audited: int
    """Transactions that the checker judged: those of the lead and of the end, which do not count, too."""
    first_finding: str
    transactions: int
    callers: int
    ends_per_kafka_transaction: float

    @property
    def clean(self) -> bool:
        """Whether every transaction was answered, and stands exactly as it was."""
        return not (self.missing or self.doubled or self.extra or self.contradicted or self.stuck or self.failed)


class Loaded(msgspec.Struct, frozen=True, kw_only=True):
    """What a load left: its result, what the checker found, and the ends in a Kafka transaction on average."""

    result: LoadResult
    audit: Audit
    ends: float


def loaded(rig: Rig, plan: LoadPlan, *, meanwhile: Callable[[], None] | None = None) -> Loaded:
    """Run a load and judge what it left; `meanwhile` is called every second."""
    auditor = rig.auditor()
    kafka_transactions, ends = rig.lane()
    result = run_load(rig, plan, meanwhile=meanwhile)
    kafka_transactions_after, ends_after = rig.lane()
    journal = Path(plan.journal_path)
    audit = auditor.audit([journal])
    journal.unlink()
    mean = (ends_after - ends) / max(1, kafka_transactions_after - kafka_transactions)
    return Loaded(result=result, audit=audit, ends=mean)


def run_load(rig: Rig, plan: LoadPlan, *, meanwhile: Callable[[], None] | None = None) -> LoadResult:
    """Run a load and nothing else."""
    within_s = plan.lead_s + plan.window_s * plan.windows + SPARE_S
    return rig.run("bench.load", plan, LoadResult, within_s=within_s, meanwhile=meanwhile)


def load_plan(rig: Rig, scenario: Scenario, *, lead_s: float, window_s: float) -> LoadPlan:
    """Return the plan of one window of a scenario's load."""
    return LoadPlan(
        host=HOST,
        port=rig.port,
        topic=rig.topic,
        callers=scenario.callers,
        batch=scenario.batch,
        client=scenario.client,
        lead_s=lead_s,
        window_s=window_s,
        pids=rig.pids,
        journal_path=str(rig.directory / f"{scenario.name}.journal"),
    )


def run_scenarios(
    rig: Rig, scenarios: Sequence[Scenario], lengths: Lengths, *, say: Callable[[str], None]
) -> list[Line]:
    """Warm the broker's JVM, then measure each scenario."""
    for scenario in WARM_UP if lengths.warm_up_s else ():
        say(f"warm-up: {scenario.name}")
        run_load(rig, load_plan(rig, scenario, lead_s=0, window_s=lengths.warm_up_s / len(WARM_UP)))
    lines = []
    for scenario in scenarios:
        say(f"{scenario.name}: {lengths.lead_s + lengths.run_s:g} s, then its raw limit and the audit")
        lines.append(measure(rig, scenario, lengths))
    return lines


def measure(rig: Rig, scenario: Scenario, lengths: Lengths) -> Line:
    """Measure one scenario, its raw limit with groups of the same size, and audit it."""
    found = loaded(rig, load_plan(rig, scenario, lead_s=lengths.lead_s, window_s=lengths.run_s))
    raw_plan = RawPlan(
        bootstrap_servers=rig.bootstrap_servers,
        topic=f"{rig.topic}.raw",
        ends=max(1, round(found.ends)),
        ahead=scenario.callers > 1,
        lead_s=min(2.0, lengths.raw_s / 2),
        run_s=lengths.raw_s,
    )
    raw = rig.run("bench.raw", raw_plan, RawResult, within_s=raw_plan.lead_s + raw_plan.run_s + SPARE_S)
    window, audit = found.result.windows[-1], found.audit
    rate = window.transactions / window.seconds
    return Line(
        scenario=scenario.name,
        tx_per_s=round(rate, 1),
        p50_ms=round(window.p50_ms, 2),
        p99_ms=round(window.p99_ms, 2),
        coordinator_cpu_us=_each(window.cpu_us, "coordinator", window.transactions) or 0.0,
        broker_cpu_us=_each(window.cpu_us, "broker", window.transactions),
        load_cpu_us=_each(window.cpu_us, "load", window.transactions) or 0.0,
        raw_tx_per_s=round(raw.tx_per_s, 1),
        ratio=round(rate / raw.tx_per_s, 3),
        missing=audit.missing,
        doubled=audit.doubled,
        extra=audit.extra,
        contradicted=audit.contradicted,
        stuck=audit.stuck,
        failed=found.result.failed,
        first_failure=found.result.first_failure,
        audited=audit.transactions,
        first_finding=next(iter(audit.first), ""),
        transactions=window.transactions,
        callers=scenario.callers,
        ends_per_kafka_transaction=round(found.ends, 1),
    )


def _each(cpu_us: Mapping[str, float], process: str, transactions: int) -> float | None:
    used = cpu_us.get(process)
    return None if used is None else round(used / max(1, transactions), 1)
