"""The port `Membership` while an instance runs: the records of the tail."""

import pytest

from halfway.protocol.transactions import State
from tests.support.contract.backend import SHARDS, Backend, new_id
from tests.support.contract.instance import Instance, half_of
from tests.support.domain.shard_records import tombstone_of
from tests.support.domain.states import state_of
from tests.support.waiting import until_true

pytestmark = pytest.mark.asyncio(loop_scope="module")


async def test_every_shard_is_acquired_once(instance: Instance) -> None:
    assert sorted(instance.listener.events) == [("acquired", shard) for shard in range(SHARDS)]
    assert [instance.states[shard].shard for shard in range(SHARDS)] == list(range(SHARDS))


async def test_the_tail_brings_what_others_append(instance: Instance, backend: Backend) -> None:
    """A paused former owner may still append an earlier prepare."""
    half = half_of(new_id(shard=1))
    offset = await backend.foreign_prepare(1, half)
    await until_true(lambda: instance.states[1].find(half.id) is not None, "the tail brings it")
    assert instance.pending(1, half.id).offset == offset
    await instance.wait_for_tail(1)
    assert instance.states[1].half_tail > offset


async def test_a_late_prepare_of_an_ended_id_is_seen_as_a_stray_and_gets_a_tombstone(
    instance: Instance, backend: Backend
) -> None:
    half = half_of(new_id())
    await instance.prepare(0, half)
    await instance.write(instance.commit_of(0, half))
    late = await backend.foreign_prepare(0, half)
    await instance.wait_for_tail(0)
    assert state_of(instance.states[0], half.id) is State.COMMITTED
    assert (half.id, late) in instance.states[0].strays()
    await instance.write(tombstone_of(half, deadline=instance.deadline()))
    assert half.id not in {name for name, _ in instance.states[0].strays()}


async def test_own_writes_come_again_by_the_tail_and_change_nothing(instance: Instance) -> None:
    half = half_of(new_id())
    await instance.prepare(0, half)
    await instance.park(0, half, reason="no verdict")
    await instance.resume(0, half)
    await instance.wait_for_tail(0)
    assert state_of(instance.states[0], half.id) is State.PREPARED
    await instance.write(instance.commit_of(0, half))
    await instance.wait_for_tail(0)
    assert state_of(instance.states[0], half.id) is State.COMMITTED
    assert half.id not in {name for name, _ in instance.states[0].strays()}


async def test_the_tail_comes_to_the_end_though_the_last_records_are_not_its_own_kind(instance: Instance) -> None:
    """Barriers and control records are at the end: a read barrier must get past them."""
    for shard in range(SHARDS):
        await instance.wait_for_tail(shard)
    half = half_of(new_id())
    await instance.prepare(0, half)
    await instance.write(instance.commit_of(0, half))
    await instance.wait_for_tail(0)
