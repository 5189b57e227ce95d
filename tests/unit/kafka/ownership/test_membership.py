"""Events of the group's thread for the membership, whose state belongs to the event loop; giving shards back."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from threading import Thread
from types import SimpleNamespace
from typing import Any, cast

import pytest
from confluent_kafka import Consumer, TopicPartition
from structlog.testing import capture_logs

from halfway.coordinator.ports import ShardListener
from halfway.coordinator.requests import ServiceLimits
from halfway.coordinator.shards.shard_table import ShardTable
from halfway.kafka.clients.config import KafkaConfig
from halfway.kafka.clients.threads import Loop
from halfway.kafka.ownership import membership as of_kafka
from halfway.kafka.ownership.acquisition import Acquired
from halfway.kafka.ownership.consumer_group import USELESS_S, Uselessness
from halfway.kafka.ownership.former_owners import AcquireError
from halfway.kafka.ownership.incarnation import Incarnation, RetryBackoff, UnservedTime, give_back
from halfway.protocol.records import OpKind
from halfway.protocol.shard import ShardState
from tests.support.domain.histories import half_of
from tests.support.domain.shard_records import op
from tests.support.ownership.cluster_harness import Instance
from tests.support.surroundings import ManualClock
from tests.support.waiting import GENEROUS_S, until_true


def instance_of(*assigned: int, **settings: Any) -> Instance:
    """Return an instance on the running loop, to which the group has assigned these shards; no Kafka answers it."""
    config = KafkaConfig(properties={"bootstrap.servers": "127.0.0.1:9"}, max_prepare_bytes=1_000, **settings)
    instance = Instance(config)
    instance.cluster.membership._loop = Loop(asyncio.get_running_loop())
    if assigned:
        instance.cluster.membership._on_assigned(set(assigned))
    return instance


async def test_a_loop_that_is_busy_past_the_time_to_give_shards_back_is_no_error() -> None:
    """The group continues without them; they are dropped as soon as the loop runs."""
    membership = instance_of(0, 1, session_timeout_s=0.1).cluster.membership
    with ThreadPoolExecutor(1) as pool, capture_logs() as logged:
        pool.submit(membership.revoked, {0}).result()  # the loop waits for it
    assert [(entry["event"], entry["log_level"]) for entry in logged] == [("revoke_out_of_time", "warning")]
    await until_true(lambda: 0 not in membership.status.acquiring)
    assert membership.status.acquiring == (1,)


async def test_a_shard_that_comes_back_while_the_loop_is_busy_is_acquired() -> None:
    """It is revoked while the loop is busy, and then assigned to this instance again."""
    membership = instance_of(0, 1, session_timeout_s=0.1).cluster.membership

    def lose_and_get_back() -> None:
        membership.revoked({0})
        membership.assigned({0})

    with ThreadPoolExecutor(1) as pool:
        pool.submit(lose_and_get_back).result()  # the loop waits for it
    await asyncio.sleep(0.05)
    await until_true(lambda: membership.status.acquiring == (0, 1), what="both are acquired")


@pytest.mark.parametrize("session_s", [0.6, 6, 10, 300])
async def test_a_death_is_noticed_when_the_session_ends(session_s: float) -> None:
    """Heartbeats are a small part of the session: one that is just missed ends it hardly earlier or later."""
    assert instance_of(session_timeout_s=session_s).cluster.membership._group.heartbeat_s <= min(0.5, session_s / 6)


class Paused:
    """Replaces the group's consumer."""

    def incremental_assign(self, partitions: list[TopicPartition]) -> None:
        """Accept partitions."""

    def pause(self, partitions: list[TopicPartition]) -> None:
        """Fetch nothing."""


async def test_a_member_is_not_seen_without_the_shards_that_it_is_assigned() -> None:
    """A member without shards is ready; until the loop knows its shards, this instance has not joined."""
    instance = instance_of()
    membership = instance.cluster.membership
    shards = [TopicPartition(instance.config.half_topic, shard) for shard in (0, 1)]
    with ThreadPoolExecutor(1) as pool:
        pool.submit(membership._group._on_assign, cast("Consumer", Paused()), shards).result()  # the loop waits for it
    seen = membership.status
    assert (seen.joined, seen.acquiring) == (False, ())
    await until_true(lambda: membership.status.joined, what="the loop knows of the shards")
    assert membership.status.acquiring == (0, 1)


@pytest.mark.parametrize("leave", ["left", "dropped"])
async def test_a_member_that_has_left_has_joined_once_it_is_assigned_something_again(leave: str) -> None:
    """Return no shards: other instances own all of them."""
    membership = instance_of().cluster.membership
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
    instance = instance_of(0, 1)
    membership = instance.cluster.membership
    membership._listener = instance.service
    incarnation = membership._incarnation = cast("Incarnation", Serving())
    left: list[str] = []
    membership._group.leave_group = lambda: left.append("left")  # type: ignore[method-assign] # nothing is joined
    membership.outdated(0, "half[0]@2: written by a newer release")
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
    instance = instance_of(0)
    membership = instance.cluster.membership
    membership._listener = shards = ShardTable(ServiceLimits(shards=1, outcome_horizon_s=900), ManualClock())
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
    instance = instance_of()
    membership = instance.cluster.membership
    membership._listener = instance.service
    with pytest.raises(RuntimeError, match="thread"):
        await membership._begin_incarnation()
    assert membership.status.incarnation is None
    assert len(producers) == 3
    assert all(producer.ended for producer in producers)


async def test_an_end_that_is_older_than_the_horizon_is_not_missing_from_the_log() -> None:
    """Its answer was lost, and the shard was away for longer than outcomes are remembered. It stays done."""
    shards = ShardTable(ServiceLimits(shards=1, outcome_horizon_s=900), ManualClock())
    membership = instance_of(outcome_horizon_s=900).cluster.membership
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


def test_only_lasting_uselessness_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    """A shard that is served for a moment begins the time anew, and so does the decision itself."""
    now = 0.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    state = Uselessness()
    found = []
    for second in range(round(3.5 * USELESS_S)):
        now = float(second)
        if state.look(useless=second != USELESS_S - 1):
            found.append(second)
    assert found == [2 * USELESS_S, 3 * USELESS_S + 1]


def test_it_stays_away_longer_each_time_until_it_serves_a_shard() -> None:
    state = Uselessness()
    pauses = [state.take_pause() for _ in range(6)]
    assert pauses == sorted(pauses)
    assert pauses[-1] == pauses[-2] == 300
    state.served()
    assert state.take_pause() == pauses[0]


def test_attempts_that_are_refused_at_once_come_more_and_more_rarely(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also after an incarnation that has lived long: it counts once. Those that take long follow each other."""
    now = 10_000.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    backoff = RetryBackoff(fenced_pause_s=0.75)
    backoff.incarnation_begun()
    now += 3600

    def pauses(times: int, *, takes_s: float) -> list[float]:
        nonlocal now
        found = []
        for _ in range(times):
            now += takes_s
            backoff.failed("TRANSACTIONAL_ID_AUTHORIZATION_FAILED")
            found.append(round(backoff.take_pause(), 3))
            now += found[-1]
        return found

    assert pauses(9, takes_s=0.0) == [0.1, 0.2, 0.4, 0.8, 1.6, 3.2, 6.4, 10.0, 10.0]
    assert pauses(2, takes_s=10.0) == [0.1, 0.1]
    backoff.incarnation_begun()
    assert pauses(2, takes_s=61.0) == [0.1, 0.1]
    assert pauses(2, takes_s=0.0) == [0.4, 0.8]


def test_attempts_that_time_out_get_longer_until_an_incarnation_begins() -> None:
    """Kafka is slow for minutes: an attempt that never lasts long enough would only add to its load."""
    backoff = RetryBackoff(fenced_pause_s=0.75)

    def attempts(times: int) -> list[float]:
        found = []
        for _ in range(times):
            found.append(backoff.attempt_s)
            backoff.failed("init_transactions: _TIMED_OUT")
        return found

    assert attempts(5) == [10.0, 20.0, 40.0, 60.0, 60.0]
    backoff.incarnation_begun()
    assert attempts(3) == [10.0, 10.0, 20.0]  # the first is the failure of the incarnation


async def test_instances_that_leave_all_at_once_come_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """What ails all of them is not one instance's alone, and nobody else serves the shards meanwhile."""
    others, calls = [True, True, False], list[str]()
    monkeypatch.setattr(of_kafka, "TRY_AGAIN_S", 0.0)
    monkeypatch.setattr(of_kafka, "has_members", lambda *_: others.pop(0))
    trouble = SimpleNamespace(shard=0, error="no", remedy=None)

    async def blocking(work: Callable[..., Any], *arguments: object) -> Any:
        return work(*arguments)

    instance = SimpleNamespace(
        _acquisitions=SimpleNamespace(troubles=[trouble]),
        _assigned={0},
        _blocking=blocking,
        _config=KafkaConfig(properties={"bootstrap.servers": "unused:1"}, max_prepare_bytes=1_000),
        _group=SimpleNamespace(leave_group=lambda: calls.append("left"), join_group=lambda: calls.append("joined")),
        _is_stopping=lambda: False,
        _useless=Uselessness(),
    )
    await asyncio.wait_for(of_kafka.KafkaMembership._leave_shards_to_others(instance), GENEROUS_S)  # type: ignore[arg-type]
    assert calls == ["left", "joined"]
    assert others == []


class OwnerLog:
    """Replaces an incarnation, and records the records of owners in order."""

    failed = False

    def __init__(self, *shards: int) -> None:
        self.shards = set(shards)
        self.records: list[tuple[int, str]] = []

    def drop(self, shard: int) -> bool:
        owned = shard in self.shards
        self.shards.discard(shard)
        return owned

    async def release(self, shards: Sequence[int], _deadline: float) -> bool:
        self.records += [(shard, "released") for shard in shards]
        return True


class Busy:
    """A listener that finishes its ends in flight when the test allows it."""

    def __init__(self) -> None:
        self.finished = {0: asyncio.Event(), 1: asyncio.Event()}

    async def revoked(self, shard: int) -> None:
        await self.finished[shard].wait()


async def test_a_shard_that_is_being_given_back_is_not_released_a_second_time_by_a_stop() -> None:
    """The second tombstone would wait for other shards, and could land behind the claim of the next owner."""
    log, busy = OwnerLog(0, 1), Busy()
    incarnation, listener = cast("Incarnation", log), cast("ShardListener", busy)
    until = asyncio.get_running_loop().time() + 60
    lost: list[int] = []
    revoked = asyncio.create_task(give_back(incarnation, {0}, listener, lost.extend, until))
    await asyncio.sleep(0.01)
    stopping = asyncio.create_task(give_back(incarnation, {0, 1}, listener, lost.extend, until))
    await asyncio.sleep(0.01)  # until both wait for the ends of shard 0
    busy.finished[0].set()
    await revoked
    log.records.append((0, "claimed by another"))
    busy.finished[1].set()
    await stopping
    assert log.records == [(0, "released"), (0, "claimed by another"), (1, "released")]
    assert not lost


@pytest.fixture
def at(monkeypatch: pytest.MonkeyPatch) -> dict[str, float]:
    """Return a clock that the test sets."""
    clock = {"now": 1000.0}
    monkeypatch.setattr("halfway.kafka.ownership.incarnation.time.time", lambda: clock["now"])
    return clock


def test_it_counts_from_the_assignment_or_from_an_earlier_release(at: dict[str, float]) -> None:
    unserved = UnservedTime()
    at["now"] = 1010.0
    unserved.begin([1, 2, 3])
    at["now"] = 1012.0
    unserved.begin([1])
    assert unserved.end(1, None) == 2.0
    assert unserved.end(2, 1_004_000) == 8.0
    assert unserved.end(3, 1_011_000) == 2.0
    assert unserved.end(1, None) == 0.0


def test_a_release_from_before_the_start_tells_nothing(at: dict[str, float]) -> None:
    """No instance may have run since then. A clock that is ahead does not make the time negative."""
    unserved = UnservedTime()
    at["now"] = 1003.0
    unserved.begin([1, 2])
    at["now"] = 1004.0
    assert unserved.end(1, 900_000) == 1.0
    at["now"] = 1001.0
    assert unserved.end(2, None) == 0.0


def test_a_shard_that_goes_to_another_is_forgotten(at: dict[str, float]) -> None:
    unserved = UnservedTime()
    unserved.begin([1])
    unserved.forget([1])
    at["now"] = 1060.0
    unserved.begin([1])
    assert unserved.end(1, None) == 0.0
