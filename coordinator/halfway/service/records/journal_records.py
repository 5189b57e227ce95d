"""The records of a transaction's history (docs/rest.md#history)."""

from __future__ import annotations

import msgspec


class HistoryEvent(msgspec.Struct, frozen=True, kw_only=True):
    """One event of a transaction. `at` is in ms since the epoch; fields that do not apply are None."""

    at: int
    event: str
    attempt: int | None = None
    """The number of a check."""
    verdict: str | None = None
    sent: bool | None = None
    host: str | None = None
    status: int | None = None
    excerpt: str | None = None
    duration_s: float | None = None
    detail: str | None = None
    cause: str | None = None
    by: str | None = None
    remark: str | None = None
