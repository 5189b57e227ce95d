"""Sends a connection the checks of a group, as many at a time as it wants (docs/stream.md#checks)."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Final, Protocol

import structlog

from halfway.domain.errors import HalfwayError, RetryableError
from halfway.rest.responses.errors import InternalError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from halfway.domain.principal import Principal
    from halfway.service.coordinator import Coordinator
    from halfway.service.requests import LeasedCheck

log = structlog.get_logger(__name__)

_WAIT_S: Final = 30.0
"""How long one request for checks waits for the first."""
_PAUSE_S: Final = 0.05
"""The pause before checks are fetched again if there were none."""
_FULL_PAUSE_S: Final = 0.5
"""The same if none may be sent, as clients do not read what they were sent."""


class Taker(Protocol):
    """A connection, as its subscriptions know it."""

    principal: Principal

    @property
    def reads(self) -> bool:
        """Return whether the client reads, and all clients together read enough."""

    async def reading(self) -> None:
        """Return once the client has read what it was sent."""

    async def push(self, checks: Sequence[LeasedCheck]) -> None:
        """Send checks."""

    def unsubscribed(self, subscription: Subscription, error: HalfwayError) -> None:
        """Notify the client that it gets no more checks of a group."""


class Subscription:
    """The checks of one group on one connection."""

    def __init__(self, coordinator: Coordinator, taker: Taker, group: str) -> None:
        """Want none yet."""
        self._coordinator = coordinator
        self._taker = taker
        self.group = group
        self._most = 0
        self._out: dict[str, float] = {}
        """The checks that are with the client, by their ids, each until its lease has passed."""
        self._changed = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    async def want(self, most: int) -> None:
        """Have at most so many checks with the client from now on.

        Raises:
            HalfwayError: the group has no checks to fetch, or the caller may not fetch them; nothing is changed.

        """
        await self._leased(0, wait_s=0)
        self._most = most
        self._changed.set()
        if self._task is None or self._task.done():  # it may have ended while the group was looked up here
            self._task = asyncio.get_running_loop().create_task(self._run())

    def answered(self, check_id: str) -> None:
        """Note that the client has answered a check."""
        if self._out.pop(check_id, None) is not None:
            self._changed.set()

    def end(self) -> None:
        """Send no more checks; those that were sent stay with the client until their leases have passed."""
        if self._task is not None:
            self._task.cancel()

    async def _run(self) -> None:
        try:
            while True:
                await self._taker.reading()
                free = await self._free()
                found = await self._try(free)
                if found:
                    await self._taker.push(found)
                else:
                    await asyncio.sleep(_PAUSE_S if self._taker.reads else _FULL_PAUSE_S)
        except HalfwayError as error:
            self._taker.unsubscribed(self, error)
        except Exception:
            log.exception("stream_subscription_failed", group=self.group)
            self._taker.unsubscribed(self, InternalError())

    async def _try(self, free: int) -> Sequence[LeasedCheck]:
        try:
            return await self._leased(free, wait_s=_WAIT_S)
        except RetryableError as error:
            await asyncio.sleep(error.retry_after_s)
            return ()

    async def _leased(self, free: int, *, wait_s: float) -> Sequence[LeasedCheck]:
        found = await self._coordinator.lease_checks(
            self.group,
            at_most=free,
            wait_s=wait_s,
            principal=self._taker.principal,
            is_connected=lambda: self._taker.reads,
        )
        until = asyncio.get_running_loop().time() + self._coordinator.limits.lease_s
        self._out.update((check.check_id, until) for check in found)
        return found

    async def _free(self) -> int:
        """Return how many more checks the client may get, once it may get any."""
        while True:
            self._changed.clear()
            now = asyncio.get_running_loop().time()
            for check_id in [check_id for check_id, until in self._out.items() if until <= now]:
                del self._out[check_id]
            if (free := self._most - len(self._out)) > 0:
                return free
            try:
                async with asyncio.timeout_at(min(self._out.values(), default=None)):
                    await self._changed.wait()
            except TimeoutError:
                pass
