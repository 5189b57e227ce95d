"""Many futures with few deadlines between them: the items of a batch share a timer."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable


class Deadlines:
    """Fails futures that are not done in time. Deadlines are times on the loop's own clock."""

    def __init__(self) -> None:
        """Watch nothing."""
        self._watched: dict[float, dict[asyncio.Future[Any], Callable[[], Exception]]] = {}
        self._timers: dict[float, asyncio.TimerHandle] = {}

    def watch(self, future: asyncio.Future[Any], deadline: float, late: Callable[[], Exception]) -> None:
        """Give a future the error that `late` makes if it is not done by its deadline."""
        watched = self._watched.get(deadline)
        if watched is None:
            watched = self._watched[deadline] = {}
            self._timers[deadline] = asyncio.get_running_loop().call_at(deadline, self._expire, deadline)
        watched[future] = late

    def forget(self, future: asyncio.Future[Any], deadline: float) -> None:
        """Watch a future no longer, whether it is done or not."""
        watched = self._watched.get(deadline)
        if watched is None or watched.pop(future, None) is None or watched:
            return
        del self._watched[deadline]
        self._timers.pop(deadline).cancel()

    def _expire(self, deadline: float) -> None:
        del self._timers[deadline]
        for future, late in self._watched.pop(deadline).items():
            if not future.done():
                future.set_exception(late())
