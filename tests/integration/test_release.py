"""A shard leaves an incarnation by a confirmed release, or with the incarnation (docs/protocol.md, step 3)."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager

import pytest

from halfway.kafka.clients.config import KafkaConfig
from halfway.kafka.clients.transactional_producer import TransactionalProducer
from halfway.kafka.lane.lane import LaneThread
from halfway.kafka.records.codec import decode_owner
from halfway.protocol.records import Message
from halfway.protocol.transactions import State
from tests.support.contract.backend import prepare
from tests.support.domain.states import state_of
from tests.support.loop_time import LoopTime
from tests.support.ownership.cluster_harness import PATIENCE_S, Instance, commit_of, half, in_shard, read_topic, running
from tests.support.replies import submitted
from tests.support.waiting import until_true


@contextmanager
def held(monkeypatch: pytest.MonkeyPatch, owner: type, name: str) -> Iterator[tuple[threading.Event, threading.Event]]:
    """Hold the first call of a lane's method on its thread: an event for its arrival, and one to release it."""
    met, go = threading.Event(), threading.Event()
    call = getattr(owner, name)

    def slow(*args: object) -> object:
        if not met.is_set():
            met.set()
            assert go.wait(PATIENCE_S)
        return call(*args)

    monkeypatch.setattr(owner, name, slow)
    try:
        yield met, go
    finally:
        go.set()


LIMIT_S = 20.0


async def in_vain(met: threading.Event, leaving: Awaitable[object]) -> object:
    """Return what a call returns whose limit is over as soon as the lane has begun."""
    call = asyncio.ensure_future(leaving)
    await asyncio.sleep(0)  # now its limit is set
    return await LoopTime().out(call, LIMIT_S, once=met.is_set, what="the lane has begun")


async def give_back(instance: Instance, shard: int) -> None:
    """Give back a shard as in a revocation."""
    until = asyncio.get_running_loop().time() + LIMIT_S
    instance.cluster.membership._on_revoked(frozenset({shard}))
    await instance.cluster.membership._give_back(frozenset({shard}), until)


def last_owner(config: KafkaConfig, shard: int) -> str | None:
    """Return the incarnation in the last owner record of a shard, None if it is released."""
    value = [seen.value for seen in read_topic(config, config.owners_topic) if seen.partition == shard][-1]
    return None if value is None else decode_owner(value).incarnation


async def release_as_surplus(instance: Instance, shard: int) -> object:
    """Release a shard like a claimed one that is no longer wanted."""
    incarnation = instance.cluster.membership._incarnation
    assert incarnation is not None
    incarnation.drop(shard)
    instance.service.lost(shard)
    return await incarnation.release([shard], asyncio.get_running_loop().time() + LIMIT_S)


@pytest.mark.parametrize("leave", [give_back, release_as_surplus])
async def test_a_late_release_does_not_land_behind_the_claim_of_who_gets_the_shard_back(
    config: KafkaConfig, monkeypatch: pytest.MonkeyPatch, leave: Callable[[Instance, int], Awaitable[object]]
) -> None:
    """The release outlives its time, the same instance gets the shard again, then the release continues."""
    async with running(config) as instance:
        with held(monkeypatch, LaneThread, "_produce_releases") as (met, go):
            before = instance.incarnation
            old = instance.cluster.membership._incarnation
            assert old is not None
            assert not await in_vain(met, leave(instance, 0))
            assert met.is_set()
            instance.cluster.membership._on_assigned({0})
            await instance.serves([0, 1])
            go.set()
            await asyncio.to_thread(old.lane.join, PATIENCE_S if instance.incarnation != before else 2)
        assert await asyncio.to_thread(last_owner, config, 0) == instance.incarnation


async def test_a_shard_is_not_acquired_again_while_its_release_is_under_way(
    config: KafkaConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is wanted again in the meantime: after the confirmed release the same incarnation claims it again."""
    async with running(config) as instance:
        with held(monkeypatch, LaneThread, "_produce_releases") as (met, go):
            before = instance.incarnation
            giving = asyncio.create_task(give_back(instance, 0))
            await until_true(met.is_set, "a release")
            instance.cluster.membership._on_assigned({0})
            await asyncio.sleep(0.3)  # it would begin at the next turn of the loop
            assert 0 not in instance.cluster.membership._acquisitions.shards
            go.set()
            await giving
        await instance.serves([0, 1])
        assert instance.incarnation == before
        assert await asyncio.to_thread(last_owner, config, 0) == before


async def test_an_end_that_outlives_its_shard_is_known_when_the_shard_comes_back(
    config: KafkaConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A commit is under way when the shard is revoked; the shard returns: the id is committed, or still pending."""
    orders = config.prefix + "orders"
    one = half(in_shard(0, "one"), Message(topic=orders, value=b"once"))
    async with running(config) as instance:
        [at] = await asyncio.to_thread(prepare, config, 0, one)
        await until_true(lambda: state_of(instance.service.states[0], one.id) is State.PREPARED, "the prepare")
        instance.service.hold = asyncio.Event()
        with held(monkeypatch, TransactionalProducer, "begin") as (met, go):
            old = instance.cluster.membership._incarnation
            assert old is not None
            first = submitted(instance.cluster.lane, commit_of(0, one, at))
            await until_true(met.is_set, "a Kafka transaction")
            await in_vain(met, give_back(instance, 0))
            instance.service.hold = None
            instance.cluster.membership._on_assigned({0})
            await instance.serves([0, 1])
            go.set()
            await asyncio.gather(first, return_exceptions=True)
            await asyncio.to_thread(old.lane.join, 2)
        known = state_of(instance.service.states[0], one.id)
        stands = [seen.value for seen in await asyncio.to_thread(read_topic, config, orders)]
        assert (known, stands) in ((State.COMMITTED, [b"once"]), (State.PREPARED, []))
