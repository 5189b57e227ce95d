"""What happens in a run: the plan that a seed makes, of transactions and faults, each of which can be left out."""

from __future__ import annotations

import random
from dataclasses import dataclass, field, replace
from typing import Any, Final

TOPICS: Final = {"orders": 3, "points": 1}
LIMIT_BYTES: Final = 65_536
"""`max.message.bytes` of these topics."""
GONE: Final = "gone"
"""A group that nobody uses, and that is deleted."""
GROUPS: Final = ("patient", "dropping", "parking", "pulled")
ACTIVE_S: Final = 6.0
"""How long producers begin transactions, and faults begin."""

_FAULTS: Final = {
    "kill": 4, "stop": 2, "pause": 3, "cut": 3, "clock": 3, "leaderless": 2, "denied": 3, "markers": 2, "slow": 2,
    "loss": 2, "fatal": 2, "endpoint": 3, "session": 2, "compact": 1, "threads": 2,
}  # fmt: skip
"""The kinds of faults, and how often each is."""


_RARE: Final = {"late": 0.1, "trap": 0.1, "stray": 0.05, "away": 0.02}
"""Faults of several instances that a seed has once, and in how many seeds; only `away` comes alone."""
_WIDE_SHARE: Final = 0.05
"""How many seeds have messages about as large as their topic takes, with long names of headers."""


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
    wide_bytes: int = 0
    """The size of its values, if they are about as large as they may be."""


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


def repeats_alike(fault: Fault) -> bool:
    """Return whether the producers whose halves become strays repeat the same messages."""
    return fault.for_s < 5


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
    for kind, share in _RARE.items():
        rare = random.Random(f"{kind} {seed}")
        if instances > 1 and rare.random() < share:
            fault, more = _rare(kind, rare, len(faults), len(transactions))
            faults = [fault] if kind == "away" else [*faults, fault]
            transactions += more
    wide = random.Random(f"wide {seed}")
    if wide.random() < _WIDE_SHARE:
        for place in wide.sample(range(len(transactions)), 3):
            transactions[place] = replace(transactions[place], wide_bytes=wide.randrange(40_000, 55_000))
    return Plan(
        seed=seed,
        instances=instances,
        transactions=transactions,
        faults=sorted(faults, key=lambda fault: fault.at),
        traits=traits,
    )


def _rare(kind: str, chance: random.Random, number: int, first: int) -> tuple[Fault, list[Transaction]]:
    """Return a fault while an owner changes, and the producers that it is about.

    Those of late halves are impatient, and try again, with other messages or the same ones.
    """
    at = chance.uniform(0.5, ACTIVE_S)
    fault = Fault(
        number=number, at=at, kind=kind, target=chance.randrange(6), for_s=chance.uniform(3, 7), how=chance.random()
    )
    changing = 1.0 if kind == "late" or not repeats_alike(fault) else 0.0
    within_s = 5.0 if kind == "trap" else 0.3
    producers = [
        replace(
            _transaction(chance, first + place, changing, 0.0, 0.0, 0.0),
            at=at + chance.uniform(0, 0.2), within_s=(within_s, *[1.0] * 30), decides_after_s=chance.uniform(0, 4),
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
