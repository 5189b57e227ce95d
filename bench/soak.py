"""A long, even load at a share of the maximum: what the coordinator holds and how long callers wait must stay flat."""

from __future__ import annotations

import time
from typing import Final

import msgspec

from bench.audit import Findings
from bench.figures import Standing, standing
from bench.plan import SCENARIOS, LoadPlan
from bench.rig import Rig
from bench.scenarios import load_plan, loaded, run_load

SCENARIO: Final = next(one for one in SCENARIOS if one.name == "single-64")
MAXIMUM_S: Final = 20.0
WINDOW_S: Final = 30.0
EVERY_S: Final = 5.0


class Lasting(msgspec.Struct, frozen=True, kw_only=True):
    """How long, and at which share of the maximum that is measured first."""

    minutes: float = 10.0
    share: float = 0.5
    warm_up_s: float = 40.0
    maximum_s: float = MAXIMUM_S
    window_s: float = WINDOW_S


class SoakLine(msgspec.Struct, frozen=True, kw_only=True):
    """One window; what the coordinator held is the most that was seen in it."""

    until_s: float
    tx_per_s: float
    p50_ms: float
    p99_ms: float
    coordinator_cpu_us: float
    rss_mib: float
    threads: int
    fds: int


class Soak(Findings, frozen=True, kw_only=True):
    """What a soak showed."""

    maximum_tx_per_s: float
    rate_per_s: float
    transactions: int
    failed: int
    first_failure: str
    first_finding: str
    lines: list[SoakLine]

    @property
    def clean(self) -> bool:
        """Whether every transaction was answered, and stands exactly as it was."""
        return not (self.found or self.failed)


class _Watch:
    """Samples of a process, every few seconds."""

    def __init__(self, pid: int) -> None:
        self._pid = pid
        self._next = 0.0
        self.samples: list[tuple[float, Standing]] = []

    def look(self) -> None:
        now = time.monotonic()
        if now >= self._next:
            self._next = now + EVERY_S
            self.samples.append((now, standing(self._pid)))

    def most(self, since: float, until: float) -> Standing:
        """Return the most of each in a span of time, of all the time where nothing was sampled in it."""
        within = [one for at, one in self.samples if since <= at < until] or [one for _, one in self.samples]
        return Standing(
            rss_mib=max(one.rss_mib for one in within),
            threads=max(one.threads for one in within),
            fds=max(one.fds for one in within),
        )


def soak(rig: Rig, lasting: Lasting) -> Soak:
    """Warm up, measure the maximum in a closed loop, then load by the clock at a share of it, and audit all of it."""
    first_plan = load_plan(rig, SCENARIO, lead_s=lasting.warm_up_s, window_s=lasting.maximum_s)
    first = run_load(rig, first_plan).windows[-1]
    maximum = first.transactions / first.seconds
    rate = maximum * lasting.share
    plan: LoadPlan = msgspec.structs.replace(
        load_plan(rig, SCENARIO, lead_s=0, window_s=lasting.window_s),
        windows=max(1, round(lasting.minutes * 60 / lasting.window_s)),
        rate_per_s=rate,
    )
    watch = _Watch(rig.coordinator_pid)
    watch.look()
    began = time.monotonic()
    found = loaded(rig, plan, meanwhile=watch.look)
    lines, at = [], 0.0
    for window in found.result.windows:
        held = watch.most(began + at, began + at + window.seconds)
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
        transactions=sum(window.transactions for window in found.result.windows),
        **found.audit.counts,
        failed=found.result.failed,
        first_failure=found.result.first_failure,
        first_finding=next(iter(found.audit.first), ""),
        lines=lines,
    )
