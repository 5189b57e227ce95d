"""Logs events that anybody can cause at any rate: the first one at once, the others counted."""

from __future__ import annotations

import asyncio
from typing import Any, Final

import structlog

_EVERY_S: Final = 10.0


class RareLog:
    """Writes at most one line in ten seconds for each reason, with how often it happened since the line before.

    Reasons are from a fixed set, never what a caller sends.
    """

    def __init__(self, name: str, event: str) -> None:
        """Take the logger's name, and the event."""
        self._log = structlog.get_logger(name)
        self._event = event
        self._counts: dict[str, int] = {}
        """How often each reason that had a line in the last ten seconds has come since."""
        self._fields: dict[str, dict[str, Any]] = {}

    def note(self, reason: str, **fields: Any) -> None:
        """Write a line, or count the event. The fields of a later line are those of the last event."""
        self._fields[reason] = fields
        if reason in self._counts:
            self._counts[reason] += 1
        else:
            self._write(reason, 1)

    def _write(self, reason: str, count: int) -> None:
        self._log.info(self._event, reason=reason, count=count, **self._fields[reason])
        self._counts[reason] = 0
        asyncio.get_running_loop().call_later(_EVERY_S, self._end, reason)

    def _end(self, reason: str) -> None:
        count = self._counts.pop(reason)
        if count:
            self._write(reason, count)
        else:
            del self._fields[reason]
