"""An answer without an offset and without an error, which librdkafka gives in an election, is no offset."""

import asyncio
from collections.abc import Iterable, Mapping
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any, cast

import pytest
from confluent_kafka import TopicPartition
from confluent_kafka.admin import AdminClient

from halfway.coordinator.ports import KnownLog
from halfway.kafka.clients.config import KafkaConfig
from halfway.kafka.clients.reader import PartitionEnds, ends
from halfway.kafka.ownership.log_watch import LogWatch

KNOWN = {0: KnownLog(half_end=7, op_end=7, half_needed=0, op_needed=0, parked_needed=0)}
CONFIG = KafkaConfig(properties={"bootstrap.servers": "127.0.0.1:9"}, max_prepare_bytes=1_000)
NO_OFFSET = -1001


class _Answers:
    """An admin client that answers with these offsets in turn, the last one again: no broker can be made to do it."""

    def __init__(self, *offsets: int) -> None:
        self.offsets = list(offsets)

    def list_offsets(self, specs: Iterable[TopicPartition], **_: object) -> Mapping[TopicPartition, Future[Any]]:
        offset = self.offsets.pop(0) if len(self.offsets) > 1 else self.offsets[0]
        answer: Future[Any] = Future()
        answer.set_result(SimpleNamespace(offset=offset))
        return dict.fromkeys(specs, answer)

    def describe_topics(self, topics: object, **_: object) -> Mapping[str, Future[Any]]:
        return {}

    def list_topics(self, *_: object, **__: object) -> None: ...

    def poll(self, _: float) -> None: ...


def answers(*offsets: int) -> AdminClient:
    return cast(AdminClient, _Answers(*offsets))


async def test_no_read_barrier_passes_at_it() -> None:
    """At -1001 it would pass at once, and a transaction that the tail has not read would be answered unknown."""
    of_half = PartitionEnds(CONFIG, "half")
    of_half._admin = answers(NO_OFFSET, 5)
    assert await of_half.end(0, deadline=asyncio.get_running_loop().time() + 30) == 5


def test_no_recovery_ends_at_it() -> None:
    assert ends(answers(NO_OFFSET, NO_OFFSET, 5), [("half", 0)], lambda: None) == {("half", 0): 5}


@pytest.mark.parametrize("offset, losses", [(NO_OFFSET, 0), (3, 1)])
async def test_it_is_no_loss(offset: int, losses: int) -> None:
    """An end before known records, seen twice, is one."""
    watch = LogWatch(CONFIG)
    watch._client = answers(offset)
    await watch.look(KNOWN)
    assert len([loss for _, loss in await watch.look(KNOWN) if "ends at" in loss.detail]) == losses


class _OwnersEndsAt(_Answers):
    """All other topics end at 9."""

    def list_offsets(self, specs: Iterable[TopicPartition], **_: object) -> Mapping[TopicPartition, Future[Any]]:
        found: dict[TopicPartition, Future[Any]] = {spec: Future() for spec in specs}
        for spec, answer in found.items():
            answer.set_result(SimpleNamespace(offset=self.offsets[0] if spec.topic == CONFIG.owners_topic else 9))
        return found


async def test_a_lost_end_of_owners_is_a_loss() -> None:
    """The next owner would fence an older one; after a loss this one claims its shards again."""
    watch = LogWatch(CONFIG)
    for end, losses in ((9, []), (8, []), (8, [CONFIG.owners_topic])):
        watch._client = cast(AdminClient, _OwnersEndsAt(end))
        found = [loss for _, loss in await watch.look(KNOWN) if "ends at" in loss.detail]
        assert [loss.topic for loss in found] == losses
