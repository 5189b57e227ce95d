"""The ids of transactions: UUIDv7, born in the coordinator's time.

An id says when it was born, so halfway can refuse an old one that it no longer knows: each id is decided once, ever.
"""

from __future__ import annotations

import hashlib
import os
import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from email.utils import parsedate_to_datetime
from struct import unpack
from typing import Any, Final
from uuid import UUID

from halfway.client.errors import HalfwayError

_UUID7: Final = re.compile(
    r"[0-9a-f]{8}-[0-9a-f]{4}-7[0-9a-f]{3}-[89ab][0-9a-f]{3}-[0-9a-f]{12}", re.ASCII | re.IGNORECASE
)
_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)
_EARLIEST_MS: Final = 10**11
"""March 1973. A time before it was given in seconds."""
_END_MS: Final = 2**48
_TURNS: Final = 20
"""Turns in a second: in each, new ids belong to one shard, or to some of many."""
_ATTEMPTS: Final = 8
"""How many an id may take on average, unless few of the shards are served where the calls go."""
_MOST_ATTEMPTS: Final = 256
"""After so many an id stays as it was drawn."""
_M: Final = 0x5BD1E995
_SEED: Final = 0x9747B28C
_MASK: Final = 0xFFFFFFFF


class InvalidIdError(HalfwayError, ValueError):
    """The id is not a UUIDv7: leave `id` out, or derive the id with `transaction_id(key, at)`."""


def transaction_id(key: str | bytes, at: datetime | int) -> str:
    """Return the id of the transaction that a business key and a time determine, the same in every language.

    `key` names what is done, once in the whole of halfway: `shop/order/42`, not `42`. `at` is a time that every caller
    knows to the millisecond, such as the one when the order came in: an aware datetime, whose microseconds are cut off,
    or milliseconds since 1970. halfway accepts an id for a new transaction only while `at` is less than its outcome
    horizon (15 minutes) ago, and at most a minute ahead of its clock.

    The first 48 bits are the time, the other bits the first 80 bits of SHA-256 of the key (text as UTF-8), except for
    the version (the upper 4 bits of byte 6: 7) and the variant (the upper 2 bits of byte 8: binary 10).
    """
    if isinstance(key, str):
        key = key.encode()
    if not key:
        raise ValueError("the key of a transaction id is empty: give what is done, such as 'shop/order/42'")
    return _uuid7(_milliseconds(at), hashlib.sha256(key).digest()[:10])


def require_id(id: object) -> str:
    """Return an id as halfway writes it, in lower case; raises InvalidIdError if it is not a UUIDv7."""
    if not isinstance(id, str) or _UUID7.fullmatch(id) is None:
        raise InvalidIdError(
            f"the transaction id {id!r} is not a UUIDv7 such as 019ac0e5-5d80-7a3b-8c4d-0123456789ab: leave it out, or"
            " derive it from a business key with transaction_id(key, at)"
        )
    return id.lower()


def canonical(id: str) -> str:
    """Return a UUIDv7 in lower case, and an id of an earlier release as it is."""
    return id.lower() if _UUID7.fullmatch(id) else id


@dataclass(frozen=True)
class Shards:
    """The number of all shards, and which of them a coordinator serves."""

    count: int
    here: Sequence[int]


class NewIds:
    """Makes ids by what coordinators have said last: their time, and which shards are served where the calls go.

    Their time is the `Date` header of an answer; before the first answer it is that of this machine.
    """

    def __init__(self) -> None:
        self._shards: Shards | None = None
        self._date: str | None = None
        self._zero_s: float | None = None
        """The coordinator's time when this machine's monotonic clock was 0. It survives if the time of day is set."""

    def learn(self, date: str | None) -> None:
        """Take the `Date` of an answer that has just come. It has whole seconds, which are enough."""
        if date is None or date == self._date:
            return
        try:
            at = parsedate_to_datetime(date)
        except ValueError:
            return
        self._zero_s = at.replace(tzinfo=at.tzinfo or UTC).timestamp() - time.monotonic()
        self._date = date

    def learn_shards(self, said: Mapping[str, Any]) -> None:
        """Take the shards of a first frame, a change or an answer that has just come; forget others if it says none."""
        match said.get("shards"):
            case {"count": int(count), "here": list(here)} if here and len(here) <= count <= 4 * _ATTEMPTS * len(here):
                self._shards = Shards(count, here)
            case _:
                self._shards = None

    def new_id(self) -> str:
        """Return a new id that is born now."""
        now_s = time.time() if self._zero_s is None else self._zero_s + time.monotonic()
        made = _uuid7(int(now_s * 1000), os.urandom(10))
        shards = self._shards  # other threads call this too
        return made if shards is None else _moved_to(made, shards, int(now_s * _TURNS))


def _moved_to(made: str, shards: Shards, turn: int) -> str:
    """Return an id with other last digits, by which it belongs to one of the shards whose turn it is.

    Ids that are made at about the same time share a shard, or some of many, so that a Kafka transaction touches few
    partitions. The shard of an id is murmur2 of it, as a positive number, modulo the number of shards.
    """
    parts = max(1, min(len(shards.here), len(shards.here) * _ATTEMPTS // shards.count))
    wanted = shards.here[turn % parts :: parts]
    head, tail = made[:32], int(made[32:], 16)
    h = _SEED ^ len(made)
    for word in unpack("<8I", head.encode()):
        h = h * _M & _MASK ^ _mixed(word)
    h = h * _M & _MASK
    for last in range(tail, tail + _MOST_ATTEMPTS):
        digits = f"{last & 0xFFFF:04x}"
        found = h ^ _mixed(int.from_bytes(digits.encode(), "little"))
        found = (found ^ found >> 13) * _M & _MASK
        if ((found ^ found >> 15) & 0x7FFFFFFF) % shards.count in wanted:
            return head + digits
    return made


def _mixed(word: int) -> int:
    k = word * _M & _MASK
    return (k ^ k >> 24) * _M & _MASK


def _milliseconds(at: object) -> int:
    match at:
        case datetime():
            if at.tzinfo is None or at.utcoffset() is None:
                raise ValueError(
                    f"at is {at.isoformat()} without a time zone: give datetime.now(UTC) or .replace(tzinfo=…)"
                )
            at = (at - _EPOCH) // timedelta(milliseconds=1)
        case bool():
            raise TypeError("at is a bool: give an aware datetime, or milliseconds since 1970 as an int")
        case int():
            pass
        case _:
            raise TypeError(f"at is {type(at).__name__}: give an aware datetime, or milliseconds since 1970 as an int")
    if not _EARLIEST_MS <= at < _END_MS:
        raise ValueError(f"at is {at} ms since 1970, which is no time of a transaction: give milliseconds, not seconds")
    return at


def _uuid7(ms: int, tail: bytes) -> str:
    """Return the UUIDv7 of a time in milliseconds whose other bits are those of 10 bytes."""
    bits = int.from_bytes(tail, "big")
    bits = bits & ~(0xF << 76) | 7 << 76
    bits = bits & ~(3 << 62) | 2 << 62
    return str(UUID(int=ms << 80 | bits))
