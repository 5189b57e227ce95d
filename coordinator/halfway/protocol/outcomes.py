"""The outcomes that a shard remembers.

There may be millions of outcomes. They are added in the order of their ends and mostly removed in that order. The
newest are kept as they come; whenever there are many of them, they are packed into one block of bytes. A block is
dropped when no outcome in it is remembered. An index of plain numbers maps an id to an address: the number of a block,
and the place of the outcome in it.

See docs/protocol.md#state-is-a-fold-over-the-log.
"""

from __future__ import annotations

from array import array
from itertools import accumulate, count
from typing import TYPE_CHECKING, Final

import msgspec

from halfway.protocol.entries import Ended, MessageIndex
from halfway.protocol.records import OpKind
from halfway.protocol.transactions import Cause, State

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from halfway.protocol.records import Op

    Shape = tuple[str, tuple[str, ...]]
    """Group and topics: many outcomes share few combinations."""

_PLACE_BITS: Final = 10
_BLOCK: Final = 1 << _PLACE_BITS
"""The most outcomes of a block."""
_HASH_SHIFT: Final = 40
_HASH_MASK: Final = (1 << 24) - 1
_NUMBERS: Final = 1 << _HASH_SHIFT - _PLACE_BITS
_PER_BUCKET: Final = 12
_NONE: Final = -1
_GONE: Final = -2
_CAUSES: Final = tuple(Cause)
_COMMITTED, _ROLLED_BACK = State.COMMITTED, State.ROLLED_BACK  # to read an attribute of an enum's class takes long
_COMMIT: Final = OpKind.COMMITTED
_ENCODER: Final = msgspec.msgpack.Encoder()


class _Packed(msgspec.Struct, array_like=True, gc=False):
    """An outcome in a block, without its tombstone."""

    id: str
    shape: int
    """The number of its shape."""
    end: int
    """The number of its cause, twice, and 1 more if it is committed."""
    half_offset: int
    at: int
    took: int
    """The time from the prepare to the end, in ms."""
    checks: int
    fingerprint: bytes
    keys: tuple[bytes | None, ...]
    remark: str | None


_DECODER: Final = msgspec.msgpack.Decoder(_Packed)


class EndCounts(msgspec.Struct, kw_only=True):
    """How many transactions of a shard have ever ended, by cause: those whose op markers are before `position`.

    The owner stores them with its cursors, and the next one adds what it finds in op from there on: so they are exact
    whenever an owner dies.
    """

    position: int = 0
    since: int | None = None
    """The time of the first that was counted, in ms since the epoch."""
    committed: dict[str, int] = {}
    rolled_back: dict[str, int] = {}

    def add(self, op: Op) -> None:
        counts = self.committed if op.kind is _COMMIT else self.rolled_back
        counts[op.cause] = counts.get(op.cause, 0) + 1
        if self.since is None:
            self.since = op.at

    def at(self, position: int) -> EndCounts:
        """Return a copy of the counts, for a position."""
        committed, rolled_back = self.committed.copy(), self.rolled_back.copy()
        return EndCounts(position=position, since=self.since, committed=committed, rolled_back=rolled_back)


class Outcomes:
    """Ended transactions by id, oldest end first."""

    def __init__(self, pack_at: int = _BLOCK) -> None:
        """Start empty. As soon as `pack_at` outcomes are not packed, they are: at most 1024."""
        self._pack_at = pack_at
        self._young: dict[str, Ended] = {}
        self._blocks: dict[int, _Block] = {}
        self._packed = 0
        self._greatest = ""
        """The greatest id that was packed. New ids are greater: they begin with the time."""
        self._numbers = count()
        self._addresses = _AddressIndex()

    def __len__(self) -> int:
        return self._packed + len(self._young)

    def __iter__(self) -> Iterator[Ended]:
        """Iterate over the outcomes, oldest end first; one that is added or removed meanwhile may or may not appear."""
        blocks, young = list(self._blocks.values()), list(self._young.values())
        for block in blocks:
            yield from map(block.ended, block.places())
        yield from young

    def get(self, transaction_id: str) -> Ended | None:
        if (young := self._young.get(transaction_id)) is not None:
            return young
        found = self._find(transaction_id)
        return None if found is None else found[0].ended(found[1])

    def positions(self, transaction_id: str) -> tuple[int, int | None] | None:
        """Return the offsets of the half and of its tombstone, None if the id has no outcome."""
        if (young := self._young.get(transaction_id)) is not None:
            return young.half_offset, young.tombstone
        found = self._find(transaction_id)
        return None if found is None else found[0].positions(found[1])

    def put(self, op: Op, tombstone: int | None) -> None:
        """Add the outcome of an id that has none, from its op. It must have ended after all others here."""
        self._young[op.id] = Ended.from_op(op, tombstone)
        if len(self._young) == self._pack_at:
            self._pack()

    def note_tombstone(self, transaction_id: str, tombstone: int) -> bool:
        """Record the offset of the last tombstone of an outcome's half; return False if the id has no outcome."""
        if (young := self._young.get(transaction_id)) is not None:
            latest = tombstone if young.tombstone is None else max(young.tombstone, tombstone)
            self._young[transaction_id] = msgspec.structs.replace(young, tombstone=latest)
            return True
        found = self._find(transaction_id)
        if found is None:
            return False
        tombstones, place = found[0].tombstones, found[1]
        tombstones[place] = max(tombstones[place], tombstone)
        return True

    def discard(self, transaction_id: str) -> None:
        if self._young.pop(transaction_id, None) is not None:
            return
        found = self._find(transaction_id)
        if found is None:
            return
        block, place = found
        block.tombstones[place] = _GONE
        block.live -= 1
        self._packed -= 1
        self._addresses.remove(hash(transaction_id), block.number << _PLACE_BITS | place)
        if not block.live:
            del self._blocks[block.number]

    def ages(self) -> Iterator[tuple[str, int, int | None]]:
        """Iterate over (id, end time, tombstone offset), oldest end first. The caller must change nothing meanwhile."""
        for block in self._blocks.values():
            for place in block.places():
                packed = block.read(place)
                yield packed.id, packed.at, block.tombstone(place)
        for ended in self._young.values():
            yield ended.id, ended.at, ended.tombstone

    def _pack(self) -> None:
        """Move the newest outcomes to a block."""
        # A block that outlived all others may still have the next number.
        number = next(number % _NUMBERS for number in self._numbers if number % _NUMBERS not in self._blocks)
        young, self._young = self._young, {}
        self._blocks[number] = _Block(number, list(young.values()))
        self._packed += len(young)
        self._greatest = max(self._greatest, *young)
        for address, name in enumerate(young, number << _PLACE_BITS):
            self._addresses.add(hash(name), address)

    def _find(self, transaction_id: str) -> tuple[_Block, int] | None:
        """Return the block and the place of an outcome that is packed."""
        if not self._packed or transaction_id > self._greatest:
            return None
        for address in self._addresses.candidates(hash(transaction_id)):
            block, place = self._blocks[address >> _PLACE_BITS], address % _BLOCK
            if block.read(place).id == transaction_id:
                return block, place
        return None


class _Block:
    """Outcomes one after the other, by their places."""

    __slots__ = ("_data", "_shapes", "_starts", "live", "number", "tombstones")

    def __init__(self, number: int, outcomes: Sequence[Ended]) -> None:
        self.number = number
        self.live = len(outcomes)
        self.tombstones = array("q", [_NONE if one.tombstone is None else one.tombstone for one in outcomes])
        """By place, `_NONE` if it is not known, `_GONE` if the outcome is remembered no more."""
        shapes: dict[Shape, int] = {}
        rows = [
            _ENCODER.encode(
                (
                    one.id,
                    shapes.setdefault((one.group, one.index.topics), len(shapes)),
                    2 * _CAUSES.index(one.cause) + (one.state is _COMMITTED),
                    one.half_offset,
                    one.at,
                    one.at - one.prepared_at,
                    one.checks,
                    one.fingerprint,
                    one.index.keys,
                    one.remark,
                )
            )
            for one in outcomes
        ]
        self._shapes = tuple(shapes)
        self._starts = array("I", accumulate(map(len, rows), initial=0))
        self._data = b"".join(rows)

    def places(self) -> Iterator[int]:
        """Iterate over the places of the remembered outcomes."""
        return (place for place, tombstone in enumerate(self.tombstones) if tombstone != _GONE)

    def read(self, place: int) -> _Packed:
        return _DECODER.decode(self._data[self._starts[place] : self._starts[place + 1]])

    def tombstone(self, place: int) -> int | None:
        tombstone = self.tombstones[place]
        return None if tombstone == _NONE else tombstone

    def positions(self, place: int) -> tuple[int, int | None]:
        return self.read(place).half_offset, self.tombstone(place)

    def ended(self, place: int) -> Ended:
        packed = self.read(place)
        group, topics = self._shapes[packed.shape]
        return Ended(
            id=packed.id,
            state=_COMMITTED if packed.end & 1 else _ROLLED_BACK,
            group=group,
            cause=_CAUSES[packed.end >> 1],
            at=packed.at,
            prepared_at=packed.at - packed.took,
            checks=packed.checks,
            half_offset=packed.half_offset,
            fingerprint=packed.fingerprint,
            index=MessageIndex(topics, packed.keys),
            remark=packed.remark,
            tombstone=self.tombstone(place),
        )


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
