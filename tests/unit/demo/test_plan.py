"""The plan of the demo."""

import pytest

from examples.orders.plan import Fault, plan
from examples.orders.service import TOPICS


def test_the_same_seed_plans_the_same_run() -> None:
    """A run that went wrong can be planned again; another seed gives another one."""
    assert plan(300, 7) == plan(300, 7)
    assert plan(300, 7) != plan(300, 8)


@pytest.mark.parametrize("orders", [50, 100, 300, 1000])
def test_every_kind_of_trouble_has_its_place(orders: int) -> None:
    """Each fault, each way to pay, both groups, and a poison message for each topic."""
    planned = plan(orders, 1)
    assert len({order.id for order in planned}) == orders
    assert {order.fault for order in planned} == set(Fault)
    assert {order.flaw for order in planned} == {None, *TOPICS}
    assert {order.group for order in planned} == {"orders", "preorders"}
    assert {order.payment for order in planned} == {
        "card", "card-declined", "card-late", "transfer", "transfer-bounces", "invoice",
    }  # fmt: skip


@pytest.mark.parametrize("orders", [0, 1, 2, 3, 4, 10])
def test_a_short_plan_has_as_many_orders_as_asked_for(orders: int) -> None:
    """Fewer orders than kinds leave some kinds out."""
    assert len(plan(orders, 1)) == orders


def test_a_flawed_order_lacks_the_detail_of_its_topic_only() -> None:
    """The other three messages are good."""
    (order,) = (order for order in plan(100, 1) if order.flaw == "points")
    details = order.body["details"]
    assert isinstance(details, dict)
    assert set(TOPICS) - set(details) == {"points"}
