"""What a reader has heard, together with an error."""

from collections.abc import Iterator
from typing import Any, cast

import pytest
from confluent_kafka import KafkaError, KafkaException

from halfway.kafka.clients.config import KafkaConfig
from halfway.kafka.clients.reader import Reader
from halfway.kafka.clients.seam import Clients

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
