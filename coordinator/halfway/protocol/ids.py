"""Transaction ids: when one was born, and which shard it belongs to (docs/protocol.md#ids).

An id is a UUIDv7, made by the server or by a client. Its first 48 bits are the time of its birth, and the murmur2 hash
of its text chooses its shard. Releases before also took any other text from clients, and made ids `<shard>-<uuid7>`:
such an id is read and ended where a log has it, and no prepare may bring it anew.
"""

from __future__ import annotations

import re
from functools import cache, lru_cache
from itertools import count
from struct import unpack_from
from typing import Final

ID: Final = re.compile(r"[0-9a-f]{8}-[0-9a-f]{4}-7[0-9a-f]{3}-[89ab][0-9a-f]{3}-[0-9a-f]{12}\Z")
_ANY_CASE: Final = re.compile(ID.pattern, re.IGNORECASE | re.ASCII)
LEGAL_ID: Final = re.compile(r"[A-Za-z0-9._~-]{1,128}\Z")
"""An id that any release has taken."""
_OLD_SERVER_ID: Final = re.compile(r"(0|[1-9][0-9]{0,4})-(" + ID.pattern.removesuffix(r"\Z") + r")\Z")

_M: Final = 0x5BD1E995
_MASK: Final = 0xFFFFFFFF
_POSITIVE: Final = 0x7FFFFFFF
_SEED: Final = 0x9747B28C
_KEPT_DIGITS: Final = 32
"""The digits of a new id that `placed` keeps: whole words of the hash."""
_TAILS: Final = 4096


def canonical(transaction_id: str) -> str:
    """Return a UUIDv7 in lower case, any other text unchanged."""
    if ID.match(transaction_id) is None and _ANY_CASE.match(transaction_id) is not None:
        return transaction_id.lower()
    return transaction_id


def birth_of(transaction_id: str) -> int | None:
    """Return when an id was made, ms since the epoch; None for an id of an old form that does not tell."""
    if ID.match(transaction_id) is not None:
        return int(transaction_id[:8] + transaction_id[9:13], 16)
    old = _OLD_SERVER_ID.match(transaction_id)
    return None if old is None else birth_of(old[2])


@lru_cache(maxsize=1 << 14)
def shard_of(transaction_id: str, shards: int) -> int | None:
    """Return the shard that an id belongs to, None for an id of an old form that names a shard that does not exist."""
    old = _OLD_SERVER_ID.match(transaction_id)
    if old is None:
        return partition_for_key(transaction_id.encode(), shards)
    shard = int(old[1])
    return shard if shard < shards else None


def placed(made: str, shard: int, shards: int) -> str:
    """Return a new id that belongs to a shard: a UUIDv7 with other last digits. It takes about `shards` attempts."""
    tails, m, mask = _tails(), _M, _MASK
    kept, first = made[:_KEPT_DIGITS], int(made[-3:], 16)
    for attempt in count(first):
        state = _add_words(_SEED ^ len(made), kept.encode()) * m & mask
        for number in range(first, first + _TAILS):
            tail, word = tails[number % _TAILS]
            h = state ^ word
            h = (h ^ h >> 13) * m & mask
            if ((h ^ h >> 15) & _POSITIVE) % shards == shard:
                return kept + tail
        kept = kept[:-4] + tails[attempt % _TAILS][0]  # there are about as many shards as last digits
    raise AssertionError


@cache
def _tails() -> list[tuple[str, int]]:
    """Return last digits: as text, and as a word of the hash."""
    return [(text := f"{number << 4 | 8:04x}", _add_words(0, text.encode())) for number in range(_TAILS)]


def partition_for_key(key: bytes, partitions: int) -> int:
    """Return the partition that Kafka's Java client chooses for a keyed record: positive murmur2 modulo partitions."""
    return (murmur2(key) & _POSITIVE) % partitions


def murmur2(data: bytes) -> int:
    """Return the 32-bit murmur2 hash of `org.apache.kafka.common.utils.Utils.murmur2`, as an unsigned int."""
    h = _add_words(_SEED ^ len(data), data)
    tail = data[len(data) & ~3 :]
    if tail:
        h = (h ^ int.from_bytes(tail, "little")) * _M & _MASK
    h = (h ^ h >> 13) * _M & _MASK
    return h ^ h >> 15


def _add_words(h: int, data: bytes) -> int:
    """Add the whole words of data to a hash."""
    m, mask = _M, _MASK
    for word in unpack_from(f"<{len(data) // 4}I", data):
        k = word * m & mask
        h = (h * m ^ (k ^ k >> 24) * m) & mask
    return h
