"""The judge of the demo finds every way in which the database, the topics and halfway can disagree."""

from dataclasses import replace

import pytest

from examples.orders.judge import Evidence, judge

AGREED = Evidence(
    sent={"a", "b", "c", "d", "e", "f"},
    orders={"a": "paid", "b": "paid", "c": "failed", "d": "awaiting"},
    fenced={"e"},
    seen={"coupon": ["a", "b"], "cart": ["b", "a"]},
    effects={"coupon": ["a"], "cart": ["a", "b"]},
    dead={"coupon": ["b"], "cart": []},
    # c is flawed too, but was never paid: its message was not sent.
    flawed={"coupon": {"b", "c"}, "cart": set()},
    transactions=[
        {"id": "a", "state": "committed", "cause": "producer"},
        {"id": "b", "state": "committed", "cause": "check"},
        {"id": "c", "state": "rolled_back", "cause": "operator"},
        {"id": "d", "state": "rolled_back", "cause": "policy"},
        {"id": "e", "state": "rolled_back", "cause": "check"},
    ],
)


def found(evidence: Evidence) -> set[tuple[str, str, tuple[str, ...]]]:
    return {(problem.where, problem.what, problem.orders) for problem in judge(evidence)}


def test_a_story_without_contradiction_has_no_problem() -> None:
    """Paid orders stand once in each topic, whatever the order of reading; the others in none."""
    assert judge(AGREED) == []


def test_a_doubled_message_is_found_though_the_count_may_fit() -> None:
    """Two messages for two paid orders, but twice the same one."""
    assert found(replace(AGREED, seen={"coupon": ["a", "b"], "cart": ["a", "a"]})) == {
        ("cart", "missing", ("b",)),
        ("cart", "doubled", ("a",)),
    }


@pytest.mark.parametrize("order", ["c", "d", "e", "f", "z"])
def test_an_invented_message_is_found(order: str) -> None:
    """A message of an order that failed, awaits payment, was fenced off, was never taken or never heard of."""
    assert found(replace(AGREED, seen={"coupon": ["a", "b"], "cart": ["a", "b", order]})) == {
        ("cart", "invented", (order,))
    }


def test_dead_letters_are_exactly_the_flawed_orders_that_were_sent() -> None:
    """A missing, an invented, a doubled dead letter and one of no known topic."""
    dead = {"coupon": [], "cart": ["a", "a"], "points": ["b"]}
    assert found(replace(AGREED, dead=dead)) == {
        ("dead letters of coupon", "missing", ("b",)),
        ("dead letters of cart", "invented", ("a",)),
        ("dead letters of cart", "doubled", ("a",)),
        ("dead letters", "of no known topic", ("b",)),
    }


@pytest.mark.parametrize("state", ["prepared", "parked"])
def test_a_transaction_without_an_outcome_is_found(state: str) -> None:
    """When everything has come to rest nothing may be pending."""
    transactions = [*AGREED.transactions[:4], {"id": "e", "state": state}]
    assert found(replace(AGREED, transactions=transactions)) == {("halfway", "still without an outcome", ("e",))}


def test_an_effect_that_is_missing_doubled_or_invented_is_found() -> None:
    """A message that its consumer cannot digest has none."""
    assert found(replace(AGREED, effects={"coupon": ["a", "b"], "cart": ["a", "a"]})) == {
        ("effects of coupon", "invented", ("b",)),
        ("effects of cart", "missing", ("b",)),
        ("effects of cart", "doubled", ("a",)),
    }
