"""Prepares of one id with different content: what is acknowledged is what the next owner of the shard finds."""

import asyncio
from collections.abc import Sequence
from typing import Any

import msgspec
import pytest

from halfway.coordinator.ports import Appended
from halfway.protocol.errors import (
    HalfwayError,
    IdReusedError,
    OutcomeUnknownError,
    OverloadedError,
    TopicUnavailableError,
)
from halfway.protocol.ids import shard_of
from halfway.protocol.records import Foreign, Half, Message, Origin, fingerprint
from halfway.protocol.transactions import Outcome
from tests.support.ids import named_id
from tests.support.service.world import SHARDS, World

ID = named_id("order-1")
NUMBER = shard_of(ID, SHARDS) or 0
ONE = Message(topic="orders", key=b"k", value=b"one")
OTHER = Message(topic="orders", key=b"k", value=b"other")

Halves = Sequence[tuple[Half, Any]]
News = tuple[int, Sequence[tuple[int, str, Half | Foreign | None]], int]


def half_of(world: World, message: Message, barrier: int) -> Half:
    now = world.memory.clock.now_ms()
    return Half(
        id=ID,
        group="shop",
        messages=(message,),
        prepared_at=now,
        since=now,
        fingerprint=fingerprint("shop", (message,), None),
        barrier=barrier,
    )


def halves(world: World) -> list[Half]:
    records = world.memory.log.shards[NUMBER].half.records
    return [record.value for record in records if record.key == ID and isinstance(record.value, Half)]


class SlowTail:
    """Keeps what the tail has read from the coordinator."""

    def __init__(self, world: World, patched: pytest.MonkeyPatch) -> None:
        self._world = world
        self._patched = patched
        self._kept: list[News] = []
        patched.setattr(world.coordinator.shards, "appended", lambda *news: self._kept.append(news))

    def catch_up(self) -> None:
        self._patched.undo()
        for news in self._kept:
            self._world.coordinator.shards.appended(*news)


async def delivered_after_a_restart(world: World) -> list[bytes | None]:
    restarted = await world.restart()
    await restarted.end(ID, Outcome.COMMIT)
    found = [record.value for record in restarted.memory.records("orders")]
    await restarted.stop()
    return found


async def test_what_was_acknowledged_is_delivered_although_a_late_half_came_just_before(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The owner had not read the late half of a former owner, and died before it could correct the log."""
    with monkeypatch.context() as patched:
        SlowTail(world, patched)
        world.memory.foreign_prepare(NUMBER, half_of(world, ONE, barrier=-1))
        assert (await world.prepare(OTHER, transaction_id=ID)).created
        assert await delivered_after_a_restart(world) == [b"other"]


async def test_a_half_on_its_way_counts_although_a_prepare_that_knew_of_it_was_not_stored(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of three prepares the first is not confirmed and on its way, the second waits for the log and is not stored.

    The third must not be acknowledged before the log shows which of the two comes first.
    """
    on_their_way: list[tuple[int, Half]] = []

    def keep(shard: int, halves: Halves, appended: Appended[Any], *, deadline: float) -> None:
        on_their_way.extend((shard, half) for half, _ in halves)
        appended([(token, OutcomeUnknownError("not in time")) for _, token in halves])

    def refuse(shard: int, halves: Halves, appended: Appended[Any], *, deadline: float) -> None:
        appended([(token, OverloadedError("too many records wait")) for _, token in halves])

    def land(shard: int, halves: Halves, appended: Appended[Any], *, deadline: float) -> None:
        """Append both in their order, and answer before the tail has read them."""
        stored = [world.memory.log.shards[number].half.append(half) for number, half in on_their_way]
        [(half, token)] = halves
        stored.append(world.memory.log.shards[shard].half.append(half))
        appended([(token, stored[-1])])

    monkeypatch.setattr(world.memory.half_log, "append", keep)
    with pytest.raises(OutcomeUnknownError):
        await world.prepare(ONE, transaction_id=ID)
    monkeypatch.setattr(world.memory.half_log, "append", refuse)
    with pytest.raises(OverloadedError):
        await world.prepare(OTHER, transaction_id=ID)
    with monkeypatch.context() as patched:
        patched.setattr(world.memory.half_log, "append", land)
        with pytest.raises(IdReusedError):
            await world.prepare(OTHER, transaction_id=ID)
    assert await delivered_after_a_restart(world) == [b"one"]


@pytest.mark.parametrize("refusal", [TopicUnavailableError("half takes no such record now"), OverloadedError("full")])
async def test_a_repeat_is_not_refused_as_not_stored_if_a_former_owner_has_stored_it(
    world: World, monkeypatch: pytest.MonkeyPatch, refusal: HalfwayError
) -> None:
    """Its half has to be written again before it is acknowledged, and that is refused."""
    await world.prepare(ONE, transaction_id=ID)
    again = await world.restart()

    async def refuse(*_: object, **__: object) -> None:
        raise refusal

    monkeypatch.setattr(again.coordinator._ending, "write_again", refuse)
    with pytest.raises(OutcomeUnknownError):
        await again.prepare(ONE, transaction_id=ID)
    await again.stop()


async def test_of_two_own_halves_the_log_decides_which_one_counts(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first one was not confirmed, and lands just before the second: the second is refused."""
    await world.settled()
    world.memory.faults.next_append_ambiguous(stored=False)
    with pytest.raises(OutcomeUnknownError):
        await world.prepare(ONE, transaction_id=ID)
    with monkeypatch.context() as patched:
        half_end = world.memory.half_log.half_end

        async def just_before(shard: int, *, deadline: float) -> int:
            end = await half_end(shard, deadline=deadline)
            barrier = world.coordinator.shards.get(NUMBER).state.barrier
            asyncio.get_running_loop().call_soon(
                world.memory.foreign_prepare, NUMBER, half_of(world, ONE, barrier=barrier)
            )
            return end

        patched.setattr(world.memory.half_log, "half_end", just_before)
        tail = SlowTail(world, patched)
        second = asyncio.create_task(world.prepare(OTHER, transaction_id=ID))
        await world.until(lambda: len(halves(world)) == 2)
        await asyncio.sleep(0.01)
        assert not second.done(), "it waits for the tail"
        tail.catch_up()
    with pytest.raises(IdReusedError):
        await second
    assert await delivered_after_a_restart(world) == [b"one"]


async def test_a_half_of_a_former_owner_is_acknowledged_when_the_lane_has_written_it_again(world: World) -> None:
    """Otherwise a half that a later owner than its own wrote could still arrive, and count."""
    world.memory.foreign_prepare(NUMBER, half_of(world, ONE, barrier=-1))
    await world.until(lambda: world.coordinator.shards.get(NUMBER).state.find(ID) is not None)
    assert not (await world.prepare(ONE, transaction_id=ID)).created
    assert [half.origin for half in halves(world)] == [Origin.PREPARE, Origin.LANE]
    late = half_of(world, OTHER, barrier=world.coordinator.shards.get(NUMBER).state.barrier)
    world.memory.foreign_prepare(NUMBER, msgspec.structs.replace(late, barrier=late.barrier - 1))
    assert await delivered_after_a_restart(world) == [b"one"]


async def test_a_half_that_is_stored_when_its_shard_is_away_is_not_acknowledged(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next owner may have taken other content of its id; the same prepare again is answered by that owner."""
    with monkeypatch.context() as patched:
        patched.setattr(world.coordinator.shards, "find", lambda _: None)
        with pytest.raises(OutcomeUnknownError) as refused:
            await world.prepare(ONE, transaction_id=ID)
        assert refused.value.fields["id"] == ID
        made = await world.prepare(ONE)
        assert made.created, "nobody else can have used an id that halfway made"
    assert not (await world.prepare(ONE, transaction_id=ID)).created


@pytest.mark.parametrize("reads", [False, True])
async def test_what_is_acknowledged_is_delivered_if_a_commit_began_with_other_content(
    world: World, monkeypatch: pytest.MonkeyPatch, reads: bool
) -> None:
    """A late half of a former owner is being committed when the tail reads this owner's own half, not acknowledged yet.

    A write that is in the lane stands: the prepare is in doubt. A commit that is still reading its payload reads again.
    """
    half_log, shards = world.memory.half_log, world.coordinator.shards
    former = next(record.offset for record in world.memory.log.shards[NUMBER].half.records if record.key == "!barrier")
    world.memory.lose()
    await world.until(lambda: len(shards.served) == SHARDS)
    arrives, acknowledged, readable = asyncio.Event(), asyncio.Event(), asyncio.Event()
    append, read_half = half_log.append, half_log.read_half
    slow: list[asyncio.Task[None]] = []

    async def append_slowly(shard: int, some: Halves, appended: Appended[Any], **deadline: float) -> None:
        answers: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        await arrives.wait()
        append(shard, some, answers.set_result, **deadline)
        await answers
        await acknowledged.wait()
        appended(answers.result())

    async def read_slowly(*args: Any, **deadline: Any) -> Half:
        half = await read_half(*args, **deadline)
        await readable.wait()
        return half

    def pending_is(message: Message) -> bool:
        shard = shards.find(NUMBER)
        entry = None if shard is None else shard.state.find(ID)
        return entry is not None and entry.fingerprint == fingerprint("shop", (message,), None)

    monkeypatch.setattr(
        half_log, "append", lambda *args, **given: slow.append(asyncio.create_task(append_slowly(*args, **given)))
    )
    monkeypatch.setattr(half_log, "read_half", read_slowly)
    prepare = asyncio.ensure_future(world.prepare(ONE, transaction_id=ID))
    await world.until(lambda: shards.preparing)
    world.memory.foreign_prepare(NUMBER, half_of(world, OTHER, former))
    await world.until(lambda: pending_is(OTHER))
    if reads:
        shards.payloads.drop(ID)
    else:
        readable.set()
    with world.memory.faults.lane_held():
        commit = asyncio.ensure_future(world.end(ID, Outcome.COMMIT))
        await world.until(lambda: ID in shards.claims and reads == (shards.claims[ID].write is None))
        arrives.set()
        await world.until(lambda: pending_is(ONE))
        readable.set()
        if not reads:
            acknowledged.set()
            with pytest.raises(OutcomeUnknownError):
                await prepare
    assert (await commit).changed
    acknowledged.set()
    await asyncio.gather(prepare, return_exceptions=True)
    assert [record.value for record in world.memory.records("orders")] == [b"one" if reads else b"other"]
    assert reads == (prepare.exception() is None)
