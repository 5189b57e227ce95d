"""Archives of made-up topics, as `halfway-pipeline archive` writes them.

Some of the transactions are damaged in each way that an audit must find.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from bench.pipeline.transactions import (
    COMMITTED,
    CONTENTS,
    GROUP,
    PREFIX,
    ROLLED_BACK,
    SHARDS,
    TOPICS,
    Bytes,
    Contents,
    Numbers,
    Transactions,
    half_value,
    op_values,
    states,
    transactions,
)
from halfway.domain.records import OpKind
from halfway.kafka.records import codec
from halfway.pipeline.sources.pins import PartitionPin, Pins, TopicPin

PLANTED: Final = 10
"""The number of transactions of each anomaly."""
ANOMALIES: Final = ("lost", "torn", "doubled", "payload_changed", "leaked", "contradicted")
CUT: Final = "cut.json"
"""The offsets of nine tenths of the transactions."""
_PARTS: Final = 10
_BLOCK: Final = 250_000
_START: Final = 1_750_000_000_000
_PER_MS: Final = 10
_ENDED_AFTER_MS: Final = 20


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
    blocks = list(_sizes(halves))
    for number, block in enumerate(_blocks(rng, blocks)):
        if number == len(blocks) * (_PARTS - 1) // _PARTS:
            (folder / CUT).write_text(_pins(last, written).to_json(), encoding="utf-8")
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
    (folder / "archive.json").write_text(json.dumps({"prefix": PREFIX}) + "\n", encoding="utf-8")
    (folder / "offsets.json").write_text(_pins(last, written).to_json(), encoding="utf-8")


def _pins(last: int, written: Mapping[str, int]) -> Pins:
    """Return them a minute after the last record."""
    now = last + 60_000
    topics = {
        name: TopicPin(
            topic=name,
            at=now,
            partitions=(PartitionPin(partition=0, start=0, end=count, high=count, first_at=_START),),
        )
        for name, count in (*written.items(), (PREFIX + "parked", 0))
    }
    return Pins(at=now, topics=topics)


def _planted(block: Transactions, name: str) -> NDArray[np.bool_]:
    found: NDArray[np.bool_] = block.number // PLANTED == ANOMALIES.index(name)
    return found


def _sizes(halves: int) -> Iterator[tuple[int, int]]:
    """Return the first and last numbers of blocks, a multiple of ten."""
    for part in range(_PARTS):
        begin, end = (halves * each // _PARTS for each in (part, part + 1))
        pieces = -(-(end - begin) // _BLOCK)
        for piece in range(pieces):
            yield begin + (end - begin) * piece // pieces, begin + (end - begin) * (piece + 1) // pieces


def _blocks(rng: np.random.Generator, sizes: Sequence[tuple[int, int]]) -> Iterator[Transactions]:
    for start, end in sizes:
        number = np.arange(start, end, dtype=np.int64)
        made = transactions(rng, number, _START + number // _PER_MS)
        yield replace(made, state=_states(number))


def _states(number: Numbers) -> Numbers:
    """Return states in which damaged transactions are committed, or rolled back if they leak."""
    planted = number < PLANTED * len(ANOMALIES)
    leaked = number // PLANTED == ANOMALIES.index("leaked")
    return np.where(planted, np.where(leaked, ROLLED_BACK, COMMITTED), states(number))


def _internal(block: Transactions, contents: Contents) -> Iterator[tuple[str, pa.Table]]:
    """Return half records, op markers and the tombstones that come with them."""
    half = np.tile(np.frombuffer(half_value(), np.uint8), (len(block), 1))
    yield PREFIX + "half", _table(block, _fixed(block.ids), _fixed(half), _internal_headers(block, "half", "prepared"))
    contradicted = block[_planted(block, "contradicted")]
    for kind, state, ended in (
        (OpKind.COMMITTED, "committed", block[block.state == COMMITTED]),
        (OpKind.ROLLED_BACK, "rolled_back", block[block.state == ROLLED_BACK]),
        (OpKind.ROLLED_BACK, "rolled_back", contradicted),
    ):
        if not len(ended):
            continue
        ids = _fixed(ended.ids)
        values = _fixed(op_values(ended, kind, contents, ended.at + _ENDED_AFTER_MS))
        yield PREFIX + "op", _table(ended, ids, values, _internal_headers(ended, "op", state))
        gone = pa.nulls(len(ended), pa.binary())
        yield PREFIX + "half", _table(ended, ids, gone, _internal_headers(ended, "half", state))


def _real(block: Transactions, contents: Contents) -> Iterator[tuple[str, pa.Table]]:
    """Return the messages in their topics: those of commits, changed by the planted anomalies."""
    for number, topic in enumerate(TOPICS):
        there = (block.state == COMMITTED) & ~_planted(block, "lost") | _planted(block, "leaked")
        if number:
            there &= ~_planted(block, "torn")
        for written in (block[there], block[_planted(block, "doubled")]):
            if not len(written):
                continue
            other = written.contents[:, number] + _planted(written, "payload_changed")
            chosen = other % CONTENTS
            headers = _headers(
                ("halfway-transaction-id", "halfway-message", "halfway-prefix", "halfway-prepared-at"),
                (
                    written.ids,
                    _same(f"{number + 1}/{len(TOPICS)}", len(written)),
                    _same(PREFIX, len(written)),
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
            "timestamp": pa.array((written.at + _ENDED_AFTER_MS) * 1000, pa.int64()).cast(pa.timestamp("us", "UTC")),
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
