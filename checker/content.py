"""The content of a message as hashes, which are equal for equal bytes."""

from __future__ import annotations

from collections.abc import Iterable
from hashlib import sha256
from typing import Final

import msgspec

HEADER_PREFIX: Final = "halfway-"
"""The prefix of headers that halfway adds; they are not part of the prepared message."""
_HASH_BYTES: Final = 16

Headers = Iterable[tuple[str, bytes | None]]


class Content(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """One message: hashes in hex (the first 16 bytes of SHA-256), None for no key or a null value."""

    topic: str
    key: str | None
    value: str | None
    headers: str = ""
    """The hash of the message's own headers, in order; empty if it has none."""


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
    """Return the hash of bytes in hex, None for None."""
    return None if data is None else sha256(data).digest()[:_HASH_BYTES].hex()
