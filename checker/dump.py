"""Reads the topics as a consumer of committed records gets them, with schemas and fastavro, not with halfway's code."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime
from functools import cache
from io import BytesIO
from operator import methodcaller
from typing import Any, Final, TypeAlias
from uuid import uuid4

import fastavro
from confluent_kafka import Consumer, IsolationLevel, KafkaError, KafkaException, Message, TopicPartition
from confluent_kafka.admin import AdminClient, OffsetSpec  # type: ignore[attr-defined]  # they are there
from fastavro.schema import fingerprint, parse_schema, to_parsing_canonical_form

from checker.content import Content, Contents, content_of
from checker.records import AnyRecord, Half, Op, Parked, Real
from halfway import schemas

_ASK_WITHIN_S: Final = 30.0
_ASK_AGAIN_S: Final = 0.2
_SILENCE_S: Final = 60.0
_read_headers: Final = methodcaller("headers")
"""`message.headers()`, by a call whose result Python checks: an interpreter that is warm checks no direct one."""
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
"""What a broker answers, for a moment, while brokers and client name different leaders of a partition."""


Place: TypeAlias = tuple[str, int]
"""A topic and a partition of it."""
Places: TypeAlias = Mapping[Place, int]
"""An offset for each of them."""


def ends(bootstrap_servers: str, *, prefix: str, topics: Sequence[str]) -> Places:
    """Return where the real topics and half, op and parked end now, by all records, also of open Kafka transactions."""
    return _ends(bootstrap_servers, [*topics, *_internal_topics(prefix)])


def read_topics(
    bootstrap_servers: str, *, prefix: str, topics: Sequence[str], since: Places | None = None
) -> Iterator[AnyRecord]:
    """Return every committed record of the real topics and of half, op and parked, up to their ends as they are now.

    The end is the one of all records: a Kafka transaction that is still open there is waited for. `since` is what
    `ends` gave before the run; without it everything is read.
    """
    reader = Topics(bootstrap_servers, prefix=prefix, topics=topics, since=since)
    yield from reader.read()
    if reader.held:
        raise TimeoutError(f"readers of committed records do not get to the ends of {reader.held}")


class Topics:
    """Reads the real topics and half, op and parked, and goes on where it stopped."""

    def __init__(
        self, bootstrap_servers: str, *, prefix: str, topics: Sequence[str], since: Places | None = None
    ) -> None:
        self._bootstrap_servers = bootstrap_servers
        self._internal = _internal_topics(prefix)
        self._topics = (*topics, *self._internal)
        self._positions: Places = since or {}
        self.held: dict[Place, int] = {}
        """Partitions that committed records could not be read to the end of the last time, and that end."""

    def begin_again(self, topic: str) -> None:
        """Read a topic from its beginning, as it has been deleted and made again."""
        self._positions = {place: position for place, position in self._positions.items() if place[0] != topic}

    def read(self) -> Iterator[AnyRecord]:
        """Return the committed records from where the last time ended up to the ends as they are now.

        If it fails, or is not read to its end, the next time gives the same again. Topics that are not there have
        no records.
        """
        found = _ends(self._bootstrap_servers, self._topics)
        held: dict[Place, int] = {}
        read = dict(self._positions)
        for message in _read(self._bootstrap_servers, read, found, held):
            kind = self._internal.get(message.topic() or "")
            record = _real(message) if kind is None else _internal(kind, message)
            if record is not None:
                yield record
        # A leader that has just been elected may name an end that lies before what was read.
        reached = {place: max(end, read.get(place, 0)) for place, end in found.items() if place not in held}
        self._positions, self.held = {**read, **reached}, held


def _internal_topics(prefix: str) -> dict[str, str]:
    return {f"{prefix}{kind}": kind for kind in _KINDS}


def _read(
    bootstrap_servers: str, positions: dict[Place, int], ends: Places, held: dict[Place, int]
) -> Iterator[Message]:
    """Give what stands from the positions on, and move them; partitions of which no more comes go to `held`."""
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
        heard = time.monotonic()
        while missing:
            for message in consumer.consume(1000, timeout=0.5):
                place = (message.topic() or "", message.partition() or 0)
                offset, error = message.offset() or 0, message.error()
                # A leader that has just been elected may not know the offset yet: then the client begins once more.
                if error is None and place in missing and positions.get(place, 0) <= offset < missing[place]:
                    heard = time.monotonic()
                    positions[place] = offset + 1
                    yield message
                elif error is not None and error.code() == KafkaError._PARTITION_EOF:  # noqa: SLF001  named so
                    if offset >= missing.get(place, offset + 1):
                        del missing[place]
                elif error is not None and not error.retriable() and error.code() not in _LEADER_MOVES:
                    raise KafkaException(error)
            if time.monotonic() - heard > _SILENCE_S:
                held.update(missing)
                return
    finally:
        consumer.close()


def _ends(bootstrap_servers: str, topics: Sequence[str]) -> dict[Place, int]:
    admin = AdminClient({"bootstrap.servers": bootstrap_servers, "log_level": 0})
    deadline = time.monotonic() + _SILENCE_S
    while True:
        metadata = admin.list_topics(timeout=_ASK_WITHIN_S).topics
        there = [topic for topic in topics if topic in metadata]
        wanted = [TopicPartition(topic, number) for topic in there for number in metadata[topic].partitions]
        asked: Any = dict.fromkeys(wanted, OffsetSpec.latest())  # type: ignore[no-untyped-call]
        answers = admin.list_offsets(
            asked, isolation_level=IsolationLevel.READ_UNCOMMITTED, request_timeout=_ASK_WITHIN_S
        )
        try:
            return {(one.topic, one.partition): answer.result(_ASK_WITHIN_S).offset for one, answer in answers.items()}
        except KafkaException as error:
            if error.args[0].code() not in _LEADER_MOVES or time.monotonic() > deadline:
                raise
        time.sleep(_ASK_AGAIN_S)


def _real(message: Message) -> Real:
    headers = _headers(message)
    told = dict(headers)
    number, _, total = _text(told.get("halfway-message")).partition("/")
    return Real(
        shard=message.partition() or 0,
        offset=message.offset() or 0,
        id=_text(told.get("halfway-transaction-id")),
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
        messages=tuple((one["topic"], _hex(one["key_hash"]), _hex(one["value_hash"])) for one in fields["messages"]),
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
    return {bytes.fromhex(fingerprint(to_parsing_canonical_form(one), "CRC-64-AVRO")): one for one in parsed}


def _decode(kind: str, value: bytes) -> dict[str, Any]:
    """Read a record in Avro's single-object encoding, whatever version wrote it."""
    writers = _writers(kind)
    newest = next(iter(writers.values()))
    body = BytesIO(value[_FINGERPRINT.stop :])
    fields: Any = fastavro.schemaless_reader(body, writers[value[_FINGERPRINT]], newest)
    return dict(fields)


def _milliseconds(moment: datetime) -> int:
    return round(moment.timestamp() * 1000)


def _headers(message: Message) -> list[tuple[str, bytes | None]]:
    try:
        headers: Any = _read_headers(message) or ()  # a list of pairs, whatever the types say
    except SystemError:
        # What Python makes of confluent_kafka's answer if a name is not UTF-8, whose
        # broken headers end the process if they are read.
        message.set_headers([])
        headers = ()
    return [(name, _bytes(value)) for name, value in headers]


def _bytes(data: str | bytes | None) -> bytes | None:
    return data.encode() if isinstance(data, str) else data


def _text(data: bytes | None) -> str:
    return (data or b"").decode(errors="replace")


def _hex(data: bytes | None) -> str | None:
    return None if data is None else data.hex()
