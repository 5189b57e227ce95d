"""API keys and secrets: what is derived from the operator's master secret need not be stored.

A key is `hw_<kind>_<public id>_<secret>_<checksum>`. Secret scanners find it by its form, and the checksum
distinguishes a mistyped key from a wrong one. Only a keyed hash of the key is stored (docs/operating.md#keys).
"""

from __future__ import annotations

import hashlib
import hmac
import re
from base64 import b64encode
from collections.abc import Sequence
from functools import lru_cache
from typing import Final
from zlib import crc32

import msgspec

from halfway.protocol.principal import Principal, PrincipalKind

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


FORM: Final = re.compile(r"hw_([gor])_([0-9A-Za-z]{12})_[0-9A-Za-z]{43}_([0-9A-Za-z]{6})")
"""The form of a key, for secret scanners too."""
RANDOM_BYTES: Final = 9 + 32
"""The random bytes of a new key: those of its public id, and those of its secret."""
_LETTERS: Final = {"g": PrincipalKind.GROUP, "o": PrincipalKind.OPERATOR, "r": PrincipalKind.READER}
KINDS: Final = {kind: letter for letter, kind in _LETTERS.items()}
"""The kinds of principals that have keys, each with its letter in the key."""
_DIGITS: Final = "0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz"
_ID: Final = slice(5, 17)
_ID_DIGITS: Final = 12
_SECRET_DIGITS: Final = 43
_CHECKSUM_DIGITS: Final = 6
_ID_BYTES: Final = 9
LONGEST: Final = 256
"""A longer text is not a key and is not examined."""


class Key(msgspec.Struct, frozen=True, kw_only=True):
    """The stored record of a key, or of a client certificate that is used like a key. Times in ms since the epoch.

    `digest` is the keyed hash of the key's whole text, None for a certificate. `certificate` is the subject or the
    alternative name (`DNS:…`, `URI:…`) of the certificate, None for a key. `seal` is a keyed hash over all other
    fields: a writer to the topic that does not know the master secret can neither make a key nor change one.
    """

    id: str
    kind: PrincipalKind
    name: str
    created_at: int
    expires_at: int | None = None
    digest: bytes | None = None
    certificate: str | None = None
    seal: bytes = b""

    @property
    def principal(self) -> Principal:
        return Principal(kind=self.kind, name=self.name, key_id=self.id)

    def is_live(self, now_ms: int) -> bool:
        return self.expires_at is None or now_ms < self.expires_at


def key_text(kind: PrincipalKind, random: bytes) -> str:
    public = _base62(int.from_bytes(random[:_ID_BYTES], "big"), _ID_DIGITS)
    secret = _base62(int.from_bytes(random[_ID_BYTES:], "big"), _SECRET_DIGITS)
    body = f"hw_{KINDS[kind]}_{public}_{secret}"
    return f"{body}_{_checksum(body)}"


def public_id(text: str) -> str:
    """Return the public id in a key's text; of any other text, the characters in its place."""
    return text[_ID]


def kind_in(text: str) -> PrincipalKind | None:
    """Return the kind of a well-formed key; None if the text is not a key, or mistyped."""
    match = FORM.fullmatch(text)
    if match is None or _checksum(text[: -_CHECKSUM_DIGITS - 1]) != match[3]:
        return None
    return _LETTERS[match[1]]


class MasterSecret:
    """Computes keyed hashes with one master secret."""

    def __init__(self, master: bytes) -> None:
        """Derive one secret for the hashes of keys, and one for the seals of their records."""
        self._key_secret = derived(master, "keys")
        self._record_secret = derived(master, "key records")

    def digest(self, text: str) -> bytes:
        """Return the keyed hash that is stored of a key."""
        return hmac.digest(self._key_secret, text.encode(), "sha256")

    def sealed(self, key: Key) -> Key:
        return msgspec.structs.replace(key, seal=self._seal(key))

    def has_sealed(self, key: Key) -> bool:
        return hmac.compare_digest(self._seal(key), key.seal)

    def _seal(self, key: Key) -> bytes:
        fields = (key.id, key.kind.value, key.name, key.created_at, key.expires_at, key.digest, key.certificate)
        return hmac.digest(self._record_secret, msgspec.msgpack.encode(fields), "sha256")


class KeyTable:
    """The keys in the log, by public id and by certificate."""

    def __init__(self) -> None:
        self._keys: dict[str, Key] = {}
        self._by_certificate: dict[str, dict[str, Key]] = {}
        """By certificate, then by public id in log order: two instances may bind a certificate at one moment."""
        self._revoked: dict[str, None] = {}

    def apply(self, key_id: str, key: Key | None) -> None:
        """Apply a record of the log; None revokes the key, and no later record brings it back.

        No record postpones the expiry of a key either: halfway never writes one that does, but an old record can be
        sent again.
        """
        if key_id in self._revoked:
            return
        before = self._keys.get(key_id)
        if key is not None and before is not None and _outlives(key, before):
            return
        self._keys.pop(key_id, None)
        if before is not None and before.certificate is not None:
            bound = self._by_certificate[before.certificate]
            del bound[key_id]
            if not bound:
                del self._by_certificate[before.certificate]
        if key is None:
            self._revoked[key_id] = None
            if len(self._revoked) > _MAX_REVOKED:
                del self._revoked[next(iter(self._revoked))]
            return
        self._keys[key_id] = key
        if key.certificate is not None:
            self._by_certificate.setdefault(key.certificate, {})[key_id] = key

    def get(self, key_id: str) -> Key | None:
        return self._keys.get(key_id)

    def bound_to(self, certificate: str) -> Key | None:
        """Return the last key record that binds a certificate's subject or alternative name; None if there is none."""
        return next(reversed(self._by_certificate.get(certificate, {}).values()), None)

    def is_revoked(self, key_id: str) -> bool:
        """Return whether a key was revoked while this instance ran; False for a key that is only not known yet."""
        return key_id in self._revoked

    def all(self) -> list[Key]:
        """Return every key, ordered by public id."""
        return [self._keys[key_id] for key_id in sorted(self._keys)]

    def __len__(self) -> int:
        return len(self._keys)


_MAX_REVOKED: Final = 100_000


def _outlives(key: Key, before: Key) -> bool:
    return before.expires_at is not None and (key.expires_at is None or key.expires_at > before.expires_at)


def _checksum(body: str) -> str:
    return _base62(crc32(body.encode()), _CHECKSUM_DIGITS)


def _base62(number: int, digits: int) -> str:
    out = []
    for _ in range(digits):
        number, digit = divmod(number, 62)
        out.append(_DIGITS[digit])
    return "".join(reversed(out))
