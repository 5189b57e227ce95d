"""Takes the end of a log away while its broker is down, as a power failure or an unclean leader election does.

Kafka acknowledges a record before it is on a disk. A log must not end within a Kafka transaction whose outcome was
written: Kafka would keep that transaction open for ever, and an operator would have to abort it.
"""

from __future__ import annotations

import random
import struct
from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from typing import Final, NamedTuple

_HEADER: Final = struct.Struct(">qiibihiqqqhii")
"""The head of a record batch (https://kafka.apache.org/documentation/#recordbatch)."""
_BEFORE_LENGTH: Final = 12
"""The bytes of a batch that its length does not count."""
_TRANSACTIONAL, _CONTROL = 0x10, 0x20
_INDEXES: Final = (".index", ".timeindex", ".txnindex")
"""Kafka makes them again."""
_LOSES: Final = 0.8
"""How likely a partition loses its end."""
_MOST: Final = 200
"""The most offsets that it loses, unless a transaction is longer."""


class _Batch(NamedTuple):
    position: int
    base: int
    end: int
    producer: int | None
    """The producer, if it is one of a transaction."""
    is_control: bool


def lose_end(replica: Path, chance: random.Random) -> int:
    """Cut the only replica of a partition a few records or many before its end; return its new end.

    It is cut before an open transaction in any case: Kafka may forget that one's outcome without a leader to tell.
    """
    ends = _safe_ends(replica)
    lost = round(_MOST ** chance.random()) if chance.random() < _LOSES else 0
    end = max((one for one in ends if one <= ends[-1] - lost), default=ends[0])
    _cut(replica, end)
    return end


def _safe_ends(replica: Path) -> list[int]:
    """Return the offsets at which no transaction is open."""
    open_ones: set[int] = set()
    ends: list[int] = []
    logs = sorted(replica.glob("*.log"))
    for batch in chain.from_iterable(map(_batches, logs)):
        if batch.producer is not None:
            (open_ones.discard if batch.is_control else open_ones.add)(batch.producer)
        if not open_ones:
            ends.append(batch.end)
    return ends or [int(logs[0].stem)]


def _batches(log: Path) -> Iterator[_Batch]:
    data, position = log.read_bytes(), 0
    while position + _HEADER.size <= len(data):
        base, length, _, _, _, attributes, last, _, _, producer, _, _, count = _HEADER.unpack_from(data, position)
        if position + _BEFORE_LENGTH + length > len(data):
            return
        in_transaction = attributes & _TRANSACTIONAL and count  # compaction keeps empty batches
        is_control = bool(attributes & _CONTROL)
        yield _Batch(position, base, base + last + 1, producer if in_transaction else None, is_control)
        position += _BEFORE_LENGTH + length


def _cut(replica: Path, end: int) -> None:
    for log in replica.glob("*.log"):
        if int(log.stem) >= end:
            log.unlink()
        else:
            kept = next((batch.position for batch in _batches(log) if batch.base >= end), None)
            if kept is None:
                continue
            with log.open("r+b") as file:
                file.truncate(kept)
        for suffix in _INDEXES:
            log.with_suffix(suffix).unlink(missing_ok=True)
    for snapshot in replica.glob("*.snapshot"):
        if int(snapshot.stem) > end:
            snapshot.unlink()
