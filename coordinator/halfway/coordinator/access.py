"""Who may do what: authenticates callers, checks their permissions, and makes, lists, rotates and revokes keys.

`protocol.principal.RULES` has the permissions, unless access is open. For a group's key a transaction of another group
does not exist (404): `coordinator.queries.queries` decides that, and `coordinator.ends` for an end that need not wait.
Keys count only while this instance reads their records: without new ones it would accept revoked keys.
"""

from __future__ import annotations

import hmac
import os
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from typing import Final, Literal

import msgspec

from halfway.coordinator.ports import Authority, Clock, KeyStore
from halfway.protocol.errors import (
    ForbiddenError,
    InvalidRequestError,
    KafkaUnavailableError,
    OverloadedError,
    TooManyKeysError,
    UnauthenticatedError,
    UnknownKeyError,
)
from halfway.protocol.keys import LONGEST, RANDOM_BYTES, Key, KeyTable, MasterSecret, key_text, kind_in, public_id
from halfway.protocol.principal import ANYBODY, RULES, Permission, Principal, PrincipalKind

FIRST_OPERATOR = "first"
"""The name of the operator whose key is a setting."""


ALWAYS_KEYED: Final = frozenset({Permission.MANAGE_KEYS, Permission.READ_CHECK_SECRETS})
"""Permissions that need a key under open access too: a caller would keep the secrets when access is closed."""


Refusal = Literal[
    "expired", "forged", "group", "kind", "mistyped", "no_key", "revoked", "unknown_certificate", "unknown_key"
]
"""The reasons by which refused calls are counted."""


class OpenAccess:
    """The `Authority` of a coordinator that requires a key only to manage keys or to read secrets.

    So operators can make and hand out keys before they are required.
    """

    def __init__(self, keyed: KeyedAccess | None = None) -> None:
        """Take the authority for keys; None if there is no master secret, and so no keys."""
        self._keyed = keyed

    def authenticate(
        self, token: str | None, certificate: Collection[str] = (), wanted: Permission | None = None
    ) -> Principal:
        """Return the operator whose key is presented, else ANYBODY; if `wanted` needs a key, the owner of the key."""
        if self._keyed is not None and wanted in ALWAYS_KEYED:
            return self._keyed.authenticate(token, certificate)
        if self._keyed is not None and token is not None:
            with suppress(UnauthenticatedError):
                principal = self._keyed.authenticate(token, certificate)
                if principal.kind is PrincipalKind.OPERATOR:
                    return principal
        return ANYBODY

    def require(self, principal: Principal, permission: Permission, group: str | None = None) -> None:
        """Allow everything except managing keys and reading secrets: these outlast open access."""
        if permission in ALWAYS_KEYED and self._keyed is not None:
            self._keyed.require(principal, permission, group)

    def may(self, principal: Principal, permission: Permission, group: str | None = None) -> bool:
        if self._keyed is None:
            return permission is not Permission.MANAGE_KEYS
        return permission not in ALWAYS_KEYED or self._keyed.may(principal, permission, group)


REFUSED_S: Final = 30.0
"""If the keys were last read to their end so long ago, none is accepted except the first operator's."""
_PAYLOAD_PERMISSIONS: Final = (Permission.READ_PAYLOADS, Permission.FETCH_CHECKS)


class KeyedAccess:
    """The `Authority` of a coordinator that requires keys. It trusts no caller's own claims."""

    def __init__(
        self,
        table: KeyTable,
        secrets: Sequence[MasterSecret],
        clock: Clock,
        *,
        first_operator: str | None = None,
        hide_payloads: bool = False,
        count_refusal: Callable[[str], None] = lambda _: None,
        keys_age_s: Callable[[], float] = float,
    ) -> None:
        """Take the keys of the log, and the master secrets that may have made their hashes.

        `first_operator` is the text of a key that is always valid. With `hide_payloads` operators read no payloads.
        `count_refusal` counts a refusal by its reason. `keys_age_s` returns for how long at most this instance may have
        missed a revocation.
        """
        self._keys_age_s = keys_age_s
        self._table = table
        self._secrets = secrets
        self._clock = clock
        self._rules = RULES
        if hide_payloads:
            hidden = {permission: RULES[permission] - {PrincipalKind.OPERATOR} for permission in _PAYLOAD_PERMISSIONS}
            self._rules = RULES | hidden
        self._count_refusal = count_refusal
        self._sealed: dict[str, tuple[Key, Principal]] = {}
        """Records whose seal was verified, by public id, with their principals: one object for all uses of a key."""
        self._fixed: dict[str, Key] = {}
        self._verified: dict[str, Key] = {}
        """Verified keys by their texts: most of the cost of verifying a text is its hash."""
        if first_operator is not None:
            key = Key(
                id=public_id(first_operator),
                kind=PrincipalKind.OPERATOR,
                name=FIRST_OPERATOR,
                created_at=0,
                digest=secrets[0].digest(first_operator),
            )
            self._fixed[key.id] = key
            self._sealed[key.id] = key, key.principal

    # --- authentication

    def authenticate(
        self, token: str | None, certificate: Collection[str] = (), wanted: Permission | None = None
    ) -> Principal:
        """Return the owner of a key, or without a key, the owner of a certificate with one of these names.

        Raises:
            UnauthenticatedError: neither is valid here.
            KafkaUnavailableError: this instance may have missed revocations.
        """
        del wanted  # every permission needs a key
        key = self._bound_key(certificate) if token is None else self._key(token)
        sealed = self._sealed.get(key.id)
        if sealed is None or sealed[0] is not key:
            sealed = self._require_seal(key)
        if key.id not in self._fixed:
            self._require_fresh_keys()
        if not key.is_live(self._clock.now_ms()):
            raise self._unauthenticated("expired", f"key {key.id} has expired: ask an operator to rotate it")
        return sealed[1]

    def _key(self, token: str) -> Key:
        verified = self._verified.get(token)
        if verified is not None and self._record(verified.id) is verified:
            return verified
        if len(token) <= LONGEST and token.isascii():
            key_id = public_id(token)
            key = self._record(key_id)
            if (
                key is not None
                and key.digest is not None
                and any(hmac.compare_digest(key.digest, secret.digest(token)) for secret in self._secrets)
            ):
                if len(self._verified) > len(self._table) + len(self._fixed):
                    self._verified.clear()  # it holds revoked keys
                self._verified[token] = key
                return key
            if kind_in(token) is not None:
                detail = (
                    f"key {key_id} is not valid here: it was revoked, never made, made for another cluster, or under a"
                    " master secret that is no longer set (HALFWAY_MASTER_SECRET_PREVIOUS may name it)"
                )
                raise self._unauthenticated("revoked" if self._table.is_revoked(key_id) else "unknown_key", detail)
        raise self._unauthenticated("mistyped", "this is not a key, or it is mistyped: its checksum is wrong")

    def _record(self, key_id: str) -> Key | None:
        return self._fixed.get(key_id) or self._table.get(key_id)

    def _bound_key(self, certificate: Collection[str]) -> Key:
        """Return the first key record that binds one of these names; an expired one only if no other is valid."""
        keys = [key for name in certificate if (key := self._table.bound_to(name)) is not None]
        if keys:
            now = self._clock.now_ms()
            return next((key for key in keys if key.is_live(now)), keys[0])
        if certificate:
            detail = "the client's certificate is bound to no principal: ask an operator to bind it, or send a key"
            raise self._unauthenticated("unknown_certificate", detail)
        raise self._unauthenticated(
            "no_key", "the request has no key: send Authorization: Bearer with a key that an operator has made"
        )

    def _require_seal(self, key: Key) -> tuple[Key, Principal]:
        if not _is_sealed(key, self._secrets):
            raise self._unauthenticated("forged", f"the record of key {key.id} {_UNSEALED}")
        if len(self._sealed) > 2 * len(self._table) + len(self._fixed) + 1:
            self._sealed = {name: sealed for name, sealed in self._sealed.items() if name in self._fixed}
        sealed = self._sealed[key.id] = key, key.principal
        return sealed

    def _require_fresh_keys(self) -> None:
        if (age_s := self._keys_age_s()) > REFUSED_S:
            raise KafkaUnavailableError(
                f"this instance could not read for {age_s:.0f} s which keys were revoked, and accepts no key now: "
                "try again, or call another instance"
            )

    def _unauthenticated(self, reason: Refusal, detail: str) -> UnauthenticatedError:
        self._count_refusal(reason)
        return UnauthenticatedError(detail)

    # --- permissions

    def require(self, principal: Principal, permission: Permission, group: str | None = None) -> None:
        """Return if the caller may do this, to this group if one is named.

        Raises:
            ForbiddenError: it may not.
            UnauthenticatedError: its key was revoked or has expired in the meantime, or it has no key.
            KafkaUnavailableError: this instance may have missed revocations.
        """
        if principal.kind is PrincipalKind.PEER:
            return
        if (key_id := principal.key_id) is not None and key_id not in self._fixed:
            self._require_fresh_keys()
            key = self._table.get(key_id)
            if self._table.is_revoked(key_id) or (key is not None and not key.is_live(self._clock.now_ms())):
                raise self._unauthenticated("revoked", f"key {key_id} was revoked, or has expired")
        kinds = self._rules[permission]
        if principal.kind not in kinds:
            if principal.kind is PrincipalKind.ANYBODY:
                raise self._unauthenticated("no_key", "the request has no key")
            raise self._forbidden("kind", f"{principal} may not {permission}: this needs {_needed(kinds, group)}")
        if group is not None and principal.group not in (None, group):
            raise self._forbidden(
                "group", f"{principal} may not {permission} for group {group!r}: this needs {_needed(kinds, group)}"
            )

    def may(self, principal: Principal, permission: Permission, group: str | None = None) -> bool:
        """Return whether a caller of this kind may do this to this group; its key is assumed to be valid still."""
        return principal.kind in self._rules[permission] and (group is None or principal.group in (None, group))

    def _forbidden(self, reason: Refusal, detail: str) -> ForbiddenError:
        self._count_refusal(reason)
        return ForbiddenError(detail)


_UNSEALED: Final = (
    "was not written by halfway, or under a master secret that is no longer set: set it as"
    " HALFWAY_MASTER_SECRET_PREVIOUS, or revoke the key and make another"
)


def _is_sealed(key: Key, secrets: Sequence[MasterSecret]) -> bool:
    return any(secret.has_sealed(key) for secret in secrets)


def _needed(kinds: Collection[PrincipalKind], group: str | None) -> str:
    """Return the kinds of keys that are sufficient, as text."""
    needed = []
    if PrincipalKind.GROUP in kinds:
        needed.append("a group's key" if group is None else f"a key of group {group!r}")
    if PrincipalKind.READER in kinds:
        needed.append("a reader's key")
    if PrincipalKind.OPERATOR in kinds:
        needed.append("an operator's key")
    return " or ".join(needed)


MAX_KEYS: Final = 10_000
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
        max_keys: int = MAX_KEYS,
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
                f"certificate {spec.certificate!r} is already bound: revoke {bound.id} first", field="certificate"
            )
        await self._remove_expired(spec, now, deadline)
        self._require_few_live(spec, now)
        if len(self._store.table) >= self._max_keys:
            raise OverloadedError(f"there are already {self._max_keys} keys: revoke some")
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
        if not _is_sealed(before, self._secrets):
            # Otherwise a kind and a name that somebody else wrote would get a valid seal.
            raise InvalidRequestError(f"the record of key {key_id} {_UNSEALED}", field="id")
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

    def is_valid(self, key: Key) -> bool:
        """Return whether a key has not expired, and its record is of a master secret that is set here."""
        return key.is_live(self._clock.now_ms()) and _is_sealed(key, self._secrets)

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
