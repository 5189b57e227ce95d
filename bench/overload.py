"""Many times the load that one coordinator can serve: what it holds, what it answers, and what it still gets done."""

from __future__ import annotations

import threading
import time
import urllib.error
import urllib.request
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Final, Self

import msgspec

from bench.audit import Findings
from bench.crowd import CrowdPlan, CrowdResult, CrowdWindow
from bench.figures import Standing, cpu_us, percentile, standing
from bench.journal import Journal
from bench.plan import Scenario
from bench.rig import Rig, RigError
from bench.scenarios import SPARE_S, load_plan, run_load
from halfway.embedded.ports import HOST

WINDOW_S: Final = 0.5
HEALTH_PATHS: Final = ("/health/live", "/health/ready", "/metrics")
_PROBE_S: Final = 30.0
_PAGE: Final = 500


class Overloading(msgspec.Struct, frozen=True, kw_only=True):
    """How much, and for how long."""

    times: float = 10.0
    """Of the maximum, which is measured first."""
    seconds: float = 60.0
    connections: int = 2_000
    patience_s: float = 5.0
    small_share: float = 0.05
    """Of the maximum, before and after the load."""
    before_s: float = 5.0
    after_s: float = 15.0
    processes: int = 1
    nice: int = 10
    warm_up_s: float = 40.0
    maximum_s: float = 20.0
    callers: int = 64
    """In the closed loop that finds the maximum."""


class Held(msgspec.Struct, frozen=True, kw_only=True):
    """The most that the coordinator held in a phase."""

    rss_mib: float
    threads: int
    fds: int


class Health(msgspec.Struct, frozen=True, kw_only=True):
    """How one path of the second port answered while the load lasted."""

    path: str
    asked: int
    answers: Mapping[str, int]
    p50_ms: float
    worst_ms: float


class Overload(Findings, frozen=True, kw_only=True):
    """What an overload showed; rates in transactions a second."""

    maximum_tx_per_s: float
    rate_per_s: float
    offered: int
    without_connection: int
    requests_per_s: float
    """Requests that were answered or given up, prepares and ends."""
    prepares: Mapping[str, int]
    ends: Mapping[str, int]
    refused_without_retry_after: int
    unlike: int
    first_unlike: str
    committed_tx_per_s: float
    share_of_maximum: float
    p50_ms: float
    p99_ms: float
    p50_before_ms: float
    recovered_after_s: float | None
    """From the end of the load until the median of a small load is, and stays, within twice of what it was before."""
    connections: int
    held_before: Held
    held: Held
    held_after: Held
    health: list[Health]
    cpu: Mapping[str, float]
    """Cores used while the load lasted, by process."""
    left_over: int
    """Transactions that were pending when all callers were gone: prepared, and their callers never heard of it."""
    transactions: int
    first_finding: str
    windows: list[CrowdWindow]

    @property
    def clean(self) -> bool:
        """Whether everything stands as it was acknowledged, and every refusal was one that a client understands."""
        return not (self.found or self.refused_without_retry_after or self.unlike or self.recovered_after_s is None)


class _Sample(msgspec.Struct, frozen=True):
    at: float
    held: Standing
    cpu: Mapping[str, float]


class _Probe(msgspec.Struct, frozen=True):
    at: float
    path: str
    status: str
    seconds: float


class _Watch:
    """Samples the processes and the second port, each on a thread of its own."""

    def __init__(self, rig: Rig) -> None:
        self._rig = rig
        self._stopped = threading.Event()
        self._threads = [threading.Thread(target=self._sample)]
        self._threads += [threading.Thread(target=self._ask, args=(path,)) for path in HEALTH_PATHS]
        self.samples: list[_Sample] = []
        self.probes: list[_Probe] = []

    def __enter__(self) -> Self:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stopped.set()
        for thread in self._threads:
            thread.join()

    def _sample(self) -> None:
        pid = self._rig.coordinator_pid
        while True:
            cpu = {name: cpu_us(one) for name, one in self._rig.pids.items()}
            self.samples.append(_Sample(time.monotonic(), standing(pid), cpu))
            if self._stopped.wait(WINDOW_S):
                return

    def _ask(self, path: str) -> None:
        while not self._stopped.wait(WINDOW_S):
            began = time.monotonic()
            status = _status(self._rig.health_url + path)
            self.probes.append(_Probe(began, path, status, time.monotonic() - began))

    def held(self, since: float, until: float) -> Held:
        within = [one.held for one in self.samples if since <= one.at <= until] or [self.samples[-1].held]
        return Held(
            rss_mib=round(max(one.rss_mib for one in within), 1),
            threads=max(one.threads for one in within),
            fds=max(one.fds for one in within),
        )

    def cpu(self, since: float, until: float) -> dict[str, float]:
        within = [one for one in self.samples if since <= one.at <= until]
        first, last = within[0], within[-1]
        spent = (last.at - first.at) * 1_000_000
        return {name: round((last.cpu[name] - first.cpu[name]) / spent, 2) for name in first.cpu}

    def health(self, since: float, until: float) -> list[Health]:
        found = []
        for path in HEALTH_PATHS:
            within = [one for one in self.probes if one.path == path and since <= one.at <= until]
            ordered = sorted(one.seconds for one in within)
            found.append(
                Health(
                    path=path,
                    asked=len(within),
                    answers=dict(Counter(one.status for one in within)),
                    p50_ms=round(percentile(ordered, 0.5) * 1000, 1),
                    worst_ms=round(max(ordered, default=0.0) * 1000, 1),
                )
            )
        return found


def _status(url: str) -> str:
    try:
        with urllib.request.urlopen(url, timeout=_PROBE_S) as answer:  # noqa: S310 - our own process
            answer.read()
            return str(answer.status)
    except urllib.error.HTTPError as error:
        return str(error.code)
    except OSError as error:
        return repr(error)


def overload(rig: Rig, wanted: Overloading) -> Overload:
    """Measure the maximum in a closed loop, overload by the clock, bring to rest what callers left, and judge all."""
    closed = Scenario(name="maximum", callers=wanted.callers)
    measured = run_load(rig, load_plan(rig, closed, lead_s=wanted.warm_up_s, window_s=wanted.maximum_s))
    if measured.failed:
        raise RigError(f"the maximum was not measured: {measured.first_failure}")
    maximum = measured.windows[-1].transactions / measured.windows[-1].seconds
    rate = maximum * wanted.times
    auditor = rig.auditor()
    plans = [_plan(rig, wanted, number, rate) for number in range(wanted.processes)]
    with _Watch(rig) as watch:
        results = _crowds(rig, plans, within_s=wanted.before_s + wanted.seconds + wanted.after_s + SPARE_S)
    left_over = _brought_to_rest(rig, rig.directory / "left.journal")
    journals = [Path(plan.journal_path) for plan in plans]
    audit = auditor.audit([*journals, rig.directory / "left.journal"])

    ended = max(one.load_ended for one in results)
    began = ended - wanted.seconds
    windows = [_together(parts) for parts in zip(*(one.windows for one in results), strict=False)]
    load = [one for one in windows if one.phase == "load"]
    seconds = sum(one.seconds for one in load)
    prepares, ends = _sum(one.prepares for one in windows), _sum(one.ends for one in windows)
    asked = _sum([*(one.prepares for one in load), *(one.ends for one in load)])
    committed = sum(one.committed for one in load) / seconds
    before_ms = percentile(sorted(one.p50_ms for one in windows if one.phase == "before"), 0.5)
    return Overload(
        maximum_tx_per_s=round(maximum, 1),
        rate_per_s=round(rate, 1),
        offered=sum(one.offered for one in load),
        without_connection=sum(one.without_connection for one in load),
        requests_per_s=round(sum(asked.values()) / seconds, 1),
        prepares=prepares,
        ends=ends,
        refused_without_retry_after=sum(one.without_retry_after for one in windows),
        unlike=sum(one.unlike for one in windows),
        first_unlike=next((one.first_unlike for one in results if one.first_unlike), ""),
        committed_tx_per_s=round(committed, 1),
        share_of_maximum=round(committed / maximum, 3),
        p50_ms=round(percentile(sorted(one.p50_ms for one in load if one.committed), 0.5), 1),
        p99_ms=round(percentile(sorted(one.p99_ms for one in load if one.committed), 0.5), 1),
        p50_before_ms=round(before_ms, 2),
        recovered_after_s=_recovered(windows, 2 * before_ms),
        connections=sum(one.open_at_most for one in results),
        held_before=watch.held(0, began),
        held=watch.held(began, ended),
        held_after=watch.held(ended + wanted.after_s - 1, ended + wanted.after_s),
        health=watch.health(began, ended),
        cpu=watch.cpu(began, ended),
        left_over=left_over,
        transactions=audit.transactions,
        **audit.counts,
        first_finding=next(iter(audit.first), ""),
        windows=windows,
    )


def _plan(rig: Rig, wanted: Overloading, number: int, rate: float) -> CrowdPlan:
    return CrowdPlan(
        host=HOST,
        port=rig.port,
        topic=rig.topic,
        name=f"crowd-{number}",
        connections=wanted.connections // wanted.processes,
        rate_per_s=rate / wanted.processes,
        seconds=wanted.seconds,
        small_rate_per_s=rate / wanted.times * wanted.small_share / wanted.processes,
        before_s=wanted.before_s,
        after_s=wanted.after_s,
        patience_s=wanted.patience_s,
        window_s=WINDOW_S,
        nice=wanted.nice,
        journal_path=str(rig.directory / f"crowd-{number}.journal"),
    )


def _crowds(rig: Rig, plans: Sequence[CrowdPlan], *, within_s: float) -> list[CrowdResult]:
    with ThreadPoolExecutor(len(plans)) as pool:
        running = [pool.submit(rig.run, "bench.crowd", plan, CrowdResult, within_s=within_s) for plan in plans]
        return [one.result() for one in running]


def _brought_to_rest(rig: Rig, journal_path: Path) -> int:
    """Roll back what is still pending, as its producer would when it is asked; return how many there were."""
    found = 0
    with journal_path.open("wb") as file:
        journal = Journal(file)
        while ids := rig.pending(_PAGE):
            journal.rolled_back(one.encode() for one in ids)
            found += len(ids)
            rig.roll_back(ids)
    return found


def _together(parts: Iterable[CrowdWindow]) -> CrowdWindow:
    """Put together what the processes saw at one time; latencies are the worst of them."""
    parts = list(parts)
    return CrowdWindow(
        phase=parts[0].phase,
        seconds=max(one.seconds for one in parts),
        offered=sum(one.offered for one in parts),
        without_connection=sum(one.without_connection for one in parts),
        prepares=_sum(one.prepares for one in parts),
        ends=_sum(one.ends for one in parts),
        without_retry_after=sum(one.without_retry_after for one in parts),
        unlike=sum(one.unlike for one in parts),
        committed=sum(one.committed for one in parts),
        p50_ms=max(one.p50_ms for one in parts),
        p99_ms=max(one.p99_ms for one in parts),
    )


def _sum(counts: Iterable[Mapping[str, int]]) -> dict[str, int]:
    found: Counter[str] = Counter()
    for one in counts:
        found.update(one)
    return dict(sorted(found.items()))


def _recovered(windows: Sequence[CrowdWindow], limit_ms: float) -> float | None:
    """Return when after the load the first of the windows began that are all served within the limit."""
    after = [one for one in windows if one.phase == "after"]
    well = 0
    for one in reversed(after):
        if not one.committed or one.p50_ms > limit_ms:
            break
        well += 1
    return None if not well else round(sum(one.seconds for one in after[:-well]), 1)
