"""`make chaos`: ends with one JSON line; exit status 1 on any violation.

The directory with the history, the dump of the topics and all logs is kept where something is wrong.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import shutil
import sys

import uvloop

from tests.chaos.faults import BROKER_FAULTS, COORDINATOR_FAULTS
from tests.chaos.run import Wanted, new_directory, run

SHOWN = 30


def main() -> int:
    """Run once."""
    parser = argparse.ArgumentParser(prog="python -m tests.chaos", description=__doc__)
    parser.add_argument("--transactions", type=int, default=2000)
    parser.add_argument("--faults", type=int, default=0, help="the load goes on until so many took effect")
    parser.add_argument("--seed", type=int, default=None)
    parser.add_argument("--instances", type=int, default=3)
    parser.add_argument("--side-by-side", type=int, default=96, help="producers")
    parser.add_argument("--coordinator-gap", type=float, default=8, help="seconds between faults, on average")
    parser.add_argument("--broker-gap", type=float, default=25, help="the same, of brokers")
    parser.add_argument(
        "--kinds", nargs="+", default=(), choices=[*COORDINATOR_FAULTS, *BROKER_FAULTS], help="of faults"
    )
    parser.add_argument("--keep", action="store_true", help="keep the directory in any case")
    given = parser.parse_args()
    wanted = Wanted(
        seed=random.SystemRandom().randrange(10**6) if given.seed is None else given.seed,
        transactions=given.transactions,
        faults=given.faults,
        instances=given.instances,
        side_by_side=given.side_by_side,
        coordinator_gap_s=given.coordinator_gap,
        broker_gap_s=given.broker_gap,
        kinds=tuple(given.kinds),
    )
    directory = new_directory()
    _say(f"{wanted.transactions} transactions, seed {wanted.seed}; everything is in {directory}")
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        outcome = runner.run(run(wanted, directory, _say))
    for death in outcome.deaths:
        _say(f"by itself: {death}")
    for finding in outcome.verdict.findings[:SHOWN]:
        _say(f"{finding.count} {finding.rule} {finding.id}: {'; '.join(finding.evidence)}")
    if outcome.verdict.sound and not given.keep:
        shutil.rmtree(directory, ignore_errors=True)
    print(json.dumps(outcome.summary()))  # noqa: T201  the result
    return 0 if outcome.verdict.sound else 1


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)  # noqa: T201  for a person at a terminal


if __name__ == "__main__":
    sys.exit(main())
