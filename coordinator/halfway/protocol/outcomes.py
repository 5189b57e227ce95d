"""The outcomes that a shard remembers.

There may be millions of outcomes, so they are packed into bytes. They are added in the order of their ends and mostly
removed in that order. Each is a run of bytes in a segment, and a segment is dropped when no outcome in it is
remembered. An index of plain numbers maps an id to an address: the number of a segment, and the offset of the outcome
in it.

See docs/protocol.md#state-is-a-fold-over-the-log.
"""

from __future__ import annotations

from array import array
from itertools import count
from struct import Struct
from typing import TYPE_CHECKING, Final

import msgspec

from halfway.protocol.entries import KEY_BYTES, Ended, MessageIndex, collapse_equal_keys
from halfway.protocol.ids import ID
from halfway.protocol.records import OpKind
from halfway.protocol.transactions import State

if TYPE_CHECKING:
    from collections.abc import Iterator

    from halfway.protocol.records import Op
    from halfway.protocol.transactions import Cause

    Shape = tuple[str, State, Cause, tuple[str, ...]]
    """Group, state, cause and topics: many outcomes share few combinations."""


_SEGMENT_BYTES: Final = 1 << 16
_OFFSET_BITS: Final = 16
_HASH_SHIFT: Final = 40
_HASH_MASK: Final = (1 << 24) - 1
_PER_BUCKET: Final = 12
_NONE: Final = -1
_MADE: Final = b"\xff"
"""The first byte of a packed UUIDv7; no UTF-8 text begins with it."""

_FIXED: Final = Struct("<IHB?IIqqqq")
"""The total length, the lengths of id and fingerprint, whether it is remembered, the shape, the number of checks, the
times of prepare and end, and the offsets of the half and of its tombstone. After it come the id, the fingerprint, and
key hashes and remark in MessagePack.
"""
_ID_LENGTH: Final = Struct("<H")
_ID_LENGTH_AT: Final = 4
_REMEMBERED_AT: Final = 7
_SHAPE: Final = Struct("<I")
_SHAPE_AT: Final = 8
_TIMES: Final = Struct("<qqq")
"""The time of the end, and the offsets of the half and of its tombstone."""
_TIMES_AT: Final = _FIXED.size - _TIMES.size
_POSITIONS: Final = Struct("<qq")
_POSITIONS_AT: Final = _FIXED.size - _POSITIONS.size

_ENCODER: Final = msgspec.msgpack.Encoder()
_DECODER: Final = msgspec.msgpack.Decoder(tuple[tuple[bytes | None, ...], str | None])


class Outcomes:
    """Ended transactions by id, oldest end first."""

    def __init__(self) -> None:
        self._count = 0
        self._segments: dict[int, _Segment] = {}
        self._newest = _Segment()
        self._numbers = count()
        self._addresses = _AddressIndex()
        self._shapes = _Shapes()

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[Ended]:
        """Iterate over the outcomes, oldest end first; one that is added or removed meanwhile may or may not appear."""
        for segment in list(self._segments.values()):
            for offset in segment.offsets():
                yield self._read(segment.data, offset)

    def get(self, transaction_id: str) -> Ended | None:
        """Return an outcome, None if the id has none."""
        location = self._find(transaction_id)
        return None if location is None else self._read(location[0].data, location[1])

    def positions(self, transaction_id: str) -> tuple[int, int | None] | None:
        """Return the offsets of the half and of its tombstone, None if the id has no outcome."""
        location = self._find(transaction_id)
        if location is None:
            return None
        half, tombstone = _POSITIONS.unpack_from(location[0].data, location[1] + _POSITIONS_AT)
        return half, None if tombstone == _NONE else tombstone

    def put(self, op: Op, tombstone: int | None) -> None:
        """Add the outcome of an id that has none, from its op. It must have ended after all others here."""
        state = State.COMMITTED if op.kind is OpKind.COMMITTED else State.ROLLED_BACK
        if len(op.messages) == 1:  # most transactions have one message
            (message,) = op.messages
            topics: tuple[str, ...] = (message.topic,)
            keys: tuple[bytes | None, ...] = (_short(message.key_hash),)
        else:
            topics = tuple([message.topic for message in op.messages])
            keys = collapse_equal_keys(tuple([_short(message.key_hash) for message in op.messages]))
        name = _pack(op.id)
        detail = _ENCODER.encode((keys, op.remark))
        size = _FIXED.size + len(name) + len(op.fingerprint) + len(detail)
        fixed = _FIXED.pack(
            size,
            len(name),
            len(op.fingerprint),
            True,
            self._shapes.take((op.group, state, op.cause, topics)),
            op.checks,
            op.prepared_at,
            op.at,
            op.half_offset,
            _NONE if tombstone is None else tombstone,
        )
        segment = self._segment(size)
        address = segment.number << _OFFSET_BITS | len(segment.data)
        segment.data += b"".join((fixed, name, op.fingerprint, detail))
        segment.live += 1
        self._addresses.add(hash(op.id), address)
        self._count += 1

    def note_tombstone(self, transaction_id: str, tombstone: int) -> bool:
        """Record the offset of the last tombstone of an outcome's half; return False if the id has no outcome."""
        location = self._find(transaction_id)
        if location is None:
            return False
        data, start = location[0].data, location[1] + _POSITIONS_AT
        half, before = _POSITIONS.unpack_from(data, start)
        _POSITIONS.pack_into(data, start, half, max(before, tombstone))
        return True

    def discard(self, transaction_id: str) -> None:
        location = self._find(transaction_id)
        if location is None:
            return
        segment, offset = location
        self._shapes.release(_SHAPE.unpack_from(segment.data, offset + _SHAPE_AT)[0])
        segment.data[offset + _REMEMBERED_AT] = False
        segment.live -= 1
        self._count -= 1
        self._addresses.remove(hash(transaction_id), segment.number << _OFFSET_BITS | offset)
        if not segment.live and segment is not self._newest:
            del self._segments[segment.number]

    def ages(self) -> Iterator[tuple[str, int, int | None]]:
        """Iterate over (id, end time, tombstone offset), oldest end first. The caller must change nothing meanwhile."""
        for segment in self._segments.values():
            for offset in segment.offsets():
                at, _, tombstone = _TIMES.unpack_from(segment.data, offset + _TIMES_AT)
                yield self._name(segment.data, offset), at, None if tombstone == _NONE else tombstone

    def _segment(self, size: int) -> _Segment:
        """Return the segment that the next outcome goes to."""
        newest = self._newest
        if newest.number in self._segments and len(newest.data) + size <= _SEGMENT_BYTES:
            return newest
        newest.seal()
        if not newest.live:
            self._segments.pop(newest.number, None)
        # A segment that outlived all others may still have the next number.
        number = next(number & _HASH_MASK for number in self._numbers if number & _HASH_MASK not in self._segments)
        self._newest = self._segments[number] = _Segment(number)
        return self._newest

    def _find(self, transaction_id: str) -> tuple[_Segment, int] | None:
        if not self._count:
            return None  # the usual case in the recovery of pending transactions
        candidates = self._addresses.candidates(hash(transaction_id))
        if not candidates:
            return None
        name = _pack(transaction_id)
        for address in candidates:
            segment, offset = self._segments[address >> _OFFSET_BITS], address & (_SEGMENT_BYTES - 1)
            if self._packed_id(segment.data, offset) == name:
                return segment, offset
        return None

    def _name(self, data: bytearray, offset: int) -> str:
        return _unpack(bytes(self._packed_id(data, offset)))

    def _packed_id(self, data: bytearray, offset: int) -> bytearray:
        start = offset + _FIXED.size
        return data[start : start + _ID_LENGTH.unpack_from(data, offset + _ID_LENGTH_AT)[0]]

    def _read(self, data: bytearray, offset: int) -> Ended:
        size, name, fingerprint, _, shape, checks, prepared_at, at, half_offset, tombstone = _FIXED.unpack_from(
            data, offset
        )
        group, state, cause, topics = self._shapes.get(shape)
        start = offset + _FIXED.size
        middle, end = start + name, start + name + fingerprint
        keys, remark = _DECODER.decode(data[end : offset + size])
        return Ended(
            id=_unpack(bytes(data[start:middle])),
            state=state,
            group=group,
            cause=cause,
            at=at,
            prepared_at=prepared_at,
            checks=checks,
            half_offset=half_offset,
            fingerprint=bytes(data[middle:end]),
            index=MessageIndex(topics, keys),
            remark=remark,
            tombstone=None if tombstone == _NONE else tombstone,
        )


class _Segment:
    """Outcomes one after the other. An outcome that is larger than a segment has a segment of its own."""

    __slots__ = ("data", "live", "number")

    def __init__(self, number: int = _NONE) -> None:
        self.number = number
        self.data = bytearray()
        self.live = 0

    def offsets(self) -> Iterator[int]:
        """Iterate over the offsets of the remembered outcomes."""
        offset = 0
        while offset < len(self.data):
            if self.data[offset + _REMEMBERED_AT]:
                yield offset
            offset += int.from_bytes(self.data[offset : offset + 4], "little")

    def seal(self) -> None:
        """Free the memory that was allocated for growing."""
        self.data = bytearray(bytes(self.data))


class _Shapes:
    """Numbers the shapes. A number is free again when no outcome has its shape."""

    def __init__(self) -> None:
        self._numbers: dict[Shape, int] = {}
        self._shapes: dict[int, Shape] = {}
        self._uses: dict[int, int] = {}
        self._free: list[int] = []

    def take(self, shape: Shape) -> int:
        number = self._numbers.get(shape)
        if number is None:
            number = self._free.pop() if self._free else len(self._shapes)
            self._numbers[shape] = number
            self._shapes[number] = shape
            self._uses[number] = 0
        self._uses[number] += 1
        return number

    def get(self, number: int) -> Shape:
        return self._shapes[number]

    def release(self, number: int) -> None:
        self._uses[number] -= 1
        if not self._uses[number]:
            del self._uses[number]
            del self._numbers[self._shapes.pop(number)]
            self._free.append(number)


class _AddressIndex:
    """Maps hashes to addresses by linear hashing. It grows by one bucket at a time, so no call takes long."""

    def __init__(self) -> None:
        self._buckets = [array("Q")]
        self._base = 1
        """The number of buckets when all were last split."""
        self._count = 0

    def _bucket(self, hashed: int) -> array[int]:
        number = hashed & (2 * self._base - 1)
        return self._buckets[number if number < len(self._buckets) else number - self._base]

    def add(self, hashed: int, address: int) -> None:
        self._bucket(hashed).append((hashed & _HASH_MASK) << _HASH_SHIFT | address)
        self._count += 1
        if self._count > _PER_BUCKET * len(self._buckets) and len(self._buckets) <= _HASH_MASK:
            self._split()

    def candidates(self, hashed: int) -> list[int]:
        """Return the addresses with this hash: mostly none, or only the right one."""
        tag = hashed & _HASH_MASK
        return [word & (1 << _HASH_SHIFT) - 1 for word in self._bucket(hashed) if word >> _HASH_SHIFT == tag]

    def remove(self, hashed: int, address: int) -> None:
        self._bucket(hashed).remove((hashed & _HASH_MASK) << _HASH_SHIFT | address)
        self._count -= 1

    def _split(self) -> None:
        number = len(self._buckets) - self._base
        bit = self._base << _HASH_SHIFT
        words = self._buckets[number]
        self._buckets[number] = array("Q", [word for word in words if not word & bit])
        self._buckets.append(array("Q", [word for word in words if word & bit]))
        if len(self._buckets) == 2 * self._base:
            self._base *= 2


def _short(key_hash: bytes | None) -> bytes | None:
    return None if key_hash is None else key_hash[:KEY_BYTES]


def _pack(transaction_id: str) -> bytes:
    """Return an id in few bytes: a UUIDv7 as its number, an id of an old form as text."""
    if ID.match(transaction_id) is not None:
        return _MADE + bytes.fromhex(transaction_id.replace("-", ""))
    return transaction_id.encode()


def _unpack(data: bytes) -> str:
    """Return the id that was packed by `_pack`."""
    if data.startswith(_MADE):
        digits = data[1:].hex()
        return f"{digits[:8]}-{digits[8:12]}-{digits[12:16]}-{digits[16:20]}-{digits[20:]}"
    return data.decode()
