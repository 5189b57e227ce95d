"""Acquisitions that a test runs itself, and lanes of owners that they fence."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import nullcontext

import pytest

from halfway.coordinator.ports import Cursors
from halfway.kafka.clients.config import KafkaConfig
from halfway.kafka.clients.transactional_producer import ProducerFailedError, TransactionalProducer, initialised
from halfway.kafka.ownership.acquisition import Acquired, Acquisition
from halfway.kafka.ownership.former_owners import FencedOwners
from halfway.protocol.records import Owner
from tests.support.ownership.cluster_harness import PATIENCE_S


class GivenCursors:
    """Cursors that a test sets."""

    def __init__(self, cursors: dict[int, Cursors] | None = None) -> None:
        self._cursors = cursors or {}

    def load(self, shards: Sequence[int]) -> dict[int, Cursors]:
        return {shard: self._cursors[shard] for shard in shards if shard in self._cursors}


def acquisition(config: KafkaConfig, incarnation: str, shard: int, **fields: object) -> Acquisition:
    settings: dict[str, object] = {
        "lane_ids": tuple(f"{config.prefix}{incarnation}.{name}" for name in ("0", "1", "q")),
        "cursors": GivenCursors(),
        "fences": FencedOwners(incarnation),
        "handling_lock": nullcontext(),
        "deadline": time.monotonic() + PATIENCE_S,
        "stall_s": config.lane_stall_s,
        "cancelled": lambda: False,
        "skipped": lambda _topic, _reason: None,
    }
    settings |= fields
    return Acquisition(config=config, incarnation=incarnation, shard=shard, **settings)  # type: ignore[arg-type]


def lane_of(config: KafkaConfig, incarnation: str) -> list[TransactionalProducer]:
    ids = [f"{config.prefix}{incarnation}.{name}" for name in ("0", "1", "q")]
    return initialised(config, ids, time.monotonic() + PATIENCE_S)


def acquire(config: KafkaConfig, incarnation: str, shards: Sequence[int], **fields: object) -> list[Acquired]:
    return [acquisition(config, incarnation, shard, **fields).acquire() for shard in shards]


def owner_of(incarnation: str, *, shard: int) -> Owner:
    return Owner(shard=shard, incarnation=incarnation, lane_ids=(), url="", acquired_at=1)


def assert_fenced(config: KafkaConfig, lanes: Sequence[TransactionalProducer]) -> None:
    for lane in lanes:
        lane.begin()
        lane.produce(config.prefix + "orders", b"never", None, 0)
        with pytest.raises(ProducerFailedError) as failed:
            lane.commit(PATIENCE_S)
        assert failed.value.fenced
        lane.abandon()
