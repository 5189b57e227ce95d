"""What the history of a transaction looks like (docs/rest.md#history)."""

from __future__ import annotations

import msgspec

from halfway.domain.transaction import State
from halfway.rest.requests.models import Timestamp


class HistoryEvent(msgspec.Struct, frozen=True, kw_only=True):
    """One thing that happened; what does not apply to it, or is not known, is null."""

    at: Timestamp
    event: str
    """`prepared`, `check`, `unknown`, `verdict_recorded`, `parked`, `resumed`, `reanchored`, `committed` or
    `rolled_back`.
    """
    attempt: int | None
    verdict: str | None
    """`commit`, `rollback`, `unknown`, or `none` if no verdict came."""
    sent: bool | None
    host: str | None
    status: int | None
    excerpt: str | None
    """The beginning of the answer, only for those who may read payloads."""
    duration_s: float | None
    detail: str | None
    cause: str | None
    by: str | None
    """Who did it by hand, as far as its instance still knows; the audit trail has it."""
    remark: str | None


class MessagePlace(msgspec.Struct, frozen=True, kw_only=True):
    """A message, and where it stands once it is committed."""

    message: int
    topic: str
    size: int | None
    partition: int | None
    offset: int | None


class HistoryResponse(msgspec.Struct, frozen=True, kw_only=True):
    """What happened to a transaction."""

    id: str
    group: str
    state: State
    prepared_at: Timestamp
    complete: bool
    """False if `missing` says that something is not known."""
    missing: list[str]
    events: list[HistoryEvent]
    """The oldest first, the last 500 at most."""
    messages: list[MessagePlace]
    messages_detail: str | None
    """Why some places are null."""
