"""Archives of made-up topics, as `halfway-pipeline archive` writes them, millions of transactions in seconds.

Every transaction has two messages. Of a hundred 85 were committed, 10 rolled back and 5 are pending; of the first some
are damaged in each way that an audit must find. The op markers are the coordinator's own bytes with other ids, times
and hashes put in: each file's first one is decoded again when it is written.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from halfway.domain.records import Half, Message, MessageDigest, Op, OpKind, digest
from halfway.domain.transaction import Cause
from halfway.kafka import codec
from halfway.pipeline.pins import PartitionPin, Pins, TopicPin

PREFIX: Final = "_halfway."
TOPICS: Final = ("orders", "payments")
GROUP: Final = "shop"
SHARDS: Final = 8
PLANTED: Final = 10
"""Transactions of each anomaly."""
ANOMALIES: Final = ("lost", "torn", "doubled", "payload_changed", "leaked", "contradicted")
_BLOCK: Final = 250_000
_COMMITTED, _ROLLED_BACK = 85, 10
"""Of a hundred."""
_TIME_BYTES: Final = 6
_START: Final = 1_750_000_000_000
_PER_MS: Final = 10
_CONTENTS: Final = 1_024
_VALUE_BYTES: Final = 200

Bytes = NDArray[np.uint8]
Numbers = NDArray[np.int64]


@dataclass(frozen=True, kw_only=True)
class Transactions:
    """A block of transactions: which they are, when they were prepared, which contents they have and what they became.

    `state` is 0 for committed, 1 for rolled back and 2 for pending.
    """

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
        self.keys = _hex(rng.integers(0, 256, (_CONTENTS, 6), np.uint8))
        self.values = _hex(rng.integers(0, 256, (_CONTENTS, _VALUE_BYTES // 2), np.uint8))
        self.key_hashes, self.value_hashes = (
            np.stack([np.frombuffer(digest(row.tobytes()) or b"", np.uint8) for row in rows])
            for rows in (self.keys, self.values)
        )


def expected(halves: int) -> dict[str, int]:
    """Return the verdicts that an audit of so many transactions must give."""
    state = _states(np.arange(halves))
    counts = dict(zip(("committed_ok", "rolled_back_ok", "pending"), map(int, np.bincount(state)), strict=True))
    taken = {"leaked": "rolled_back_ok"}
    for name in ANOMALIES:
        counts[taken.get(name, "committed_ok")] -= PLANTED
        counts[name] = PLANTED
    return counts


def write(folder: Path, halves: int, *, messages: bool, seed: int) -> None:
    """Write an archive; without real topics it is for `sweep` only."""
    rng = np.random.default_rng(seed)
    contents = Contents(rng)
    written = dict.fromkeys((PREFIX + "half", PREFIX + "op", *(TOPICS if messages else ())), 0)
    last = _START
    for number, block in enumerate(_blocks(rng, halves)):
        last = int(block.at[-1])
        tables = list(_internal(block, contents))
        if messages:
            tables += list(_real(block, contents))
        for part, (topic, table) in enumerate(tables):
            count = len(table)
            offsets = pa.array(np.arange(written[topic], written[topic] + count, dtype=np.int64))
            written[topic] += count
            place = folder / "committed" / f"topic={topic}" / f"part-{number:05}-{part}.parquet"
            place.parent.mkdir(parents=True, exist_ok=True)
            pq.write_table(table.append_column("offset", offsets), place, compression="zstd", compression_level=1)
    now = last + 60_000
    pins = {
        name: TopicPin(
            topic=name,
            at=now,
            partitions=(PartitionPin(partition=0, start=0, end=count, high=count, first_at=_START),),
        )
        for name, count in (*written.items(), (PREFIX + "parked", 0))
    }
    (folder / "archive.json").write_text(json.dumps({"prefix": PREFIX}) + "\n", encoding="utf-8")
    (folder / "offsets.json").write_text(Pins(at=now, topics=pins).to_json(), encoding="utf-8")


def _states(number: Numbers) -> Numbers:
    share = number % 100
    state = np.where(share < _COMMITTED, 0, np.where(share < _COMMITTED + _ROLLED_BACK, 1, 2))
    planted = number < PLANTED * len(ANOMALIES)
    leaked = ANOMALIES.index("leaked")
    return np.where(planted, np.where(number // PLANTED == leaked, 1, 0), state)


def _planted(block: Transactions, name: str) -> NDArray[np.bool_]:
    found: NDArray[np.bool_] = block.number // PLANTED == ANOMALIES.index(name)
    return found


def _blocks(rng: np.random.Generator, halves: int) -> Iterator[Transactions]:
    for start in range(0, halves, _BLOCK):
        number = np.arange(start, min(start + _BLOCK, halves), dtype=np.int64)
        at = _START + number // _PER_MS
        yield Transactions(
            number=number,
            ids=_ids(rng, number % SHARDS, at),
            at=at,
            contents=rng.integers(0, _CONTENTS, (len(number), len(TOPICS))),
            state=_states(number),
        )


def _ids(rng: np.random.Generator, shard: Numbers, at: Numbers) -> Bytes:
    """Return ids as the coordinator makes them: shard and UUIDv7."""
    raw = rng.integers(0, 256, (len(at), 16), np.uint8)
    for byte in range(6):
        raw[:, byte] = (at >> (40 - 8 * byte)) & 0xFF
    raw[:, 6] = 0x70 | raw[:, 6] & 0x0F
    raw[:, 8] = 0x80 | raw[:, 8] & 0x3F
    digits, ids = _hex(raw), np.full((len(at), 38), ord("-"), np.uint8)
    ids[:, 0] = ord("0") + shard
    for into, begin, end in ((2, 0, 8), (11, 8, 12), (16, 12, 16), (21, 16, 20), (26, 20, 32)):
        ids[:, into : into + end - begin] = digits[:, begin:end]
    return ids


def _hex(raw: Bytes) -> Bytes:
    digits = np.frombuffer(b"0123456789abcdef", np.uint8)
    both: Bytes = np.stack((digits[raw >> 4], digits[raw & 15]), axis=2).reshape(len(raw), -1)
    return both


def _internal(block: Transactions, contents: Contents) -> Iterator[tuple[str, pa.Table]]:
    """Return half records, op markers and the tombstones that come with them."""
    half = np.tile(np.frombuffer(_half(), np.uint8), (len(block), 1))
    yield PREFIX + "half", _table(block, _fixed(block.ids), _fixed(half), _internal_headers(block, "half", "prepared"))
    contradicted = block[_planted(block, "contradicted")]
    for kind, state, ended in (
        (OpKind.COMMITTED, "committed", block[block.state == 0]),
        (OpKind.ROLLED_BACK, "rolled_back", block[block.state == 1]),
        (OpKind.ROLLED_BACK, "rolled_back", contradicted),
    ):
        if not len(ended):
            continue
        ids = _fixed(ended.ids)
        values = _fixed(_ops(ended, kind, contents))
        yield PREFIX + "op", _table(ended, ids, values, _internal_headers(ended, "op", state))
        gone = pa.nulls(len(ended), pa.binary())
        yield PREFIX + "half", _table(ended, ids, gone, _internal_headers(ended, "half", state))


def _half() -> bytes:
    message = Message(topic=TOPICS[0], key=b"k", value=b"nobody decodes a half")
    half = Half(
        id="x", group=GROUP, messages=(message,), prepared_at=_START, since=_START, fingerprint=bytes(range(16))
    )
    return codec.encode_half(half)


def _ops(ended: Transactions, kind: OpKind, contents: Contents) -> Bytes:
    """Return op markers: one that the coordinator's own code has made, with other ids, times and hashes put in."""
    marks = [bytes([mark]) * 16 for mark in range(1, 2 * len(TOPICS) + 1)]
    digests = tuple(
        MessageDigest(topic=topic, key_hash=marks[2 * n], value_hash=marks[2 * n + 1], size=_VALUE_BYTES)
        for n, topic in enumerate(TOPICS)
    )
    own, prepared_at, at = "0-" + "f" * 36, _START + 1, _START + 2
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
    put(_varint(np.array([at]))[0].tobytes(), _varint(ended.at + 20))
    for number in range(len(TOPICS)):
        chosen = ended.contents[:, number]
        put(marks[2 * number], contents.key_hashes[chosen])
        put(marks[2 * number + 1], contents.value_hashes[chosen])
    first = codec.decode_op(values[0].tobytes())
    if (first.id.encode(), first.prepared_at) != (ended.ids[0].tobytes(), int(ended.at[0])):
        raise ValueError(f"an op marker was put together wrongly: {first}")
    return values


def _varint(numbers: Numbers) -> Bytes:
    """Return times in ms as Avro writes them: six bytes each."""
    zigzag = numbers << 1
    encoded = np.stack([zigzag >> 7 * byte & 0x7F | 0x80 for byte in range(_TIME_BYTES)], axis=1)
    encoded[:, -1] &= 0x7F
    return encoded.astype(np.uint8)


def _real(block: Transactions, contents: Contents) -> Iterator[tuple[str, pa.Table]]:
    """Return the messages in their topics: those of commits, but for what was planted."""
    for number, topic in enumerate(TOPICS):
        there = (block.state == 0) & ~_planted(block, "lost") | _planted(block, "leaked")
        if number:
            there &= ~_planted(block, "torn")
        for written in (block[there], block[_planted(block, "doubled")]):
            if not len(written):
                continue
            other = written.contents[:, number] + _planted(written, "payload_changed")
            chosen = other % _CONTENTS
            headers = _headers(
                ("halfway-transaction-id", "halfway-message", "halfway-prepared-at"),
                (
                    written.ids,
                    _same(f"{number + 1}/{len(TOPICS)}", len(written)),
                    np.frombuffer(np.char.mod("%d", written.at).astype("S13").tobytes(), np.uint8).reshape(-1, 13),
                ),
            )
            yield (
                topic,
                _table(written, _fixed(contents.keys[chosen]), _fixed(contents.values[chosen]), headers),
            )


def _table(written: Transactions, keys: pa.Array, values: pa.Array, headers: pa.Array) -> pa.Table:
    return pa.table(
        {
            "key": keys,
            "value": values,
            "partition": pa.array((written.number % SHARDS).astype(np.int32)),
            "timestamp": pa.array((written.at + 20) * 1000, pa.int64()).cast(pa.timestamp("us", "UTC")),
            "headers": headers,
        }
    )


def _internal_headers(written: Transactions, kind: str, state: str) -> pa.Array:
    named = {name: value for name, value in codec.record_headers(kind, GROUP, state) if isinstance(value, bytes)}
    return _headers(tuple(named), tuple(_same(value.decode(), len(written)) for value in named.values()))


def _same(text: str, count: int) -> Bytes:
    return np.tile(np.frombuffer(text.encode(), np.uint8), (count, 1))


def _headers(names: Sequence[str], values: Sequence[Bytes]) -> pa.Array:
    """Return a list of headers for each record, from the values of each header."""
    count = len(values[0])
    keys = pa.array(list(names)).take(pa.array(np.tile(np.arange(len(names)), count)))
    widths = np.tile([value.shape[1] for value in values], count)
    all_values = _binary(np.concatenate(values, axis=1), widths)
    pairs = pa.StructArray.from_arrays([keys, all_values], ["key", "value"])
    return pa.ListArray.from_arrays(pa.array(np.arange(count + 1, dtype=np.int32) * len(names)), pairs)


def _fixed(rows: Bytes) -> pa.Array:
    return _binary(rows, np.full(len(rows), rows.shape[1]))


def _binary(data: Bytes, widths: NDArray[Any]) -> pa.Array:
    offsets = np.zeros(len(widths) + 1, np.int32)
    np.cumsum(widths, out=offsets[1:])
    buffers = [None, pa.py_buffer(offsets.tobytes()), pa.py_buffer(np.ascontiguousarray(data).tobytes())]
    return pa.Array.from_buffers(pa.binary(), len(widths), buffers)
