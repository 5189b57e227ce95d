"""Logs refused requests: the first of each kind, and then how many more there were in a minute, with a sample."""

from __future__ import annotations

from http import HTTPStatus
from typing import Final

import structlog

from halfway.service.log_summary import LogSummary

log = structlog.get_logger(__name__)

_SHOWN: Final = 128
"""Shown characters of what a client sent: as many as an id may have."""


class RefusalLog:
    """A kind is an operation, its error and the group. What the caller can change is info, all else a warning."""

    def __init__(self) -> None:
        """Start with nothing counted."""
        self._of_callers = LogSummary(log, "info", "request_refused")
        self._of_ours = LogSummary(log, "warning", "request_refused")

    def note(
        self,
        operation: str,
        status: int,
        error_code: str | None,
        *,
        group: str | None,
        id: str | None,  # noqa: A002 - the name of the field
        request_id: str | None,
    ) -> None:
        """Log or count a request, or an item of one, that was refused."""
        is_ours = status >= HTTPStatus.INTERNAL_SERVER_ERROR or status == HTTPStatus.TOO_MANY_REQUESTS
        summary = self._of_ours if is_ours else self._of_callers
        kind = {"operation": operation, "status": int(status), "error": error_code, "group": group and group[:_SHOWN]}
        summary.note(kind, id=id and id[:_SHOWN], request_id=request_id)
