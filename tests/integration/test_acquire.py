"""Acquiring shards on a real broker: former owners are fenced, and their open transactions are settled."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any

import pytest
from confluent_kafka import KafkaException
from msgspec import structs

from halfway.kafka.clients.config import KafkaConfig
from halfway.kafka.clients.reader import Reader
from halfway.kafka.clients.transactional_producer import ProducerFailedError, TransactionalProducer, initialised
from halfway.kafka.ownership.former_owners import CLOCK, AcquireError, FencedOwners, LastClaim
from halfway.kafka.records.codec import (
    BARRIER_KEY,
    HEADER_LANE,
    KIND_BARRIER,
    KIND_OWNER,
    LAYOUT_KEY,
    decode_owner,
    encode_barrier,
    encode_owner,
    record_headers,
)
from halfway.kafka.records.lane_records import owner_key
from halfway.protocol.records import Barrier
from tests.support.brokers.fixtures import Kafka
from tests.support.ownership.acquisitions import acquire, acquisition, assert_fenced, lane_of, owner_of
from tests.support.ownership.cluster_harness import (
    PATIENCE_S,
    config_for,
    create_internal_topics,
    create_topics,
    delete_records,
    produce,
    read_topic,
)
from tests.support.waiting import GENEROUS_S


def test_the_former_owner_can_write_nothing_more(config: KafkaConfig) -> None:
    """Step 3: the lane ids of an owner that did not release are fenced, its open Kafka transaction is aborted."""
    orders = config.prefix + "orders"
    former = lane_of(config, "former")
    acquire(config, "former", [0])
    for producer in former[:2]:
        producer.begin()
        producer.produce(orders, b"never", None, 0)
        producer.produce(config.half_topic, None, b"x", 0)
    acquire(config, "next", [0])
    for producer in former[:2]:
        with pytest.raises(ProducerFailedError):
            producer.commit(PATIENCE_S)
        producer.abandon()
    former[2].begin()
    former[2].produce(orders, b"never", None, 0)
    with pytest.raises(ProducerFailedError) as failed:
        former[2].commit(PATIENCE_S)
    assert failed.value.fenced
    former[2].abandon()
    assert read_topic(config, orders) == []


def test_an_open_release_of_a_frozen_owner_does_not_stop_the_next(config: KafkaConfig) -> None:
    """Steps 2 and 3 again: the open release holds back the LSO; its owner is before it and is fenced."""
    former = lane_of(config, "former")
    acquire(config, "former", [0])
    former[0].begin()
    former[0].produce(config.owners_topic, None, b"0", 0, headers=record_headers(KIND_OWNER, "", "released"))
    assert former[0]._producer is not None
    former[0]._producer.flush(PATIENCE_S)
    acquire(config, "next", [0])
    with pytest.raises(ProducerFailedError):
        former[0].commit(PATIENCE_S)
    for producer in former:
        producer.abandon()
    assert decode_owner(read_topic(config, config.owners_topic)[-1].value).incarnation == "next"


def test_an_open_rehearsal_of_a_frozen_owner_holds_no_consumer_back(kafka: Kafka) -> None:
    """The next owner aborts it, long before it would time out."""
    config = config_for(kafka.bootstrap_servers, transaction_timeout_s=2 * PATIENCE_S)
    create_internal_topics(config)
    orders = config.prefix + "orders"
    create_topics(config, {orders: 1})
    acquire(config, "first", [0])
    [rehearsal] = initialised(config, [f"{config.prefix}first.r"], time.monotonic() + PATIENCE_S)
    rehearsal.begin()
    rehearsal.produce(orders, b"tried", None, 0)
    assert rehearsal.flush(time.monotonic() + PATIENCE_S, lambda: False)
    produce(config, orders, 0, None, b"plain")
    acquire(config, "second", [0])
    assert [seen.value for seen in read_topic(config, orders)] == [b"plain"]
    rehearsal.abandon()


def test_a_producer_that_learns_while_it_produces_that_it_was_fenced_says_so(config: KafkaConfig) -> None:
    """From then on every `produce` fails with an error that does not name its cause."""
    transactional_id = f"{config.prefix}fenced"
    first, second = (TransactionalProducer(config, transactional_id) for _ in range(2))
    try:
        first.initialise(time.monotonic() + GENEROUS_S)
        first.begin()
        second.initialise(time.monotonic() + GENEROUS_S)
        failure: ProducerFailedError | None = None
        give_up = time.monotonic() + GENEROUS_S
        while failure is None and time.monotonic() < give_up:
            try:
                first.produce(config.owners_topic, b"", b"0", 0)
            except KafkaException as error:
                failure = first.failure("produce", error)
            time.sleep(0.01)
        assert failure is not None
        assert failure.fenced
        assert failure.step == "produce"
    finally:
        first.abandon()
        second.abandon()


def test_of_two_that_acquire_at_once_only_one_claims(config: KafkaConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    """Step 4: an acquirer that was fenced by another's step 1 stops, and claims nothing."""
    slow = acquisition(config, "slow", 0)
    claim = slow._claim

    def overtaken(producer: TransactionalProducer) -> dict[str, int]:
        acquire(config, "quick", [0])
        return claim(producer)

    monkeypatch.setattr(slow, "_claim", overtaken)
    with pytest.raises(AcquireError) as failed:
        slow.acquire()
    assert failed.value.fenced
    assert not slow.claimed
    assert [decode_owner(seen.value).incarnation for seen in read_topic(config, config.owners_topic)] == ["quick"]


def test_an_acquisition_gives_up_when_it_is_no_longer_wanted_or_out_of_time(config: KafkaConfig) -> None:
    """Waits are bounded, and a revoked shard is not claimed."""
    unwanted = acquisition(config, "one", 0, cancelled=lambda: True)
    with pytest.raises(AcquireError, match="no longer wanted"):
        unwanted.acquire()
    late = acquisition(config, "two", 0, deadline=time.monotonic())
    with pytest.raises(AcquireError):
        late.acquire()
    assert read_topic(config, config.owners_topic) == []


FOREIGN = pytest.mark.parametrize(
    "value",
    [b"rubbish", None, b"", encode_barrier(Barrier(incarnation="x", at=1)), encode_owner(owner_of("x", shard=1))],
    ids=["rubbish", "null by hand", "nothing", "another kind", "of another shard"],
)


@FOREIGN
def test_a_foreign_owner_record_hides_nobody_who_must_be_fenced(config: KafkaConfig, value: bytes | None) -> None:
    """The owner record before it still exists: that owner is fenced, and the new record is after the garbage."""
    former, skipped = lane_of(config, "former"), list[tuple[str, str]]()
    acquire(config, "former", [0])
    produce(config, config.owners_topic, 0, b"0", value)
    acquire(config, "next", [0], skipped=lambda *told: skipped.append(told))
    assert_fenced(config, former)
    assert [topic for topic, _ in skipped] == [config.owners_topic]
    assert decode_owner(read_topic(config, config.owners_topic)[-1].value).incarnation == "next"


def test_where_compaction_left_only_a_foreign_owner_record_the_barriers_tell_whom_to_fence(config: KafkaConfig) -> None:
    """A claim is also a barrier in parked and in half, with its own key."""
    former = lane_of(config, "former")
    barrier = encode_barrier(Barrier(incarnation="former", at=1))
    headers = record_headers(KIND_BARRIER, "", "acquired")
    produce(config, config.owners_topic, 0, b"0", b"rubbish")
    produce(config, config.half_topic, 0, BARRIER_KEY, barrier, headers)
    produce(config, config.parked_topic, 0, BARRIER_KEY, b"rubbish")
    acquire(config, "next", [0])
    assert_fenced(config, former)


def test_where_compaction_left_nothing_of_an_owner_the_barriers_tell_whom_to_fence(config: KafkaConfig) -> None:
    """As after a foreign null value, which hides the owner record and is then compacted away."""
    former = lane_of(config, "former")
    barrier = encode_barrier(Barrier(incarnation="former", at=1))
    produce(config, config.parked_topic, 0, BARRIER_KEY, barrier, record_headers(KIND_BARRIER, "", "acquired"))
    acquire(config, "next", [0])
    assert_fenced(config, former)


def test_where_the_records_of_an_owner_were_deleted_the_barriers_tell_whom_to_fence(config: KafkaConfig) -> None:
    """As by a `cleanup.policy=delete` on owners while its owner is frozen."""
    former = lane_of(config, "former")
    acquire(config, "former", [0])
    delete_records(config, [config.owners_topic, config.half_topic])
    acquire(config, "next", [0])
    assert_fenced(config, former)


def test_where_every_record_of_an_owner_was_deleted_the_shard_is_not_served(config: KafkaConfig) -> None:
    """Nobody would fence it: owners, half and parked had `cleanup.policy=delete`. Unlike a shard that nobody owned."""
    former = lane_of(config, "former")
    acquire(config, "former", [0])
    delete_records(config, [config.owners_topic, config.half_topic, config.parked_topic])
    with pytest.raises(AcquireError, match="or deleted in") as failed:
        acquire(config, "next", [0])
    assert f"delete the topic {config.owners_topic}" in (failed.value.remedy or "")
    for lane in former:
        lane.abandon()


def test_a_long_log_without_owner_records_may_take_longer_than_a_start(
    config: KafkaConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Then all of half is read; no deadline ends this while it makes progress."""
    barrier = encode_barrier(Barrier(incarnation="former", at=1))
    former = lane_of(config, "former")
    produce(config, config.half_topic, 0, BARRIER_KEY, barrier, record_headers(KIND_BARRIER, "", "acquired"))
    for number in range(50):
        produce(config, config.half_topic, 0, f"a-{number}".encode(), b"long")
    monkeypatch.setattr("halfway.kafka.clients.reader.BATCH", 0)
    read = Reader.read

    def slowly(*args: Any) -> None:
        time.sleep(0.3)
        read(*args)

    monkeypatch.setattr(Reader, "read", slowly)
    acquire(config, "next", [0], deadline=time.monotonic() + 12)
    assert_fenced(config, former)


def test_a_partition_that_cannot_be_read_to_its_end_is_named(config: KafkaConfig) -> None:
    """A hanging Kafka transaction is before the barrier: unread records are never served."""
    acquire(config, "one", [0])
    [stranger] = initialised(config, [f"{config.prefix}stranger"], time.monotonic() + PATIENCE_S)
    stranger.begin()
    stranger.produce(config.half_topic, b"open", b"a-1", 0)
    assert stranger.flush(time.monotonic() + PATIENCE_S, lambda: False)
    with pytest.raises(AcquireError, match=f"reading {config.half_topic}-0 makes no progress: "):
        acquire(replace(config, max_stall_s=8), "next", [0])
    stranger.abandon()


def test_an_owner_record_of_a_later_release_is_not_passed_over(config: KafkaConfig) -> None:
    """It is undecodable but has halfway's headers: the owner in the barrier is fenced, not the one before."""
    later = lane_of(config, "later")
    acquire(config, "former", [0])
    unknown = b"\xc3\x01" + b"\x07" * 8 + b"body"
    produce(config, config.owners_topic, 0, b"0", unknown, record_headers(KIND_OWNER, "", "acquired"))
    barrier = encode_barrier(Barrier(incarnation="later", at=1))
    produce(config, config.parked_topic, 0, BARRIER_KEY, barrier, record_headers(KIND_BARRIER, "", "acquired"))
    acquire(config, "next", [0])
    assert_fenced(config, later)


def test_where_nothing_tells_who_owned_a_shard_it_is_not_served(config: KafkaConfig) -> None:
    """Overwritten in owners, parked and half: serving it would not be safe, and the error contains the remedy."""
    produce(config, config.owners_topic, 0, b"0", b"rubbish")
    for topic in (config.half_topic, config.parked_topic):
        produce(config, topic, 0, BARRIER_KEY, b"rubbish")
    with pytest.raises(AcquireError, match="is overwritten or deleted in") as failed:
        acquire(config, "one", [0])
    assert "make sure that no instance runs" in (failed.value.remedy or "")


def test_records_under_other_keys_in_owners_are_no_owners(config: KafkaConfig) -> None:
    """No key, no text, another shard's: only the owner before them is fenced."""
    former, skipped = lane_of(config, "former"), list[tuple[str, str]]()
    acquire(config, "former", [0])
    for key in (None, b"", b"\xff", b"1", b"00", LAYOUT_KEY + b"s"):
        produce(config, config.owners_topic, 0, key, encode_owner(owner_of("x", shard=0)))
        produce(config, config.owners_topic, 0, key, None)
    acquire(config, "next", [0], skipped=lambda *told: skipped.append(told))
    assert_fenced(config, former)
    assert skipped == [(config.owners_topic, "wrong_key")] * 12


def test_an_owner_whose_record_was_not_shown_is_fenced_too(
    config: KafkaConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A broker that is cut off from the controllers answers as a leader still, and its log ends where that began."""
    hidden, lane = owner_of("hidden", shard=0), lane_of(config, "hidden")
    record = encode_owner(structs.replace(hidden, lane_ids=tuple(one.transactional_id for one in lane)))
    fences = FencedOwners("after")
    after = acquisition(config, "after", 0, fences=fences)
    read = after._fence_former_owners

    def too_early(reader: Reader) -> None:
        """Read what that broker has: all but the last owner record."""
        read(reader)
        produce(config, config.owners_topic, 0, owner_key(0), record, record_headers(KIND_OWNER, "", "acquired"))
        fence_before = after._former_owners.fence_before

        def released_first(shard: int, offset: int) -> LastClaim:
            """Let the hidden owner release the shard behind the new owner record: nobody has fenced it yet."""
            lane[0].begin()
            released = record_headers(KIND_OWNER, "", "released")
            lane[0].produce(config.owners_topic, None, owner_key(0), 0, headers=released)
            lane[0].commit(PATIENCE_S)
            return fence_before(shard, offset)

        monkeypatch.setattr(after._former_owners, "fence_before", released_first)

    monkeypatch.setattr(after, "_fence_former_owners", too_early)
    acquire(config, "before", [0])
    with pytest.raises(AcquireError, match="fenced only now"):
        after.acquire()
    assert after.former == "hidden"
    assert_fenced(config, lane)
    acquire(config, "after", [0], fences=fences)
    last = read_topic(config, config.owners_topic)[-1]
    assert last.value is not None
    assert decode_owner(last.value).incarnation == "after"


@pytest.mark.parametrize("is_released", [False, True])
def test_an_owner_whose_record_kafka_has_lost_is_fenced_too(config: KafkaConfig, is_released: bool) -> None:
    """An unclean election of owners: its last record is an older one, but the barriers name the last owner."""
    lost, fences = lane_of(config, "lost"), FencedOwners("next")
    acquire(config, "before", [0])
    acquire(config, "lost", [0])
    record = None if is_released else encode_owner(structs.replace(owner_of("before", shard=0), lane_ids=("before.0",)))
    headers = [*record_headers(KIND_OWNER, "", "any"), (HEADER_LANE, b"before.0")]
    produce(config, config.owners_topic, 0, owner_key(0), record, headers)
    with pytest.raises(AcquireError, match="Kafka has lost the owner record of lost, which is fenced only now"):
        acquire(config, "next", [0], fences=fences)
    assert_fenced(config, lost)
    acquire(config, "next", [0], fences=fences)


def test_what_kafka_has_against_an_owner_record_is_told_with_the_remedy(
    kafka: Kafka, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The error names Kafka's reason, not only that the record has no place."""
    strict = config_for(kafka.bootstrap_servers)
    topics = dict.fromkeys((strict.half_topic, strict.op_topic, strict.parked_topic), strict.shards)
    create_topics(strict, topics)
    create_topics(strict, {strict.owners_topic: strict.shards}, **{"message.timestamp.before.max.ms": "3600000"})
    late = acquisition(strict, "late", 0)
    now = time.time_ns
    monkeypatch.setattr(time, "time_ns", lambda: now() - 2 * 3_600_000_000_000)
    with pytest.raises(AcquireError, match="INVALID_TIMESTAMP") as failed:
        late.acquire()
    assert failed.value.remedy == CLOCK
