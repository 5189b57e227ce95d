"""The ids of transactions: UUIDv7, born in the coordinator's time.

An id says when it was born, so halfway can refuse an old one that it no longer knows: each id is decided once, ever.
"""

from __future__ import annotations

import hashlib
import os
import re
import time
from datetime import UTC, datetime, timedelta
from email.utils import parsedate_to_datetime
from typing import Final
from uuid import UUID

from halfway.client.errors import HalfwayError

_UUID7: Final = re.compile(
    r"[0-9a-f]{8}-[0-9a-f]{4}-7[0-9a-f]{3}-[89ab][0-9a-f]{3}-[0-9a-f]{12}", re.ASCII | re.IGNORECASE
)
_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)
_EARLIEST_MS: Final = 10**11
"""March 1973. A time before it was given in seconds."""
_END_MS: Final = 2**48


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


class CoordinatorClock:
    """The coordinator's time, by the `Date` header of its last answer; before the first answer that of this machine."""

    def __init__(self) -> None:
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

    def new_id(self) -> str:
        """Return a new id that is born now."""
        now_s = time.time() if self._zero_s is None else self._zero_s + time.monotonic()
        return _uuid7(int(now_s * 1000), os.urandom(10))


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
