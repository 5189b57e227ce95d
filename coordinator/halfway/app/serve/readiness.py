"""Whether this instance should get requests: after its first recovery, if it can serve some of them or forward them.

See docs/operating.md#health.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence

    from halfway.coordinator.ports import OwnerHint
    from halfway.kafka.ownership.membership import MembershipStatus

_WATCH_S: Final = 1.0


class Readiness:
    """What a load balancer needs to know of this instance.

    Nothing that can happen to all instances at once makes an instance unready: a load balancer without any ready server
    refuses every call, also those that the instances could serve.
    """

    def __init__(
        self,
        status: Callable[[], MembershipStatus],
        others: Callable[[], Sequence[OwnerHint]],
        reaches: Callable[[OwnerHint], Awaitable[bool]],
        writer_trouble: Callable[[], str | None] = lambda: None,
    ) -> None:
        """Take the functions that return the membership and the other owners, and that try to connect to one.

        `writer_trouble` returns why this instance can store no prepare, although Kafka may take them of others.
        """
        self._status = status
        self._others = others
        self._reaches = reaches
        self._writer_trouble = writer_trouble
        self._has_started = False
        self._is_cut_off = False
        """Whether no other owner could be reached when this instance tried last."""

    def starting(self) -> str | None:
        """Return what the first recovery still waits for; None once it is finished, for as long as this process runs.

        A shard that cannot be acquired is not waited for.
        """
        if not self._has_started:
            reason = unfinished(self._status())
            if reason is not None:
                return reason
            self._has_started = True
        return None

    def reason(self) -> str | None:
        """Return why this instance should get no requests; None if it should."""
        status = self._status()
        if (starting := self.starting()) is not None:
            return starting
        if status.too_old is not None:
            # It could forward, but a rollout of a release that can serve nothing must not go on.
            return f"this instance is of a release that is too old ({status.too_old})"
        if (trouble := self._writer_trouble()) is not None or status.owned:
            return trouble
        return self._cannot_forward(status)

    def _cannot_forward(self, status: MembershipStatus) -> str | None:
        if not self._others():
            return f"{_idle(status)}, and knows no other instance that it could forward calls to"
        if self._is_cut_off:
            return f"{_idle(status)}, and reaches no other instance that it could forward calls to"
        return None

    async def watch(self) -> None:
        """While this instance serves no shard, find out whether it reaches any other owner."""
        while True:
            await asyncio.sleep(_WATCH_S)
            self._is_cut_off = not self._status().owned and not await self._reaches_any()

    async def _reaches_any(self) -> bool:
        for owner in self._others():
            if await self._reaches(owner):
                return True
        return False


def unfinished(status: MembershipStatus) -> str | None:
    """Return what keeps this instance from serving its shards; None if it serves all that it can acquire."""
    if not status.joined:
        return f"this instance has not joined the group of instances yet{_in_brackets(status.last_error)}"
    failing = {trouble.shard for trouble in status.troubles}
    if recovering := [shard for shard in status.acquiring if shard not in failing]:
        shards = ", ".join(map(str, recovering))
        return f"this instance is recovering shards {shards}{_in_brackets(status.last_error)}"
    return None


def _idle(status: MembershipStatus) -> str:
    if (reason := unfinished(status)) is not None:
        return f"{reason}, serves no shard"
    if status.troubles:
        return "this instance serves no shard, because none of the shards assigned to it could be acquired"
    return "this instance serves no shard, because none is assigned to it"


def _in_brackets(error: str | None) -> str:
    return "" if error is None else f" ({error})"
