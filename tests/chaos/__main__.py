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
from collections.abc import Collection

import uvloop

from tests.chaos.faults import BROKER_FAULTS, COORDINATOR_FAULTS, FULL_STOP
from tests.chaos.run import Wanted, new_directory, run

SHOWN = 30
FAULTS_IN_100_000 = 44
FEWEST_FAULTS = 20
FAULTS_WITH_A_FULL_STOP = 40


def main() -> int:
    """Run once."""
    parser = argparse.ArgumentParser(prog="python -m tests.chaos", description=__doc__)
    parser.add_argument("--transactions", type=int, default=2000, help="prepares that are to be acknowledged")
    parser.add_argument(
        "--faults", type=int, help="the load goes on until so many took effect; three in four of them of coordinators"
    )
    parser.add_argument("--seed", type=int)
    parser.add_argument("--instances", type=int, default=Wanted.instances)
    parser.add_argument("--side-by-side", type=int, default=Wanted.side_by_side, help="producers")
    parser.add_argument("--a-second", type=float, default=Wanted.a_second, help="transactions begun, at most")
    parser.add_argument(
        "--coordinator-gap", type=float, default=Wanted.coordinator_gap_s, help="seconds between faults, on average"
    )
    parser.add_argument("--broker-gap", type=float, default=Wanted.broker_gap_s, help="the same, of brokers")
    parser.add_argument(
        "--kinds", nargs="+", default=(), choices=[*COORDINATOR_FAULTS, *BROKER_FAULTS], help="of faults"
    )
    parser.add_argument("--keep", action="store_true", help="keep the directory in any case")
    given = parser.parse_args()
    faults = faults_for(given.transactions) if given.faults is None else given.faults
    coordinator_faults, broker_faults, full_stops = split(faults, given.kinds)
    wanted = Wanted(
        seed=random.SystemRandom().randrange(10**6) if given.seed is None else given.seed,
        transactions=given.transactions,
        coordinator_faults=coordinator_faults,
        broker_faults=broker_faults,
        full_stops=full_stops,
        instances=given.instances,
        side_by_side=given.side_by_side,
        a_second=given.a_second,
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


def faults_for(transactions: int) -> int:
    """Give how many faults a run of this length has where nobody says."""
    return max(FEWEST_FAULTS, transactions * FAULTS_IN_100_000 // 100_000)


def split(faults: int, kinds: Collection[str] = ()) -> tuple[int, int, int]:
    """Give how many faults of coordinators and of brokers are wanted of so many, and full stops beside them."""
    wanted = kinds or [*COORDINATOR_FAULTS, *BROKER_FAULTS]
    of_brokers = any(kind in BROKER_FAULTS and kind != FULL_STOP for kind in wanted)
    of_coordinators = any(kind in COORDINATOR_FAULTS for kind in wanted)
    brokers = (faults // 4 if of_coordinators else faults) if of_brokers else 0
    stops = FULL_STOP in wanted and faults >= FAULTS_WITH_A_FULL_STOP
    return faults - brokers if of_coordinators else 0, brokers, int(stops)


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)  # noqa: T201  for a person at a terminal


if __name__ == "__main__":
    sys.exit(main())
