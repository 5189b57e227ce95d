"""What is observed in one turn of the event loop, told to the observer once for all of a kind."""

from __future__ import annotations

import asyncio
from collections import Counter
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from halfway.service.activity import Activity


class Tally:
    """Counts prepares and ends; `began` is on the loop's clock."""

    def __init__(self, observer: Activity) -> None:
        """Start empty."""
        self.activity = self._observer = observer
        self._prepared: Counter[tuple[str, str, float]] = Counter()
        self._ended: Counter[tuple[str, str, str, str, float]] = Counter()
        self._resolved: Counter[tuple[str, str, str, int]] = Counter()
        self._scheduled = False

    def prepared(self, group: str, result: str, began: float) -> None:
        """Count a prepare by its result."""
        self._prepared[group, result, began] += 1
        self._schedule()

    def ended(self, group: str, outcome: str, cause: str, result: str, began: float) -> None:
        """Count an end by outcome, cause and result."""
        self._ended[group, outcome, cause, result, began] += 1
        self._schedule()

    def resolved_after(self, group: str, outcome: str, cause: str, after_ms: int) -> None:
        """Count an outcome by the time since the prepare."""
        self._resolved[group, outcome, cause, after_ms] += 1
        self._schedule()

    def _schedule(self) -> None:
        if not self._scheduled:
            self._scheduled = True
            asyncio.get_running_loop().call_soon(self._tell)

    def _tell(self) -> None:
        self._scheduled = False
        now, observer = asyncio.get_running_loop().time(), self._observer
        prepared, ended, resolved = self._prepared, self._ended, self._resolved
        self._prepared, self._ended, self._resolved = Counter(), Counter(), Counter()
        for (group, result, began), count in prepared.items():
            observer.prepared(group, result, now - began, count=count)
        for (group, outcome, cause, result, began), count in ended.items():
            observer.ended(group, outcome, cause, result, now - began, count=count)
        for (group, outcome, cause, after_ms), count in resolved.items():
            observer.resolved(group, outcome, cause, count)
            observer.resolved_after(group, outcome, after_ms / 1000, count=count)
