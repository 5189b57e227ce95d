"""The entries of a shard's state: transactions without their payloads."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import lru_cache
from sys import intern
from typing import ClassVar

import msgspec

from halfway.protocol.records import Half, Op, OpKind, Origin, Parked, digest, size_of
from halfway.protocol.transactions import Cause, State

KEY_BYTES = 8
_COMMITTED, _ROLLED_BACK = State.COMMITTED, State.ROLLED_BACK  # to read an attribute of an enum's class takes long
_MARKS_COMMIT = OpKind.COMMITTED


class MessageIndex(msgspec.Struct, frozen=True, gc=False):
    """The topic and the short key hash of each message, for lists.

    There may be millions of these, so equal topics are shared, and a key that all messages have is stored once.
    """

    topics: tuple[str, ...]
    keys: tuple[bytes | None, ...]

    @classmethod
    def of(cls, pairs: Iterable[tuple[str, bytes | None]]) -> MessageIndex:
        """Build an index from the topic and the short key hash of each message."""
        entries = tuple(pairs)
        topics = _shared(tuple(intern(topic) for topic, _ in entries))
        return cls(topics, collapse_equal_keys(tuple(key for _, key in entries)))

    def __iter__(self) -> Iterator[tuple[str, bytes | None]]:
        """Iterate over (topic, key hash) of each message."""
        keys = self.keys if len(self.keys) == len(self.topics) else self.keys * len(self.topics)
        return zip(self.topics, keys, strict=True)


def collapse_equal_keys(keys: tuple[bytes | None, ...]) -> tuple[bytes | None, ...]:
    """Return the key hashes of all messages as an index stores them: a single one if all are equal."""
    return keys[:1] if len(set(keys)) == 1 else keys


@lru_cache(maxsize=1024)
def _shared(topics: tuple[str, ...]) -> tuple[str, ...]:
    return topics


class Pending(msgspec.Struct, kw_only=True, gc=False):
    """A pending transaction without its payload. The fields after `op_offset` live in memory only."""

    id: str
    group: str
    offset: int
    prepared_at: int
    since: int
    fingerprint: bytes
    check_after_ms: int | None
    origin: Origin
    size: int
    index: MessageIndex
    checks: int
    checked_at: int | None
    commit_verdict: bool
    remark: str | None
    barrier: int
    op_offset: int | None = None
    attempts: int = 0
    last_error: str | None = None
    leased_check: int = 0
    """The number of the last check that this owner leased; 0 if it has leased none."""
    leased_until: int | None = None
    """When the lease of the last check ends, ms since the epoch: 0 if the check was answered, None if only a former
    owner of the shard knows."""
    checked_here: bool = False
    """True if this owner of the shard has sent a check, and has missed none since."""
    offered_at: int | None = None
    """When this owner last tried to queue a check, ms since the epoch."""
    offered_since: int | None = None
    """When this owner first tried to queue a check, ms since the epoch."""
    look_at: int | None = None
    """When the scan next looks at it, ms since the epoch: 0 for as soon as possible, None if no look is planned."""
    state: ClassVar[State] = State.PREPARED

    def ask_afresh(self) -> None:
        """Let the policy roll it back only after another check was sent: earlier answers may be out of date."""
        self.checked_here = False
        self.offered_at = self.offered_since = None

    @classmethod
    def of(cls, offset: int, half: Half) -> Pending:
        """Build the entry of the half record at `offset`."""
        return cls(
            id=half.id,
            group=intern(half.group),
            offset=offset,
            prepared_at=half.prepared_at,
            since=half.prepared_at if half.since == half.prepared_at else half.since,
            fingerprint=half.fingerprint,
            check_after_ms=half.check_after_ms,
            origin=half.origin,
            size=size_of(half.messages),
            index=_index_of(half),
            checks=half.checks,
            checked_at=half.checked_at,
            commit_verdict=half.commit_verdict,
            remark=half.remark,
            barrier=half.barrier,
            attempts=half.checks,
        )


class ParkedEntry(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """A parked transaction without its payload. `offset` is the offset of its record in parked[s]."""

    id: str
    group: str
    offset: int
    prepared_at: int
    parked_at: int
    fingerprint: bytes
    size: int
    index: MessageIndex
    checks: int
    reason: str
    commit_verdict: bool
    remark: str | None
    state: ClassVar[State] = State.PARKED

    @classmethod
    def of(cls, offset: int, parked: Parked) -> ParkedEntry:
        half = parked.half
        return cls(
            id=half.id,
            group=intern(half.group),
            offset=offset,
            prepared_at=half.prepared_at,
            parked_at=parked.parked_at,
            fingerprint=half.fingerprint,
            size=size_of(half.messages),
            index=_index_of(half),
            checks=parked.checks,
            reason=parked.reason,
            commit_verdict=half.commit_verdict,
            remark=half.remark,
        )


class Ended(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """An ended transaction. `tombstone` is the offset of its tombstone in half[s], once it is known."""

    id: str
    state: State
    group: str
    cause: Cause
    at: int
    prepared_at: int
    checks: int
    half_offset: int
    fingerprint: bytes
    index: MessageIndex
    remark: str | None
    tombstone: int | None = None

    @classmethod
    def from_op(cls, op: Op, tombstone: int | None) -> Ended:
        """Build the outcome of a final op marker."""
        if len(op.messages) == 1:  # most transactions have one message
            (message,) = op.messages
            index = MessageIndex((message.topic,), (message.key_hash and message.key_hash[:KEY_BYTES],))
        else:
            keys = tuple([message.key_hash and message.key_hash[:KEY_BYTES] for message in op.messages])
            index = MessageIndex(tuple([message.topic for message in op.messages]), collapse_equal_keys(keys))
        return cls(
            id=op.id,
            state=_COMMITTED if op.kind is _MARKS_COMMIT else _ROLLED_BACK,
            group=op.group,
            cause=op.cause,
            at=op.at,
            prepared_at=op.prepared_at,
            checks=op.checks,
            half_offset=op.half_offset,
            fingerprint=op.fingerprint,
            index=index,
            remark=op.remark,
            tombstone=tombstone,
        )

    @property
    def op(self) -> Op:
        """Its op marker, as far as it is remembered: the digests of the messages are not."""
        return Op(
            kind=OpKind.COMMITTED if self.state is State.COMMITTED else OpKind.ROLLED_BACK,
            id=self.id,
            group=self.group,
            half_offset=self.half_offset,
            cause=self.cause,
            prepared_at=self.prepared_at,
            at=self.at,
            fingerprint=self.fingerprint,
            checks=self.checks,
            remark=self.remark,
        )


Unresolved = Pending | ParkedEntry
Entry = Unresolved | Ended


class OpTotals(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """The totals in the last op marker of an id that has no outcome."""

    offset: int
    at: int
    resumed: bool
    checks: int
    checked_at: int | None
    commit_verdict: bool
    remark: str | None

    @classmethod
    def of(cls, offset: int, op: Op) -> OpTotals:
        return cls(
            offset=offset,
            at=op.at,
            resumed=op.kind is OpKind.RESUMED,
            checks=op.checks,
            checked_at=op.checked_at,
            commit_verdict=op.commit_verdict,
            remark=op.remark,
        )


def _index_of(half: Half) -> MessageIndex:
    if len(half.messages) == 1:  # most transactions have one message
        (message,) = half.messages
        return MessageIndex(_shared((intern(message.topic),)), (short_key_hash(message.key),))
    hashes = {key: short_key_hash(key) for key in {message.key for message in half.messages}}
    return MessageIndex.of((message.topic, hashes[message.key]) for message in half.messages)


def short_key_hash(key: bytes | None) -> bytes | None:
    hashed = digest(key)
    return None if hashed is None else hashed[:KEY_BYTES]
