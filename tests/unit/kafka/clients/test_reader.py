"""What a reader hears together with an error, and answers without an offset, which librdkafka gives in an election."""

import asyncio
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any, cast

import pytest
from confluent_kafka import KafkaError, KafkaException, TopicPartition
from confluent_kafka.admin import AdminClient

from halfway.coordinator.ports import KnownLog
from halfway.kafka.clients.config import KafkaConfig
from halfway.kafka.clients.reader import PartitionEnds, Reader, ends
from halfway.kafka.clients.seam import Clients
from halfway.kafka.ownership.log_watch import LogWatch

PLACE = ("half", 0)


class _Message:
    def __init__(self, place: tuple[str, int], offset: int | None, error: int) -> None:
        self._place, self._offset, self._error = place, offset, error

    def topic(self) -> str:
        return self._place[0]

    def partition(self) -> int:
        return self._place[1]

    def offset(self) -> int | None:
        return self._offset

    def error(self) -> KafkaError:
        return KafkaError(self._error)


class _Batch:
    """A consumer with one batch: no broker can be made to give an end and another partition's error together."""

    def __init__(self, _: object) -> None:
        self._left: Iterator[_Message] = iter(
            [_Message(PLACE, 12, KafkaError._PARTITION_EOF), _Message(("", -1), None, KafkaError._AUTHENTICATION)]
        )

    def list_topics(self, *_: object, **__: object) -> None: ...

    def incremental_assign(self, _: object) -> None: ...

    def poll(self, _: float) -> _Message | None:
        return next(self._left, None)

    def consume(self, *_: object) -> list[_Message]:
        return list(self._left)


def test_an_end_that_comes_with_an_error_is_heard() -> None:
    """Librdkafka reports it once: a tail that missed it would hold up the read barriers of an idle shard."""
    clients = Clients(consumer=cast("Any", _Batch))
    properties = {"bootstrap.servers": "127.0.0.1:9"}
    reader = Reader(KafkaConfig(properties=properties, max_prepare_bytes=1_000, clients=clients))
    reader.add({PLACE: 10})
    with pytest.raises(KafkaException):
        reader.read(0.1, lambda *_: None)
    assert reader.heard == {PLACE}
    assert reader.positions == {PLACE: 12}
    reader.read(0.1, lambda *_: None)
    assert reader.heard == set()


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
