"""The writes of a lane that is fenced, hangs or fails, or whose tail finds undecodable records."""

from __future__ import annotations

import asyncio
import re
import threading
import time
from collections.abc import Iterable, Mapping
from dataclasses import replace

import pytest
from confluent_kafka import Producer

from halfway.kafka.clients.config import KafkaConfig
from halfway.kafka.clients.transactional_producer import fence
from halfway.kafka.records.codec import KIND_HALF, record_headers
from halfway.kafka.topics.metadata import TopicMetadata, WritablePartitions
from halfway.protocol.errors import LaneLostError
from halfway.protocol.records import Message
from halfway.protocol.transactions import State
from halfway.schemas.single_object import MARKER
from tests.support.brokers.fixtures import Kafka
from tests.support.contract.backend import prepare
from tests.support.domain.states import state_of
from tests.support.ownership.cluster_harness import (
    PATIENCE_S,
    Instance,
    commit_of,
    config_for,
    create_internal_topics,
    create_topics,
    half,
    in_shard,
    read_topic,
    running,
)
from tests.support.waiting import until_true


async def test_a_fenced_lane_loses_its_writes_and_recovers_by_itself(config: KafkaConfig) -> None:
    """Fencing the lane's ids ends the incarnation: LaneLostError, then a new one which writes again."""
    orders = config.prefix + "orders"
    async with running(config) as instance:
        before = instance.incarnation
        ids = [f"{config.prefix}{before}.{name}" for name in ("0", "1", "q")]
        await asyncio.to_thread(fence, config, ids, time.monotonic() + PATIENCE_S)
        one = half("a-1", Message(topic=orders, value=b"once"))
        with pytest.raises(LaneLostError):
            await instance.write(commit_of(0, one, 0))
        await instance.write_until_known(commit_of(0, one, 0))
        assert instance.incarnation not in (None, before)
        assert instance.observer.told("lane_failed", "reason") == ["fenced"]
        assert ("lost", 0) in instance.service.events
    assert [seen.value for seen in read_topic(config, orders)] == [b"once"]


async def test_what_a_lane_that_hangs_is_at_is_lost_and_can_be_written_by_the_next(
    kafka: Kafka, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its callers do not wait for the thread, which is fenced when it wakes up."""
    config = config_for(kafka.bootstrap_servers, max_stall_s=6)
    create_internal_topics(config)
    create_topics(config, {config.prefix + "orders": 1})
    wake, fresh = threading.Event(), TopicMetadata.fresh

    def hang_once(self: TopicMetadata, names: Iterable[str], timeout: float) -> Mapping[str, WritablePartitions | None]:
        monkeypatch.setattr(TopicMetadata, "fresh", fresh)
        wake.wait()
        return fresh(self, names, timeout)

    one = half("a-1", Message(topic=config.prefix + "orders", value=b"once"))
    async with running(config) as instance:
        monkeypatch.setattr(TopicMetadata, "fresh", hang_once)
        try:
            with pytest.raises(LaneLostError):
                await instance.write(commit_of(0, one, 0))
            await instance.serves(range(2))
        finally:
            wake.set()
        await instance.write_until_known(commit_of(0, one, 0))
    assert [seen.value for seen in read_topic(config, config.prefix + "orders")] == [b"once"]


async def test_a_record_of_a_newer_release_costs_its_own_shard_only(config: KafkaConfig) -> None:
    """It has halfway's headers: skipping it could lose a prepare. The tail gives the shard up, and a start does too.

    An operator who knows that no newer release has written it skips it by name, and the id gets its record back.
    """
    newer = Producer(config.producer())

    def written(transaction_id: bytes, shard: int) -> None:
        headers = record_headers(KIND_HALF, "shop", "prepared")
        newer.produce(config.half_topic, MARKER + b"newer schema", transaction_id, shard, headers=headers)
        newer.flush(PATIENCE_S)

    def given_up(instance: Instance) -> bool:
        [*troubles] = instance.cluster.membership.status.troubles
        return [trouble.shard for trouble in troubles] == [0] and "newer release" in troubles[0].error

    mine = half(in_shard(0, "mine"))
    async with running(config) as instance:
        await asyncio.to_thread(prepare, config, 0, mine)
        others = set(instance.service.states) - {0}
        before = instance.incarnation
        await until_true(lambda: state_of(instance.service.states[0], mine.id) is State.PREPARED, "its half")
        await asyncio.to_thread(written, mine.id.encode(), 0)
        await until_true(lambda: given_up(instance), "it gives up the shard and says why")
        assert set(instance.service.states) == others
        assert instance.incarnation == before
        assert [event for event in instance.service.events if event[0] == "lost"] == []
    again = Instance(config)
    try:
        await again.start()
        await until_true(lambda: given_up(again) and set(again.service.states) == others, "all others")
        assert again.observer.count("skipped_record", topic=config.half_topic) == 0
        remedy = again.cluster.membership.status.troubles[0].remedy
    finally:
        await again.stop()
    named = re.search(r"HALFWAY_SKIP_RECORDS=(\S+)", remedy)
    assert named is not None, remedy
    async with running(replace(config, skip_records=(named[1],))) as instance:
        assert state_of(instance.service.states[0], mine.id) is State.PREPARED
        assert instance.observer.count("skipped_record", topic=config.half_topic) == 1
