"""What happens in a run: the plan that a seed makes, of transactions and faults, each of which can be left out."""

from __future__ import annotations

import random
from dataclasses import dataclass, field, replace
from typing import Any, Final

TOPICS: Final = {"orders": 3, "points": 1}
GROUPS: Final = ("patient", "dropping", "parking", "pulled")
ACTIVE_S: Final = 6.0
"""How long producers begin transactions, and faults begin."""

_FAULTS: Final = {
    "kill": 4, "stop": 2, "pause": 3, "cut": 3, "clock": 3, "leaderless": 2, "denied": 3, "markers": 2, "slow": 2,
    "loss": 2, "fatal": 2, "endpoint": 3, "session": 2, "compact": 1, "threads": 2,
}  # fmt: skip
"""The kinds of faults, and how often each is."""


_LATE_SHARE: Final = 0.1
"""How many seeds have a writer whose halves arrive after another owner's."""


@dataclass(frozen=True, kw_only=True)
class Transaction:
    """What a producer does with one transaction."""

    number: int
    at: float
    group: str
    topics: tuple[str, ...]
    within_s: tuple[float, ...]
    """How long each attempt to prepare waits for its answer."""
    changes: bool
    """Whether a repeated prepare has other messages."""
    commits: bool
    decides_after_s: float | None
    """When the producer's local transaction is over; None if it dies before."""
    ends_within_s: tuple[float, ...]
    """How long each attempt to end waits; none if the producer dies first."""
    ends_again: float | None
    """When the producer sends its end once more."""
    contradicts: bool
    """Whether that is the opposite one."""
    looks_after_s: tuple[float, ...]
    is_silent: bool
    """Whether its checks are answered with unknown while there are faults."""


@dataclass(frozen=True, kw_only=True)
class Fault:
    """Something that goes wrong for a time."""

    number: int
    at: float
    kind: str
    target: int
    for_s: float
    how: float
    """A number between 0 and 1 that decides the rest."""

    def __str__(self) -> str:
        return f"{self.kind} {self.target} at {self.at:.2f} for {self.for_s:.2f} s ({self.how:.2f})"


@dataclass(kw_only=True)
class Plan:
    """A whole run."""

    seed: int
    instances: int
    transactions: list[Transaction]
    faults: list[Fault]
    traits: dict[str, Any] = field(default_factory=dict)
    """What is so all the time: how the network, the threads and the endpoints are."""


def plan(seed: int) -> Plan:
    """Make the plan of a seed. Each seed leaves out some kinds of faults, so that the others get further."""
    chance = random.Random(f"plan {seed}")
    kinds = {kind: weight for kind, weight in _FAULTS.items() if chance.random() < 0.5}
    faults = []
    if kinds:
        for number in range(chance.choice((0, 1, 2, 3, 5, 8, 12))):
            kind = chance.choices(list(kinds), list(kinds.values()))[0]
            for_s = chance.choice((chance.uniform(0.05, 1), chance.uniform(1, 4), chance.uniform(4, 7)))
            faults.append(
                Fault(
                    number=number,
                    at=chance.uniform(0, ACTIVE_S),
                    kind=kind,
                    target=chance.randrange(6),
                    for_s=for_s,
                    how=chance.random(),
                )
            )
    changing = chance.choice((0.0, 0.0, 0.3, 0.8))
    impatient = chance.choice((0.0, 0.2, 0.7))
    dying = chance.choice((0.0, 0.1, 0.4))
    silent = chance.choice((0.0, 0.1, 0.6))
    traits = {
        "net_late": chance.choice((0.0, 0.0, 0.02, 0.1)),
        "net_late_s": chance.choice((0.1, 1.0, 6.0)),
        "net_lost": chance.choice((0.0, 0.0, 0.01, 0.05)),
        "kafka_s": chance.choice((0.001, 0.005, 0.05)),
        "markers_s": chance.choice((0.001, 0.02, 0.3)),
        "threads_late": chance.choice((0.0, 0.05, 0.3)),
        "threads_late_s": chance.choice((0.001, 0.02, 0.5)),
        "polls": chance.choice((1, 4, 8, 8)),
        "endpoint_bad": chance.choice((0.0, 0.1, 0.5)),
    }
    transactions = [
        _transaction(random.Random(f"transaction {seed} {number}"), number, changing, impatient, dying, silent)
        for number in range(chance.randint(20, 50))
    ]
    instances = chance.choice((1, 2, 2, 3))
    late = random.Random(f"late {seed}")
    if instances > 1 and late.random() < _LATE_SHARE:
        fault, more = _late(late, len(faults), len(transactions))
        faults.append(fault)
        transactions += more
    return Plan(
        seed=seed,
        instances=instances,
        transactions=transactions,
        faults=sorted(faults, key=lambda fault: fault.at),
        traits=traits,
    )


def _late(chance: random.Random, number: int, first: int) -> tuple[Fault, list[Transaction]]:
    """Return halves that are on the way while their owner changes, and their producers, which try other messages."""
    at = chance.uniform(0.5, ACTIVE_S)
    fault = Fault(
        number=number, at=at, kind="late", target=chance.randrange(6), for_s=chance.uniform(3, 7), how=chance.random()
    )
    producers = [
        replace(
            _transaction(chance, first + place, 1.0, 0.0, 0.0, 0.0),
            at=at + chance.uniform(0, 0.2), within_s=(0.3, *[1.0] * 30), decides_after_s=chance.uniform(0, 4),
        )
        for place in range(4)
    ]  # fmt: skip
    return fault, producers


def _transaction(
    chance: random.Random, number: int, changing: float, impatient: float, dying: float, silent: float
) -> Transaction:
    def patience() -> float:
        return chance.uniform(0.001, 0.5) if chance.random() < impatient else chance.uniform(1, 5)

    is_dead = chance.random() < dying
    return Transaction(
        number=number,
        at=chance.uniform(0, ACTIVE_S),
        group=chance.choice(GROUPS),
        topics=tuple(chance.choices(tuple(TOPICS), k=chance.choice((1, 1, 2, 3)))),
        within_s=tuple(patience() for _ in range(chance.choice((1, 3, 6)))),
        changes=chance.random() < changing,
        commits=chance.random() < 0.7,
        decides_after_s=None if is_dead else chance.choice((0.0, chance.uniform(0, 0.1), chance.uniform(0, 3))),
        ends_within_s=() if is_dead else tuple(patience() for _ in range(chance.choice((0, 1, 2, 6)))),
        ends_again=chance.uniform(0, 4) if chance.random() < 0.2 else None,
        contradicts=chance.random() < 0.5,
        looks_after_s=tuple(chance.uniform(0, 6) for _ in range(chance.choice((0, 0, 1, 2)))),
        is_silent=chance.random() < silent,
    )
