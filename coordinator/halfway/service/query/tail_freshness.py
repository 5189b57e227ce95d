"""Tracks how recently this instance has read half to its end: what others append stays unknown until then."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Final

import structlog

from halfway.domain.errors import HalfwayError
from halfway.service.elapsed import Instant

if TYPE_CHECKING:
    from halfway.service.ports import HalfLog
    from halfway.service.shards.shard_table import ShardTable

log = structlog.get_logger(__name__)

LATE_S: Final = 30.0
_EVERY_S: Final = 5.0
_WITHIN_S: Final = 5.0


class TailFreshness:
    """Waits until the tail of each served shard has passed the end of half[s], at an interval."""

    def __init__(
        self, shards: ShardTable, half_log: HalfLog, *, late_s: float = LATE_S, every_s: float = _EVERY_S
    ) -> None:
        """Take the served shards and the log that gives their ends. Nothing is read before `watch`."""
        self._shards = shards
        self._half_log = half_log
        self._late_s = late_s
        self._every_s = every_s
        self._read_at: dict[int, Instant] = {}
        """By served shard: what was appended before this moment is known."""
        self._warned = False

    @property
    def age_s(self) -> float:
        """For how long at most a record of a served shard may not have been seen; 0 if no shard is served."""
        return max((at.age_s for at in self._read_at.values()), default=0.0)

    @property
    def is_late(self) -> bool:
        """Return whether that is too long."""
        return self.age_s > self._late_s

    async def watch(self) -> None:
        """Read at an interval. Log once if that fails for long, and once when it succeeds again."""
        while True:
            served = self._shards.served
            self._read_at = {number: self._read_at.get(number) or Instant.now() for number in served}
            errors = await asyncio.gather(*(self._pass_end(number) for number in served))
            if self.is_late and not self._warned:
                self._warned = True
                reason = next((error for error in errors if error is not None), None)
                log.warning("tail_not_current", age_s=round(self.age_s, 1), error=reason)
            elif self._warned and not self.is_late:
                self._warned = False
                log.info("tail_current_again")
            await asyncio.sleep(self._every_s)

    async def _pass_end(self, number: int) -> str | None:
        """Wait until the tail has passed the present end; return the error if it has not."""
        asked = Instant.now()
        deadline = asyncio.get_running_loop().time() + _WITHIN_S
        try:
            end = await self._half_log.half_end(number, deadline=deadline)
            await self._shards.get(number).wait_for_tail(end, deadline=deadline)
        except HalfwayError as error:
            return error.detail
        self._read_at[number] = asked
        return None
