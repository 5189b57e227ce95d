"""Decides who may do what: everybody everything under open access, else as `domain.principal.RULES` say.

A transaction of another group is not there for a group's key (404): this is decided where it is looked up
(`service.query.lookup`, and `service.resolve.caller_requests` for an end that need not wait). Everything else that a
caller may not do is refused here.
"""

from __future__ import annotations

import hmac
from contextlib import suppress
from typing import TYPE_CHECKING, Final

from halfway.domain.errors import ForbiddenError, UnauthenticatedError
from halfway.domain.keys import LONGEST, Key, KeyTable, kind_in, public_id
from halfway.domain.principal import ANYBODY, RULES, Permission, Principal, PrincipalKind

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Sequence

    from halfway.domain.keys import MasterSecret
    from halfway.service.ports import Clock

FIRST_OPERATOR = "first"
"""The name of the operator whose key is a setting."""


NEVER_OPEN: Final = frozenset({Permission.MANAGE_KEYS, Permission.READ_CHECK_SECRETS})
"""What takes a key under open access too: whoever learnt a secret then would still have it afterwards."""


class OpenAccess:
    """The `Authority` of a coordinator that asks nobody for a key, but those who make keys or read secrets.

    So keys can be made and handed out before they are asked for.
    """

    def __init__(self, keyed: KeyedAccess | None = None) -> None:
        """Take what will decide once keys are asked for; None if there is no master secret to make keys with."""
        self._keyed = keyed

    def authenticate(
        self, token: str | None, certificate: Collection[str] = (), wanted: Permission | None = None
    ) -> Principal:
        """Return an operator who shows a key, ANYBODY for everybody else; whose key it is if that is asked for."""
        if self._keyed is not None and wanted in NEVER_OPEN:
            return self._keyed.authenticate(token, certificate)
        if self._keyed is not None and token is not None:
            with suppress(UnauthenticatedError):
                principal = self._keyed.authenticate(token, certificate)
                if principal.kind is PrincipalKind.OPERATOR:
                    return principal
        return ANYBODY

    def require(self, principal: Principal, permission: Permission, group: str | None = None) -> None:
        """Allow everything except managing keys and reading secrets, which are good once access control is on."""
        if permission in NEVER_OPEN and self._keyed is not None:
            self._keyed.require(principal, permission, group)

    def may(self, principal: Principal, permission: Permission, group: str | None = None) -> bool:
        """Whether `require` would return."""
        if self._keyed is None:
            return permission is not Permission.MANAGE_KEYS
        return permission not in NEVER_OPEN or self._keyed.may(principal, permission, group)


_SHOW_PAYLOADS: Final = (Permission.READ_PAYLOADS, Permission.FETCH_CHECKS)


class KeyedAccess:
    """The `Authority` of a coordinator that asks for keys: nothing is decided by what a caller says of itself."""

    def __init__(
        self,
        table: KeyTable,
        secrets: Sequence[MasterSecret],
        clock: Clock,
        *,
        first_operator: str | None = None,
        hide_payloads: bool = False,
        refused: Callable[[str], None] = lambda _: None,
        demand_current: Callable[[], None] = lambda: None,
    ) -> None:
        """Take the keys of the log, and the secrets that their hashes may be keyed with.

        `first_operator` is the text of a key that always holds; with `hide_payloads` operators read no payloads;
        `refused` counts a refusal by its reason; `demand_current` raises a HalfwayError if the keys are not known as
        they are now.
        """
        self._demand_current = demand_current
        self._table = table
        self._secrets = secrets
        self._clock = clock
        self._rules = RULES
        if hide_payloads:
            hidden = {permission: RULES[permission] - {PrincipalKind.OPERATOR} for permission in _SHOW_PAYLOADS}
            self._rules = RULES | hidden
        self._refused = refused
        self._sealed: dict[str, Key] = {}
        """Records whose seal was found to hold, by public id."""
        self._fixed: dict[str, Key] = {}
        self._shown: dict[str, Key] = {}
        """Keys by their texts, once these were found to be right: hashing a text is most of what a look at it costs."""
        if first_operator is not None:
            key = Key(
                id=public_id(first_operator),
                kind=PrincipalKind.OPERATOR,
                name=FIRST_OPERATOR,
                created_at=0,
                digest=secrets[0].digest(first_operator),
            )
            self._fixed[key.id] = self._sealed[key.id] = key

    # --- who calls

    def authenticate(
        self, token: str | None, certificate: Collection[str] = (), wanted: Permission | None = None
    ) -> Principal:
        """Return who shows a key; without a key, whose certificate has one of these names.

        Raises:
            UnauthenticatedError: nobody that is known here.
            KafkaUnavailableError: it is not known here which keys were revoked.

        """
        del wanted  # whatever it is, it takes a key
        key = self._bound(certificate) if token is None else self._key(token)
        if self._sealed.get(key.id) is not key:
            self._demand_seal(key)
        if key.id not in self._fixed:
            self._demand_current()
        if not key.live(self._clock.now_ms()):
            raise self._unknown("expired", f"key {key.id} has expired: let an operator rotate it")
        return key.principal

    def _key(self, token: str) -> Key:
        shown = self._shown.get(token)
        if shown is not None and self._record(shown.id) is shown:
            return shown
        if len(token) <= LONGEST and token.isascii():
            key_id = public_id(token)
            key = self._record(key_id)
            if (
                key is not None
                and key.digest is not None
                and any(hmac.compare_digest(key.digest, secret.digest(token)) for secret in self._secrets)
            ):
                if len(self._shown) > len(self._table) + len(self._fixed):
                    self._shown.clear()  # of keys that are revoked
                self._shown[token] = key
                return key
            if kind_in(token) is not None:
                detail = f"key {key_id} is not valid here: it was revoked, is of another cluster, or was never made"
                raise self._unknown("revoked" if self._table.revoked(key_id) else "unknown_key", detail)
        raise self._unknown("mistyped", "what is shown is no key, or is mistyped: its checksum does not hold")

    def _record(self, key_id: str) -> Key | None:
        return self._fixed.get(key_id) or self._table.get(key_id)

    def _bound(self, certificate: Collection[str]) -> Key:
        """Return the first key that one of these names stands for; an expired one only if no other holds."""
        found = [key for name in certificate if (key := self._table.bound_to(name)) is not None]
        if found:
            now = self._clock.now_ms()
            return next((key for key in found if key.live(now)), found[0])
        if certificate:
            detail = "the client's certificate is bound to nobody: let an operator bind it, or send a key"
            raise self._unknown("unknown_certificate", detail)
        raise self._unknown("no_key", "no key is shown: send Authorization: Bearer with one that an operator has made")

    def _demand_seal(self, key: Key) -> None:
        if not any(secret.holds(key) for secret in self._secrets):
            raise self._unknown("forged", f"the record of key {key.id} was not written by halfway: revoke it")
        if len(self._sealed) > 2 * len(self._table) + len(self._fixed) + 1:
            self._sealed = dict(self._fixed)
        self._sealed[key.id] = key

    def _unknown(self, reason: str, detail: str) -> UnauthenticatedError:
        self._refused(reason)
        return UnauthenticatedError(detail)

    # --- what they may do

    def require(self, principal: Principal, permission: Permission, group: str | None = None) -> None:
        """Return if the caller may do this, to this group if one is named.

        Raises:
            ForbiddenError: it may not.
            UnauthenticatedError: its key was revoked since, or has expired; or nobody was asked for a key.
            KafkaUnavailableError: it is not known here which keys were revoked.

        """
        if principal.kind is PrincipalKind.PEER:
            return
        if (key_id := principal.key_id) is not None and key_id not in self._fixed:
            self._demand_current()
            key = self._table.get(key_id)
            if self._table.revoked(key_id) or (key is not None and not key.live(self._clock.now_ms())):
                raise self._unknown("revoked", f"key {key_id} was revoked, or has expired")
        kinds = self._rules[permission]
        if principal.kind not in kinds:
            if principal.kind is PrincipalKind.ANYBODY:
                raise self._unknown("no_key", "no key is shown")
            raise self._forbidden("kind", f"{principal} may not {permission}: it takes {_needed(kinds, group)}")
        if group is not None and principal.group not in (None, group):
            raise self._forbidden(
                "group",
                f"{principal} may not {permission} for group {group!r}: it takes {_needed(kinds, group)}",
            )

    def may(self, principal: Principal, permission: Permission, group: str | None = None) -> bool:
        """Whether a caller of this kind may do this to this group; its key is taken to hold still."""
        return principal.kind in self._rules[permission] and (group is None or principal.group in (None, group))

    def _forbidden(self, reason: str, detail: str) -> ForbiddenError:
        self._refused(reason)
        return ForbiddenError(detail)


def _needed(kinds: Collection[PrincipalKind], group: str | None) -> str:
    """Return whose key would do."""
    needed = []
    if PrincipalKind.GROUP in kinds:
        needed.append("a group's key" if group is None else f"a key of group {group!r}")
    if PrincipalKind.READER in kinds:
        needed.append("a reader's key")
    if PrincipalKind.OPERATOR in kinds:
        needed.append("an operator's key")
    return " or ".join(needed)
