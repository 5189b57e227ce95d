"""What happens in a run: the plan that a seed makes, of transactions and faults, each of which can be left out."""

from __future__ import annotations

import random
from dataclasses import dataclass, field, replace
from typing import Any, Final

from halfway.coordinator.requests import GroupSpec
from halfway.protocol.records import CheckMode, OnExhausted, PolicyOverrides

TOPICS: Final = {"orders": 3, "points": 1}
LIMIT_BYTES: Final = 65_536
"""`max.message.bytes` of these topics."""
TOPIC_SETTINGS: Final = {"max.message.bytes": f"{LIMIT_BYTES}"}
GONE: Final = "gone"
"""A group that nobody uses, and that is deleted."""
GROUPS: Final = ("patient", "dropping", "parking", "pulled")
POLICIES: Final = {
    "patient": PolicyOverrides(first_check_after_s=0.7, check_interval_s=0.7, max_interval_s=2, max_checks=100),
    "dropping": PolicyOverrides(
        first_check_after_s=0.7, check_interval_s=0.5, max_interval_s=1, max_checks=3, max_age_s=1_200,
        on_exhausted=OnExhausted.ROLLBACK,
    ),
    "parking": PolicyOverrides(first_check_after_s=0.5, check_interval_s=0.5, max_interval_s=1, max_checks=2),
    "pulled": PolicyOverrides(first_check_after_s=0.7, check_interval_s=0.7, max_interval_s=2, max_checks=100),
    GONE: PolicyOverrides(),
}  # fmt: skip
ACTIVE_S: Final = 6.0
"""How long producers begin transactions, and faults begin."""

_FAULTS: Final = {
    "kill": 4, "stop": 2, "pause": 3, "cut": 3, "clock": 3, "leaderless": 2, "denied": 3, "markers": 2, "slow": 2,
    "loss": 2, "fatal": 2, "endpoint": 3, "session": 2, "compact": 1, "threads": 2,
}  # fmt: skip
"""The kinds of faults, and how often each is."""


_RARE: Final = {"late": 0.1, "trap": 0.1, "stray": 0.05, "away": 0.02}
"""Faults of several instances that a seed has once, and in how many seeds; only `away` comes alone."""
_OPERATED: Final = ("group", "deleted", "grown", "below", "in_doubt", "internal", "operator", "limited")
"""What operators and brokers do, in seeds of their own, which also have producers with a store."""
_OPERATED_SHARE: Final = 0.3
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
    is_stored: bool = False
    """Whether the producer has decided and stored it before it first prepares it, as `when_away="store"` does."""


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
    operated = random.Random(f"more 3599 {seed}")  # a stream that leaves the seeds of the tests as they were
    if operated.random() < _OPERATED_SHARE:
        for _ in range(operated.choice((1, 2, 4))):
            kind = operated.choice(_OPERATED)
            faults.append(_fault(kind, operated, len(faults), operated.uniform(0.2, ACTIVE_S), 0.3))
        transactions = [
            replace(one, is_stored=True, changes=False, within_s=one.within_s * 4) if operated.random() < 0.2 else one
            for one in transactions
        ]
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


def _fault(kind: str, chance: random.Random, number: int, at: float, least_s: float) -> Fault:
    target, for_s = chance.randrange(6), chance.uniform(least_s, 7)
    return Fault(number=number, at=at, kind=kind, target=target, for_s=for_s, how=chance.random())


def group_spec(name: str, **changes: Any) -> GroupSpec:
    """Return a group as it is registered, with changes."""
    mode = CheckMode.PULL if name == "pulled" else CheckMode.PUSH
    urls = () if name == "pulled" else ("http://shop.invalid/check",)
    given = {"mode": mode, "urls": urls, "topics": tuple(TOPICS), "policy": POLICIES[name], **changes}
    return GroupSpec(name=name, **given)


def _rare(kind: str, chance: random.Random, number: int, first: int) -> tuple[Fault, list[Transaction]]:
    """Return a fault while an owner changes, and the producers that it is about.

    Those of late halves are impatient, and try again, with other messages or the same ones.
    """
    at = chance.uniform(0.5, ACTIVE_S)
    fault = _fault(kind, chance, number, at, 3)
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
