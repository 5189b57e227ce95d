"""Each shard is acquired separately: one that cannot be acquired does not delay the others."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from halfway.kafka.clients.transactional_producer import TransactionalProducer, initialised
from halfway.kafka.ownership.concurrent_acquisition import AT_ONCE
from halfway.kafka.records.codec import BARRIER_KEY
from tests.support.brokers.fixtures import Kafka
from tests.support.ownership.cluster_harness import (
    PATIENCE_S,
    Instance,
    config_for,
    create_internal_topics,
    produce,
    running,
)
from tests.support.waiting import until_true


async def test_shards_that_cannot_be_acquired_hold_up_no_other_and_are_named(kafka: Kafka) -> None:
    """A hanging Kafka transaction in half[0], an overwritten owner of shard 1: the others are served, then 0 too."""
    config = config_for(kafka.bootstrap_servers, max_stall_s=10, shards=4, transaction_timeout_s=600)
    create_internal_topics(config)
    produce(config, config.owners_topic, 1, b"1", b"rubbish")
    for topic in (config.half_topic, config.parked_topic):
        produce(config, topic, 1, BARRIER_KEY, b"rubbish")
    [stranger] = initialised(config, [f"{config.prefix}stranger"], time.monotonic() + PATIENCE_S)
    stranger.begin()
    stranger.produce(config.half_topic, b"open", b"a-1", 0)
    assert await asyncio.to_thread(stranger.flush, time.monotonic() + PATIENCE_S, lambda: False)

    instance = Instance(config)
    membership = instance.cluster.membership
    began = time.time()
    await instance.start()
    try:
        await instance.serves([2, 3])
        await until_true(lambda: [trouble.shard for trouble in membership.status.troubles] == [0, 1], "both are named")
        incarnation = instance.incarnation
        hanging, unknown = membership.status.troubles
        assert f"{config.half_topic}-0" in hanging.error
        assert f"find-hanging --topic {config.half_topic} --partition 0 --max-transaction-timeout 10;" in hanging.remedy
        assert "is overwritten or deleted" in unknown.error
        assert f"delete the topic {config.owners_topic}" in unknown.remedy
        assert all(began <= trouble.since <= time.time() for trouble in (hanging, unknown))

        await asyncio.to_thread(stranger.abort, PATIENCE_S)
        await instance.serves([0, 2, 3])
        await until_true(lambda: [trouble.shard for trouble in membership.status.troubles] == [1], "one is left")
        assert membership.status.troubles[0].since == unknown.since
        await until_true(lambda: membership.status.troubles[0].tries > unknown.tries, "another try")
        assert instance.incarnation == incarnation
        assert ("lost", 2) not in instance.service.events
    finally:
        stranger.abandon()
        await instance.stop()


@contextmanager
def counting_acquirers(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """Count the existing producers for owner records whenever another one is created."""
    alive: set[str] = set()
    counts: list[int] = []
    make, abandon = TransactionalProducer.__init__, TransactionalProducer.abandon

    def made(self: TransactionalProducer, config: object, transactional_id: str, **over: object) -> None:
        make(self, config, transactional_id, **over)  # type: ignore[arg-type]
        if ".owner." in transactional_id:
            alive.add(transactional_id)
            counts.append(len(alive))

    def abandoned(self: TransactionalProducer) -> None:
        abandon(self)
        alive.discard(self.transactional_id)

    monkeypatch.setattr(TransactionalProducer, "__init__", made)
    monkeypatch.setattr(TransactionalProducer, "abandon", abandoned)
    yield counts
    until = time.monotonic() + PATIENCE_S
    while alive:  # each is abandoned a moment after its shard is served
        assert time.monotonic() < until, f"{alive} are not given up"
        time.sleep(0.02)


async def test_many_shards_are_acquired_a_few_at_a_time(kafka: Kafka, monkeypatch: pytest.MonkeyPatch) -> None:
    """The number of producers for acquisitions does not grow with the number of shards."""
    config = config_for(kafka.bootstrap_servers, shards=3 * AT_ONCE)
    create_internal_topics(config)
    with counting_acquirers(monkeypatch) as counts:
        async with running(config):
            pass
    assert len(counts) >= config.shards
    assert max(counts) <= AT_ONCE
