"""A log that ends too early, begins too late or is another one than before, on a real broker."""

import asyncio

import pytest
from confluent_kafka import Producer, TopicPartition

from halfway.coordinator.ports import KnownLog, LogLoss
from halfway.kafka.clients.config import KafkaConfig
from halfway.kafka.ownership.log_watch import LogWatch
from tests.support.brokers.fixtures import Kafka
from tests.support.ownership.cluster_harness import (
    PATIENCE_S,
    admin_of,
    config_for,
    create_internal_topics,
    create_topics,
    delete_topics,
    half,
    in_shard,
    prepare,
)
from tests.support.waiting import eventually


def knows(**fields: int) -> dict[int, KnownLog]:
    return {0: KnownLog(**({"half_end": 0, "op_end": 0, "half_needed": 0} | fields))}


def made(kafka: Kafka) -> KafkaConfig:
    config = config_for(kafka.bootstrap_servers)
    create_internal_topics(config)
    return config


async def test_an_end_that_is_too_low_is_believed_at_the_second_look(kafka: Kafka) -> None:
    """A leader that has just been elected may not know its end yet."""
    config = made(kafka)
    records = [half(in_shard(0, name)) for name in ("a", "b", "c")]
    await asyncio.to_thread(prepare, config, 0, *records)
    watch = LogWatch(config)
    assert await watch.look(knows(half_end=3)) == []
    assert await watch.look(knows(half_end=4)) == []
    assert watch.doubts
    [(shard, loss)] = await watch.look(knows(half_end=4))
    assert (shard, loss.topic, loss.half_start) == (0, config.half_topic, None)
    assert "ends at 3, but had records up to 4" in loss.detail


@pytest.mark.parametrize("op_end", [1, 2])
async def test_starts_behind_what_is_needed_are_all_reported_once(kafka: Kafka, op_end: int) -> None:
    """The records of all three topics are deleted between two looks: no loss hides another one.

    If op ended at 2 one horizon ago, all outcomes of the horizon are left, but not what it has of pending transactions.
    """
    config = config_for(kafka.bootstrap_servers)
    names = (config.half_topic, config.op_topic, config.parked_topic, config.owners_topic)
    create_topics(config, dict.fromkeys(names, 2), **{"cleanup.policy": "delete"})
    cut = names[:3]
    producer = Producer(config.producer())
    for topic in cut * 3:
        producer.produce(topic, b"a record", partition=0)
    assert producer.flush(PATIENCE_S) == 0
    watch = LogWatch(config)
    known = knows(half_end=3, half_needed=1, op_end=op_end, op_needed=1, parked_needed=1)
    assert await watch.look(known) == []
    admin = admin_of(config)
    for done in admin.delete_records([TopicPartition(topic, 0, 2) for topic in cut]).values():
        done.result(PATIENCE_S)
    found = [loss for _, loss in await watch.look(known)]
    assert [loss.topic for loss in found] == list(cut)
    starts = [(loss.half_start, loss.op_start, loss.parked_start) for loss in found]
    assert starts == [(2, None, None), (None, 2, None), (None, None, 2)]
    assert [loss.is_op_cut for loss in found] == [False, op_end < 2, False]
    assert await watch.look(known) == []


async def test_a_topic_that_was_made_again_has_lost_everything(kafka: Kafka) -> None:
    """Every shard that is served is compared, whatever is in the new topic already."""
    config = made(kafka)
    watch = LogWatch(config)
    assert await watch.look(knows()) == []
    delete_topics(config, [config.op_topic])
    assert await watch.look(knows()) == [], "it is missing, and logged"
    create_topics(config, {config.op_topic: 2})
    # The broker may still have the former topic in its metadata for a moment.
    [(_, loss)] = await eventually(lambda: watch.look(knows()), bool)
    assert loss == LogLoss(topic=config.op_topic, detail=f"topic {config.op_topic} was deleted and created again")
    assert await watch.look(knows()) == []
