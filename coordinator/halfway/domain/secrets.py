"""Secrets that are derived from the operator's master secret, so that none of them has to be stored."""

from __future__ import annotations

import hashlib
import hmac
from base64 import b64encode
from collections.abc import Sequence
from functools import lru_cache
from typing import Final

_HASH: Final = hashlib.sha256
_SALT: Final = b"halfway"
_CACHED_GROUPS: Final = 4096
SHOWN_PREFIX: Final = "whsec_"
"""The prefix of a secret that is shown, as Standard Webhooks defines it. Secret scanners know it."""


def derived(master: bytes, purpose: str) -> bytes:
    """Return 32 bytes for one purpose. They reveal nothing about those of another purpose."""
    return hkdf(master, salt=_SALT, info=purpose.encode())


def hkdf(material: bytes, *, salt: bytes, info: bytes) -> bytes:
    """Return one block, 32 bytes, of HKDF with SHA-256 (RFC 5869)."""
    key = hmac.digest(salt, material, _HASH)
    return hmac.digest(key, info + b"\x01", _HASH)


class CheckSecrets:
    """The secrets that sign the checks of each group; none without a master secret."""

    def __init__(self, masters: Sequence[bytes] = ()) -> None:
        """Take the valid master secrets, the newest first; during a rotation also the one before it."""
        self._masters = tuple(masters)
        self.of = lru_cache(_CACHED_GROUPS)(self._of)

    def _of(self, group: str) -> tuple[bytes, ...]:
        """Return the secrets of a group, the newest first."""
        return tuple(derived(master, f"check-signing/{group}") for master in self._masters)

    def shown(self, group: str) -> tuple[str, ...]:
        """Return the secrets of a group in the form that Standard Webhooks libraries accept."""
        return tuple(SHOWN_PREFIX + b64encode(secret).decode("ascii") for secret in self.of(group))
