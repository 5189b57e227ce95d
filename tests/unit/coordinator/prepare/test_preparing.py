"""Prepares: refusals, repeats, and lost answers."""

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any

import pytest

from halfway.coordinator.ports import Appended, TopicFacts
from halfway.coordinator.requests import Prepare, Prepared, ServiceLimits
from halfway.protocol.errors import (
    IdReusedError,
    InvalidRequestError,
    MessageTooLargeError,
    OutcomeUnknownError,
    UnknownGroupError,
)
from halfway.protocol.records import Foreign, Half, LimitOverrides, Message
from halfway.protocol.transactions import Outcome, State
from tests.support.ids import named_id
from tests.support.replies import once
from tests.support.service.broker import topic
from tests.support.service.world import SHARDS, World

BIG = 900_000


@pytest.mark.parametrize("stored", [True, False])
async def test_a_lost_answer_is_outcome_unknown_and_a_repeat_is_safe(world: World, *, stored: bool) -> None:
    """The caller may send the same id again; there is one transaction in the end."""
    world.memory.faults.next_append_ambiguous(stored=stored)
    with pytest.raises(OutcomeUnknownError) as raised:
        await world.prepare(transaction_id=named_id("order-1"))
    assert raised.value.fields["id"] == named_id("order-1")
    again = await world.prepare(transaction_id=named_id("order-1"))
    assert again.state is State.PREPARED
    assert (await world.end(named_id("order-1"), Outcome.COMMIT)).changed
    await world.scan(after_s=100)
    assert len(world.memory.records("orders")) == 1
    assert world.memory.caller.requests == []


async def test_sizes_are_refused_before_they_are_stored(world: World) -> None:
    """A message above its topic's limit, a prepare above halfway's, and a topic with too small a limit."""
    world.memory.create_topic("points", topic(1, max_message_bytes=100_000))
    with pytest.raises(MessageTooLargeError, match="points"):
        await world.prepare(Message(topic="points", key=b"k", value=b"x" * 100_000))
    many = tuple(Message(topic="orders", key=b"k", value=b"x" * BIG) for _ in range(6))
    with pytest.raises(MessageTooLargeError, match="together"):
        await world.prepare(*many)
    world.memory.create_topic("points", topic(1, max_message_bytes=5000))
    with pytest.raises(InvalidRequestError, match=r"max\.message\.bytes 5000"):
        await world.prepare(Message(topic="points", key=b"k", value=b"x"))


async def test_a_prepare_that_waits_for_its_topic_is_not_stored_after_its_group_was_deleted(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A deletion counts prepares on their way to the log: this one is not there yet."""
    asked, gate, described = asyncio.Event(), asyncio.Event(), world.memory.topics.describe

    async def slowly(names: Sequence[str], *, deadline: float) -> Mapping[str, TopicFacts | None]:
        asked.set()
        await gate.wait()
        return await described(names, deadline=deadline)

    monkeypatch.setattr(world.memory.topics, "known", lambda _: None)
    monkeypatch.setattr(world.memory.topics, "describe", slowly)
    preparing = asyncio.create_task(world.prepare())
    await asked.wait()
    await world.coordinator.delete_group("shop", deadline=world.deadline())
    gate.set()
    with pytest.raises(UnknownGroupError):
        await preparing
    assert world.coordinator.shards.unresolved == 0


async def test_a_prepare_that_a_former_owner_stored_too_is_answered_by_what_stands(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The former owner's record was committed while this one was on its way: the answer must not be pending."""
    gate, append = asyncio.Event(), world.memory.half_log.append
    halves: list[tuple[int, Half]] = []

    def watched(shard: int, appending: Sequence[tuple[Half, Any]], appended: Appended[Any], *, deadline: float) -> None:
        halves.extend((shard, half) for half, _ in appending)
        once(gate, append)(shard, appending, appended, deadline=deadline)

    monkeypatch.setattr(world.memory.half_log, "append", watched)
    preparing = asyncio.create_task(world.prepare(transaction_id=named_id("order-1")))
    await world.until(lambda: halves)
    world.memory.foreign_prepare(*halves[0])
    await world.end(named_id("order-1"), Outcome.COMMIT)
    gate.set()
    answered = await preparing
    assert (answered.state, answered.created) == (State.COMMITTED, False)
    assert len(world.memory.records("orders")) == 1


async def test_a_prepare_looks_again_if_another_one_of_its_id_became_ambiguous_meanwhile(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The end offset that it has read does not cover the half of the later prepare, which the tail has not read yet."""
    await world.settled()
    world.memory.faults.next_append_ambiguous(stored=False)
    with pytest.raises(OutcomeUnknownError):
        await world.prepare(transaction_id=named_id("order-1"))
    asked, go_on, half_end = asyncio.Event(), asyncio.Event(), world.memory.half_log.half_end
    told: list[tuple[int, Sequence[tuple[int, str, Half | Foreign | None]], int]] = []

    async def slow(shard: int, *, deadline: float) -> int:
        end = await half_end(shard, deadline=deadline)
        asked.set()
        await go_on.wait()
        return end

    with monkeypatch.context() as patched:
        patched.setattr(world.memory.half_log, "half_end", slow)
        other = asyncio.create_task(
            world.prepare(Message(topic="orders", key=b"k", value=b"other"), transaction_id=named_id("order-1"))
        )
        await asked.wait()
    with monkeypatch.context() as patched:
        patched.setattr(world.coordinator.shards, "appended", lambda *news: told.append(news))
        world.memory.faults.next_append_ambiguous(stored=True)
        with pytest.raises(OutcomeUnknownError):
            await world.prepare(transaction_id=named_id("order-1"))
        go_on.set()
        await asyncio.sleep(0.01)
    for news in told:
        world.coordinator.shards.appended(*news)
    with pytest.raises(IdReusedError):
        await other


async def test_what_a_prepare_holds_is_given_back_if_its_caller_goes_away_while_it_waits(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Every prepare is answered once, even if no caller waits."""
    world = await World.start(limits=ServiceLimits(shards=SHARDS, default_limits=LimitOverrides(bytes_in_flight=10)))
    await world.group()
    asked, go_on, describe = asyncio.Event(), asyncio.Event(), world.memory.topics.describe

    async def slowly(*args: object, **named: object) -> object:
        asked.set()
        await go_on.wait()
        return await describe(*args, **named)  # type: ignore[arg-type]  # passed through

    with monkeypatch.context() as patched:
        patched.setattr(world.memory.topics, "known", lambda _: None)
        patched.setattr(world.memory.topics, "describe", slowly)
        request = Prepare(group="shop", messages=(Message(topic="orders", value=b"x" * 8),))
        answers = world.begin_prepares([request], deadline=world.deadline())
        await asked.wait()
        answers.abandon()
        go_on.set()
        await world.until(lambda: not answers.left)
    assert (await world.prepare(Message(topic="orders", value=b"x" * 8))).created
    await world.stop()


async def test_one_that_breaks_when_it_is_admitted_keeps_no_other_of_its_list_from_being_done(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    broken = RuntimeError("broken")

    def require(_principal: object, _permission: object, group: str | None = None) -> None:
        if group == "broken":
            raise broken

    monkeypatch.setattr(world.coordinator.authority, "require", require)
    messages = (Message(topic="orders", value=b"v"),)
    requests = [Prepare(group=group, messages=messages) for group in ("shop", "broken", "shop")]
    first, second, third = await world.begin_prepares(requests, deadline=world.deadline()).all()
    assert isinstance(first, Prepared)
    assert second is broken
    assert isinstance(third, Prepared)
