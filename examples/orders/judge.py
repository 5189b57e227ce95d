"""Compares the order database, the four topics, the dead letters and halfway, by ids and not by counts."""

from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

COMMITTED, ROLLED_BACK = "committed", "rolled_back"
FENCED = "fenced off by a check"
NOT_TAKEN = "never taken"
UNHEARD_OF = "not in the database"


@dataclass(frozen=True, kw_only=True)
class Evidence:
    """The state of everything after the run.

    `sent` are the orders that customers sent, `orders` maps each placed order to its state, and `fenced` are the orders
    that a check kept out of the database. `seen` and `dead` list the order ids in each topic, as often as they occur
    there; `effects` lists them as often as the topic's consumer has processed them. `flawed` are the orders whose
    message in a topic cannot be processed. `transactions` are halfway's own lists.
    """

    sent: Collection[str]
    orders: Mapping[str, str]
    fenced: Collection[str]
    seen: Mapping[str, Sequence[str]]
    effects: Mapping[str, Sequence[str]]
    dead: Mapping[str, Sequence[str]]
    flawed: Mapping[str, Collection[str]]
    transactions: Sequence[Mapping[str, Any]]

    @property
    def paid(self) -> set[str]:
        """The orders whose messages must have been sent."""
        return {order for order, state in self.orders.items() if state == "paid"}

    def state_of(self, order: str) -> str:
        """Return the state of an order according to the database."""
        if order in self.orders:
            return self.orders[order]
        if order in self.fenced:
            return FENCED
        return NOT_TAKEN if order in self.sent else UNHEARD_OF


@dataclass(frozen=True, kw_only=True)
class Problem:
    """One disagreement."""

    where: str
    what: str
    orders: tuple[str, ...]


def judge(evidence: Evidence) -> list[Problem]:
    """Return all disagreements; an empty list means that everything agrees."""
    differences: list[tuple[str, str, set[str]]] = []
    for topic, ids in evidence.seen.items():
        differences += ((topic, what, orders) for what, orders in _compare(evidence.paid, ids))
        flawed = evidence.paid & set(evidence.flawed.get(topic, ()))
        effects, dead = evidence.effects.get(topic, ()), evidence.dead.get(topic, ())
        differences += ((f"dead letters of {topic}", what, orders) for what, orders in _compare(flawed, dead))
        differences += (
            (f"effects of {topic}", what, orders) for what, orders in _compare(evidence.paid - flawed, effects)
        )
    differences += (("halfway", what, orders) for what, orders in _transactions(evidence))
    stray = {order for topic, ids in evidence.dead.items() if topic not in evidence.seen for order in ids}
    differences.append(("dead letters", "of no known topic", stray))
    return [
        Problem(where=where, what=what, orders=tuple(sorted(orders))) for where, what, orders in differences if orders
    ]


def _compare(expected: set[str], ids: Sequence[str]) -> Iterator[tuple[str, set[str]]]:
    counts = Counter(ids)
    yield "missing", expected - set(counts)
    yield "invented", set(counts) - expected
    yield "doubled", {order for order, count in counts.items() if count > 1}


def _transactions(evidence: Evidence) -> Iterator[tuple[str, set[str]]]:
    states = {str(transaction["id"]): str(transaction["state"]) for transaction in evidence.transactions}
    committed = {order for order, state in states.items() if state == COMMITTED}
    yield (
        "still without an outcome",
        {order for order, state in states.items() if state not in {COMMITTED, ROLLED_BACK}},
    )
    yield "committed, but not paid", committed - evidence.paid
    yield "paid, but not committed", evidence.paid - committed
    yield "neither placed nor fenced off", set(states) - set(evidence.orders) - set(evidence.fenced)


def orders_by_state(evidence: Evidence) -> list[tuple[str, int, dict[str, int]]]:
    """Return, for each state, the number of orders, and of messages in each topic including duplicates."""
    states = Counter(evidence.state_of(order) for order in {*evidence.sent, *evidence.orders, *evidence.fenced})
    rows = {state: Counter[str]() for state in ("paid", "failed", "awaiting", FENCED, NOT_TAKEN, UNHEARD_OF)}
    for topic, ids in evidence.seen.items():
        for order in ids:
            rows[evidence.state_of(order)][topic] += 1
    return [
        (state, states[state], {topic: row[topic] for topic in evidence.seen})
        for state, row in rows.items()
        if state != UNHEARD_OF or row
    ]


def resolved_by(evidence: Evidence) -> dict[str, Counter[str]]:
    """Return the number of transactions by their cause (producer, check, operator, policy) and outcome."""
    causes = {cause: Counter[str]() for cause in ("producer", "check", "operator", "policy")}
    for transaction in evidence.transactions:
        cause = str(transaction.get("cause") or "nobody yet")
        causes.setdefault(cause, Counter())[str(transaction["state"])] += 1
    return causes
