"""Made-up transactions by the block, millions of them in seconds, for the pipeline's benchmarks.

Every transaction has two messages. Of a hundred 85 are committed, 10 rolled back and 5 pending. The op markers are the
coordinator's own bytes with other ids, times and hashes put in: each block's first one is decoded again.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from halfway.domain.records import Half, Message, MessageDigest, Op, OpKind, digest
from halfway.domain.transaction import Cause
from halfway.kafka.records import codec

PREFIX: Final = "_halfway."
TOPICS: Final = ("orders", "payments")
GROUP: Final = "shop"
SHARDS: Final = 8
COMMITTED, ROLLED_BACK, PENDING = range(3)
"""What a transaction became, or is."""
CONTENTS: Final = 1_024
"""Different keys and values."""
VALUE_BYTES: Final = 200
_OF_A_HUNDRED: Final = np.repeat([COMMITTED, ROLLED_BACK, PENDING], [85, 10, 5])
_SOME_TIME: Final = 1_750_000_000_000
_TIME_BYTES: Final = 6

Bytes = NDArray[np.uint8]
Numbers = NDArray[np.int64]


@dataclass(frozen=True, kw_only=True)
class Transactions:
    """A block of transactions: which they are, when they were prepared (ms), which contents they have, their states."""

    number: Numbers
    ids: Bytes
    at: Numbers
    contents: NDArray[np.int64]
    state: Numbers

    def __getitem__(self, chosen: Any) -> Transactions:
        return Transactions(
            number=self.number[chosen],
            ids=self.ids[chosen],
            at=self.at[chosen],
            contents=self.contents[chosen],
            state=self.state[chosen],
        )

    def __len__(self) -> int:
        return len(self.number)


class Contents:
    """A pool of keys and values, and their hashes."""

    def __init__(self, rng: np.random.Generator) -> None:
        self.keys = hexadecimal(rng.integers(0, 256, (CONTENTS, 6), np.uint8))
        self.values = hexadecimal(rng.integers(0, 256, (CONTENTS, VALUE_BYTES // 2), np.uint8))
        self.key_hashes, self.value_hashes = (
            np.stack([np.frombuffer(digest(row.tobytes()) or b"", np.uint8) for row in rows])
            for rows in (self.keys, self.values)
        )


def transactions(rng: np.random.Generator, number: Numbers, at: Numbers) -> Transactions:
    """Make the transactions with these numbers."""
    return Transactions(
        number=number,
        ids=_ids(rng, number % SHARDS, at),
        at=at,
        contents=rng.integers(0, CONTENTS, (len(number), len(TOPICS))),
        state=states(number),
    )


def states(number: Numbers) -> Numbers:
    """Return the states of the transactions with these numbers."""
    return _OF_A_HUNDRED[number % len(_OF_A_HUNDRED)]


def _ids(rng: np.random.Generator, shard: Numbers, at: Numbers) -> Bytes:
    """Return ids as the coordinator makes them: shard and UUIDv7."""
    raw = rng.integers(0, 256, (len(at), 16), np.uint8)
    for byte in range(6):
        raw[:, byte] = (at >> (40 - 8 * byte)) & 0xFF
    raw[:, 6] = 0x70 | raw[:, 6] & 0x0F
    raw[:, 8] = 0x80 | raw[:, 8] & 0x3F
    digits, ids = hexadecimal(raw), np.full((len(at), 38), ord("-"), np.uint8)
    ids[:, 0] = ord("0") + shard
    for into, begin, end in ((2, 0, 8), (11, 8, 12), (16, 12, 16), (21, 16, 20), (26, 20, 32)):
        ids[:, into : into + end - begin] = digits[:, begin:end]
    return ids


def hexadecimal(raw: Bytes) -> Bytes:
    """Return the bytes of each row as digits."""
    digits = np.frombuffer(b"0123456789abcdef", np.uint8)
    both: Bytes = np.stack((digits[raw >> 4], digits[raw & 15]), axis=2).reshape(len(raw), -1)
    return both


def half_value() -> bytes:
    """Return the value of a half record. It has another id, which does not matter, because no job decodes it."""
    message = Message(topic=TOPICS[0], key=b"k", value=bytes(VALUE_BYTES))
    half = Half(
        id="x", group=GROUP, messages=(message,), prepared_at=_SOME_TIME, since=_SOME_TIME, fingerprint=bytes(range(16))
    )
    return codec.encode_half(half)


def op_values(ended: Transactions, kind: OpKind, contents: Contents, ended_at: Numbers) -> Bytes:
    """Return op markers: one that the coordinator's own code has made, with other ids, times and hashes put in."""
    marks = [bytes([mark]) * 16 for mark in range(1, 2 * len(TOPICS) + 1)]
    digests = tuple(
        MessageDigest(topic=topic, key_hash=marks[2 * n], value_hash=marks[2 * n + 1], size=VALUE_BYTES)
        for n, topic in enumerate(TOPICS)
    )
    own, prepared_at, at = "0-" + "f" * 36, _SOME_TIME + 1, _SOME_TIME + 2
    op = Op(
        kind=kind,
        id=own,
        group=GROUP,
        half_offset=0,
        cause=Cause.PRODUCER,
        prepared_at=prepared_at,
        at=at,
        messages=digests,
    )
    template = codec.encode_op(op)
    values = np.tile(np.frombuffer(template, np.uint8), (len(ended), 1))

    def put(mark: bytes, what: Bytes) -> None:
        if template.count(mark) != 1:
            raise ValueError(f"an op marker does not hold {mark.hex()} once")
        place = template.index(mark)
        values[:, place : place + len(mark)] = what

    put(own.encode(), ended.ids)
    put(_varint(np.array([prepared_at]))[0].tobytes(), _varint(ended.at))
    put(_varint(np.array([at]))[0].tobytes(), _varint(ended_at))
    for number in range(len(TOPICS)):
        chosen = ended.contents[:, number]
        put(marks[2 * number], contents.key_hashes[chosen])
        put(marks[2 * number + 1], contents.value_hashes[chosen])
    first = codec.decode_op(values[0].tobytes())
    if (first.id.encode(), first.prepared_at) != (ended.ids[0].tobytes(), int(ended.at[0])):
        raise ValueError(f"an op marker was put together wrongly: {first}")
    return values


def _varint(numbers: Numbers) -> Bytes:
    """Return times in ms in Avro's encoding, six bytes each."""
    zigzag = numbers << 1
    encoded = np.stack([zigzag >> 7 * byte & 0x7F | 0x80 for byte in range(_TIME_BYTES)], axis=1)
    encoded[:, -1] &= 0x7F
    return encoded.astype(np.uint8)
