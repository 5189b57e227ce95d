"""The events of the audit trail (docs/operating.md#the-audit-trail)."""

from __future__ import annotations

from enum import StrEnum

import msgspec


class Audited(StrEnum):
    """The actions on record: manual changes of transactions, and what is done to jobs, groups and keys."""

    REGISTER_GROUP = "register_group"
    CHANGE_GROUP = "change_group"
    DELETE_GROUP = "delete_group"
    END_BY_HAND = "end_by_hand"
    RESUME = "resume"
    CHECK_NOW = "check_now"
    START_JOB = "start_job"
    STOP_JOB = "stop_job"
    CREATE_KEY = "create_key"
    ROTATE_KEY = "rotate_key"
    REVOKE_KEY = "revoke_key"
    READ_CHECK_SECRETS = "read_check_secrets"


class AuditEvent(msgspec.Struct, frozen=True, kw_only=True):
    """One action that a caller took or attempted. It holds no key, no secret and no payload."""

    id: str
    """The id of this event. A reader that finds it twice counts it once."""
    at: int
    """Milliseconds since the epoch."""
    action: str
    actor_kind: str
    actor: str
    """The name of the group, operator or reader; empty for the other kinds."""
    key_id: str | None
    """The public id of the key or certificate that the caller presented."""
    subject: str
    """The object of the action: the id of a transaction or a job, the name of a group, the public id of a key."""
    group: str | None
    """The group that the action concerns, if it is known."""
    detail: str | None
    """The change, in words."""
    remark: str | None
    """The caller's remark."""
    result: str
    """`done`, an error code, or `interrupted` if the caller did not wait for the result."""
    instance: str
    """The instance that received the call."""
