"""Secrets that are derived from the operator's master secret, so that none of them is stored."""

from __future__ import annotations

import hashlib
import hmac
from base64 import b64encode
from collections.abc import Sequence
from functools import lru_cache
from typing import Final

_HASH: Final = hashlib.sha256
_SALT: Final = b"halfway"
_GROUPS: Final = 4096
SHOWN_PREFIX: Final = "whsec_"
"""How a secret begins when it is shown, as Standard Webhooks has it; secret scanners know it."""


def derived(master: bytes, purpose: str) -> bytes:
    """Return 32 bytes for one purpose. No purpose's bytes tell another's."""
    return hkdf(master, salt=_SALT, info=purpose.encode())


def hkdf(material: bytes, *, salt: bytes, info: bytes) -> bytes:
    """Return 32 bytes by HKDF with SHA-256 (RFC 5869): one block."""
    key = hmac.digest(salt, material, _HASH)
    return hmac.digest(key, info + b"\x01", _HASH)


class CheckSecrets:
    """What the checks of each group are signed with; nothing if there is no master secret."""

    def __init__(self, masters: Sequence[bytes] = ()) -> None:
        """Take the master secrets that are valid: the newest first, the one before it while it is rotated."""
        self._masters = tuple(masters)
        self.of = lru_cache(_GROUPS)(self._of)

    def _of(self, group: str) -> tuple[bytes, ...]:
        """Return the secrets of a group, the newest first."""
        return tuple(derived(master, f"check-signing/{group}") for master in self._masters)

    def shown(self, group: str) -> tuple[str, ...]:
        """Return the secrets of a group as a library for Standard Webhooks takes them."""
        return tuple(SHOWN_PREFIX + b64encode(secret).decode("ascii") for secret in self.of(group))
