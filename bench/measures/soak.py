"""A long, even load at a share of the maximum: resources and latencies of the coordinator must stay flat."""

from __future__ import annotations

import time
from typing import Final

import msgspec

from bench.audit.load_audit import Findings
from bench.figures import Standing, standing
from bench.measures.scenarios import load_plan, run_audited_load, run_load
from bench.plan import SCENARIOS, LoadPlan
from bench.system.rig import Rig

SCENARIO: Final = next(scenario for scenario in SCENARIOS if scenario.name == "single-64")
MAXIMUM_S: Final = 20.0
WINDOW_S: Final = 30.0
EVERY_S: Final = 5.0


class SoakOptions(msgspec.Struct, frozen=True, kw_only=True):
    """The length, and the share of the maximum, which is measured first."""

    minutes: float = 10.0
    share: float = 0.5
    warm_up_s: float = 40.0
    maximum_s: float = MAXIMUM_S
    window_s: float = WINDOW_S


class SoakLine(msgspec.Struct, frozen=True, kw_only=True):
    """One window; the coordinator's resources are the highest samples in it."""

    until_s: float
    tx_per_s: float
    p50_ms: float
    p99_ms: float
    coordinator_cpu_us: float
    rss_mib: float
    threads: int
    fds: int


class Soak(Findings, frozen=True, kw_only=True):
    """The result of a soak."""

    maximum_tx_per_s: float
    rate_per_s: float
    transactions: int
    failed: int
    first_failure: str
    first_finding: str
    lines: list[SoakLine]

    @property
    def clean(self) -> bool:
        """Whether every transaction was answered, and the topics contain exactly what was acknowledged."""
        return not (self.found or self.failed)


class _Watch:
    """Samples a process every few seconds."""

    def __init__(self, pid: int) -> None:
        self._pid = pid
        self._next = 0.0
        self.samples: list[tuple[float, Standing]] = []

    def sample(self) -> None:
        now = time.monotonic()
        if now >= self._next:
            self._next = now + EVERY_S
            self.samples.append((now, standing(self._pid)))

    def most(self, since: float, until: float) -> Standing:
        """Return the highest samples of a period, or of the whole time if it has no samples."""
        within = [sample for at, sample in self.samples if since <= at < until] or [
            sample for _, sample in self.samples
        ]
        return Standing(
            rss_mib=max(sample.rss_mib for sample in within),
            threads=max(sample.threads for sample in within),
            fds=max(sample.fds for sample in within),
        )


def soak(rig: Rig, options: SoakOptions) -> Soak:
    """Warm up, measure the maximum in a closed loop, load by the clock at a share of it, and audit everything."""
    first_plan = load_plan(rig, SCENARIO, lead_s=options.warm_up_s, window_s=options.maximum_s)
    first = run_load(rig, first_plan).windows[-1]
    maximum = first.transactions / first.seconds
    rate = maximum * options.share
    plan: LoadPlan = msgspec.structs.replace(
        load_plan(rig, SCENARIO, lead_s=0, window_s=options.window_s),
        windows=max(1, round(options.minutes * 60 / options.window_s)),
        rate_per_s=rate,
    )
    watch = _Watch(rig.coordinator_pid)
    watch.sample()
    started = time.monotonic()
    load = run_audited_load(rig, plan, meanwhile=watch.sample)
    lines, at = [], 0.0
    for window in load.result.windows:
        held = watch.most(started + at, started + at + window.seconds)
        at += window.seconds
        lines.append(
            SoakLine(
                until_s=round(at, 1),
                tx_per_s=round(window.transactions / window.seconds, 1),
                p50_ms=round(window.p50_ms, 2),
                p99_ms=round(window.p99_ms, 2),
                coordinator_cpu_us=round(window.cpu_us["coordinator"] / max(1, window.transactions), 1),
                rss_mib=round(held.rss_mib, 1),
                threads=held.threads,
                fds=held.fds,
            )
        )
    return Soak(
        maximum_tx_per_s=round(maximum, 1),
        rate_per_s=round(rate, 1),
        transactions=sum(window.transactions for window in load.result.windows),
        **load.audit.counts,
        failed=load.result.failed,
        first_failure=load.result.first_failure,
        first_finding=next(iter(load.audit.first), ""),
        lines=lines,
    )
