"""The records in the internal topics (docs/protocol.md#topics); `schemas/` has their Avro form.

Times are milliseconds since the epoch. Hashes are the first 16 bytes of SHA-256.
"""

from __future__ import annotations

from enum import Enum, StrEnum
from hashlib import sha256
from typing import Final

import msgspec

from halfway.domain.policy import PolicyOverrides
from halfway.domain.transaction import Cause

HASH_BYTES = 16
NO_BARRIER: Final = -1
"""The barrier of a half whose record names none: the lane wrote it, or a release that did not know the header."""
MAX_REMARK_BYTES: Final = 1024
MAX_TOPICS: Final = 1000
"""The limit of a group's topics."""
_ENCODER: Final = msgspec.msgpack.Encoder()


def digest(data: bytes | None) -> bytes | None:
    """Return the hash that is stored of a key or a value, None for None."""
    return None if data is None else sha256(data).digest()[:HASH_BYTES]


def headers_digest(headers: tuple[tuple[str, bytes | None], ...]) -> bytes:
    """Return the hash that is stored of headers (docs/protocol.md#topics)."""
    if not headers:
        return _NO_HEADERS
    text = ",".join([f"{name.encode().hex()}={'-' if value is None else value.hex()}" for name, value in headers])
    return sha256(text.encode()).digest()[:HASH_BYTES]


_NO_HEADERS: Final = sha256(b"").digest()[:HASH_BYTES]


class Message(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """One message of a transaction, as it will be written to its real topic."""

    topic: str
    key: bytes | None = None
    value: bytes | None = None
    headers: tuple[tuple[str, bytes | None], ...] = ()
    partition: int | None = None

    @property
    def size(self) -> int:
        """The number of bytes of key, value, header names and header values, as Kafka stores them."""
        size = len(self.key or b"") + len(self.value or b"")
        if not self.headers:
            return size
        for name, value in self.headers:
            size += (len(name) if name.isascii() else len(name.encode())) + len(value or b"")
        return size

    def __repr__(self) -> str:
        """Leave the payload out, because a repr may end up in a log."""
        return f"Message(topic={self.topic!r}, partition={self.partition}, {self.size} bytes)"


def size_of(messages: tuple[Message, ...]) -> int:
    """Return the total number of bytes of messages. Most transactions have one message."""
    return messages[0].size if len(messages) == 1 else sum([message.size for message in messages])


class Origin(StrEnum):
    """The writer of a half: a first prepare, or the lane (resume, re-anchor, correction), whose record wins."""

    PREPARE = "prepare"
    LANE = "lane"


class Half(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """A half message: one transaction's messages, invisible until it is committed."""

    id: str
    group: str
    messages: tuple[Message, ...]
    prepared_at: int
    since: int
    """The time from which checks and age are counted: the prepare, or the last resume."""
    fingerprint: bytes
    check_after_ms: int | None = None
    origin: Origin = Origin.PREPARE
    checks: int = 0
    checked_at: int | None = None
    commit_verdict: bool = False
    remark: str | None = None
    barrier: int = NO_BARRIER
    """The offset of its writer's barrier record in half[s], which a first prepare carries in a header. Of two prepares
    of an id with different content, the one with the later barrier counts."""

    @property
    def size(self) -> int:
        """The number of bytes of all messages."""
        return size_of(self.messages)


def fingerprint(group: str, messages: tuple[Message, ...], check_after_ms: int | None) -> bytes:
    """Return the 16-byte hash of a prepare's content: equal for the same content at any time."""
    content = _ENCODER.encode((group, check_after_ms, messages))
    return sha256(content).digest()[:HASH_BYTES]


class Foreign(Enum):
    """A placeholder for a record under a transaction's id that halfway did not write."""

    FOREIGN = "foreign"


FOREIGN: Final = Foreign.FOREIGN


class MessageDigest(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """The part of a message that an op marker keeps: enough for an audit after the half is compacted away."""

    topic: str
    key_hash: bytes | None
    value_hash: bytes | None
    size: int
    headers_hash: bytes | None = None
    """Of the producer's own headers; None in markers of earlier releases."""
    partition: int | None = None
    """The partition that the producer chose, None for none."""

    @classmethod
    def of(cls, message: Message) -> MessageDigest:
        """Return the digest of one message."""
        return cls(
            topic=message.topic,
            key_hash=digest(message.key),
            value_hash=digest(message.value),
            size=message.size,
            headers_hash=headers_digest(message.headers),
            partition=message.partition,
        )


class OpKind(StrEnum):
    """The event that an op marker records."""

    COMMITTED = "COMMITTED"
    ROLLED_BACK = "ROLLED_BACK"
    CHECKED = "CHECKED"
    VERDICT = "VERDICT"
    PARKED = "PARKED"
    RESUMED = "RESUMED"

    def __init__(self, kind: str) -> None:
        """Set `final`: whether it is an outcome."""
        self.final = kind in {"COMMITTED", "ROLLED_BACK"}


class Op(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """An op marker. `checks`, `checked_at` and `commit_verdict` are totals: the last op of an id is enough."""

    kind: OpKind
    id: str
    group: str
    half_offset: int
    cause: Cause
    prepared_at: int
    at: int
    fingerprint: bytes = b""
    """The fingerprint of the half, so that the same prepare is recognised after the end."""
    checks: int = 0
    checked_at: int | None = None
    commit_verdict: bool = False
    remark: str | None = None
    messages: tuple[MessageDigest, ...] = ()


class Parked(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """A transaction that halfway no longer checks. It is kept until it is ended or resumed."""

    half: Half
    reason: str
    parked_at: int
    checks: int


class CheckMode(StrEnum):
    """How a group gets its checks: by HTTP request, or by long poll."""

    PUSH = "push"
    PULL = "pull"


class Group(msgspec.Struct, frozen=True, kw_only=True):
    """A producer group: its check endpoints, topics and policy."""

    name: str
    mode: CheckMode
    urls: tuple[str, ...]
    topics: tuple[str, ...]
    policy: PolicyOverrides
    created_at: int
    updated_at: int


class Owner(msgspec.Struct, frozen=True, kw_only=True):
    """The owner of a shard (docs/protocol.md#ownership-and-fencing)."""

    shard: int
    incarnation: str
    lane_ids: tuple[str, ...]
    url: str
    acquired_at: int


class Barrier(msgspec.Struct, frozen=True, kw_only=True):
    """A record that a new owner writes to each partition of its shard. Everything before it is settled."""

    incarnation: str
    at: int
