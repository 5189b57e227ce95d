"""Measures how many checks per second a coordinator sends to a fast endpoint, and the cost of each.

Transactions of one group are prepared and left pending. They become due faster than they can be checked, and the
endpoint answers at once. So this measures the dispatcher, and the writes of a verdict, which differ by verdict.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Final

import msgspec

from bench.figures import cpu_us
from bench.measures.scenarios import warm_up
from bench.system.prefill import fill
from bench.system.rig import Rig, RigError
from halfway.embedded.ports import HOST, pick_port
from halfway.embedded.process import SupervisedProcess

VERDICTS: Final = ("commit", "unknown")
_ROOT: Final = Path(__file__).resolve().parents[2]
_POLL_S: Final = 0.25
_PATIENCE_S: Final = 120.0
_FIRST, _LAST = 0.1, 0.9
"""The measured part of the checks, as shares of all."""
_POLICY: Final = {"first_check_after_s": 10.0, "check_interval_s": 600.0, "max_interval_s": 600.0}
"""Each transaction is checked once."""


class ChecksOptions(msgspec.Struct, frozen=True, kw_only=True):
    """The transactions to check for each verdict, and the most checks in flight."""

    transactions: int = 60_000
    concurrency: int = 48
    warm_up_s: float = 30.0

    @property
    def settings(self) -> dict[str, str]:
        """The coordinator's settings; by default a host gets 1,000 checks a second and a group has 16 in flight."""
        return {
            "HALFWAY_CHECK_CONCURRENCY": str(self.concurrency),
            "HALFWAY_CHECK_HOST_RATE": "100000",
            "HALFWAY_CHECK_QUEUE": "20000",
            "HALFWAY_CHECK_ALSO_NETWORKS": "127.0.0.0/8,::1",
        }


class ChecksLine(msgspec.Struct, frozen=True, kw_only=True):
    """The result for one verdict; CPU is in microseconds for one check."""

    verdict: str
    checks: int
    checks_per_s: float
    coordinator_cpu_us: float
    broker_cpu_us: float | None
    endpoint_cpu_us: float
    pending: int
    """Pending transactions after the last check: none after commit, all after unknown."""


def checks(
    options: ChecksOptions, *, say: Callable[[str], None], bootstrap_servers: str | None = None
) -> list[ChecksLine]:
    """Measure each verdict with its own coordinator."""
    lines = []
    with ExitStack() as stack:
        broker: Rig | None = None
        for verdict in VERDICTS:
            rig = stack.enter_context(
                Rig(
                    say=say,
                    bootstrap_servers=bootstrap_servers if broker is None else broker.bootstrap_servers,
                    name=f"checks-{verdict}",
                    settings=options.settings,
                )
            )
            if broker is None:
                broker = rig
                warm_up(rig, options.warm_up_s, say=say)
            rig.broker_pid = broker.broker_pid
            lines.append(_measure(rig, verdict, options, say))
    return lines


def _measure(rig: Rig, verdict: str, options: ChecksOptions, say: Callable[[str], None]) -> ChecksLine:
    port = pick_port()
    command = [sys.executable, "-m", "bench.load.check_endpoint", str(port), verdict]
    endpoint = SupervisedProcess(command, cwd=_ROOT, log_path=rig.directory / "endpoint.log")
    try:
        rig.register("checked", check={"urls": [f"http://{HOST}:{port}/check"]}, policy=_POLICY)
        say(f"{verdict}: {options.transactions:,} transactions are prepared")
        fill(rig, "checked", options.transactions)
        pids = {**rig.pids, "endpoint": endpoint.pid}
        before, started, done_before = _wait_for_checks(rig, pids, _FIRST * options.transactions)
        after, ended, done = _wait_for_checks(rig, pids, _LAST * options.transactions)
        _wait_for_checks(rig, pids, options.transactions)
        count = done - done_before
        used = {name: (after[name] - before[name]) / count for name in pids}
        [pending] = rig.metrics("halfway_pending")
        return ChecksLine(
            verdict=verdict,
            checks=count,
            checks_per_s=count / (ended - started),
            coordinator_cpu_us=used["coordinator"],
            broker_cpu_us=used.get("broker"),
            endpoint_cpu_us=used["endpoint"],
            pending=round(pending),
        )
    finally:
        endpoint.kill()


def _wait_for_checks(rig: Rig, pids: dict[str, int], checked: float) -> tuple[dict[str, float], float, int]:
    """Wait until `checked` checks are done; return the CPU time used so far, the time, and the number of checks."""
    deadline = time.monotonic() + _PATIENCE_S
    while True:
        [done] = rig.metrics("halfway_checks_total")
        if done >= checked:
            return {name: cpu_us(pid) for name, pid in pids.items()}, time.monotonic(), round(done)
        if time.monotonic() > deadline:
            raise RigError(f"only {done:,.0f} of {checked:,.0f} checks were done")
        time.sleep(_POLL_S)
