"""`make chaos`: ends with one JSON line; the exit status is 1 on any violation.

If anything is wrong, the directory with the history, the dump of the topics and all logs is kept.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import sys
import tempfile
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

import uvloop

from tests.chaos.coordinator_faults import AWAY
from tests.chaos.ending import SHOWN, end, say
from tests.chaos.faults import BROKER_FAULTS, COORDINATOR_FAULTS, FULL_STOP, KINDS, TOPIC_FAULTS
from tests.chaos.run import RunOptions, run

FAULTS_IN_100_000 = 60
FEWEST_FAULTS = 20
FAULTS_WITH_A_FULL_STOP = 40
LONG = 10_000
"""From this many transactions on a run has faults that last for minutes."""
SHORT_HORIZON_S = 150.0
"""Long enough for requests in flight to arrive within it, and short enough to use ids again."""
LONG_HORIZON_S = 8 * 3600.0
"""Long enough for clocks that are set hours ahead: they take no outcome for one that may be forgotten."""


def main() -> int:
    """Run once."""
    parser = argparse.ArgumentParser(prog="python -m tests.chaos", description=__doc__)
    parser.add_argument("--transactions", type=int, default=2000, help="prepares that are to be acknowledged")
    parser.add_argument(
        "--faults", type=int, help="the load goes on until so many took effect; half of them of coordinators"
    )
    parser.add_argument("--seed", type=int)
    parser.add_argument("--instances", type=int, default=RunOptions.instances)
    parser.add_argument("--side-by-side", type=int, default=RunOptions.side_by_side, help="producers")
    parser.add_argument("--a-second", type=float, default=RunOptions.a_second, help="transactions begun, at most")
    parser.add_argument(
        "--coordinator-gap", type=float, default=RunOptions.coordinator_gap_s, help="seconds between faults, on average"
    )
    parser.add_argument("--broker-gap", type=float, default=RunOptions.broker_gap_s, help="the same, of brokers")
    parser.add_argument(
        "--topic-gap", type=float, default=RunOptions.topic_gap_s, help="the same, of what is done to topics"
    )
    parser.add_argument("--kinds", nargs="+", default=(), choices=KINDS, help="of faults")
    parser.add_argument(
        "--horizon",
        type=float,
        help="seconds; below 900 ended ids are prepared again past it, and clocks are set ahead by less than half of it"
        " (default: 150 for odd seeds and coordinator_away, 8 hours for seeds divisible by 4, else 900)",
    )
    parser.add_argument("--long-faults", action="store_true", help="some last for minutes, as in long runs")
    parser.add_argument("--keep", action="store_true", help="keep the directory in any case")
    arguments = parser.parse_args()
    faults = faults_for(arguments.transactions) if arguments.faults is None else arguments.faults
    shares = split(faults, arguments.kinds)
    seed = random.SystemRandom().randrange(10**6) if arguments.seed is None else arguments.seed
    options = RunOptions(
        seed=seed,
        transactions=arguments.transactions,
        coordinator_faults=shares.coordinators,
        broker_faults=shares.brokers,
        topic_faults=shares.topics,
        full_stops=shares.full_stops,
        instances=arguments.instances,
        side_by_side=arguments.side_by_side,
        a_second=arguments.a_second,
        coordinator_gap_s=arguments.coordinator_gap,
        broker_gap_s=arguments.broker_gap,
        topic_gap_s=arguments.topic_gap,
        horizon_s=arguments.horizon or horizon_for(seed, arguments.kinds),
        long_faults=arguments.long_faults or arguments.transactions >= LONG,
        kinds=tuple(arguments.kinds),
    )
    directory = Path(tempfile.mkdtemp(prefix="halfway-chaos-"))
    say(f"{options.transactions} transactions, seed {options.seed}; everything is in {directory}")
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        outcome = runner.run(run(options, directory, say))
    for death in outcome.deaths:
        say(f"by itself: {death}")
    more = [f"not noticed: {what}" for what in outcome.admitted[:SHOWN]]
    more += [f"the audit differs: {difference}" for difference in outcome.audit.differences[:SHOWN]]
    return end(outcome, directory, keep=arguments.keep, more=more)


def horizon_for(seed: int, kinds: Collection[str] = ()) -> float:
    """Return the default outcome horizon of a seed; the short one if a kind was asked for that lasts longer than it."""
    if seed % 2 or AWAY in kinds:
        return SHORT_HORIZON_S
    return RunOptions.horizon_s if seed % 4 else LONG_HORIZON_S


def faults_for(transactions: int) -> int:
    """Return the default number of faults for a run of this length."""
    return max(FEWEST_FAULTS, transactions * FAULTS_IN_100_000 // 100_000)


@dataclass(frozen=True, kw_only=True)
class Shares:
    """Return the number of faults of each side, and of full stops."""

    coordinators: int
    brokers: int
    topics: int
    full_stops: int


def split(faults: int, kinds: Collection[str] = ()) -> Shares:
    """Distribute the faults over the played kinds: half for coordinators, a quarter each for brokers and topics."""
    wanted = kinds or KINDS
    plays = [
        any(kind in deck and kind != FULL_STOP for kind in wanted)
        for deck in (COORDINATOR_FAULTS, BROKER_FAULTS, TOPIC_FAULTS)
    ]
    weights = [weight * played for weight, played in zip((2, 1, 1), plays, strict=True)]
    shares = [faults * weight // (sum(weights) or 1) for weight in weights]
    if any(plays):
        shares[plays.index(True)] += faults - sum(shares)
    stops = FULL_STOP in wanted and faults >= FAULTS_WITH_A_FULL_STOP
    return Shares(coordinators=shares[0], brokers=shares[1], topics=shares[2], full_stops=int(stops))


if __name__ == "__main__":
    sys.exit(main())
