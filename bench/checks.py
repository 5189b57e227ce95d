"""`python -m bench checks`: how many checks a second a coordinator sends to a fast endpoint, and the cost of each.

Transactions of one group are prepared and left pending. They become due faster than they can be checked, and the
endpoint answers at once. So this measures the dispatcher, and the writes of a verdict, which differ by verdict.
"""

from __future__ import annotations

import time
from typing import Annotated, Final

import msgspec
from msgspec import Meta

from bench.figures import Record, Row, Say, cpu_us
from bench.scenarios import fill, warm_up
from bench.system import Broker, Rig, endpoint, until

VERDICTS: Final = ("commit", "unknown")
_FIRST, _LAST = 0.1, 0.9
"""The measured part of the checks, as shares of all."""
_POLICY: Final = {"first_check_after_s": 10.0, "check_interval_s": 600.0, "max_interval_s": 600.0}
"""Each transaction is checked once."""


class Options(msgspec.Struct, frozen=True, kw_only=True):
    """The size of the run."""

    transactions: Annotated[int, Meta(description="transactions of each verdict")] = 60_000
    concurrency: Annotated[int, Meta(description="checks in flight")] = 48
    warm_up: Annotated[float, Meta(description="seconds")] = 30.0


def run(kafka: Broker, options: Options, say: Say) -> Record:
    """Measure each verdict with its own coordinator."""
    # By default a group has 16 in flight, and a host gets 64 times as many a second.
    settings = {
        "HALFWAY_CHECK_CONCURRENCY": str(options.concurrency),
        "HALFWAY_CHECK_ALSO_NETWORKS": "127.0.0.0/8,::1",
    }
    rows: list[Row] = []
    for verdict in VERDICTS:
        with Rig(kafka, f"checks-{verdict}", settings=settings) as rig:
            warm_up([rig], 0 if rows else options.warm_up, say)
            rows.append(_measure(rig, verdict, options, say))
    return Record(title=f"checks, {options.concurrency} in flight; CPU in µs a check", rows=rows)


def _measure(rig: Rig, verdict: str, options: Options, say: Say) -> Row:
    with endpoint(verdict, rig.directory) as (url, pid):
        rig.first.register(rig.topic, "checked", check={"urls": [url]}, policy=_POLICY)
        say(f"{verdict}: {options.transactions:,} transactions are prepared")
        fill(rig, "checked", options.transactions)
        pids = {"coordinator": (rig.first.pid,), "broker": rig.broker.pids, "endpoint": (pid,)}

        def checked(share: float) -> tuple[float, float, dict[str, float]]:
            """Wait for a share of the checks; return their number, the time, and the CPU time used so far."""
            number = until(
                lambda: rig.first.metric("halfway_checks_total"),
                lambda done: done >= share * options.transactions,
                "the checks were not done",
            )
            return number, time.monotonic(), {name: sum(map(cpu_us, of)) for name, of in pids.items() if of}

        done_before, started, before = checked(_FIRST)
        done, ended, after = checked(_LAST)
        checked(1.0)
        if verdict == "commit":
            until(lambda: rig.first.metric("halfway_pending"), lambda left: left == 0, "the commits were not done")
        return {
            "verdict": verdict,
            "checks": round(done - done_before),
            "a second": (done - done_before) / (ended - started),
            **{name: (after[name] - before[name]) / max(1.0, done - done_before) for name in after},
            "pending after": round(rig.first.metric("halfway_pending")),
        }
