"""API keys: their form, what is stored of them, and what the master secret is good for (docs/operating.md#keys).

A key is `hw_<kind>_<public id>_<secret>_<checksum>`. Secret scanners find it by its form, and the checksum tells a
mistyped key from a wrong one. Only a keyed hash of it is stored.
"""

from __future__ import annotations

import hmac
import re
from typing import Final
from zlib import crc32

import msgspec

from halfway.domain.principal import Principal, PrincipalKind
from halfway.domain.secrets import derived

FORM: Final = re.compile(r"hw_([gor])_([0-9A-Za-z]{12})_[0-9A-Za-z]{43}_([0-9A-Za-z]{6})")
"""What a key looks like, for secret scanners too."""
RANDOM_BYTES: Final = 9 + 32
"""How much randomness a key is made of: of its public id, and of its secret."""
_LETTERS: Final = {"g": PrincipalKind.GROUP, "o": PrincipalKind.OPERATOR, "r": PrincipalKind.READER}
KINDS: Final = {kind: letter for letter, kind in _LETTERS.items()}
"""The kinds of principals that have keys, each with its letter."""
_DIGITS: Final = "0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz"
_ID: Final = slice(5, 17)
_ID_DIGITS: Final = 12
_SECRET_DIGITS: Final = 43
_CHECKSUM_DIGITS: Final = 6
_ID_BYTES: Final = 9
LONGEST: Final = 256
"""A longer text is no key, and not looked at."""


class Key(msgspec.Struct, frozen=True, kw_only=True):
    """What is stored of a key, or of a client certificate that stands for one. Times in ms since the epoch.

    `digest` is the keyed hash of the key's whole text, None for a certificate; `certificate` is the subject or the
    alternative name (`DNS:…`, `URI:…`) that binds it, None for a key. `seal` is a keyed hash over all other fields: who
    may write to the topic, and does not know the master secret, can make no key and change none.
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
        """Who shows it."""
        return Principal(kind=self.kind, name=self.name, key_id=self.id)

    def live(self, now_ms: int) -> bool:
        """Whether it has not expired."""
        return self.expires_at is None or now_ms < self.expires_at


def key_text(kind: PrincipalKind, random: bytes) -> str:
    """Return a new key, made of `RANDOM_BYTES` random bytes."""
    public = _base62(int.from_bytes(random[:_ID_BYTES], "big"), _ID_DIGITS)
    secret = _base62(int.from_bytes(random[_ID_BYTES:], "big"), _SECRET_DIGITS)
    body = f"hw_{KINDS[kind]}_{public}_{secret}"
    return f"{body}_{_checksum(body)}"


def public_id(text: str) -> str:
    """Return the public id in a key's text, or whatever stands in its place."""
    return text[_ID]


def kind_in(text: str) -> PrincipalKind | None:
    """Return the kind of a text that is a whole key; None if it is none, or mistyped."""
    found = FORM.fullmatch(text)
    if found is None or _checksum(text[: -_CHECKSUM_DIGITS - 1]) != found[3]:
        return None
    return _LETTERS[found[1]]


class MasterSecret:
    """Keyed hashes under one master secret."""

    def __init__(self, master: bytes) -> None:
        """Derive the secrets for keys and for their records."""
        self._of_keys = derived(master, "keys")
        self._of_records = derived(master, "key records")

    def digest(self, text: str) -> bytes:
        """Return what is stored of a key."""
        return hmac.digest(self._of_keys, text.encode(), "sha256")

    def sealed(self, key: Key) -> Key:
        """Return a record with its seal."""
        return msgspec.structs.replace(key, seal=self._seal(key))

    def holds(self, key: Key) -> bool:
        """Whether a record has the seal that this secret gives it."""
        return hmac.compare_digest(self._seal(key), key.seal)

    def _seal(self, key: Key) -> bytes:
        fields = (key.id, key.kind.value, key.name, key.created_at, key.expires_at, key.digest, key.certificate)
        return hmac.digest(self._of_records, msgspec.msgpack.encode(fields), "sha256")


class KeyTable:
    """The keys as the log tells them: by public id, and by the certificate that stands for one."""

    def __init__(self) -> None:
        """Start with none."""
        self._keys: dict[str, Key] = {}
        self._by_certificate: dict[str, dict[str, Key]] = {}
        """By public id, in the order of the log: two instances may bind a certificate at one moment."""
        self._revoked: dict[str, None] = {}

    def apply(self, key_id: str, key: Key | None) -> None:
        """Note a record of the log; None for a key that is revoked, which no later record brings back.

        Nor does one put off when a key expires: halfway writes none that does, but an old record can be sent again.
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
            if len(self._revoked) > _REVOKED_KEPT:
                del self._revoked[next(iter(self._revoked))]
            return
        self._keys[key_id] = key
        if key.certificate is not None:
            self._by_certificate.setdefault(key.certificate, {})[key_id] = key

    def get(self, key_id: str) -> Key | None:
        """Return a key by its public id."""
        return self._keys.get(key_id)

    def bound_to(self, certificate: str) -> Key | None:
        """Return the key record that a certificate's subject or alternative name stands for: the last of them."""
        return next(reversed(self._by_certificate.get(certificate, {}).values()), None)

    def revoked(self, key_id: str) -> bool:
        """Whether a key was revoked while this instance ran; one that is merely not known yet is not."""
        return key_id in self._revoked

    def all(self) -> list[Key]:
        """Return every key, by public id."""
        return [self._keys[key_id] for key_id in sorted(self._keys)]

    def __len__(self) -> int:
        """Return how many there are."""
        return len(self._keys)


_REVOKED_KEPT: Final = 100_000


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
