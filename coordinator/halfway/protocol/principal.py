"""Callers, and the permissions of each kind of caller (docs/api.md#permissions)."""

from __future__ import annotations

from enum import StrEnum
from typing import Final

import msgspec


class PrincipalKind(StrEnum):
    """The kind of a caller."""

    GROUP = "group"
    """The service of a producer group. It acts for its own group only."""
    OPERATOR = "operator"
    """A person or a tool that acts manually, for any group."""
    READER = "reader"
    """A caller that reads metrics, groups and transactions, never payloads."""
    PEER = "peer"
    """Another instance that forwards a call without a principal, or this instance itself."""
    ANYBODY = "anybody"
    """A caller under open access, which needs no key."""


class Principal(msgspec.Struct, frozen=True, kw_only=True, gc=False, omit_defaults=True):
    """A caller. It holds no secret and may be logged."""

    kind: PrincipalKind
    name: str = ""
    """The group of a group's key, the name of an operator or a reader; empty for the other kinds."""
    key_id: str | None = None
    """The public id of the key, or of the certificate's binding, that it presented."""

    @property
    def group(self) -> str | None:
        """The only group that it may act for; None if it is not limited to one."""
        return self.name if self.kind is PrincipalKind.GROUP else None

    def __str__(self) -> str:
        """Return the caller's name in logs and errors."""
        named = f"{self.kind} {self.name!r}" if self.name else str(self.kind)
        return named if self.key_id is None else f"{named} (key {self.key_id})"


ANYBODY: Final = Principal(kind=PrincipalKind.ANYBODY)
PEER: Final = Principal(kind=PrincipalKind.PEER)


class Permission(StrEnum):
    """Something that callers may be permitted to do. The values are used in error messages."""

    DESCRIBE = "read the description of this interface"
    PREPARE = "prepare a transaction"
    END = "end a transaction"
    END_BY_HAND = "end a transaction manually"
    BATCH = "prepare and end many transactions"
    STREAM = "open a stream"
    GET = "read a transaction"
    LIST = "list transactions"
    READ_PAYLOADS = "read payloads"
    CHECK = "check a transaction now"
    RESUME = "resume a parked transaction"
    FETCH_CHECKS = "fetch checks"
    GET_GROUP = "read a group"
    LIST_GROUPS = "list groups"
    PUT_GROUP = "change a group's checks and policy"
    GRANT_TOPICS = "register a group or add to its topics"
    LIMIT_GROUP = "change a group's limits"
    READ_CHECK_SECRETS = "read the secrets that sign a group's checks"
    DELETE_GROUP = "delete a group"
    MANAGE_KEYS = "manage keys"
    READ_STATISTICS = "read statistics"
    READ_METRICS = "read metrics"


_EVERYBODY: Final = frozenset(PrincipalKind)
_OPERATORS: Final = frozenset({PrincipalKind.OPERATOR, PrincipalKind.PEER})
_WRITERS: Final = _OPERATORS | {PrincipalKind.GROUP}
_READERS: Final = _OPERATORS | {PrincipalKind.GROUP, PrincipalKind.READER}

RULES: Final[dict[Permission, frozenset[PrincipalKind]]] = {
    Permission.DESCRIBE: _EVERYBODY,
    Permission.PREPARE: _WRITERS,
    Permission.END: _WRITERS,
    Permission.END_BY_HAND: _OPERATORS,
    Permission.BATCH: _WRITERS,
    Permission.STREAM: _WRITERS,
    Permission.GET: _READERS,
    Permission.LIST: _READERS,
    Permission.READ_PAYLOADS: _WRITERS,
    Permission.CHECK: _WRITERS,
    Permission.RESUME: _OPERATORS,
    Permission.FETCH_CHECKS: _WRITERS,
    Permission.GET_GROUP: _READERS,
    Permission.LIST_GROUPS: _READERS,
    Permission.PUT_GROUP: _WRITERS,
    Permission.GRANT_TOPICS: _OPERATORS,
    Permission.LIMIT_GROUP: _OPERATORS,
    Permission.READ_CHECK_SECRETS: frozenset({PrincipalKind.GROUP}),
    Permission.DELETE_GROUP: _OPERATORS,
    Permission.MANAGE_KEYS: _OPERATORS,
    Permission.READ_STATISTICS: _READERS,
    Permission.READ_METRICS: _OPERATORS | {PrincipalKind.READER},
}
"""The kinds of callers that have each permission. A group's key never acts for another group."""
