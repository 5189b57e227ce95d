"""Authenticates callers and checks their permissions, by `domain.principal.RULES` unless access is open.

For a group's key a transaction of another group does not exist (404). `service.query.lookup` decides that, and
`service.resolve.caller_requests` for an end that need not wait. This module refuses everything else that a caller may
not do.
"""

from __future__ import annotations

import hmac
from contextlib import suppress
from typing import TYPE_CHECKING, Final, Literal

from halfway.domain.errors import ForbiddenError, UnauthenticatedError
from halfway.domain.keys import LONGEST, Key, KeyTable, kind_in, public_id
from halfway.domain.principal import ANYBODY, RULES, Permission, Principal, PrincipalKind

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Sequence

    from halfway.domain.keys import MasterSecret
    from halfway.service.ports import Clock

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
        """Return whether `require` would allow this."""
        if self._keyed is None:
            return permission is not Permission.MANAGE_KEYS
        return permission not in ALWAYS_KEYED or self._keyed.may(principal, permission, group)


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
        require_fresh_keys: Callable[[], None] = lambda: None,
    ) -> None:
        """Take the keys of the log, and the master secrets that may have made their hashes.

        `first_operator` is the text of a key that is always valid. With `hide_payloads` operators read no payloads.
        `count_refusal` counts a refusal by its reason. `require_fresh_keys` raises a HalfwayError if this instance may
        have missed revocations.
        """
        self._require_fresh_keys = require_fresh_keys
        self._table = table
        self._secrets = secrets
        self._clock = clock
        self._rules = RULES
        if hide_payloads:
            hidden = {permission: RULES[permission] - {PrincipalKind.OPERATOR} for permission in _PAYLOAD_PERMISSIONS}
            self._rules = RULES | hidden
        self._count_refusal = count_refusal
        self._sealed: dict[str, Key] = {}
        """Records whose seal was verified, by public id."""
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
            self._fixed[key.id] = self._sealed[key.id] = key

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
        if self._sealed.get(key.id) is not key:
            self._require_seal(key)
        if key.id not in self._fixed:
            self._require_fresh_keys()
        if not key.is_live(self._clock.now_ms()):
            raise self._unauthenticated("expired", f"key {key.id} has expired: ask an operator to rotate it")
        return key.principal

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
                    f"key {key_id} is not valid here: it was revoked, belongs to another cluster, or was never made"
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

    def _require_seal(self, key: Key) -> None:
        if not any(secret.has_sealed(key) for secret in self._secrets):
            raise self._unauthenticated("forged", f"the record of key {key.id} was not written by halfway: revoke it")
        if len(self._sealed) > 2 * len(self._table) + len(self._fixed) + 1:
            self._sealed = dict(self._fixed)
        self._sealed[key.id] = key

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
                "group",
                f"{principal} may not {permission} for group {group!r}: this needs {_needed(kinds, group)}",
            )

    def may(self, principal: Principal, permission: Permission, group: str | None = None) -> bool:
        """Return whether a caller of this kind may do this to this group; its key is assumed to be valid still."""
        return principal.kind in self._rules[permission] and (group is None or principal.group in (None, group))

    def _forbidden(self, reason: Refusal, detail: str) -> ForbiddenError:
        self._count_refusal(reason)
        return ForbiddenError(detail)


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
