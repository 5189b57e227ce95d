"""Faults that are put into halfway to prove that the simulation sees them: `python -m tests.simulation.mutants`.

To write one: name it, say where and what it is in a line of `MUTANTS`. It counts as found if a run with it has a
problem and the same seed without it has none.
"""

from __future__ import annotations

import argparse
import gc
import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Final

from halfway.coordinator.checkback import scan
from halfway.coordinator.commit_verdicts import CommitVerdicts
from halfway.coordinator.shards.shard import OutcomeWindow, Shard
from halfway.kafka.clients.transactional_producer import ProducerFailedError
from halfway.kafka.lane import transaction
from halfway.kafka.lane.transaction import LaneTransaction
from halfway.kafka.log import compacted_table, half_log, tail
from halfway.kafka.ownership import acquisition, former_owners
from halfway.kafka.topics import required_config
from halfway.protocol import policy
from halfway.protocol.entries import Pending
from halfway.protocol.records import Message
from halfway.protocol.shard import ShardState
from tests.simulation.instances import replaced, silence
from tests.simulation.oracles import problems
from tests.simulation.run import Simulation
from tests.simulation.story import plan


def nothing(*_: object, **__: object) -> None:
    """Do nothing."""


def no(*_: object, **__: object) -> bool:
    return False


def poll_unguarded(client: Any, timeout: float) -> None:
    client.producer.poll(timeout)


def first_in_the_log(state: ShardState, offset: int, half: Any, held: Pending) -> None:
    state._stray(half.id, max(offset, held.offset))


def commit_or_not(lane: LaneTransaction) -> None:
    try:
        lane._producer.commit(lane._stall_s)
    except ProducerFailedError:
        """Take it for committed."""


def at_most_two(lane: LaneTransaction) -> None:
    for encoded in lane._writes:
        for one in encoded.real[:2]:
            lane._produce(
                one.topic, one.value, one.key, one.partition, None, None, lane._now, one.headers
            )  # fmt: skip


def stored_anyhow(error: Any, message: Any) -> int:
    return 0


def all_is_old(window: OutcomeWindow, now: float) -> int:
    return window._state.op_tail


def size_in_characters(message: Message) -> int:
    names = sum(len(name) + len(value or b"") for name, value in message.headers)
    return len(message.key or b"") + len(message.value or b"") + names


async def no_wait(shard: Shard, position: int, *, deadline: float) -> None:
    """Take the fold for up to date."""


MUTANTS: Final[dict[str, list[tuple[Any, str, Any]]]] = {
    # the faults of an earlier round, put back
    "a commit that met 503 is forgotten": [(CommitVerdicts, "settle", nothing), (CommitVerdicts, "keep", nothing)],
    "a late half replaces what was acknowledged": [(ShardState, "_half_of_two_owners", first_in_the_log)],
    "a jump of the clock rolls back unasked": [
        (policy, "_has_missed_a_check", no), (Pending, "ask_afresh", nothing),
    ],
    "one fatal error ends the writer of halves": [(half_log._Client, "poll", poll_unguarded)],
    "a clock that was ahead delays checks for hours": [
        (policy, "is_of_wrong_clock", no), (scan.Scan, "clock_was_set", nothing),
    ],
    "what was prepared ahead of time is written so": [
        (transaction, "_MOST_AHEAD_MS", 10**12), (required_config, "_ANY_TIME_MS", required_config.HOUR_MS),
    ],
    "a deleted group is there again after a gap": [(compacted_table, "_LEAST_GAP_S", math.inf)],
    "the horizon begins at the restart": [(OutcomeWindow, "start", all_is_old)],
    "names of headers are counted in characters": [(Message, "size", property(size_in_characters))],
    # others
    "a former owner is not fenced": [(former_owners.FormerOwners, "_fence_owner", nothing)],
    "an acquisition reads what is not committed": [
        (acquisition, "_CONSUMER_OVERRIDES", {"isolation.level": "read_uncommitted"})
    ],
    "a failed commit is taken for one": [(LaneTransaction, "commit", commit_or_not)],
    "a third message is left out": [(LaneTransaction, "produce_messages", at_most_two)],
    "an unknown write is acknowledged": [(half_log, "_failure", stored_anyhow)],
    "the tail is not waited for": [(Shard, "wait_for_tail", no_wait)],
    "strays are not seen": [(ShardState, "_stray", nothing)],
    "a verdict is lost with its owner": [(CommitVerdicts, "_start_recording", nothing)],
    "the tail skips what others wrote": [(tail.Tail, "_handle", nothing)],
}  # fmt: skip


@contextmanager
def mutated(name: str) -> Iterator[None]:
    """Put a fault into halfway for a time."""
    with replaced(MUTANTS[name]):
        yield


def find(name: str, first: int, at_most: int, report: Callable[[str], None]) -> int | None:
    """Return how many seeds it took to find a mutant, None if none did."""
    for number in range(at_most):
        seed = first + number
        with mutated(name):
            found = problems(Simulation(plan(seed)).go())
        if found and not problems(Simulation(plan(seed)).go()):
            report(f"{name}: {number + 1} schedules, seed {seed}: {found[0][:200]}")
            return number + 1
    report(f"{name}: not found in {at_most}")
    return None


def main() -> int:
    """Look for each mutant; return 1 if one is not found."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", help="parts of names; all without")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--runs", type=int, default=1000)
    options = parser.parse_args()
    silence()
    gc.collect()
    gc.freeze()
    begun = time.process_time()
    names = [name for name in MUTANTS if not options.names or any(part in name for part in options.names)]
    missed = [name for name in names if find(name, options.seed, options.runs, print) is None]
    print(f"{len(names) - len(missed)} of {len(names)} found in {time.process_time() - begun:.0f} s of CPU")
    return 1 if missed else 0


if __name__ == "__main__":
    raise SystemExit(main())
