"""Writes what the lane writes: to a log in memory, or to Kafka."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from confluent_kafka import Producer

from halfway.kafka.records import codec
from halfway.protocol.records import Half, Message, MessageDigest, Op, OpKind, Parked
from halfway.protocol.transactions import Cause
from tests.support.pipeline.logs import PREFIX, Headers, Log


@dataclass
class KafkaLog:
    """Topics of a broker. `dated` records have the time that is given, others the present one."""

    producer: Producer
    partition: Callable[[str, bytes | None], int]
    """The partition of a topic for a key."""
    dated: bool = False
    ahead: int = 0

    def write(self, topic: str, key: bytes | None, value: bytes | None, at: int, headers: Headers, **_: object) -> None:
        timestamp = at if self.dated else 0
        self.producer.produce(topic, value, key, self.partition(topic, key), headers=[*headers], timestamp=timestamp)
        self.producer.poll(0)


@dataclass
class Writer:
    """Writes what the lane writes."""

    log: Log | KafkaLog
    group: str = "g"
    prefix: str = PREFIX

    def lay_out(self, created_at: int) -> None:
        """Tell when the topics were created."""
        layout = codec.encode_layout(codec.Layout(shards=8, created_at=created_at))
        headers = codec.record_headers(codec.KIND_LAYOUT, "", "created")
        self.log.write(self.prefix + "owners", codec.LAYOUT_KEY, layout, created_at, headers)

    def half(self, name: str, messages: Sequence[Message], at: int, *, prepared_at: int | None = None) -> None:
        now = at + self.log.ahead
        prepared = now if prepared_at is None else prepared_at
        half = Half(
            id=name, group=self.group, messages=tuple(messages), prepared_at=prepared, since=now, fingerprint=b"f" * 16
        )
        self.log.write(
            self.prefix + "half", name.encode(), codec.encode_half(half), at, codec.half_headers(half, "prepared")
        )

    def write_tombstone(self, kind: str, name: str, at: int, state: str, prepared_at: int = 0) -> None:
        headers = codec.record_headers(kind, self.group, state)
        self.log.write(self.prefix + kind, name.encode(), None, at, headers, prepared_at=prepared_at)

    def park(self, name: str, messages: Sequence[Message], at: int, prepared_at: int) -> None:
        half = Half(
            id=name, group=self.group, messages=tuple(messages), prepared_at=prepared_at, since=at,
            fingerprint=b"f" * 16,
        )  # fmt: skip
        parked = Parked(half=half, reason="asked enough", parked_at=at, checks=3)
        headers = codec.record_headers("parked", self.group, "parked")
        self.log.write(self.prefix + "parked", name.encode(), codec.encode_parked(parked), at, headers)
        self.write_tombstone("half", name, at, "parked")

    def op(self, name: str, kind: OpKind, messages: Sequence[Message], at: int, prepared_at: int) -> None:
        op = Op(
            kind=kind, id=name, group=self.group, half_offset=0, cause=Cause.PRODUCER, prepared_at=prepared_at,
            at=at + self.log.ahead, messages=tuple(map(MessageDigest.of, messages)),
        )  # fmt: skip
        state = "committed" if kind is OpKind.COMMITTED else "rolled_back"
        self.raw_op(name, codec.encode_op(op), at, state, prepared_at)

    def raw_op(self, name: str, value: bytes, at: int, state: str, prepared_at: int = 0) -> None:
        headers = codec.record_headers("op", self.group, state)
        self.log.write(self.prefix + "op", name.encode(), value, at, headers, prepared_at=prepared_at)

    def message(
        self,
        name: str,
        what: Message,
        place: str,
        at: int,
        prepared_at: int | str,
        *,
        prefix: str | None = "",
        named: bool = False,
    ) -> None:
        """Write a message. `prefix` is another deployment's, or None for none; it is `named` if an op names it."""
        headers: list[tuple[str, str | bytes | None]] = [
            *what.headers,
            ("halfway-transaction-id", name),
            ("halfway-message", place),
            ("halfway-prepared-at", f"{prepared_at}"),
        ]
        if prefix is not None:
            headers.append(("halfway-prefix", prefix or self.prefix))
        self.log.write(what.topic, what.key, what.value, at, headers, named=named)

    def commit(self, name: str, messages: Sequence[Message], at: int, prepared_at: int) -> None:
        for number, message in enumerate(messages, 1):
            self.message(name, message, f"{number}/{len(messages)}", at, prepared_at, named=True)
        self.op(name, OpKind.COMMITTED, messages, at, prepared_at)
        self.write_tombstone("half", name, at, "committed", prepared_at)

    def roll_back(self, name: str, at: int, prepared_at: int) -> None:
        self.op(name, OpKind.ROLLED_BACK, (), at, prepared_at)
        self.write_tombstone("half", name, at, "rolled_back", prepared_at)
