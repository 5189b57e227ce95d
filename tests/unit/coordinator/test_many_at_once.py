"""Random lists of prepares and ends at two instances whose lanes are lost: nothing is held forever."""

import asyncio
import dataclasses
import random
from collections import Counter

import pytest

from halfway.coordinator.requests import End, EndResult, Prepare, Prepared
from halfway.protocol.errors import HalfwayError
from halfway.protocol.ids import shard_of
from halfway.protocol.records import LimitOverrides, Message, Op
from halfway.protocol.transactions import Cause, Outcome
from tests.support.ids import named_id
from tests.support.service.begun import Begun
from tests.support.service.broker import Memory
from tests.support.service.world import LIMITS, SHARDS, World

LISTS = 50
SENT = [named_id(f"sent-{number}") for number in range(30)]
LIMITED = dataclasses.replace(LIMITS, default_limits=LimitOverrides(bytes_in_flight=4000, pending=5000))


async def two_instances() -> list[World]:
    first = Memory(shards=SHARDS, topics={"orders": 3}, owns={0})
    worlds = [await World.start(one, LIMITED) for one in (first, Memory(shards=SHARDS, owns={1}, beside=first))]
    await worlds[0].group()
    return worlds


def prepare(chance: random.Random) -> Prepare:
    topic = chance.choice(["orders"] * 9 + ["missing"])
    message = Message(topic=topic, key=b"k", value=b"v" * chance.choice([1, 300]))
    return Prepare(group="shop", messages=(message,), id=chance.choice([None, None, chance.choice(SENT)]))


def end(chance: random.Random, names: list[str]) -> End:
    return End(
        id=chance.choice(names),
        outcome=chance.choice(list(Outcome)),
        cause=chance.choice([Cause.PRODUCER, Cause.OPERATOR]),
        remark=chance.choice([None, "looked it up"]),
    )


def nothing_is_held(world: World) -> bool:
    """Return whether every claim, reservation, count and timer was released."""
    service = world.coordinator
    ending, preparer = service._ending, service._preparer
    return not (
        service.shards.claims
        or service.shards.preparing
        or ending._new
        or ending._deadlines._watched
        or preparer._new
        or preparer._deadlines._watched
        or preparer._reserved
        or preparer._group_limits._in_flight
    )


@pytest.mark.parametrize("seed", range(6))
async def test_every_place_is_answered_and_gives_back_what_it_took(seed: int) -> None:
    """Even if callers disconnect and answers are lost; and each id is decided once."""
    chance, worlds = random.Random(seed), await two_instances()
    prepares: list[Begun[Prepared]] = []
    ends: list[tuple[list[End], Begun[EndResult]]] = []
    for _ in range(LISTS):
        world = chance.choice(worlds)
        if chance.random() < 0.15:
            chance.choice(worlds).memory.faults.lose_next_batch(written=chance.random() < 0.5)
        if chance.random() < 0.15:
            chance.choice(worlds).memory.faults.next_append_ambiguous(stored=chance.random() < 0.5)
        made = [one.id for answers in prepares for one in answers.results if isinstance(one, Prepared)]
        wanted = [end(chance, SENT + made) for _ in range(chance.randint(0, 8))]
        deadline = world.deadline(chance.choice([0.001, 0.02, 5, 5, 5]))
        ends.append((wanted, world.begin_ends(wanted, deadline=deadline)))
        halves = [prepare(chance) for _ in range(chance.randint(0, 8))]
        prepares.append(world.begin_prepares(halves, deadline=deadline))
        for _ in range(chance.randint(0, 3)):
            await asyncio.sleep(0)
        if chance.random() < 0.2:
            ends[-1][1].abandon()
            prepares[-1].abandon()
    await worlds[0].until(lambda: not any(answers.left for answers in prepares))
    await worlds[0].until(lambda: not any(answers.left for _, answers in ends))
    await worlds[0].until(lambda: all(nothing_is_held(world) for world in worlds))
    await worlds[0].until(lambda: all(world.coordinator.shards.served for world in worlds))

    log = worlds[0].memory.log
    final = Counter(
        record.key
        for shard in log.shards
        for record in shard.op.records
        if isinstance(record.value, Op) and record.value.kind.final
    )
    stands = Counter(dict(record.headers)["halfway-transaction-id"] for record in worlds[0].memory.records("orders"))
    assert set(final.values()) == set(stands.values()) == {1}
    for wanted, answers in ends:
        for asked, told in zip(wanted, answers.results, strict=True):
            assert isinstance(told, EndResult | HalfwayError | ConnectionAbortedError)
            assert not isinstance(told, EndResult) or told.id == asked.id
    for half in (one for answers in prepares for one in answers.results if isinstance(one, Prepared)):
        shards = [world.coordinator.shards.find(shard_of(half.id, SHARDS) or 0) for world in worlds]
        assert any(shard is not None and shard.state.find(half.id) is not None for shard in shards)
    for world in worlds:
        await world.stop()
