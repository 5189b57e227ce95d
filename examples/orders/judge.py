"""Do the order database, the four topics, the dead letters and halfway tell the same story? By ids, not by counts."""

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
    """What was found when everything had come to rest.

    `sent` are the orders that customers sent, `orders` gives the state of each that was placed, `fenced` those that a
    check kept out of the database. `seen` and `dead` list order ids by topic as often as they stand there, `effects` as
    often as the topic's consumer has given them effect. `flawed`
    gives the orders whose message in a topic its consumer cannot digest. `transactions` are halfway's own lists.
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
        """Return what the database says of an order."""
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
    """Return everything that does not agree; an empty list means that all of it does."""
    found: list[tuple[str, str, set[str]]] = []
    for topic, ids in evidence.seen.items():
        found += ((topic, what, orders) for what, orders in _against(evidence.paid, ids))
        flawed = evidence.paid & set(evidence.flawed.get(topic, ()))
        done, dead = evidence.effects.get(topic, ()), evidence.dead.get(topic, ())
        found += ((f"dead letters of {topic}", what, orders) for what, orders in _against(flawed, dead))
        found += ((f"effects of {topic}", what, orders) for what, orders in _against(evidence.paid - flawed, done))
    found += (("halfway", what, orders) for what, orders in _transactions(evidence))
    stray = {order for topic, ids in evidence.dead.items() if topic not in evidence.seen for order in ids}
    found.append(("dead letters", "of no topic that is known", stray))
    return [Problem(where=where, what=what, orders=tuple(sorted(orders))) for where, what, orders in found if orders]


def _against(wanted: set[str], ids: Sequence[str]) -> Iterator[tuple[str, set[str]]]:
    times = Counter(ids)
    yield "missing", wanted - set(times)
    yield "invented", set(times) - wanted
    yield "doubled", {order for order, count in times.items() if count > 1}


def _transactions(evidence: Evidence) -> Iterator[tuple[str, set[str]]]:
    states = {str(found["id"]): str(found["state"]) for found in evidence.transactions}
    committed = {order for order, state in states.items() if state == COMMITTED}
    yield (
        "still without an outcome",
        {order for order, state in states.items() if state not in {COMMITTED, ROLLED_BACK}},
    )
    yield "committed, but not paid", committed - evidence.paid
    yield "paid, but not committed", evidence.paid - committed
    yield "neither placed nor fenced off", set(states) - set(evidence.orders) - set(evidence.fenced)


def orders_by_state(evidence: Evidence) -> list[tuple[str, int, dict[str, int]]]:
    """Return for each state the number of orders and of messages in each topic, duplicates included."""
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
    """Return the number of transactions by who resolved them (producer, check, operator, policy) and outcome."""
    causes = {cause: Counter[str]() for cause in ("producer", "check", "operator", "policy")}
    for found in evidence.transactions:
        cause = str(found.get("cause") or "nobody yet")
        causes.setdefault(cause, Counter())[str(found["state"])] += 1
    return causes
