"""Measures a coordinator under many times its maximum load: its resources, answers and throughput."""

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

from bench.audit.journal import Journal
from bench.audit.load_audit import Findings
from bench.figures import Standing, cpu_us, percentile, standing
from bench.load.crowd import CrowdPlan, CrowdResult, CrowdWindow
from bench.measures.scenarios import SPARE_S, load_plan, run_load
from bench.plan import Scenario
from bench.system.rig import Rig, RigError
from halfway.embedded.ports import HOST

WINDOW_S: Final = 0.5
HEALTH_PATHS: Final = ("/health/live", "/health/ready", "/metrics")
_PROBE_S: Final = 30.0
_PAGE: Final = 500


class OverloadOptions(msgspec.Struct, frozen=True, kw_only=True):
    """The size and the length of the load."""

    times: float = 10.0
    """The load, as a multiple of the maximum, which is measured first."""
    seconds: float = 60.0
    connections: int = 2_000
    patience_s: float = 5.0
    small_share: float = 0.05
    """The load before and after, as a share of the maximum."""
    before_s: float = 5.0
    after_s: float = 15.0
    processes: int = 1
    nice: int = 10
    warm_up_s: float = 40.0
    maximum_s: float = 20.0
    callers: int = 64
    """Callers in the closed loop that measures the maximum."""


class Held(msgspec.Struct, frozen=True, kw_only=True):
    """The peak resources of the coordinator in a phase."""

    rss_mib: float
    threads: int
    fds: int


class Health(msgspec.Struct, frozen=True, kw_only=True):
    """The answers of one path of the health port during the load."""

    path: str
    asked: int
    answers: Mapping[str, int]
    p50_ms: float
    worst_ms: float


class Overload(Findings, frozen=True, kw_only=True):
    """The result of an overload; rates are in transactions per second."""

    maximum_tx_per_s: float
    rate_per_s: float
    offered: int
    without_connection: int
    requests_per_s: float
    """Prepares and ends that were answered or given up."""
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
    """From the end of the load until the median of a small load stays within twice its earlier value."""
    connections: int
    held_before: Held
    held: Held
    held_after: Held
    health: list[Health]
    cpu: Mapping[str, float]
    """Cores used during the load, by process."""
    left_over: int
    """Transactions that were pending after all callers had ended: their prepare was stored and not answered."""
    transactions: int
    first_finding: str
    windows: list[CrowdWindow]

    @property
    def clean(self) -> bool:
        """Whether the topics contain what was acknowledged, and every refusal was one that a client understands."""
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
    """Samples the processes and the health port, each on its own thread."""

    def __init__(self, rig: Rig) -> None:
        self._rig = rig
        self._stopped = threading.Event()
        self._threads = [threading.Thread(target=self._sample)]
        self._threads += [threading.Thread(target=self._probe, args=(path,)) for path in HEALTH_PATHS]
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
            cpu = {name: cpu_us(sample) for name, sample in self._rig.pids.items()}
            self.samples.append(_Sample(time.monotonic(), standing(pid), cpu))
            if self._stopped.wait(WINDOW_S):
                return

    def _probe(self, path: str) -> None:
        while not self._stopped.wait(WINDOW_S):
            started = time.monotonic()
            status = _status(self._rig.health_url + path)
            self.probes.append(_Probe(started, path, status, time.monotonic() - started))

    def held(self, since: float, until: float) -> Held:
        within = [sample.held for sample in self.samples if since <= sample.at <= until] or [self.samples[-1].held]
        return Held(
            rss_mib=round(max(sample.rss_mib for sample in within), 1),
            threads=max(sample.threads for sample in within),
            fds=max(sample.fds for sample in within),
        )

    def cpu(self, since: float, until: float) -> dict[str, float]:
        within = [sample for sample in self.samples if since <= sample.at <= until]
        first, last = within[0], within[-1]
        spent = (last.at - first.at) * 1_000_000
        return {name: round((last.cpu[name] - first.cpu[name]) / spent, 2) for name in first.cpu}

    def health(self, since: float, until: float) -> list[Health]:
        results = []
        for path in HEALTH_PATHS:
            within = [probe for probe in self.probes if probe.path == path and since <= probe.at <= until]
            ordered = sorted(probe.seconds for probe in within)
            results.append(
                Health(
                    path=path,
                    asked=len(within),
                    answers=dict(Counter(probe.status for probe in within)),
                    p50_ms=round(percentile(ordered, 0.5) * 1000, 1),
                    worst_ms=round(max(ordered, default=0.0) * 1000, 1),
                )
            )
        return results


def _status(url: str) -> str:
    try:
        with urllib.request.urlopen(url, timeout=_PROBE_S) as answer:  # noqa: S310 - our own process
            answer.read()
            return str(answer.status)
    except urllib.error.HTTPError as error:
        return str(error.code)
    except OSError as error:
        return repr(error)


def overload(rig: Rig, options: OverloadOptions) -> Overload:
    """Measure the maximum in a closed loop, overload by the clock, roll back the rest, and audit everything."""
    closed = Scenario(name="maximum", callers=options.callers)
    measured = run_load(rig, load_plan(rig, closed, lead_s=options.warm_up_s, window_s=options.maximum_s))
    if measured.failed:
        raise RigError(f"the maximum was not measured: {measured.first_failure}")
    maximum = measured.windows[-1].transactions / measured.windows[-1].seconds
    rate = maximum * options.times
    auditor = rig.auditor()
    plans = [_plan(rig, options, number, rate) for number in range(options.processes)]
    with _Watch(rig) as watch:
        results = _crowds(rig, plans, within_s=options.before_s + options.seconds + options.after_s + SPARE_S)
    left_over = _roll_back_pending(rig, rig.directory / "left.journal")
    journals = [Path(plan.journal_path) for plan in plans]
    audit = auditor.audit([*journals, rig.directory / "left.journal"])

    ended = max(window.load_ended for window in results)
    started = ended - options.seconds
    windows = [_merge(parts) for parts in zip(*(window.windows for window in results), strict=False)]
    load = [window for window in windows if window.phase == "load"]
    seconds = sum(window.seconds for window in load)
    prepares, ends = _sum(window.prepares for window in windows), _sum(window.ends for window in windows)
    requests = _sum([*(window.prepares for window in load), *(window.ends for window in load)])
    committed = sum(window.committed for window in load) / seconds
    before_ms = percentile(sorted(window.p50_ms for window in windows if window.phase == "before"), 0.5)
    return Overload(
        maximum_tx_per_s=round(maximum, 1),
        rate_per_s=round(rate, 1),
        offered=sum(window.offered for window in load),
        without_connection=sum(window.without_connection for window in load),
        requests_per_s=round(sum(requests.values()) / seconds, 1),
        prepares=prepares,
        ends=ends,
        refused_without_retry_after=sum(window.without_retry_after for window in windows),
        unlike=sum(window.unlike for window in windows),
        first_unlike=next((window.first_unlike for window in results if window.first_unlike), ""),
        committed_tx_per_s=round(committed, 1),
        share_of_maximum=round(committed / maximum, 3),
        p50_ms=round(percentile(sorted(window.p50_ms for window in load if window.committed), 0.5), 1),
        p99_ms=round(percentile(sorted(window.p99_ms for window in load if window.committed), 0.5), 1),
        p50_before_ms=round(before_ms, 2),
        recovered_after_s=_recovered(windows, 2 * before_ms),
        connections=sum(window.open_at_most for window in results),
        held_before=watch.held(0, started),
        held=watch.held(started, ended),
        held_after=watch.held(ended + options.after_s - 1, ended + options.after_s),
        health=watch.health(started, ended),
        cpu=watch.cpu(started, ended),
        left_over=left_over,
        transactions=audit.transactions,
        **audit.counts,
        first_finding=next(iter(audit.first), ""),
        windows=windows,
    )


def _plan(rig: Rig, options: OverloadOptions, number: int, rate: float) -> CrowdPlan:
    return CrowdPlan(
        host=HOST,
        port=rig.port,
        topic=rig.topic,
        name=f"crowd-{number}",
        connections=options.connections // options.processes,
        rate_per_s=rate / options.processes,
        seconds=options.seconds,
        small_rate_per_s=rate / options.times * options.small_share / options.processes,
        before_s=options.before_s,
        after_s=options.after_s,
        patience_s=options.patience_s,
        window_s=WINDOW_S,
        nice=options.nice,
        journal_path=str(rig.directory / f"crowd-{number}.journal"),
    )


def _crowds(rig: Rig, plans: Sequence[CrowdPlan], *, within_s: float) -> list[CrowdResult]:
    with ThreadPoolExecutor(len(plans)) as pool:
        running = [pool.submit(rig.run, "bench.load.crowd", plan, CrowdResult, within_s=within_s) for plan in plans]
        return [job.result() for job in running]


def _roll_back_pending(rig: Rig, journal_path: Path) -> int:
    """Roll back the pending transactions, as their producer would after a check; return their number."""
    count = 0
    with journal_path.open("wb") as file:
        journal = Journal(file)
        while ids := rig.pending(_PAGE):
            journal.rolled_back(transaction_id.encode() for transaction_id in ids)
            count += len(ids)
            rig.roll_back(ids)
    return count


def _merge(parts: Iterable[CrowdWindow]) -> CrowdWindow:
    """Merge the windows of all processes; latencies are the highest ones."""
    parts = list(parts)
    return CrowdWindow(
        phase=parts[0].phase,
        seconds=max(part.seconds for part in parts),
        offered=sum(part.offered for part in parts),
        without_connection=sum(part.without_connection for part in parts),
        prepares=_sum(part.prepares for part in parts),
        ends=_sum(part.ends for part in parts),
        without_retry_after=sum(part.without_retry_after for part in parts),
        unlike=sum(part.unlike for part in parts),
        committed=sum(part.committed for part in parts),
        p50_ms=max(part.p50_ms for part in parts),
        p99_ms=max(part.p99_ms for part in parts),
    )


def _sum(counts: Iterable[Mapping[str, int]]) -> dict[str, int]:
    total: Counter[str] = Counter()
    for part in counts:
        total.update(part)
    return dict(sorted(total.items()))


def _recovered(windows: Sequence[CrowdWindow], limit_ms: float) -> float | None:
    """Return how long after the load the windows stayed within the limit; None if the last one did not."""
    after = [window for window in windows if window.phase == "after"]
    recovered = 0
    for window in reversed(after):
        if not window.committed or window.p50_ms > limit_ms:
            break
        recovered += 1
    return None if not recovered else round(sum(window.seconds for window in after[:-recovered]), 1)
