"""Writes to a log in memory what the lane writes to Kafka."""

from collections.abc import Sequence
from dataclasses import dataclass

from halfway.kafka.records import codec
from halfway.protocol.records import Half, Message, MessageDigest, Op, OpKind, Parked
from halfway.protocol.transactions import Cause
from tests.support.pipeline.logs import PREFIX, Log


@dataclass
class Writer:
    """Writes what the lane writes."""

    log: Log
    group: str = "g"

    def lay_out(self, created_at: int) -> None:
        """Tell when the topics were created."""
        layout = codec.encode_layout(codec.Layout(shards=8, created_at=created_at))
        headers = codec.record_headers(codec.KIND_LAYOUT, "", "created")
        self.log.write(PREFIX + "owners", codec.LAYOUT_KEY, layout, created_at, headers)

    def half(self, name: str, messages: Sequence[Message], at: int, *, prepared_at: int | None = None) -> None:
        now = at + self.log.ahead
        prepared = now if prepared_at is None else prepared_at
        half = Half(
            id=name, group=self.group, messages=tuple(messages), prepared_at=prepared, since=now, fingerprint=b"f" * 16
        )
        self.log.write(
            PREFIX + "half", name.encode(), codec.encode_half(half), at, codec.half_headers(half, "prepared")
        )

    def write_tombstone(self, kind: str, name: str, at: int, state: str, prepared_at: int = 0) -> None:
        headers = codec.record_headers(kind, self.group, state)
        self.log.write(PREFIX + kind, name.encode(), None, at, headers, prepared_at=prepared_at)

    def park(self, name: str, messages: Sequence[Message], at: int, prepared_at: int) -> None:
        half = Half(
            id=name, group=self.group, messages=tuple(messages), prepared_at=prepared_at, since=at,
            fingerprint=b"f" * 16,
        )  # fmt: skip
        parked = Parked(half=half, reason="asked enough", parked_at=at, checks=3)
        headers = codec.record_headers("parked", self.group, "parked")
        self.log.write(PREFIX + "parked", name.encode(), codec.encode_parked(parked), at, headers)
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
        self.log.write(PREFIX + "op", name.encode(), value, at, headers, prepared_at=prepared_at)

    def message(
        self, name: str, what: Message, place: str, at: int, prepared_at: int | str, *, prefix: str | None = PREFIX
    ) -> None:
        headers: list[tuple[str, str | bytes | None]] = [
            *what.headers,
            ("halfway-transaction-id", name),
            ("halfway-message", place),
            ("halfway-prepared-at", f"{prepared_at}"),
        ]
        if prefix is not None:
            headers.append(("halfway-prefix", prefix))
        self.log.write(what.topic, what.key, what.value, at, headers)

    def commit(self, name: str, messages: Sequence[Message], at: int, prepared_at: int) -> None:
        for number, message in enumerate(messages, 1):
            self.message(name, message, f"{number}/{len(messages)}", at, prepared_at)
            self.log.records[-1].named = True
        self.op(name, OpKind.COMMITTED, messages, at, prepared_at)
        self.write_tombstone("half", name, at, "committed", prepared_at)

    def roll_back(self, name: str, at: int, prepared_at: int) -> None:
        self.op(name, OpKind.ROLLED_BACK, (), at, prepared_at)
        self.write_tombstone("half", name, at, "rolled_back", prepared_at)
