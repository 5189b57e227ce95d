"""The models of a transaction's history (docs/rest.md#history)."""

from __future__ import annotations

import msgspec

from halfway.domain.transaction import State
from halfway.rest.requests.models import Timestamp


class HistoryEvent(msgspec.Struct, frozen=True, kw_only=True):
    """One event. A field that does not apply, or is not known, is null."""

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
    """The beginning of the answer; only callers that may read payloads see it."""
    duration_s: float | None
    detail: str | None
    cause: str | None
    by: str | None
    """The caller that did it manually, if its instance still knows it; the audit trail always has it."""
    remark: str | None


class MessagePlace(msgspec.Struct, frozen=True, kw_only=True):
    """A message, and its place in Kafka once it is committed."""

    message: int
    topic: str
    size: int | None
    partition: int | None
    offset: int | None


class HistoryResponse(msgspec.Struct, frozen=True, kw_only=True):
    """The history of a transaction."""

    id: str
    group: str
    state: State
    prepared_at: Timestamp
    complete: bool
    """False if something is not known; `missing` says what."""
    missing: list[str]
    events: list[HistoryEvent]
    """Oldest first; at most the last 500."""
    messages: list[MessagePlace]
    messages_detail: str | None
    """Why some places are null."""
