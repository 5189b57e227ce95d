"""A commit verdict that is not written yet concerns its own group only."""

import pytest

from halfway.domain.errors import EndUnconfirmedError, UnknownTransactionError
from halfway.domain.keys import MasterSecret
from halfway.domain.principal import PEER, Principal, PrincipalKind
from halfway.domain.records import CheckMode, Message
from halfway.domain.transaction import Outcome
from halfway.memory import Memory
from halfway.service.access.access import KeyedAccess
from halfway.service.requests import End, GroupSpec, Prepare
from tests.support.service.world import QUICK, SHARDS, World


async def test_another_groups_end_does_not_drop_a_commit_verdict_that_is_kept() -> None:
    """Otherwise the policy could roll back against a commit verdict that cannot be written for long."""
    memory = Memory(shards=SHARDS, topics={"orders": 1})
    memory.authority = KeyedAccess(memory.keys.table, [MasterSecret(b"s" * 32)], memory.clock)
    world = await World.start(memory)
    coordinator = world.coordinator
    shop, other = (Principal(kind=PrincipalKind.GROUP, name=name) for name in ("shop", "other"))
    spec = GroupSpec(name="shop", mode=CheckMode.PULL, urls=(), topics=("orders",), policy=QUICK)
    await coordinator.put_group(spec, deadline=world.deadline(), principal=PEER)
    order = Prepare(group="shop", id="order-1", messages=(Message(topic="orders", key=b"k", value=b"v"),))
    await coordinator.prepare(order, deadline=world.deadline(), principal=shop)
    await world.scan(after_s=6)
    [check] = await coordinator.lease_checks("shop", at_most=1, wait_s=0, principal=shop)
    commit = End(id="order-1", outcome=Outcome.COMMIT, check_id=check.check_id)
    with memory.faults.lane_held():
        with pytest.raises(EndUnconfirmedError):
            await coordinator.end(commit, deadline=world.deadline(0.02), principal=shop)
        assert "order-1" in coordinator.shards.unwritten_commit_verdicts
        with pytest.raises(UnknownTransactionError):
            await coordinator.end(commit, deadline=world.deadline(), principal=other)
        assert "order-1" in coordinator.shards.unwritten_commit_verdicts
    await world.stop()
