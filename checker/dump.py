"""Reads the committed records of the topics with the schemas and fastavro, without halfway's own code."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime
from functools import cache
from io import BytesIO
from operator import methodcaller
from typing import Any, Final, TypeAlias
from uuid import uuid4

import fastavro
import msgspec
from confluent_kafka import Consumer, IsolationLevel, KafkaError, KafkaException, Message, TopicPartition
from confluent_kafka.admin import AdminClient, OffsetSpec  # type: ignore[attr-defined]  # they are there
from fastavro.schema import fingerprint, parse_schema, to_parsing_canonical_form

from checker.content import Content, Contents, content_of
from checker.records import AnyRecord, Half, Op, Parked, Real
from halfway import schemas

_REQUEST_S: Final = 30.0
_RETRY_S: Final = 0.2
_SILENCE_S: Final = 60.0
_read_headers: Final = methodcaller("headers")
"""`message.headers()`, called so that Python checks the result: a warm interpreter does not check a direct call."""
_FINGERPRINT: Final = slice(2, 10)
_KINDS: Final = ("half", "op", "parked")
_LEADER_MOVES: Final = frozenset(
    {
        KafkaError.LEADER_NOT_AVAILABLE,
        KafkaError.NOT_LEADER_FOR_PARTITION,
        KafkaError.FENCED_LEADER_EPOCH,
        KafkaError.UNKNOWN_LEADER_EPOCH,
        KafkaError.OFFSET_NOT_AVAILABLE,
    }
)
"""Errors that last until the brokers and the client agree on the leader of a partition."""


Place: TypeAlias = tuple[str, int]
"""A topic and one of its partitions."""
Places: TypeAlias = Mapping[Place, int]
"""An offset for each partition."""


def ends(bootstrap_servers: str, *, prefix: str, topics: Sequence[str]) -> Places:
    """Return the current end offsets of the real topics and of half, op and parked, including open transactions."""
    return _ends(bootstrap_servers, [*topics, *_internal_topics(prefix)])


def read_topics(
    bootstrap_servers: str, *, prefix: str, topics: Sequence[str], since: Places | None = None
) -> Iterator[AnyRecord]:
    """Yield every committed record of the real topics and of half, op and parked, up to their current ends.

    The end is that of all records, so this waits for Kafka transactions that are still open. `since` is the result of
    `ends` before the run; without it everything is read.
    """
    reader = Topics(bootstrap_servers, prefix=prefix, topics=topics, since=since)
    yield from reader.read()
    if reader.held:
        raise TimeoutError(f"committed records cannot be read to the ends of {reader.held}")


class Topics:
    """Reads the real topics and half, op and parked; each call continues where the last one stopped."""

    def __init__(
        self, bootstrap_servers: str, *, prefix: str, topics: Sequence[str], since: Places | None = None
    ) -> None:
        self._bootstrap_servers = bootstrap_servers
        self._internal = _internal_topics(prefix)
        self._topics = (*topics, *self._internal)
        self._positions: Places = since or {}
        self._lives: Counter[str] = Counter()
        """How often each topic was created again, or lost its end."""
        self.held: dict[Place, int] = {}
        """Partitions whose committed records could not be read to the end last time, each with that end."""

    def begin_again(self, topic: str) -> None:
        """Read a topic from its beginning next time, because it was deleted and created again."""
        self._positions = {place: position for place, position in self._positions.items() if place[0] != topic}
        self._lives[topic] += 1

    def go_back(self, topic: str, ends: Mapping[int, int]) -> None:
        """Read partitions of a topic from these offsets next time: they have lost what they had from there on."""
        lost = {(topic, number): min(end, self._positions.get((topic, number), 0)) for number, end in ends.items()}
        self._positions = {**self._positions, **lost}
        self._lives[topic] += 1

    def read(self) -> Iterator[AnyRecord]:
        """Yield the committed records from the last position up to the current ends.

        If it fails, or is not consumed to its end, the next call yields the same records again. A missing topic has no
        records.
        """
        ends_now = _ends(self._bootstrap_servers, self._topics)
        held: dict[Place, int] = {}
        read = dict(self._positions)
        for message in _read(self._bootstrap_servers, read, ends_now, held):
            kind = self._internal.get(message.topic() or "")
            record = _real(message) if kind is None else _internal(kind, message)
            if record is not None:
                yield msgspec.structs.replace(record, life=self._lives[message.topic() or ""])
        # A newly elected leader may return an end before the position that was read already.
        reached = {place: max(end, read.get(place, 0)) for place, end in ends_now.items() if place not in held}
        self._positions, self.held = {**read, **reached}, held


def _internal_topics(prefix: str) -> dict[str, str]:
    return {f"{prefix}{kind}": kind for kind in _KINDS}


def _read(
    bootstrap_servers: str, positions: dict[Place, int], ends: Places, held: dict[Place, int]
) -> Iterator[Message]:
    """Yield the records from the positions on, and move these; partitions that make no progress are added to `held`."""
    missing = {place: end for place, end in ends.items() if end > positions.get(place, 0)}
    consumer = Consumer(
        {
            "bootstrap.servers": bootstrap_servers,
            "group.id": f"checker-{uuid4().hex}",
            "isolation.level": "read_committed",
            "enable.partition.eof": True,
            "enable.auto.commit": False,
            "auto.offset.reset": "earliest",
            "queued.max.messages.kbytes": 16384,
            "log_level": 0,
        }
    )
    try:
        consumer.assign([TopicPartition(*place, positions.get(place, 0)) for place in missing])
        last_read_at = time.monotonic()
        while missing:
            for message in consumer.consume(1000, timeout=0.5):
                place = (message.topic() or "", message.partition() or 0)
                offset, error = message.offset() or 0, message.error()
                # A newly elected leader may not know the offset yet; then the client starts again from the beginning.
                if error is None and place in missing and positions.get(place, 0) <= offset < missing[place]:
                    last_read_at = time.monotonic()
                    positions[place] = offset + 1
                    yield message
                elif error is not None and error.code() == KafkaError._PARTITION_EOF:  # noqa: SLF001  named so
                    if offset >= missing.get(place, offset + 1):
                        del missing[place]
                elif error is not None and not error.retriable() and error.code() not in _LEADER_MOVES:
                    raise KafkaException(error)
            if time.monotonic() - last_read_at > _SILENCE_S:
                held.update(missing)
                return
    finally:
        consumer.close()


def _ends(bootstrap_servers: str, topics: Sequence[str]) -> dict[Place, int]:
    admin = AdminClient({"bootstrap.servers": bootstrap_servers, "log_level": 0})
    deadline = time.monotonic() + _SILENCE_S
    while True:
        metadata = admin.list_topics(timeout=_REQUEST_S).topics
        existing = [topic for topic in topics if topic in metadata]
        partitions = [TopicPartition(topic, number) for topic in existing for number in metadata[topic].partitions]
        specs: Any = dict.fromkeys(partitions, OffsetSpec.latest())  # type: ignore[no-untyped-call]
        answers = admin.list_offsets(specs, isolation_level=IsolationLevel.READ_UNCOMMITTED, request_timeout=_REQUEST_S)
        try:
            return {(key.topic, key.partition): answer.result(_REQUEST_S).offset for key, answer in answers.items()}
        except KafkaException as error:
            if error.args[0].code() not in _LEADER_MOVES or time.monotonic() > deadline:
                raise
        time.sleep(_RETRY_S)


def _real(message: Message) -> Real:
    headers = _headers(message)
    by_name = dict(headers)
    number, _, total = _text(by_name.get("halfway-message")).partition("/")
    return Real(
        shard=message.partition() or 0,
        offset=message.offset() or 0,
        id=_text(by_name.get("halfway-transaction-id")),
        content=content_of(message.topic() or "", _bytes(message.key()), _bytes(message.value()), headers),
        number=int(number) if number.isdecimal() else 0,
        total=int(total) if total.isdecimal() else 0,
    )


def _internal(kind: str, message: Message) -> AnyRecord | None:
    if _text(dict(_headers(message)).get("halfway-kind")) != kind:
        return None  # a barrier
    key, value = _bytes(message.key()) or b"", _bytes(message.value())
    place: dict[str, Any] = {"shard": message.partition(), "offset": message.offset(), "id": key.decode()}
    if value is None:
        return Parked(**place, tombstone=True) if kind == "parked" else Half(**place)
    fields = _decode(kind, value)
    if kind == "parked":
        return Parked(**place, contents=_contents(fields["half"]["messages"]))
    if kind == "half":
        return Half(**place, contents=_contents(fields["messages"]), group=fields["group"])
    return Op(
        **place,
        kind=fields["kind"],
        cause=fields["cause"],
        group=fields["group"],
        messages=tuple(
            (digest["topic"], _hex(digest["key_hash"]), _hex(digest["value_hash"])) for digest in fields["messages"]
        ),
        half_offset=fields["half_offset"],
        checks=fields["checks"],
        at=_milliseconds(fields["at"]),
        remark=fields["remark"] if fields["cause"] == "policy" else None,
    )


def _contents(messages: Sequence[Mapping[str, Any]]) -> Contents:
    return tuple(_content(message) for message in messages)


def _content(message: Mapping[str, Any]) -> Content:
    headers = [(header["name"], header["value"]) for header in message["headers"]]
    return content_of(message["topic"], message["key"], message["value"], headers)


@cache
def _writers(kind: str) -> dict[bytes, Any]:
    parsed = [parse_schema(version) for version in schemas.versions(kind)]
    return {bytes.fromhex(fingerprint(to_parsing_canonical_form(schema), "CRC-64-AVRO")): schema for schema in parsed}


def _decode(kind: str, value: bytes) -> dict[str, Any]:
    """Decode a record in Avro's single-object encoding, of any schema version."""
    writers = _writers(kind)
    newest = next(iter(writers.values()))
    body = BytesIO(value[_FINGERPRINT.stop :])
    fields: Any = fastavro.schemaless_reader(body, writers[value[_FINGERPRINT]], newest)
    return dict(fields)


def _milliseconds(moment: datetime) -> int:
    return round(moment.timestamp() * 1000)


def _headers(message: Message) -> list[tuple[str, bytes | None]]:
    try:
        headers: Any = _read_headers(message) or ()  # a list of pairs, although the types differ
    except SystemError:
        # Python raises this for confluent_kafka's broken result if a name is not UTF-8; reading these headers again
        # would end the process.
        message.set_headers([])
        headers = ()
    return [(name, _bytes(value)) for name, value in headers]


def _bytes(data: str | bytes | None) -> bytes | None:
    return data.encode() if isinstance(data, str) else data


def _text(data: bytes | None) -> str:
    return (data or b"").decode(errors="replace")


def _hex(data: bytes | None) -> str | None:
    return None if data is None else data.hex()
