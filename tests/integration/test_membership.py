"""Several instances in one group, and one instance through its possible failures."""

from __future__ import annotations

import asyncio
import threading
import time
from contextlib import nullcontext

import pytest

from halfway.kafka.clients.config import KafkaConfig
from halfway.kafka.clients.transactional_producer import ProducerFailedError, initialised
from halfway.kafka.ownership.acquisition import Acquisition
from halfway.kafka.ownership.former_owners import AcquireError, FencedOwners
from halfway.protocol.errors import LaneLostError, NotWrittenError
from halfway.protocol.records import Message
from tests.support.brokers.fixtures import Kafka
from tests.support.contract.backend import prepare
from tests.support.domain.states import state_of
from tests.support.ownership.cluster_harness import (
    PATIENCE_S,
    Instance,
    add_partitions,
    admin_of,
    commit_of,
    config_for,
    create_internal_topics,
    create_topics,
    half,
    in_shard,
    read_topic,
    running,
)
from tests.support.replies import submitted
from tests.support.waiting import until_true


@pytest.fixture
def config(kafka: Kafka) -> KafkaConfig:
    made = config_for(kafka.bootstrap_servers, shards=4)
    create_internal_topics(made)
    create_topics(made, {made.prefix + "orders": 1})
    return made


def served(*instances: Instance) -> list[int]:
    return sorted(shard for instance in instances for shard in instance.service.states)


async def test_only_what_must_move_moves(config: KafkaConfig) -> None:
    """An instance that joins or leaves moves only its share; every other shard is served without a break."""
    async with running(config) as first:
        second, third = Instance(config), Instance(config)
        old = (first, second)
        try:
            await second.start()
            await until_true(lambda: [len(one.service.states) for one in old] == [2, 2], "two each")
            had = [set(one.service.states) for one in old]
            for one in old:
                one.service.events.clear()
            await third.start()
            await until_true(lambda: served(*old, third) == [0, 1, 2, 3] and third.service.states != {}, "a share")
            moved = set(third.service.states)
            assert len(moved) == 1
            for one, before in zip(old, had, strict=True):
                assert one.service.events == [("revoked", shard) for shard in before & moved]
                one.service.events.clear()
            await third.stop()
            await until_true(lambda: served(*old) == [0, 1, 2, 3], "its share is served again")
            events = [event for one in old for event in one.service.events]
            assert events == [("acquired", shard) for shard in moved]
        finally:
            await third.stop()
            await second.stop()


async def test_partitions_added_to_half_are_no_shards(config: KafkaConfig) -> None:
    """The group assigns them too; the instance serves its shards, and reports no others as acquiring."""
    await asyncio.to_thread(add_partitions, config, config.half_topic, 6)
    async with running(config) as instance:
        status = instance.cluster.membership.status
        assert (status.joined, status.owned, status.acquiring, status.last_error) == (True, (0, 1, 2, 3), (), None)
        await instance.write(
            commit_of(0, half(in_shard(0, "one", shards=4), Message(topic=config.prefix + "orders")), 0)
        )


async def test_an_instance_whose_shard_was_acquired_by_another_recovers_by_itself(config: KafkaConfig) -> None:
    """Another's acquisition fences the lane: every shard is lost, and acquired again by a new incarnation."""
    orders = config.prefix + "orders"
    async with running(config) as instance:
        before = instance.incarnation
        stranger = Acquisition(
            config=config,
            incarnation="stranger",
            lane_ids=(f"{config.prefix}stranger.0",),
            shard=2,
            cursors=instance.cursors,
            fences=FencedOwners("stranger"),
            handling_lock=nullcontext(),
            deadline=time.monotonic() + PATIENCE_S,
            stall_s=config.lane_stall_s,
            cancelled=lambda: False,
            skipped=lambda _topic, _reason: None,
        )
        # If the lane wrote in between, a new incarnation could acquire the shard first and fence the stranger.
        await asyncio.to_thread(stranger.acquire)
        while instance.incarnation == before:
            try:
                await instance.write(commit_of(0, half("w"), 0))
            except (LaneLostError, NotWrittenError):
                await asyncio.sleep(0.02)
            else:
                assert instance.incarnation != before, "a fenced lane wrote"
        await until_true(lambda: instance.incarnation not in (None, before), "a new incarnation")
        await instance.serves(range(4))
        one = half("a-1", Message(topic=orders, value=b"once"))
        await instance.write_until_known(commit_of(2, one, 0))
        assert instance.observer.told("lane_failed", "reason") == ["fenced"]
        assert {shard for event, shard in instance.service.events if event == "lost"} == {0, 1, 2, 3}
    assert [seen.value for seen in read_topic(config, orders)] == [b"once"]


async def test_two_instances_under_load_while_shards_move_write_everything_once(config: KafkaConfig) -> None:
    """Ends continue while a second instance joins and leaves; a retried one is written once."""
    orders = config.prefix + "orders"
    instances: list[Instance] = []

    async def write_one(number: int) -> None:
        shard = number % 4
        one = half(in_shard(shard, f"w-{number}", shards=4), Message(topic=orders, key=b"%d" % number, value=b"v"))
        while True:
            owner = next((instance for instance in instances if shard in instance.service.states), None)
            if owner is not None:
                if state_of(owner.service.states[shard], one.id) is not None:
                    return
                try:
                    await owner.write(commit_of(shard, one, 0))
                except (LaneLostError, NotWrittenError):
                    pass
                else:
                    return
            await asyncio.sleep(0.02)

    async def load(done: asyncio.Event) -> int:
        number = 0
        while not done.is_set():
            await asyncio.gather(*(write_one(number + offset) for offset in range(8)))
            number += 8
        return number

    async with running(config) as first:
        instances.append(first)
        done = asyncio.Event()
        loading = asyncio.create_task(load(done))
        second = Instance(config)
        await second.start()
        instances.append(second)
        await until_true(lambda: len(second.service.states) == 2, "two shards for the second")
        await asyncio.sleep(0.5)
        await second.stop()
        instances.remove(second)
        await first.serves(range(4))
        done.set()
        async with asyncio.timeout(PATIENCE_S):
            total = await loading
        assert first.observer.told("lane_failed", "reason") == second.observer.told("lane_failed", "reason") == []
    keys = sorted(int(seen.key or b"-1") for seen in read_topic(config, orders))
    assert keys == list(range(total))


async def test_what_is_not_finished_in_time_is_dropped_and_not_released(config: KafkaConfig) -> None:
    """The owner record stays, so that the next owner fences; the service learns that the shards are lost."""
    async with running(config, serving=range(4)) as instance:
        instance.service.hold = asyncio.Event()
        await instance.stop(seconds=2)
        assert {shard for event, shard in instance.service.events if event == "lost"} == {0, 1, 2, 3}
    last = {seen.partition: seen.value for seen in read_topic(config, config.owners_topic)}
    assert all(value is not None for value in last.values())
    async with running(config):
        pass


async def test_nothing_is_appended_to_a_shard_that_the_service_has_given_back(config: KafkaConfig) -> None:
    """Stopping while the tail is behind: the service gets no event of a shard after it has finished it."""
    async with running(config) as instance:
        for shard in range(4):
            many = [half(in_shard(shard, f"p-{number}", shards=4)) for number in range(1_500)]
            await asyncio.to_thread(prepare, config, shard, *many)
        await instance.stop()
        assert instance.service.errors == []


async def test_a_lane_that_was_closed_by_a_failure_hands_its_waiting_ends_back(config: KafkaConfig) -> None:
    """Every future is answered, whatever happens to the incarnation."""
    async with running(config) as instance:
        incarnation = instance.cluster.membership._incarnation
        assert incarnation is not None
        futures = [submitted(instance.cluster.lane, commit_of(0, half(f"w-{number}"), 0)) for number in range(500)]
        incarnation.fail(ProducerFailedError("lane", "made up"))
        async with asyncio.timeout(PATIENCE_S):
            results = await asyncio.gather(*futures, return_exceptions=True)
        for result in results:
            assert not isinstance(result, BaseException) or isinstance(result, (LaneLostError, NotWrittenError))
        assert any(isinstance(result, LaneLostError) for result in results)
        await instance.serves(range(4))


async def test_kafka_that_cannot_be_reached_is_tried_until_it_can_and_stop_does_not_hang(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Not ready, no incarnation, and an error in the status; stopping works nevertheless."""
    monkeypatch.setattr("halfway.kafka.ownership.incarnation.INITIALISE_S", 1.0)
    config = config_for("127.0.0.1:9")
    instance = Instance(config)
    await instance.start()
    await until_true(lambda: instance.cluster.membership.status.last_error is not None, "an error")
    status = instance.cluster.membership.status
    assert (status.joined, status.incarnation, status.owned) == (False, None, ())
    await instance.stop(seconds=1)


async def test_stopping_while_kafka_does_not_answer_ends_every_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """An incarnation that is being begun is abandoned: neither the stop nor a thread waits for its time-out."""
    monkeypatch.setattr("halfway.kafka.ownership.incarnation.INITIALISE_S", 100 * PATIENCE_S)
    before = {*threading.enumerate()}
    instance = Instance(config_for("127.0.0.1:9"))
    await instance.start()
    await until_true(
        lambda: any(thread.name.startswith("halfway-init") for thread in threading.enumerate()), "an incarnation begun"
    )
    async with asyncio.timeout(PATIENCE_S):
        await instance.stop(seconds=100 * PATIENCE_S)
        for thread in {*threading.enumerate()} - before:
            if thread.name.startswith(("halfway-init", "halfway-membership", "halfway-members")):
                await asyncio.to_thread(thread.join)


async def test_stopping_in_the_middle_of_an_acquisition_does_not_wait_for_it(
    config: KafkaConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A hanging acquisition is abandoned after a short time, for any deadline of the stop."""
    hangs, release = threading.Event(), threading.Event()

    def hang(self: Acquisition) -> None:
        hangs.set()
        release.wait()
        assert self.cancelled()
        raise AcquireError("test", "made up")

    monkeypatch.setattr(Acquisition, "acquire", hang)
    instance = Instance(config)
    await instance.start()
    try:
        await until_true(hangs.is_set, "an acquisition")
        async with asyncio.timeout(PATIENCE_S):
            await instance.stop(seconds=100 * PATIENCE_S)
    finally:
        release.set()


async def test_stop_ends_every_thread_and_leaves_the_group(config: KafkaConfig) -> None:
    """Nothing of an instance remains, and the next one is assigned everything at once."""
    async with running(config) as instance:
        await instance.write(commit_of(0, half("a-1"), 0))
    names = ("halfway-lane", "halfway-tail", "halfway-members")
    await until_true(
        lambda: not [thread for thread in threading.enumerate() if thread.name.startswith(names)], "no thread is left"
    )
    # A member that had not left would keep its shards for a session.
    admin = admin_of(config)
    described = admin.describe_consumer_groups([config.members_group])[config.members_group].result(PATIENCE_S)
    assert list(described.members) == []
    async with running(config):
        pass


def test_each_lane_id_is_new_in_each_incarnation(config: KafkaConfig) -> None:
    """Initialising an id a second time fences its first producer: nothing but a fence may do so."""
    transactional_id = f"{config.prefix}twice.0"
    [first] = initialised(config, [transactional_id], time.monotonic() + PATIENCE_S)
    [second] = initialised(config, [transactional_id], time.monotonic() + PATIENCE_S)
    first.begin()
    first.produce(config.prefix + "orders", b"never", None, 0)
    with pytest.raises(ProducerFailedError) as failed:
        first.commit(10)
    assert failed.value.fenced
    first.abandon()
    second.abandon()
