"""Payloads are shown to the group, to operators unless that is switched off, and to no other caller."""

from collections.abc import AsyncIterator

import pytest

from halfway.coordinator.access import KeyedAccess
from halfway.coordinator.requests import GroupSpec, ListQuery, Prepare
from halfway.protocol.errors import ForbiddenError
from halfway.protocol.keys import MasterSecret
from halfway.protocol.principal import Principal, PrincipalKind
from halfway.protocol.records import CheckMode, Message, PolicyOverrides
from tests.support.ids import named_id
from tests.support.service.broker import Memory
from tests.support.service.world import SHARDS, World

SHOP = Principal(kind=PrincipalKind.GROUP, name="shop")
ANNA = Principal(kind=PrincipalKind.OPERATOR, name="anna")
BOARD = Principal(kind=PrincipalKind.READER, name="board")
PAYLOAD = Message(topic="orders", key=b"k-4711", value=b"p4yl0ad")


async def start_world(*, hide_payloads: bool) -> World:
    """Start an instance with access control, and a transaction of the group `shop`, which fetches its checks."""
    memory = Memory(shards=SHARDS, topics={"orders": 3})
    secrets = [MasterSecret(b"m" * 32)]
    memory.authority = KeyedAccess(memory.keys.table, secrets, memory.clock, hide_payloads=hide_payloads)
    world = await World.start(memory)
    spec = GroupSpec(name="shop", mode=CheckMode.PULL, urls=(), topics=("orders",), policy=PolicyOverrides())
    await world.coordinator.put_group(spec, deadline=world.deadline(), principal=ANNA)
    wanted = Prepare(group="shop", messages=(PAYLOAD,), id=named_id("o-42"))
    await world.coordinator.prepare(wanted, deadline=world.deadline(), principal=SHOP)
    return world


@pytest.fixture
async def open_to_operators() -> AsyncIterator[World]:
    world = await start_world(hide_payloads=False)
    yield world
    await world.stop()


@pytest.fixture
async def hidden() -> AsyncIterator[World]:
    world = await start_world(hide_payloads=True)
    yield world
    await world.stop()


async def shown(world: World, principal: Principal) -> tuple[Message, ...] | None:
    view = await world.coordinator.get(named_id("o-42"), deadline=world.deadline(), principal=principal)
    assert view.id == named_id("o-42")
    return None if view.messages is None else tuple(view.messages)


async def count_by_key(world: World, principal: Principal) -> int:
    query = ListQuery(key=b"k-4711", limit=10)
    page = await world.coordinator.list(query, deadline=world.deadline(), principal=principal)
    return len(page.transactions)


async def fetched(world: World, principal: Principal) -> object:
    return await world.coordinator.lease_checks("shop", at_most=1, wait_s=0, principal=principal)


async def test_a_group_and_an_operator_read_payloads_and_a_reader_does_not(open_to_operators: World) -> None:
    assert await shown(open_to_operators, SHOP) == await shown(open_to_operators, ANNA) == (PAYLOAD,)
    assert await shown(open_to_operators, BOARD) is None


async def test_payloads_can_be_hidden_from_operators(hidden: World) -> None:
    """An operator sees the transaction without its messages, and gets no check, because checks have messages."""
    assert await shown(hidden, SHOP) == (PAYLOAD,)
    assert await shown(hidden, ANNA) is None
    with pytest.raises(ForbiddenError, match=r"a key of group 'shop'$"):
        await fetched(hidden, ANNA)
    await fetched(hidden, SHOP)


async def test_who_may_not_read_payloads_cannot_search_by_message_key_either(
    open_to_operators: World, hidden: World
) -> None:
    """A caller that can search can guess."""
    assert [await count_by_key(open_to_operators, one) for one in (SHOP, ANNA)] == [1, 1]
    assert await count_by_key(hidden, SHOP) == 1
    for world, caller in ((open_to_operators, BOARD), (hidden, ANNA), (hidden, BOARD)):
        with pytest.raises(ForbiddenError):
            await count_by_key(world, caller)
