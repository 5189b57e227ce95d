"""Events of the group's thread for the membership, whose state belongs to the event loop."""

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from threading import Thread
from typing import cast

import pytest
from confluent_kafka import Consumer, TopicPartition
from structlog.testing import capture_logs

from halfway.coordinator.requests import ServiceLimits
from halfway.coordinator.shards.shard_table import ShardTable
from halfway.kafka.clients.config import KafkaConfig
from halfway.kafka.clients.threads import Loop
from halfway.kafka.ownership import membership as of_kafka
from halfway.kafka.ownership.acquisition import Acquired
from halfway.kafka.ownership.former_owners import AcquireError
from halfway.kafka.ownership.incarnation import Incarnation
from halfway.protocol.records import OpKind
from halfway.protocol.shard import ShardState
from tests.support.domain.histories import half_of
from tests.support.domain.shard_records import op
from tests.support.ownership.cluster_harness import Instance
from tests.support.surroundings import ManualClock
from tests.support.waiting import until_true


async def test_a_loop_that_is_busy_past_the_time_to_give_shards_back_is_no_error() -> None:
    """The group continues without them; they are dropped as soon as the loop runs."""
    servers = {"bootstrap.servers": "127.0.0.1:9"}
    config = KafkaConfig(properties=servers, max_prepare_bytes=1_000, session_timeout_s=0.1)
    membership = Instance(config).cluster.membership
    membership._loop = Loop(asyncio.get_running_loop())
    membership._on_assigned({0, 1})
    with ThreadPoolExecutor(1) as pool, capture_logs() as logged:
        pool.submit(membership.revoked, {0}).result()  # the loop waits for it
    assert [(entry["event"], entry["log_level"]) for entry in logged] == [("revoke_out_of_time", "warning")]
    while 0 in membership.status.acquiring:  # noqa: ASYNC110 - no event reports that
        await asyncio.sleep(0.01)
    assert membership.status.acquiring == (1,)


async def test_a_shard_that_comes_back_while_the_loop_is_busy_is_acquired() -> None:
    """It is revoked while the loop is busy, and then assigned to this instance again."""
    servers = {"bootstrap.servers": "127.0.0.1:9"}
    config = KafkaConfig(properties=servers, max_prepare_bytes=1_000, session_timeout_s=0.1)
    membership = Instance(config).cluster.membership
    membership._loop = Loop(asyncio.get_running_loop())
    membership._on_assigned({0, 1})

    def lose_and_get_back() -> None:
        membership.revoked({0})
        membership.assigned({0})

    with ThreadPoolExecutor(1) as pool:
        pool.submit(lose_and_get_back).result()  # the loop waits for it
    await asyncio.sleep(0.05)
    await until_true(lambda: membership.status.acquiring == (0, 1), what="both are acquired")


@pytest.mark.parametrize("session_s", [0.6, 6, 10, 300])
def test_a_death_is_noticed_when_the_session_ends(session_s: float) -> None:
    """Heartbeats are a small part of the session: one that is just missed ends it hardly earlier or later."""
    config = KafkaConfig(
        properties={"bootstrap.servers": "127.0.0.1:9"}, max_prepare_bytes=1_000, session_timeout_s=session_s
    )
    assert Instance(config).cluster.membership._group.heartbeat_s <= min(0.5, session_s / 6)


class Paused:
    """Replaces the group's consumer."""

    def incremental_assign(self, partitions: list[TopicPartition]) -> None:
        """Accept partitions."""

    def pause(self, partitions: list[TopicPartition]) -> None:
        """Fetch nothing."""


async def test_a_member_is_not_seen_without_the_shards_that_it_is_assigned() -> None:
    """A member without shards is ready; until the loop knows its shards, this instance has not joined."""
    config = KafkaConfig(properties={"bootstrap.servers": "127.0.0.1:9"}, max_prepare_bytes=1_000)
    membership = Instance(config).cluster.membership
    membership._loop = Loop(asyncio.get_running_loop())
    shards = [TopicPartition(config.half_topic, shard) for shard in (0, 1)]
    with ThreadPoolExecutor(1) as pool:
        pool.submit(membership._group._on_assign, cast("Consumer", Paused()), shards).result()  # the loop waits for it
    seen = membership.status
    assert (seen.joined, seen.acquiring) == (False, ())
    await until_true(lambda: membership.status.joined, what="the loop knows of the shards")
    assert membership.status.acquiring == (0, 1)


@pytest.mark.parametrize("leave", ["left", "dropped"])
async def test_a_member_that_has_left_has_joined_once_it_is_assigned_something_again(leave: str) -> None:
    """Return no shards: other instances own all of them."""
    config = KafkaConfig(properties={"bootstrap.servers": "127.0.0.1:9"}, max_prepare_bytes=1_000)
    membership = Instance(config).cluster.membership
    membership._loop = Loop(asyncio.get_running_loop())
    events: list[tuple[Callable[[], None], bool]] = [
        (lambda: membership.assigned({0}), True),
        (membership.left if leave == "left" else lambda: membership.dropped({0}), False),
        (lambda: membership.assigned(set()), True),
    ]
    for tell, joined in events:
        tell()
        await until_true(lambda: membership.status.joined == joined, what=f"joined is {joined}")  # noqa: B023 - called at once


class Serving:
    """Replaces an incarnation that can serve acquired shards."""

    id = "this"
    failed = False

    def __init__(self) -> None:
        self.shards: set[int] = set()

    def holds(self, shard: int) -> bool:
        return shard in self.shards

    def serve(self, shard: int, _position: int) -> None:
        self.shards.add(shard)


async def test_an_unreadable_shard_costs_no_other_one() -> None:
    """An instance leaves the group only if it can read none of its shards."""
    config = KafkaConfig(properties={"bootstrap.servers": "127.0.0.1:9"}, max_prepare_bytes=1_000)
    instance = Instance(config)
    membership = instance.cluster.membership
    membership._listener = instance.service
    membership._on_assigned({0, 1})
    incarnation = membership._incarnation = cast("Incarnation", Serving())
    left: list[str] = []
    membership._group.leave_group = lambda: left.append("left")  # type: ignore[method-assign] # nothing is joined
    membership.outdated(0, "half[0]@2: written by a newer release")
    membership._loop = Loop(asyncio.get_running_loop())
    await membership.serve(incarnation, Acquired(shard=1, state=ShardState(1), barrier=0))
    assert incarnation.holds(1)
    assert membership.status.last_error is None
    assert membership.status.acquiring == (0,)
    membership._on_revoked(frozenset({1}))
    running = asyncio.create_task(membership._run())
    try:
        await until_true(lambda: left)
        assert membership.status.last_error == "half[0]@2: written by a newer release"
    finally:
        running.cancel()


async def test_a_log_that_has_lost_its_end_is_folded_once_more_from_its_beginning() -> None:
    """Its cursors may be beyond a half whose tombstone is lost too. What is missing then is written again."""
    config = KafkaConfig(properties={"bootstrap.servers": "127.0.0.1:9"}, max_prepare_bytes=1_000)
    instance = Instance(config)
    membership = instance.cluster.membership
    membership._listener = shards = ShardTable(ServiceLimits(shards=1, outcome_horizon_s=900), ManualClock())
    membership._loop = Loop(asyncio.get_running_loop())
    membership._on_assigned({0})
    half = half_of("a", "a", 1_000)
    former, shorter, whole = (ShardState(0, horizon_ms=900_000) for _ in range(3))
    former.apply_half(7, half.id, half)
    for state in (former, shorter, whole):
        state.half_tail = state.op_tail = 9
        state.complete_fold()
    shards.acquired(0, former)
    shards.payloads.put(half, half.size)
    shards.lost(0)
    membership._own[0] = {"this"}
    incarnation = membership._incarnation = cast("Incarnation", Serving())

    with pytest.raises(AcquireError, match="has lost the end of the log"):
        await membership.serve(incarnation, Acquired(shard=0, state=shorter, barrier=8))
    assert instance.cursors._distrusted == {0}
    assert not shards.serves(0)
    await membership.serve(incarnation, Acquired(shard=0, state=whole, barrier=8))
    assert shards.get(0).unwritten == {half.id: half}


class LaneId:
    """Replaces an initialised producer."""

    def __init__(self, name: str) -> None:
        self.transactional_id = name
        self.ended = False

    def idle(self) -> None:
        """Do nothing."""

    def demand_unworn(self) -> None:
        """Return no fault."""

    def abandon(self) -> None:
        self.ended = True


@pytest.mark.parametrize("thread", ["halfway-suspects", "halfway-lane", "halfway-tail"])
async def test_an_incarnation_whose_threads_do_not_start_serves_nothing(
    monkeypatch: pytest.MonkeyPatch, thread: str
) -> None:
    """No thread can start: part of an incarnation would acquire shards for which it cannot write."""
    producers: list[LaneId] = []

    def lane_producers(*_: object) -> list[LaneId]:
        producers.extend(LaneId(name) for name in "01q")
        return producers

    start = Thread.start

    def start_others(self: Thread) -> None:
        if self.name == thread:
            raise RuntimeError("can't start new thread")
        start(self)

    monkeypatch.setattr(of_kafka, "lane_producers", lane_producers)
    monkeypatch.setattr(Thread, "start", start_others)
    instance = Instance(KafkaConfig(properties={"bootstrap.servers": "127.0.0.1:9"}, max_prepare_bytes=1_000))
    membership = instance.cluster.membership
    membership._loop = Loop(asyncio.get_running_loop())
    membership._listener = instance.service
    with pytest.raises(RuntimeError, match="thread"):
        await membership._begin_incarnation()
    assert membership.status.incarnation is None
    assert len(producers) == 3
    assert all(producer.ended for producer in producers)


async def test_an_end_that_is_older_than_the_horizon_is_not_missing_from_the_log() -> None:
    """Its answer was lost, and the shard was away for longer than outcomes are remembered. It stays done."""
    servers = {"bootstrap.servers": "127.0.0.1:9"}
    config = KafkaConfig(properties=servers, max_prepare_bytes=1_000, outcome_horizon_s=900)
    shards = ShardTable(ServiceLimits(shards=1, outcome_horizon_s=900), ManualClock())
    membership = Instance(config).cluster.membership
    membership._listener = shards
    half = half_of("a", "a", 1_000)
    former, new = (ShardState(0, horizon_ms=900_000) for _ in range(2))
    for state, tail in ((former, 10), (new, 11)):
        state.apply_half(1, half.id, half)
        state.half_tail = state.op_tail = tail
        state.complete_fold()
    shards.acquired(0, former)
    shards.payloads.put(half, half.size)
    shards.lost(0)
    new.apply_end(1, op(OpKind.COMMITTED, half.id, half_offset=1, at=5_000), 2)
    new.acquired_at = 1_000_000
    membership._compare(Acquired(shard=0, state=new, barrier=10), True, False)
    shards.acquired(0, new)
    assert new.find(half.id) is None
    assert not shards.get(0).unwritten
