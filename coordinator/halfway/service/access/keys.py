"""Makes, lists, rotates and revokes keys, for operators only (docs/operating.md#keys)."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Final

import msgspec

from halfway.domain.errors import (
    InvalidRequestError,
    OverloadedError,
    TooManyKeysError,
    UnknownKeyError,
)
from halfway.domain.keys import RANDOM_BYTES, Key, MasterSecret, key_text, public_id
from halfway.domain.principal import Permission, Principal, PrincipalKind

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from halfway.service.ports import Authority, Clock, KeyStore

MAX_LIVE_KEYS: Final = 2
"""Keys that one principal may have at once: the old one, and the new one while its services change over."""
EXPIRED_KEPT_MS: Final = 30 * 24 * 3_600_000
"""A key that expired longer ago than this is removed when its principal gets another key."""


class NewKey(msgspec.Struct, frozen=True, kw_only=True):
    """A new key. `text` is shown only once; it is None for a certificate."""

    key: Key
    text: str | None


class KeySpec(msgspec.Struct, frozen=True, kw_only=True):
    """The request of an operator for a key, or for the binding of a client certificate, to a principal."""

    kind: PrincipalKind
    name: str
    expires_in_ms: int | None = None
    certificate: str | None = None


class KeyPage(msgspec.Struct, frozen=True, kw_only=True):
    """Keys by public id; `next` is the last key's id if there are more."""

    keys: tuple[Key, ...]
    next: str | None


class Keys:
    """The operations of operators on keys."""

    def __init__(
        self,
        authority: Authority,
        store: KeyStore,
        secret: MasterSecret,
        clock: Clock,
        *,
        max_keys: int,
        previous: Sequence[MasterSecret] = (),
        random: Callable[[int], bytes] = os.urandom,
    ) -> None:
        """Store the parts. New keys are hashed and sealed with `secret`, earlier ones perhaps with a `previous` one."""
        self._authority = authority
        self._store = store
        self._secret = secret
        self._secrets = (secret, *previous)
        self._clock = clock
        self._max_keys = max_keys
        self._random = random

    async def create(self, spec: KeySpec, *, deadline: float, principal: Principal) -> NewKey:
        """Make a key, or bind a certificate.

        Raises:
            TooManyKeysError: its principal already has two of this kind.
            InvalidRequestError: the certificate is already bound.
            OverloadedError: there are already as many keys as allowed.

        """
        self._authority.require(principal, Permission.MANAGE_KEYS)
        await self._store.refresh(deadline=deadline)
        now = self._clock.now_ms()
        bound = None if spec.certificate is None else self._store.table.bound_to(spec.certificate)
        if bound is not None:
            raise InvalidRequestError(
                f"certificate {spec.certificate!r} is already bound: revoke {bound.id} first",
                field="certificate",
            )
        await self._remove_expired(spec, now, deadline)
        self._require_few_live(spec, now)
        if len(self._store.table) >= self._max_keys:
            raise OverloadedError(f"there are already {self._max_keys} keys: revoke some, or raise HALFWAY_MAX_KEYS")
        return await self._write(spec, now, deadline)

    async def rotate(
        self, key_id: str, *, keep_ms: int, expires_in_ms: int | None, deadline: float, principal: Principal
    ) -> NewKey:
        """Make another key for the same principal; the given key expires after `keep_ms`.

        Raises:
            UnknownKeyError: there is no such key.
            TooManyKeysError: its principal already has another key, which must be revoked first.
            InvalidRequestError: it is a certificate's binding, which needs no rotation, or halfway did not write it.

        """
        self._authority.require(principal, Permission.MANAGE_KEYS)
        before = await self._find(key_id, deadline)
        if not any(secret.has_sealed(before) for secret in self._secrets):
            # Otherwise a kind and a name that somebody else wrote would get a valid seal.
            raise InvalidRequestError(
                f"the record of key {key_id} was not written by halfway: revoke it, and make another key", field="id"
            )
        if before.certificate is not None:
            raise InvalidRequestError(
                f"{key_id} binds a certificate: a renewed certificate of the same name continues to use it", field="id"
            )
        spec = KeySpec(kind=before.kind, name=before.name, expires_in_ms=expires_in_ms)
        new = await self.create(spec, deadline=deadline, principal=principal)
        until = self._clock.now_ms() + keep_ms
        if before.expires_at is None or until < before.expires_at:
            ending = msgspec.structs.replace(before, expires_at=until)
            await self._store.put(self._secret.sealed(ending), deadline=deadline)
            if self._store.table.is_revoked(key_id):
                # It was revoked in the meantime: no record may follow the revocation.
                await self._store.delete(key_id, deadline=deadline)
        return new

    async def revoke(self, key_id: str, *, deadline: float, principal: Principal) -> Key:
        """Revoke a key everywhere, within a second, and return it; UnknownKeyError if there is none."""
        self._authority.require(principal, Permission.MANAGE_KEYS)
        key = await self._find(key_id, deadline)
        await self._store.delete(key_id, deadline=deadline)
        return key

    async def page(
        self, *, name: str | None, limit: int, after: str | None, deadline: float, principal: Principal
    ) -> KeyPage:
        """Return a page of keys by public id, after an id, and of one name if it is given."""
        self._authority.require(principal, Permission.MANAGE_KEYS)
        await self._store.refresh(deadline=deadline)
        matching = [
            key
            for key in self._store.table.all()
            if (after is None or key.id > after) and (name is None or key.name == name)
        ]
        keys = matching[:limit]
        return KeyPage(keys=tuple(keys), next=keys[-1].id if len(keys) < len(matching) else None)

    async def _find(self, key_id: str, deadline: float) -> Key:
        await self._store.refresh(deadline=deadline)
        key = self._store.table.get(key_id)
        if key is None:
            raise UnknownKeyError(key_id)
        return key

    async def _write(self, spec: KeySpec, now: int, deadline: float) -> NewKey:
        text = None if spec.certificate is not None else key_text(spec.kind, self._random(RANDOM_BYTES))
        key = Key(
            id=public_id(text if text is not None else key_text(spec.kind, self._random(RANDOM_BYTES))),
            kind=spec.kind,
            name=spec.name,
            created_at=now,
            expires_at=None if spec.expires_in_ms is None else now + spec.expires_in_ms,
            digest=None if text is None else self._secret.digest(text),
            certificate=spec.certificate,
        )
        await self._store.put(self._secret.sealed(key), deadline=deadline)
        try:
            self._require_few_live(spec, now, more=0)
        except TooManyKeysError:
            # Another instance made a key at the same moment.
            await self._store.delete(key.id, deadline=deadline)
            raise
        return NewKey(key=key, text=text)

    def _keys_of(self, spec: KeySpec) -> Sequence[Key]:
        return [
            key
            for key in self._store.table.all()
            if (key.kind, key.name, key.certificate is None) == (spec.kind, spec.name, spec.certificate is None)
        ]

    def _require_few_live(self, spec: KeySpec, now: int, *, more: int = 1) -> None:
        live = [key.id for key in self._keys_of(spec) if key.is_live(now)]
        if len(live) + more > MAX_LIVE_KEYS:
            raise TooManyKeysError(f"{spec.kind} {spec.name!r}", live)

    async def _remove_expired(self, spec: KeySpec, now: int, deadline: float) -> None:
        for key in self._keys_of(spec):
            if key.expires_at is not None and key.expires_at < now - EXPIRED_KEPT_MS:
                await self._store.delete(key.id, deadline=deadline)
