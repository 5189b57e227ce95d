"""`python -m bench overload`: many times the maximum load, or, with `--times` below 1, a steady load for a long time.

The maximum is measured in a closed loop. Then transactions begin by the clock, whether or not earlier ones are served:
a small load, the large one, and the small one again, to measure when it is served as before. Afterwards what callers
left is rolled back, and the checker judges everything.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from http import HTTPStatus
from pathlib import Path
from statistics import median
from typing import Annotated, Final

import msgspec
from msgspec import Meta

from bench.audit import Journal
from bench.figures import Record, Row, Say, percentile
from bench.load.wire import payloads
from bench.plan import GROUP, Phase, Window
from bench.scenarios import ALL, load, plan_of
from bench.system import Broker, Rig, RigError, repeating

WINDOW_S: Final = 0.5
HEALTH_PATHS: Final = ("/health/live", "/health/ready", "/metrics")
_PAGE: Final = 500
_SMALL: Final = 0.05
"""The load before and after, as a share of the maximum."""


class Options(msgspec.Struct, frozen=True, kw_only=True):
    """The size and the length of the load."""

    times: Annotated[float, Meta(description="the load as a multiple of the maximum, which is measured first")] = 10.0
    seconds: Annotated[float, Meta(description="seconds of load")] = 60.0
    connections: Annotated[int, Meta(description="connections, with one request at a time on each")] = 2_000
    patience: Annotated[float, Meta(description="seconds that a caller waits for an answer")] = 5.0
    small: Annotated[float, Meta(description="seconds of a small load before and after")] = 15.0
    nice: Annotated[int, Meta(description="the priority of the load: in production it has machines of its own")] = 10
    warm_up: Annotated[float, Meta(description="seconds")] = 40.0
    maximum: Annotated[float, Meta(description="seconds in which the maximum is measured")] = 20.0
    callers: Annotated[int, Meta(description="callers that measure the maximum")] = 64
    settings: Annotated[tuple[str, ...], Meta(description="NAME=VALUE, settings of the coordinator")] = ()


def run(kafka: Broker, options: Options, say: Say) -> Record:
    """Start a coordinator, and overload it."""
    with Rig(kafka, "overload", settings=dict(part.split("=", 1) for part in options.settings)) as rig:
        return overload(rig, options, say)


def overload(rig: Rig, options: Options, say: Say) -> Record:
    """Measure the maximum in a closed loop, overload by the clock, roll back the rest, and audit everything."""
    closed = msgspec.structs.replace(ALL["single-64"], callers=options.callers)
    say("the maximum is measured")
    phases = Phase(name="lead", seconds=options.warm_up), Phase(name="run", seconds=options.maximum)
    measured = load(rig, plan_of(rig, closed, *phases))
    if measured.failed:
        raise RigError(f"the maximum was not measured: {measured.first_failure}")
    [window] = measured.of("run")
    maximum = window.transactions / window.seconds
    crowd = msgspec.structs.replace(ALL["single-64"], callers=options.connections)
    plan = plan_of(
        rig,
        crowd,
        _phase("before", options.small, maximum * _SMALL),
        _phase("load", options.seconds, maximum * options.times),
        _phase("after", options.small, maximum * _SMALL),
    )
    plan = msgspec.structs.replace(plan, patience_s=options.patience, nice=options.nice)
    auditor, left = rig.auditor(), rig.directory / "left.journal"
    say(f"{options.seconds:g} s of {maximum * options.times:,.0f} tx/s")
    with ExitStack() as stack:
        probes = {path: stack.enter_context(repeating(rig.first.probe(path), WINDOW_S)) for path in HEALTH_PATHS}
        result = load(rig, plan)
        health = {path: probe() for path, probe in probes.items()}
    left_over = _roll_back_pending(rig, left)
    audit = auditor.audit([Path(plan.journal_path), left], payloads())
    windows = result.of("load")
    before_ms = percentile(sorted(window.p50_ms for window in result.of("before")), 0.5)
    recovered = _recovered(result.of("after"), 2 * before_ms)
    seconds = sum(window.seconds for window in windows)
    committed = sum(window.transactions for window in windows) / seconds
    row: Row = {
        "maximum tx/s": maximum,
        "offered tx/s": maximum * options.times,
        "committed tx/s": committed,
        "of the maximum": committed / maximum,
        "p50 ms": median([window.p50_ms for window in windows if window.transactions] or [0.0]),
        "p99 ms": median([window.p99_ms for window in windows if window.transactions] or [0.0]),
        "offered": sum(window.offered for window in windows),
        "found no connection": sum(window.without_caller for window in windows),
        "requests/s": sum(_sum([*(w.prepares for w in windows), *(w.ends for w in windows)]).values()) / seconds,
        "prepares": _sum(window.prepares for window in result.windows),
        "ends": _sum(window.ends for window in result.windows),
        "refusals without Retry-After": result.without_retry_after,
        "other answers, lost connections": result.failed,
        "connections": result.connections,
        **_held("before", result.of("before")),
        **_held("in the load", windows),
        **_held("after", result.of("after")[-2:]),
        **{f"cores of {name}": sum(one.cpu_us[name] for one in windows) / seconds / 1e6 for name in windows[0].cpu_us},
        **{name: value for path, calls in health.items() for name, value in calls.row(path).items()},
        "small load before, p50 ms": before_ms,
        "recovered after s": recovered,
        "left over and rolled back": left_over,
        "audited": audit.transactions,
        **audit.found,
    }
    unhealthy = sum(calls.failed for calls in health.values())
    unclean = unhealthy or result.failed or result.without_retry_after or recovered is None
    return Record(
        title="transactions that begin by the clock, whatever happens to the ones before",
        rows=[row],
        notes=[note for note in (result.first_failure, *audit.first[:1]) if note] + _minutes(windows),
        clean=audit.clean and not unclean,
    )


def _phase(name: str, seconds: float, rate: float) -> Phase:
    return Phase(name=name, seconds=seconds, windows=max(1, round(seconds / WINDOW_S)), rate_per_s=rate)


def _roll_back_pending(rig: Rig, journal_path: Path) -> int:
    """Roll back the pending transactions, as their producer would after a check; return their number."""
    number, path = 0, f"/v1/transactions?state=prepared&group={GROUP}&limit={_PAGE}"
    with journal_path.open("wb") as file:
        while ids := msgspec.json.decode(rig.first.ask("GET", path)[1])["transactions"]:
            Journal(file).rolled_back(one["id"].encode() for one in ids)
            body = {"end": [{"id": one["id"], "outcome": "rollback"} for one in ids]}
            answer = msgspec.json.decode(rig.first.ask("POST", "/v1/batch", body)[1])
            if any(item["status"] != HTTPStatus.OK for item in answer["end"]):
                raise RigError(f"rollbacks failed: {answer}")
            number += len(ids)
    return number


def _held(when: str, windows: Sequence[Window]) -> dict[str, float]:
    """Return the peak resources of the coordinator in some windows."""
    held = [window.held for window in windows if window.held is not None]
    return {
        f"RSS MiB {when}": max(one.rss_mib for one in held),
        f"threads {when}": max(one.threads for one in held),
        f"descriptors {when}": max(one.fds for one in held),
    }


def _minutes(windows: Sequence[Window]) -> list[str]:
    """Return a line for each minute of a long load: a steady one must stay flat."""
    each = round(60 / WINDOW_S)
    lines = []
    for number in range(0, len(windows) - each, each):
        part = windows[number : number + each]
        held = _held("at most", part)
        rate = sum(window.transactions for window in part) / sum(window.seconds for window in part)
        shown = ", ".join(f"{name} {value:,.0f}" for name, value in held.items())
        lines.append(f"minute {number // each + 1}: {rate:,.0f} tx/s, {shown}")
    return lines


def _sum(counts: Iterable[Mapping[str, int]]) -> dict[str, int]:
    return dict(sorted(sum(map(Counter, counts), Counter[str]()).items()))


def _recovered(after: Sequence[Window], limit_ms: float) -> float | None:
    """Return how long after the load the windows stayed within the limit; None if the last one did not."""
    recovered = 0
    for window in reversed(after):
        if not window.transactions or window.p50_ms > limit_ms:
            break
        recovered += 1
    return None if not recovered else sum(window.seconds for window in after[:-recovered])
