"""How many checks a second a coordinator sends to a fast endpoint, and what each costs it.

Transactions of one group are prepared and left alone. They come due faster than they can be checked, and the endpoint
answers at once, so the dispatcher is what is measured: with what a verdict writes, which differs by verdict.
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
from bench.filling import fill
from bench.rig import Rig, RigError
from bench.scenarios import warm_up
from halfway.embedded.ports import HOST, pick_port
from halfway.embedded.process import SupervisedProcess

VERDICTS: Final = ("commit", "unknown")
_ROOT: Final = Path(__file__).resolve().parents[1]
_LOOK_S: Final = 0.25
_PATIENCE_S: Final = 120.0
_FIRST, _LAST = 0.1, 0.9
"""Of all checks, the shares between which they count."""
_POLICY: Final = {"first_check_after_s": 10.0, "check_interval_s": 600.0, "max_interval_s": 600.0}
"""Each is checked once."""


class Checking(msgspec.Struct, frozen=True, kw_only=True):
    """How many transactions are checked for each verdict, and how many checks may be in flight."""

    transactions: int = 60_000
    concurrency: int = 48
    warm_up_s: float = 30.0

    @property
    def settings(self) -> dict[str, str]:
        """The coordinator's: by default a host gets 1,000 checks a second, and a group has 16 in flight."""
        return {
            "HALFWAY_CHECK_CONCURRENCY": str(self.concurrency),
            "HALFWAY_CHECK_HOST_RATE": "100000",
            "HALFWAY_CHECK_QUEUE": "20000",
            "HALFWAY_CHECK_ALSO_NETWORKS": "127.0.0.0/8,::1",
        }


class ChecksLine(msgspec.Struct, frozen=True, kw_only=True):
    """What one verdict showed; microseconds of CPU are for one check."""

    verdict: str
    checks: int
    checks_per_s: float
    coordinator_cpu_us: float
    broker_cpu_us: float | None
    endpoint_cpu_us: float
    pending: int
    """How many are pending after the last check: none after a commit, all after unknown."""


def checks(wanted: Checking, *, say: Callable[[str], None], bootstrap_servers: str | None = None) -> list[ChecksLine]:
    """Measure each verdict, with a coordinator of its own."""
    lines = []
    with ExitStack() as stack:
        broker: Rig | None = None
        for verdict in VERDICTS:
            rig = stack.enter_context(
                Rig(
                    say=say,
                    bootstrap_servers=bootstrap_servers if broker is None else broker.bootstrap_servers,
                    name=f"checks-{verdict}",
                    settings=wanted.settings,
                )
            )
            if broker is None:
                broker = rig
                warm_up(rig, wanted.warm_up_s, say=say)
            rig.broker_pid = broker.broker_pid
            lines.append(_measured(rig, verdict, wanted, say))
    return lines


def _measured(rig: Rig, verdict: str, wanted: Checking, say: Callable[[str], None]) -> ChecksLine:
    port = pick_port()
    command = [sys.executable, "-m", "bench.verdicts", str(port), verdict]
    endpoint = SupervisedProcess(command, cwd=_ROOT, log_path=rig.directory / "endpoint.log")
    try:
        rig.register("checked", check={"urls": [f"http://{HOST}:{port}/check"]}, policy=_POLICY)
        say(f"{verdict}: {wanted.transactions:,} transactions are prepared")
        fill(rig, "checked", wanted.transactions)
        pids = {**rig.pids, "endpoint": endpoint.pid}
        before, began, begun = _when(rig, pids, _FIRST * wanted.transactions)
        after, ended, done = _when(rig, pids, _LAST * wanted.transactions)
        _when(rig, pids, wanted.transactions)
        count = done - begun
        used = {name: (after[name] - before[name]) / count for name in pids}
        [pending] = rig.metrics("halfway_pending")
        return ChecksLine(
            verdict=verdict,
            checks=count,
            checks_per_s=count / (ended - began),
            coordinator_cpu_us=used["coordinator"],
            broker_cpu_us=used.get("broker"),
            endpoint_cpu_us=used["endpoint"],
            pending=round(pending),
        )
    finally:
        endpoint.kill()


def _when(rig: Rig, pids: dict[str, int], checked: float) -> tuple[dict[str, float], float, int]:
    """Wait until so many checks are done; return the CPU time used until then, the time, and how many are done."""
    deadline = time.monotonic() + _PATIENCE_S
    while True:
        [done] = rig.metrics("halfway_checks_total")
        if done >= checked:
            return {name: cpu_us(pid) for name, pid in pids.items()}, time.monotonic(), round(done)
        if time.monotonic() > deadline:
            raise RigError(f"only {done:,.0f} of {checked:,.0f} checks were done")
        time.sleep(_LOOK_S)
