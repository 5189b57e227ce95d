"""Two instances over one log: calls go to the owner of the shard, over one hop, and no partial result is returned."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest

from halfway.coordinator.ports import OwnerHint
from halfway.coordinator.queries import queries as get_and_list
from halfway.coordinator.records import CountCall, GetCall, LeaseCall, ListCall, PeerCall
from halfway.coordinator.requests import End, ListQuery, Prepare
from halfway.protocol.errors import (
    EndUnconfirmedError,
    GroupInUseError,
    NotServedError,
    OutcomeUnknownError,
    PeerLostError,
    ShardUnavailableError,
    UnknownGroupError,
)
from halfway.protocol.ids import shard_of
from halfway.protocol.principal import PEER
from halfway.protocol.records import CheckMode, Message
from halfway.protocol.transactions import Cause, Outcome
from tests.support.ids import named_id_in
from tests.support.service.broker import Memory
from tests.support.service.world import SHARDS, World
from tests.support.waiting import GENEROUS_S


async def instance(owns: set[int], first: Memory | None = None) -> World:
    """Start an instance with these shards, over the log and the clock of the first one."""
    topics = {"orders": 3, "points": 1} if first is None else {}
    return await World.start(Memory(shards=SHARDS, topics=topics, owns=owns, beside=first))


@pytest.fixture
async def pair() -> AsyncIterator[tuple[World, World]]:
    """Start two instances with one shard each, and the group `shop`."""
    here = await instance({0})
    there = await instance({1}, here.memory)
    await here.group()
    yield here, there
    await here.stop()
    await there.stop()


def own_id(shard: int, number: int = 0) -> str:
    """Return a client's id that belongs to a shard."""
    return named_id_in(shard, f"t-{number}", shards=SHARDS)


async def test_a_forwarded_call_is_counted_where_it_is_done(pair: tuple[World, World]) -> None:
    """The instance that forwards counts a forwarded call, not a failure."""
    here, there = pair
    await here.end((await here.prepare(transaction_id=own_id(1))).id, Outcome.COMMIT)
    assert here.memory.observer.count("prepared") == here.memory.observer.count("ended") == 0
    assert here.memory.observer.count("forwarded", result="done") == 2
    assert there.memory.observer.count("prepared", result="prepared") == 1
    assert there.memory.observer.count("ended", result="changed") == 1


async def test_an_instance_without_shards_has_its_prepares_done_by_others(pair: tuple[World, World]) -> None:
    here, _ = pair
    third = await instance(set(), here.memory)
    made = [(await third.prepare()).id for _ in range(4)]
    assert {shard_of(name, SHARDS) for name in made} == {0, 1}
    assert (await third.end(made[0], Outcome.ROLLBACK)).changed
    await third.stop()


async def test_a_shard_without_owner_is_unavailable(pair: tuple[World, World]) -> None:
    here, there = pair
    await there.stop()
    with pytest.raises(ShardUnavailableError) as caught:
        await here.get(own_id(1))
    assert caught.value.fields["shard"] == 1


async def test_what_is_asked_by_another_instance_is_never_forwarded(pair: tuple[World, World]) -> None:
    """One hop: an instance that is called as the owner and is not the owner refuses."""
    here, _ = pair
    with pytest.raises(ShardUnavailableError) as caught:
        await here.coordinator.peer_handler.answer(GetCall(id=own_id(1)), deadline=here.deadline(), principal=PEER)
    assert not isinstance(caught.value, NotServedError)
    assert here.memory.observer.count("forwarded") == 0


async def test_a_lost_answer_is_said_to_be_unknown(pair: tuple[World, World]) -> None:
    """What the owner did stands; a repeat returns it."""
    here, there = pair
    name = own_id(1)
    here.memory.peers.lose_answers = 1
    with pytest.raises(OutcomeUnknownError) as caught:
        await here.prepare(transaction_id=name)
    assert caught.value.fields == {"id": name}
    assert (await here.prepare(transaction_id=name)).created is False
    here.memory.peers.lose_answers = 1
    with pytest.raises(EndUnconfirmedError):
        await here.end(name, Outcome.COMMIT)
    assert (await here.end(name, Outcome.COMMIT)).changed is False
    here.memory.peers.lose_answers = 1
    with pytest.raises(ShardUnavailableError):
        await here.get(name)
    assert len(there.memory.records("orders")) == 1


async def test_lists_are_of_all_shards_or_an_error(pair: tuple[World, World], monkeypatch: pytest.MonkeyPatch) -> None:
    here, there = pair
    names = []
    for number in range(10):
        here.memory.clock.advance(1)
        names.append((await here.prepare(transaction_id=own_id(number // 5, number))).id)
    for world in pair:
        seen: list[str] = []
        query = ListQuery(limit=3)
        while True:
            page = await world.coordinator.list(query, deadline=world.deadline())
            seen += [shown.id for shown in page.transactions]
            if page.next is None:
                break
            query = ListQuery(limit=3, cursor=page.next)
        assert seen == names
    await there.stop()
    with pytest.raises(ShardUnavailableError, match="all shards"):
        await here.coordinator.list(ListQuery(), deadline=here.deadline())
    third = await instance(set(), here.memory)
    find = third.memory.owners.find
    monkeypatch.setattr(third.memory.owners, "find", lambda _: find(0))  # a wrong hint
    with pytest.raises(ShardUnavailableError, match="shard 1"):
        await third.coordinator.list(ListQuery(), deadline=third.deadline())
    await third.stop()


async def test_a_shard_that_goes_while_it_is_listed_is_not_told_in_part(
    pair: tuple[World, World], monkeypatch: pytest.MonkeyPatch
) -> None:
    _, there = pair
    await there.prepare(transaction_id=own_id(1))
    call = ListCall(query=ListQuery(), shards=(1,))
    monkeypatch.setattr(get_and_list, "_SLICE", 1)
    listing = asyncio.create_task(
        there.coordinator.peer_handler.answer(call, deadline=there.deadline(), principal=PEER)
    )
    await asyncio.sleep(0)
    there.coordinator.shards.lost(1)
    with pytest.raises(ShardUnavailableError):
        await listing


async def test_a_group_that_is_being_deleted_takes_no_prepares_anywhere(pair: tuple[World, World]) -> None:
    """Until the deletion is refused, or the group is registered again."""
    here, there = pair
    name = (await there.prepare(transaction_id=own_id(1))).id
    with pytest.raises(GroupInUseError) as caught:
        await here.coordinator.delete_group("shop", deadline=here.deadline())
    assert caught.value.fields["pending"] == 1
    await there.end(name, Outcome.ROLLBACK)
    hold = CountCall(group="shop", shards=(1,), hold_s=60)
    await there.coordinator.peer_handler.answer(hold, deadline=there.deadline(), principal=PEER)
    with pytest.raises(UnknownGroupError):
        await there.prepare(transaction_id=own_id(1, 1))
    there.memory.clock.advance(1)
    await here.coordinator.delete_group("shop", deadline=here.deadline())
    await here.group()
    assert (await there.prepare(transaction_id=own_id(1, 2))).created


async def test_a_second_deletion_of_a_group_lets_no_prepare_in_before_the_first(pair: tuple[World, World]) -> None:
    """It checks whether the group is in use while the first one writes: a new prepare would be left without a group."""
    here, _ = pair
    peer_handler = here.coordinator.peer_handler
    for hold_s in (10.0, 0.0):
        call = CountCall(group="shop", shards=(0,), hold_s=hold_s)
        await peer_handler.answer(call, deadline=here.deadline(), principal=PEER)
        with pytest.raises(UnknownGroupError):
            await here.prepare(transaction_id=own_id(0))


@pytest.mark.parametrize("then", ["counted", "no owner of another shard", "lost answer"])
async def test_a_group_is_written_again_if_a_new_owner_accepted_a_prepare_during_its_deletion(then: str) -> None:
    """Nobody asked that owner to hold prepares back. The group is as it was when it was deleted, and takes prepares."""
    here = await instance(set())
    first, second = await instance({0}, here.memory), await instance({1}, here.memory)
    await here.group()
    change, new = here.memory.groups.change, list[World]()

    async def change_after_a_move(*call: Any, **given: Any) -> None:
        if not new:
            here.memory.groups.change = change  # type: ignore[method-assign]
            await here.group(urls=("http://changed/",))
            second.memory.kill()
            new.append(await instance({1}, here.memory))
            await new[0].prepare(transaction_id=own_id(1))
            if then == "no owner of another shard":
                first.memory.kill()
            here.memory.peers.lose_answers = int(then == "lost answer")
        await change(*call, **given)

    here.memory.groups.change = change_after_a_move  # type: ignore[method-assign]
    with pytest.raises(GroupInUseError if then != "no owner of another shard" else ShardUnavailableError):
        await here.coordinator.delete_group("shop", deadline=asyncio.get_running_loop().time() + 4)
    assert here.coordinator._groups.get("shop").urls == ("http://changed/",)
    assert then != "counted" or (await new[0].prepare(transaction_id=own_id(1, 1))).created
    assert (await new[0].end(own_id(1), Outcome.COMMIT)).state == "committed"


async def test_a_deletion_that_is_refused_leaves_the_group_as_it_was(pair: tuple[World, World]) -> None:
    here, there = pair
    await there.prepare(transaction_id=own_id(1))
    with pytest.raises(GroupInUseError):
        await here.coordinator.delete_group("shop", deadline=here.deadline())
    assert (await there.prepare(transaction_id=own_id(1, 1))).created
    assert (await here.prepare(transaction_id=own_id(0, 1))).created


async def test_a_group_is_not_deleted_while_a_shard_cannot_be_asked(pair: tuple[World, World]) -> None:
    here, there = pair
    there.memory.kill()
    with pytest.raises(ShardUnavailableError):
        await here.coordinator.delete_group("shop", deadline=here.deadline())
    assert (await here.coordinator.get_group("shop", deadline=here.deadline())).group == "shop"


async def test_a_poll_hands_out_the_checks_of_every_owner_once(pair: tuple[World, World]) -> None:
    here, _ = pair
    await here.group(mode=CheckMode.PULL)
    names = {(await here.prepare(transaction_id=own_id(shard, shard))).id for shard in (0, 1)}
    here.memory.clock.advance(6)
    for world in pair:
        await world.scan()
    polls = await asyncio.gather(
        *(world.coordinator.lease_checks("shop", at_most=5, wait_s=0.2) for world in (*pair, *pair))
    )
    leased = [check.id for checks in polls for check in checks]
    assert sorted(leased) == sorted(names)


@pytest.mark.parametrize("shard, lost", [(0, "caller"), (1, "caller"), (1, "answer"), (1, "confirmation")])
async def test_a_check_that_no_poll_has_taken_is_not_counted(pair: tuple[World, World], shard: int, lost: str) -> None:
    """The caller hangs up, or the connection to the owner breaks: policy must not give up without a check."""
    here, owner = pair[0], pair[shard]
    ask, is_connected = here.memory.peers.ask, True

    async def ask_and_lose(instance: OwnerHint, call: PeerCall, **given: Any) -> Any:
        nonlocal is_connected
        if lost == "confirmation" and isinstance(call, LeaseCall) and call.settled:
            raise PeerLostError("the connection was closed")
        answer = await ask(instance, call, **given)
        if lost == "answer":
            raise PeerLostError("the connection was closed")
        is_connected = lost != "caller"
        return answer

    await here.group(mode=CheckMode.PULL)
    name = (await here.prepare(transaction_id=own_id(shard))).id
    await owner.scan(after_s=6)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(here.memory.peers, "ask", ask_and_lose)
        found = await here.coordinator.lease_checks("shop", at_most=5, wait_s=0, is_connected=lambda: is_connected)
        await here.until(lambda: not here.coordinator._fan_out._settling)
    assert [check.id for check in found] == [name] * (lost == "confirmation")
    await owner.scan()
    assert (await owner.get(name)).checks == 0
    if lost == "confirmation":
        await here.end(name, Outcome.COMMIT, check_id=found[0].check_id)
        assert (await here.get(name)).cause is Cause.CHECK
        return
    if lost == "answer":
        assert await here.coordinator.lease_checks("shop", at_most=5, wait_s=0) == []
        await owner.scan(after_s=31)
    [check] = await here.coordinator.lease_checks("shop", at_most=5, wait_s=0)
    assert check.attempt == 1
    await here.until(lambda: not here.coordinator._fan_out._settling)
    await owner.scan()
    assert (await owner.get(name)).checks == 1


async def test_a_poll_that_waits_ends_with_a_check_that_comes_due_elsewhere(pair: tuple[World, World]) -> None:
    here, there = pair
    await here.group(mode=CheckMode.PULL)
    name = (await here.prepare(transaction_id=own_id(1))).id
    waiting = asyncio.create_task(here.coordinator.lease_checks("shop", at_most=5, wait_s=3600))
    await asyncio.sleep(0.01)
    here.memory.clock.advance(6)
    await there.scan()
    async with asyncio.timeout(GENEROUS_S):
        [check] = await waiting
    assert check.id == name


async def test_a_poll_goes_on_while_an_owner_is_away(pair: tuple[World, World]) -> None:
    """The checks of this instance are handed out; the others come with a later poll."""
    here, _ = pair
    await here.group(mode=CheckMode.PULL)
    name = (await here.prepare(transaction_id=own_id(0))).id
    here.memory.clock.advance(6)
    await here.scan()
    here.memory.kafka.handlers.clear()
    [check] = await here.coordinator.lease_checks("shop", at_most=5, wait_s=1)
    assert check.id == name
    assert await here.coordinator.lease_checks("shop", at_most=5, wait_s=0.1) == []


async def test_a_poll_is_answered_though_what_waits_for_others_is_cancelled_first(pair: tuple[World, World]) -> None:
    """An instance that stops ends its calls to others; its callers are answered."""
    here, _ = pair
    await here.group(mode=CheckMode.PULL)
    waiting = asyncio.create_task(here.coordinator.lease_checks("shop", at_most=5, wait_s=3600))
    gathering = here.coordinator._fan_out
    await here.until(lambda: gathering._waiting)
    first = set(gathering._waiting.values())
    await gathering.close()
    await here.until(
        lambda: set(gathering._waiting.values()) - first
    )  # it asks again: nothing has come due, and this instance still serves
    await here.coordinator.drain()
    async with asyncio.timeout(GENEROUS_S):
        assert await waiting == []


async def test_a_shard_that_goes_while_an_id_is_looked_for_has_the_call_forwarded(
    pair: tuple[World, World], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between reading the end of half and waiting for it: nothing would wake a call that waits for a lost shard."""
    here, there = pair
    name, half_end = own_id(0), here.memory.half_log.half_end

    async def lose_shard(shard: int, *, deadline: float) -> int:
        end = await half_end(shard, deadline=deadline)
        here.memory.kill()
        here.coordinator.shards.lost(0)
        return end + 1

    monkeypatch.setattr(here.memory.half_log, "half_end", lose_shard)
    with pytest.raises(NotServedError):
        await here.get(name)
    assert there.coordinator.shards.served == [1]


async def test_a_call_whose_caller_went_away_is_answered_all_the_same(pair: tuple[World, World]) -> None:
    """Resources of an answer, such as a group's bytes, are released; the other instance is not called again."""
    here, _ = pair
    request = Prepare(group="shop", messages=(Message(topic="orders", value=b"v"),), id=own_id(1))
    answers = here.begin_prepares([request], deadline=here.deadline())
    answers.abandon()
    await here.until(lambda: not answers.left)
    ends = here.begin_ends([End(id=own_id(1), outcome=Outcome.UNKNOWN)], deadline=here.deadline())
    ends.abandon()
    await here.until(lambda: not ends.left)
    assert here.memory.observer.count("forwarded", call="end") == 0
