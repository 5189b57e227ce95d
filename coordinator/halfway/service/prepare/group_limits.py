"""Limits for each group, so that one busy group leaves capacity for the others.

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
    """A token bucket: tokens are added at a rate, up to those of one second."""

    __slots__ = ("at", "tokens")

    def __init__(self, tokens: float, at: float) -> None:
        self.tokens = tokens
        self.at = at


class GroupLimits:
    """Decides whether a group may prepare now. Rate and bytes are counted for this instance.

    Pending and parked transactions are limited over all instances: each instance has the share of its shards.
    """

    def __init__(self, limits: ServiceLimits, shards: ShardTable, groups: Groups) -> None:
        """Store the parts."""
        self._pending = limits.group_max_pending
        self._rate = limits.group_prepares_per_s
        self._bytes = limits.group_bytes_in_flight
        self._shards = shards
        self._groups = groups
        self._buckets: dict[str, _Bucket] = {}
        self._in_flight: Counter[str] = Counter()

    def admission(self, answers: Answers[Prepared], *, forwarded: bool) -> Callable[[int, Prepare], None] | None:
        """Return a function that admits a prepare of a list by its index; None if groups have no such limit.

        The function raises GroupLimitedError if the group has reached its limit on rate or bytes. The bytes of a
        prepare are released with its answer. A forwarded prepare takes no token: it has taken one at the instance that
        forwards it.
        """
        if self._bytes is None and self._rate is None:
            return None
        reserved: dict[int, tuple[str, int]] = {}

        def release(index: int, _: object) -> None:
            if index in reserved:
                self._release(*reserved.pop(index))

        def admit(index: int, request: Prepare) -> None:
            size = self._admit(request, forwarded=forwarded)
            if size:
                reserved[index] = request.group, size

        if self._bytes is not None:
            answers.on_each_answer(release)
        return admit

    def _admit(self, request: Prepare, *, forwarded: bool) -> int:
        """Admit a prepare, and return the bytes to release later."""
        group = request.group
        size = 0
        if self._bytes is not None:
            size = size_of(request.messages)
            in_flight = self._in_flight[group]
            if in_flight and in_flight + size > self._bytes:
                raise GroupLimitedError(group, "bytes_in_flight", self._bytes, retry_after_s=_BYTES_RETRY_S)
        if self._rate is not None and not forwarded:
            self._take_token(group, self._rate)
        if size:
            self._in_flight[group] += size
        return size

    def _release(self, group: str, size: int) -> None:
        """Release the bytes of an answered prepare."""
        self._in_flight[group] -= size
        if self._in_flight[group] <= 0:
            del self._in_flight[group]

    def require_room(self, group: str) -> None:
        """Raise GroupLimitedError if a group has as many pending and parked transactions as it may have.

        Call it directly before a prepare is stored: from then on the prepare counts.
        """
        limit = self._pending
        if limit is None:
            return
        served = [number for number in self._shards.served if self._shards.serves(number)]
        if not served:
            return  # another instance stores and counts it
        share = max(1, limit * len(served) // self._shards.count)
        if sum(self._shards.counts_of(group, served)) >= share:
            raise GroupLimitedError(group, "pending", limit, retry_after_s=_PENDING_RETRY_S)

    def _take_token(self, group: str, rate: float) -> None:
        now = asyncio.get_running_loop().time()
        capacity = max(1.0, rate)
        bucket = self._buckets.get(group)
        if bucket is None:
            if self._groups.find(group) is None:
                return  # it is refused anyway, and a bucket for every unknown name would fill the memory
            self._forget_full(now, rate)
            bucket = self._buckets[group] = _Bucket(capacity, now)
        bucket.tokens = min(capacity, bucket.tokens + (now - bucket.at) * rate)
        bucket.at = now
        if bucket.tokens < 1:
            raise GroupLimitedError(group, "prepares_per_s", rate, retry_after_s=(1 - bucket.tokens) / rate)
        bucket.tokens -= 1

    def _forget_full(self, now: float, rate: float) -> None:
        """Drop the buckets of groups that have sent nothing for so long that they are full, and of deleted groups."""
        idle_s = max(1.0, rate) / rate
        for group in [group for group, bucket in self._buckets.items() if now - bucket.at > idle_s]:
            del self._buckets[group]
