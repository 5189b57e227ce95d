"""What one message holds, as hashes: equal for equal bytes."""

from __future__ import annotations

from collections.abc import Iterable
from hashlib import sha256
from typing import Final

import msgspec

HEADER_PREFIX: Final = "halfway-"
"""Headers that halfway adds; they are no part of what was prepared."""
_HASH_BYTES: Final = 16

Headers = Iterable[tuple[str, bytes | None]]


class Content(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """One message: hashes in hex (the first 16 bytes of SHA-256), None for no key or a null value."""

    topic: str
    key: str | None
    value: str | None
    headers: str = ""
    """Of its own headers, in order; empty for none."""


Contents = tuple[Content, ...]


def content_of(topic: str, key: bytes | None, value: bytes | None, headers: Headers = ()) -> Content:
    """Hash a message."""
    own = [(name, data) for name, data in headers if not name.startswith(HEADER_PREFIX)]
    return Content(
        topic=topic,
        key=digest(key),
        value=digest(value),
        headers=digest(msgspec.msgpack.encode(own)) or "" if own else "",
    )


def digest(data: bytes | None) -> str | None:
    """Return the hash of bytes in hex, None for none."""
    return None if data is None else sha256(data).digest()[:_HASH_BYTES].hex()
