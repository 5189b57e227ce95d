"""Keys are made, listed, rotated and revoked: by operators only (docs/operating.md#keys)."""

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

LIVE_KEYS: Final = 2
"""Keys that one principal may have at once: the old one and the new one while services are given the new one."""
KEPT_MS: Final = 30 * 24 * 3_600_000
"""A key that expired longer ago than this is removed when its principal gets another one."""


class NewKey(msgspec.Struct, frozen=True, kw_only=True):
    """A key that was just made; `text` is shown this once, and is None for a certificate that is bound."""

    key: Key
    text: str | None


class KeySpec(msgspec.Struct, frozen=True, kw_only=True):
    """What an operator wants: a key, or a client certificate that stands for one, for this principal."""

    kind: PrincipalKind
    name: str
    expires_in_ms: int | None = None
    certificate: str | None = None


class KeyPage(msgspec.Struct, frozen=True, kw_only=True):
    """Keys by public id, and the last one's id if there are more."""

    keys: tuple[Key, ...]
    next: str | None


class Keys:
    """What operators do to keys."""

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
        """Keep the parts; new keys are hashed and sealed with `secret`, earlier ones may be with a `previous` one."""
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
            TooManyKeysError: its principal has two of its kind already.
            InvalidRequestError: the certificate is bound already.
            OverloadedError: there are as many keys as may be.

        """
        self._authority.require(principal, Permission.MANAGE_KEYS)
        await self._store.refresh(deadline=deadline)
        now = self._clock.now_ms()
        bound = None if spec.certificate is None else self._store.table.bound_to(spec.certificate)
        if bound is not None:
            raise InvalidRequestError(
                f"certificate {spec.certificate!r} is bound already: revoke {bound.id} first",
                field="certificate",
            )
        await self._remove_expired(spec, now, deadline)
        self._demand_few(spec, now)
        if len(self._store.table) >= self._max_keys:
            raise OverloadedError(f"there are {self._max_keys} keys already: revoke some, or raise HALFWAY_MAX_KEYS")
        return await self._written(spec, now, deadline)

    async def rotate(
        self, key_id: str, *, keep_ms: int, expires_in_ms: int | None, deadline: float, principal: Principal
    ) -> NewKey:
        """Make another key for the same principal; the one named expires after `keep_ms`.

        Raises:
            UnknownKeyError: there is no such key.
            TooManyKeysError: its principal has another one already: revoke that first.
            InvalidRequestError: it is a certificate's binding, which needs no rotation; or halfway has not written it.

        """
        self._authority.require(principal, Permission.MANAGE_KEYS)
        before = await self._found(key_id, deadline)
        if not any(secret.holds(before) for secret in self._secrets):
            # Its new record would have a valid seal, whatever kind and name somebody else wrote into it.
            raise InvalidRequestError(
                f"the record of key {key_id} was not written by halfway: revoke it, and make another key", field="id"
            )
        if before.certificate is not None:
            raise InvalidRequestError(
                f"{key_id} binds a certificate: a renewed certificate of the same name goes on with it", field="id"
            )
        spec = KeySpec(kind=before.kind, name=before.name, expires_in_ms=expires_in_ms)
        new = await self.create(spec, deadline=deadline, principal=principal)
        until = self._clock.now_ms() + keep_ms
        if before.expires_at is None or until < before.expires_at:
            ending = msgspec.structs.replace(before, expires_at=until)
            await self._store.put(self._secret.sealed(ending), deadline=deadline)
            if self._store.table.revoked(key_id):
                await self._store.delete(key_id, deadline=deadline)  # meanwhile: its record must not stand after that
        return new

    async def revoke(self, key_id: str, *, deadline: float, principal: Principal) -> Key:
        """Revoke a key everywhere, within a second, and return it; UnknownKeyError if there is none."""
        self._authority.require(principal, Permission.MANAGE_KEYS)
        key = await self._found(key_id, deadline)
        await self._store.delete(key_id, deadline=deadline)
        return key

    async def page(
        self, *, name: str | None, limit: int, after: str | None, deadline: float, principal: Principal
    ) -> KeyPage:
        """Show keys by public id, those after an id; those of one name if it is given."""
        self._authority.require(principal, Permission.MANAGE_KEYS)
        await self._store.refresh(deadline=deadline)
        found = [
            key
            for key in self._store.table.all()
            if (after is None or key.id > after) and (name is None or key.name == name)
        ]
        shown = found[:limit]
        return KeyPage(keys=tuple(shown), next=shown[-1].id if len(shown) < len(found) else None)

    async def _found(self, key_id: str, deadline: float) -> Key:
        await self._store.refresh(deadline=deadline)
        key = self._store.table.get(key_id)
        if key is None:
            raise UnknownKeyError(key_id)
        return key

    async def _written(self, spec: KeySpec, now: int, deadline: float) -> NewKey:
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
            self._demand_few(spec, now, more=0)
        except TooManyKeysError:
            # Another instance made one at the same moment.
            await self._store.delete(key.id, deadline=deadline)
            raise
        return NewKey(key=key, text=text)

    def _of(self, spec: KeySpec) -> Sequence[Key]:
        return [
            key
            for key in self._store.table.all()
            if (key.kind, key.name, key.certificate is None) == (spec.kind, spec.name, spec.certificate is None)
        ]

    def _demand_few(self, spec: KeySpec, now: int, *, more: int = 1) -> None:
        live = [key.id for key in self._of(spec) if key.live(now)]
        if len(live) + more > LIVE_KEYS:
            raise TooManyKeysError(f"{spec.kind} {spec.name!r}", live)

    async def _remove_expired(self, spec: KeySpec, now: int, deadline: float) -> None:
        for key in self._of(spec):
            if key.expires_at is not None and key.expires_at < now - KEPT_MS:
                await self._store.delete(key.id, deadline=deadline)
