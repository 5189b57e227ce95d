"""Limits for each group, so that one that floods does not take what others need.

See docs/operating.md#limits-for-each-group.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from typing import TYPE_CHECKING

from halfway.domain.errors import GroupLimitedError
from halfway.domain.records import size_of

if TYPE_CHECKING:
    from collections.abc import Callable

    from halfway.service.answers import Answers
    from halfway.service.requests import Prepare, Prepared, ServiceLimits
    from halfway.service.shards.groups import Groups
    from halfway.service.shards.shard_table import ShardTable

_PENDING_RETRY_S = 5.0
_BYTES_RETRY_S = 1.0


class _Bucket:
    """Tokens that come at a rate, up to those of one second."""

    __slots__ = ("at", "tokens")

    def __init__(self, tokens: float, at: float) -> None:
        self.tokens = tokens
        self.at = at


class GroupLimits:
    """Decides whether a group may prepare now. Rate and bytes are of this instance.

    What is pending or parked is bounded over all instances: each takes the share of the shards that it serves.
    """

    def __init__(self, limits: ServiceLimits, shards: ShardTable, groups: Groups) -> None:
        """Keep the parts."""
        self._pending = limits.group_max_pending
        self._rate = limits.group_prepares_per_s
        self._bytes = limits.group_bytes_in_flight
        self._shards = shards
        self._groups = groups
        self._buckets: dict[str, _Bucket] = {}
        self._in_flight: Counter[str] = Counter()

    def admitting(self, answers: Answers[Prepared], *, forwarded: bool = False) -> Callable[[int, Prepare], None]:
        """Return what admits the prepares of a list by their indexes; what one takes is given back with its answer.

        One that another instance forwards has its token. It raises GroupLimitedError if the group has reached a limit.
        """
        held: dict[int, tuple[str, int]] = {}

        def release(index: int, _: object) -> None:
            if index in held:
                self._release(*held.pop(index))

        def admit(index: int, request: Prepare) -> None:
            size = self._admit(request, forwarded=forwarded)
            if size:
                held[index] = request.group, size

        if self._bytes is not None:
            answers.watch(release)
        return admit

    def _admit(self, request: Prepare, *, forwarded: bool) -> int:
        """Take what a prepare needs, and return the bytes to give back."""
        group = request.group
        if self._pending is not None:
            self._demand_room(group, self._pending)
        size = 0
        if self._bytes is not None:
            size = size_of(request.messages)
            held = self._in_flight[group]
            if held and held + size > self._bytes:
                raise GroupLimitedError(group, "bytes_in_flight", self._bytes, retry_after_s=_BYTES_RETRY_S)
        if self._rate is not None and not forwarded:
            self._demand_token(group, self._rate)
        if size:
            self._in_flight[group] += size
        return size

    def _release(self, group: str, size: int) -> None:
        """Give back the bytes of a prepare that is answered."""
        self._in_flight[group] -= size
        if self._in_flight[group] <= 0:
            del self._in_flight[group]

    def _demand_room(self, group: str, most: int) -> None:
        served = [number for number in self._shards.served if self._shards.serves(number)]
        if not served:
            return  # another instance takes it, and counts it
        share = max(1, most * len(served) // self._shards.count)
        if sum(self._shards.counts_of(group, served)) >= share:
            raise GroupLimitedError(group, "pending", most, retry_after_s=_PENDING_RETRY_S)

    def _demand_token(self, group: str, rate: float) -> None:
        now = asyncio.get_running_loop().time()
        most = max(1.0, rate)
        bucket = self._buckets.get(group)
        if bucket is None:
            if self._groups.find(group) is None:
                return  # it is refused anyway, and names that nobody has registered are without number
            self._forget_full(now, rate)
            bucket = self._buckets[group] = _Bucket(most, now)
        bucket.tokens = min(most, bucket.tokens + (now - bucket.at) * rate)
        bucket.at = now
        if bucket.tokens < 1:
            raise GroupLimitedError(group, "prepares_per_s", rate, retry_after_s=(1 - bucket.tokens) / rate)
        bucket.tokens -= 1

    def _forget_full(self, now: float, rate: float) -> None:
        """Drop the groups that have sent nothing for long; a deleted one is among them."""
        idle_s = max(1.0, rate) / rate
        for group in [group for group, bucket in self._buckets.items() if now - bucket.at > idle_s]:
            del self._buckets[group]
