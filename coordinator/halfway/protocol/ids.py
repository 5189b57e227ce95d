"""Transaction ids: when one was born, and which shard it belongs to (docs/protocol.md#ids).

An id is a UUIDv7, made by the server or by a client. Its first 48 bits are the time of its birth, and the murmur2 hash
of its text chooses its shard. Releases before also took any other text from clients, and made ids `<shard>-<uuid7>`:
such an id is read and ended where a log has it, and no prepare may bring it anew.
"""

from __future__ import annotations

import re
from array import array
from functools import cache
from os import urandom
from struct import unpack_from
from typing import Final

ID: Final = re.compile(r"[0-9a-f]{8}-[0-9a-f]{4}-7[0-9a-f]{3}-[89ab][0-9a-f]{3}-[0-9a-f]{12}\Z")
_ANY_CASE: Final = re.compile(ID.pattern, re.IGNORECASE | re.ASCII)
LEGAL_ID: Final = re.compile(r"[A-Za-z0-9._~-]{1,128}\Z")
"""An id that any release has taken."""
_OLD_SERVER_ID: Final = re.compile(r"(0|[1-9][0-9]{0,4})-(" + ID.pattern.removesuffix(r"\Z") + r")\Z")

AHEAD_MS: Final = 60_000
"""The largest difference between the clocks of instances, and how far ahead of its owner's clock an id may be born."""
BORN_AFTER_END_MS: Final = 2 * AHEAD_MS
"""How long after the time of its end an id may be born: the owner that wrote the end may have had a clock behind."""

_M: Final = 0x5BD1E995
_MASK: Final = 0xFFFFFFFF
_POSITIVE: Final = 0x7FFFFFFF
_SEED: Final = 0x9747B28C
_LENGTH: Final = 36
_WORDS: Final = 4096
_ODD: Final = 40_503
"""It spreads the numbers of 12 bits over those of 16."""
_REMEMBERED: Final = 1 << 14


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


def shard_of(transaction_id: str, shards: int) -> int | None:
    """Return the shard that an id belongs to, None for an id of an old form that names a shard that does not exist."""
    try:
        return _shards[transaction_id, shards]
    except KeyError:
        old = _OLD_SERVER_ID.match(transaction_id)
        shard = partition_for_key(transaction_id.encode(), shards) if old is None else int(old[1])
        return _remember(transaction_id, shards, shard if shard < shards else None)


_shards: dict[tuple[str, int], int | None] = {}
"""The shards of ids that were made or looked up last: an id is looked up several times, and its hash takes 4 µs."""


def _remember(transaction_id: str, shards: int, shard: int | None) -> int | None:
    if len(_shards) >= _REMEMBERED:
        _shards.clear()
    _shards[transaction_id, shards] = shard
    return shard


class IdMaker:
    """Makes ids that belong to a given shard, by attempts: about as many as there are shards.

    The ids of one millisecond share their first 24 characters, whose hash is computed once, with 26 random bits. The
    next 12 bits count from a random number, so that they never repeat, and 24 random bits follow.
    """

    def __init__(self, shards: int) -> None:
        self._shards = shards
        self._ms = -1
        self._head = ""
        self._hash = 0
        self._counted = 0
        self._counter = 0
        self._words = _words()
        self._random: list[int] = []

    def make(self, at: int, shard: int) -> str:
        """Return a new id that was born at a time (ms since the epoch) and belongs to a shard."""
        words, m, mask, shards = self._words, _M, _MASK, self._shards
        while True:
            if at != self._ms or self._counted == _WORDS:
                self._begin(at)
            self._counted += 1
            counted, one = words[(self._counter + self._counted) % _WORDS]
            drawn = self._random.pop() if self._random else self._draw()
            middle, other = words[drawn & 0xFFF]
            state = ((self._hash ^ one) * m & mask ^ other) * m & mask
            first = drawn >> 12 & 0xFFF
            for attempt in range(first, first + _WORDS):
                last, word = words[attempt % _WORDS]
                h = state ^ word
                h = (h ^ h >> 13) * m & mask
                if ((h ^ h >> 15) & _POSITIVE) % shards == shard:
                    made = f"{self._head}{counted}{middle}{last}"
                    _remember(made, shards, shard)
                    return made

    def _begin(self, at: int) -> None:
        """Begin a millisecond, or go on in one whose counter is used up."""
        drawn, time = self._draw(), f"{at:012x}"
        self._head = f"{time[:8]}-{time[8:]}-7{drawn & 0xFFF:03x}-{0x8000 | drawn >> 12 & 0x3FFF:04x}-"
        self._hash = _add_words(_SEED ^ _LENGTH, self._head.encode()) * _M & _MASK
        self._ms, self._counted, self._counter = at, 0, self._draw()

    def _draw(self) -> int:
        """Return 32 random bits. The operating system is asked for many at once."""
        if not self._random:
            self._random = array("I", urandom(4096)).tolist()
        return self._random.pop()


@cache
def _words() -> list[tuple[str, int]]:
    """Return four digits for each number of 12 bits: as text, and as a word of the hash."""
    return [(text := f"{number * _ODD & 0xFFFF:04x}", _add_words(0, text.encode())) for number in range(_WORDS)]


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
