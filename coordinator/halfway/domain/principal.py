"""Who calls, and what each kind of caller may do (docs/rest.md#who-may-do-what)."""

from __future__ import annotations

from enum import StrEnum
from typing import Final

import msgspec


class PrincipalKind(StrEnum):
    """What a caller is."""

    GROUP = "group"
    """A producer group's service: it acts for its own group only."""
    OPERATOR = "operator"
    """A person or tool that acts for every group, by hand."""
    READER = "reader"
    """It looks at metrics, groups and transactions, never at payloads."""
    PEER = "peer"
    """Another instance that passes on a call of no principal, or this instance itself."""
    ANYBODY = "anybody"
    """A caller under open access, where nobody is asked for a key."""


class Principal(msgspec.Struct, frozen=True, kw_only=True, gc=False, omit_defaults=True):
    """Who calls. It holds no secret and may be logged."""

    kind: PrincipalKind
    name: str = ""
    """The group of a group's key, the name of an operator or a reader; empty for the other kinds."""
    key_id: str | None = None
    """The public id of the key or the certificate's binding that it showed."""

    @property
    def group(self) -> str | None:
        """The only group that it may act for; None if it is not bound to one."""
        return self.name if self.kind is PrincipalKind.GROUP else None

    def __str__(self) -> str:
        """Return what logs and errors call it."""
        named = f"{self.kind} {self.name!r}" if self.name else str(self.kind)
        return named if self.key_id is None else f"{named} (key {self.key_id})"


ANYBODY: Final = Principal(kind=PrincipalKind.ANYBODY)
PEER: Final = Principal(kind=PrincipalKind.PEER)


class Permission(StrEnum):
    """What may be done."""

    DESCRIBE = "read the description of this interface"
    PREPARE = "prepare a transaction"
    END = "end a transaction"
    END_BY_HAND = "end a transaction by hand"
    BATCH = "prepare and end many transactions"
    STREAM = "open a stream"
    GET = "look at a transaction"
    LIST = "list transactions"
    READ_PAYLOADS = "read payloads"
    CHECK = "ask about a transaction now"
    RESUME = "resume a parked transaction"
    FETCH_CHECKS = "fetch checks"
    GET_GROUP = "look at a group"
    LIST_GROUPS = "list groups"
    PUT_GROUP = "change a group's checks and policy"
    GRANT_TOPICS = "register a group or add to its topics"
    READ_CHECK_SECRETS = "read what a group's checks are signed with"
    DELETE_GROUP = "delete a group"
    MANAGE_KEYS = "manage keys"
    READ_STATISTICS = "read statistics"
    LIST_JOBS = "look at jobs"
    RUN_JOBS = "start or stop a job"
    READ_METRICS = "read metrics"


_EVERYBODY: Final = frozenset(PrincipalKind)
_BY_HAND: Final = frozenset({PrincipalKind.OPERATOR, PrincipalKind.PEER})
_WORK: Final = _BY_HAND | {PrincipalKind.GROUP}
_LOOK: Final = _BY_HAND | {PrincipalKind.GROUP, PrincipalKind.READER}

RULES: Final[dict[Permission, frozenset[PrincipalKind]]] = {
    Permission.DESCRIBE: _EVERYBODY,
    Permission.PREPARE: _WORK,
    Permission.END: _WORK,
    Permission.END_BY_HAND: _BY_HAND,
    Permission.BATCH: _WORK,
    Permission.STREAM: _WORK,
    Permission.GET: _LOOK,
    Permission.LIST: _LOOK,
    Permission.READ_PAYLOADS: _WORK,
    Permission.CHECK: _WORK,
    Permission.RESUME: _BY_HAND,
    Permission.FETCH_CHECKS: _WORK,
    Permission.GET_GROUP: _LOOK,
    Permission.LIST_GROUPS: _LOOK,
    Permission.PUT_GROUP: _WORK,
    Permission.GRANT_TOPICS: _BY_HAND,
    Permission.READ_CHECK_SECRETS: frozenset({PrincipalKind.GROUP}),
    Permission.DELETE_GROUP: _BY_HAND,
    Permission.MANAGE_KEYS: _BY_HAND,
    Permission.READ_STATISTICS: _LOOK,
    Permission.LIST_JOBS: _LOOK,
    Permission.RUN_JOBS: _WORK,
    Permission.READ_METRICS: _BY_HAND | {PrincipalKind.READER},
}
"""Which kinds may do what; a group's key never acts for another group, whatever stands here."""
