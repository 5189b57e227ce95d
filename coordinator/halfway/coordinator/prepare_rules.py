"""The rules for a prepare, in the order in which they are applied (docs/protocol.md#prepare), and the limits of groups.

Each refuses a prepare that would fail later, and names the field, its value, and the allowed values. The limits
(docs/operating.md#limits-for-each-group) leave capacity for the other groups.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Mapping
from typing import Final

from halfway.coordinator.ports import TopicFacts
from halfway.coordinator.requests import Prepare, ServiceLimits
from halfway.coordinator.shards.groups import Groups
from halfway.coordinator.shards.shard_table import ShardTable
from halfway.protocol.errors import (
    GroupLimitedError,
    IdInFutureError,
    InvalidRequestError,
    MessageTooLargeError,
    OverloadedError,
    PreparesRejectedError,
    TopicNotAllowedError,
    UnknownTopicError,
)
from halfway.protocol.ids import AHEAD_MS, ID, birth_of
from halfway.protocol.records import Group, Message, rfc3339, size_of

MIN_TOPIC_MESSAGE_BYTES: Final = 65_536
"""The size of the lane's batches: a topic that accepts less would refuse them."""
RECORD_OVERHEAD_BYTES: Final = 512
"""The most that halfway's headers and Kafka's framing add to a message."""
HEADER_OVERHEAD_BYTES: Final = 10
"""The most that Kafka's framing adds to each header."""


def require_prepares_accepted(group: Group, limits: ServiceLimits) -> None:
    """Raise PreparesRejectedError if an operator has the new transactions of a group, or of all groups, refused."""
    if group.reject_prepares or limits.reject_prepares:
        raise PreparesRejectedError(group.name)


def require_id(transaction_id: str) -> None:
    """Raise InvalidRequestError if an id that the caller made is no UUIDv7 in lower case."""
    if ID.match(transaction_id) is None:
        raise InvalidRequestError(
            f"id {transaction_id[:140]!r} is not valid: make a UUIDv7, or leave it out", field="id"
        )


def require_born(transaction_id: str, now: int) -> int | None:
    """Return when a new id was born (ms since the epoch); raise IdInFutureError if that is too far ahead."""
    born = birth_of(transaction_id)
    if born is not None and born > now + AHEAD_MS:
        raise IdInFutureError(transaction_id, born=rfc3339(born), now=rfc3339(now))
    return born


def require_messages_within_limits(request: Prepare, limits: ServiceLimits) -> None:
    """Raise InvalidRequestError for too many messages or none, MessageTooLargeError for too many bytes."""
    if not 0 < len(request.messages) <= limits.max_messages:
        raise InvalidRequestError(
            f"messages has {len(request.messages)} items: send from 1 to {limits.max_messages}", field="messages"
        )
    size = size_of(request.messages)
    if size > limits.max_prepare_bytes:
        raise MessageTooLargeError(
            f"messages have {size} bytes together, more than the limit of {limits.max_prepare_bytes}: send less, "
            "or raise HALFWAY_MAX_PREPARE_BYTES",
            size=size,
            limit=limits.max_prepare_bytes,
        )


def require_check_before_max_age(check_after_ms: int, max_age_s: float) -> None:
    """Raise InvalidRequestError if the first check would come after the policy gives up."""
    latest = round(max_age_s * 1000)
    if check_after_ms >= latest:
        raise InvalidRequestError(
            f"check_after_s {check_after_ms / 1000:g} is not below the group's max_age_s {latest / 1000:g}",
            field="check_after_s",
        )


def require_topics_of_group(request: Prepare, group: Group) -> None:
    """Raise TopicNotAllowedError for a message to a topic that the group does not have."""
    for number, message in enumerate(request.messages):
        if message.topic not in group.topics:
            raise TopicNotAllowedError(
                f"topic {message.topic!r} is not among the topics of group {group.name!r}: "
                f"add it with PATCH /v1/groups/{group.name} first (with access control, an operator does)",
                field=f"messages[{number}].topic",
            )


def require_topics_take_messages(request: Prepare, facts: Mapping[str, TopicFacts | None]) -> None:
    """Raise UnknownTopicError, InvalidRequestError or MessageTooLargeError if a topic would refuse its message."""
    for number, message in enumerate(request.messages):
        _require_topic_takes(number, message, facts.get(message.topic))


def require_room(unresolved: int, limits: ServiceLimits) -> None:
    """Raise OverloadedError if this instance already holds its maximum of pending and parked transactions."""
    if unresolved >= limits.max_pending:
        raise OverloadedError(f"{limits.max_pending} transactions are already pending or parked here: end some first")


def _require_topic_takes(number: int, message: Message, facts: TopicFacts | None) -> None:
    field = f"messages[{number}]"
    if facts is None:
        raise UnknownTopicError(
            f"topic {message.topic!r} does not exist: create it in Kafka first", field=f"{field}.topic"
        )
    if facts.max_message_bytes < MIN_TOPIC_MESSAGE_BYTES:
        raise InvalidRequestError(
            f"topic {message.topic!r} has max.message.bytes {facts.max_message_bytes}: halfway needs at least "
            f"{MIN_TOPIC_MESSAGE_BYTES}",
            field=f"{field}.topic",
        )
    if facts.compacted and message.key is None:
        raise InvalidRequestError(
            f"topic {message.topic!r} is compacted and needs a key, but key is null", field=f"{field}.key"
        )
    if message.partition is not None and message.partition >= facts.partitions:
        raise InvalidRequestError(
            f"{field}.partition: {message.partition} is not valid: topic {message.topic!r} has the partitions 0 to "
            f"{facts.partitions - 1}; leave it out, or null, for the key to choose",
            field=f"{field}.partition",
        )
    size = message.size + RECORD_OVERHEAD_BYTES + HEADER_OVERHEAD_BYTES * len(message.headers)
    if size > facts.max_message_bytes:
        raise MessageTooLargeError(
            f"{field} has {size} bytes with its headers, more than the max.message.bytes {facts.max_message_bytes} of "
            f"topic {message.topic!r}",
            errors=[{"field": field, "detail": f"{size} bytes"}],
        )


_PENDING_RETRY_S = 5.0
_BYTES_RETRY_S = 1.0


class _Bucket:
    """A token bucket: tokens are added at a rate, up to those of one second."""

    __slots__ = ("at", "full_at", "tokens")

    def __init__(self, tokens: float, at: float) -> None:
        self.tokens = tokens
        self.at = at
        self.full_at = at


class GroupLimits:
    """Decides whether a group may prepare now. Rate and bytes are counted for this instance.

    Pending and parked transactions are limited over all instances: each instance has the share of its shards. A
    group's own limit overrides the setting.
    """

    def __init__(self, limits: ServiceLimits, shards: ShardTable, groups: Groups) -> None:
        self._default = limits.default_limits
        self._shards = shards
        self._groups = groups
        self._buckets: dict[str, _Bucket] = {}
        self._in_flight: Counter[str] = Counter()

    def admit(self, request: Prepare, *, is_relayed: bool) -> int:
        """Admit a prepare, and return the bytes to release with its answer; GroupLimitedError at a limit.

        A prepare that another instance has relayed takes no token: it has taken one there.
        """
        group = request.group
        known = self._groups.find(group)
        if known is None:
            return 0  # it is refused anyway, and a bucket for every unknown name would fill the memory
        most = known.limits.bytes_in_flight or self._default.bytes_in_flight
        rate = known.limits.prepares_per_s or self._default.prepares_per_s
        size = 0
        if most is not None:
            size = size_of(request.messages)
            in_flight = self._in_flight[group]
            if in_flight and in_flight + size > most:
                raise GroupLimitedError(group, "bytes_in_flight", most, retry_after_s=_BYTES_RETRY_S)
        if rate is not None and not is_relayed:
            self._take_token(group, rate)
        if size:
            self._in_flight[group] += size
        return size

    def release(self, group: str, size: int) -> None:
        """Release the bytes of an answered prepare."""
        self._in_flight[group] -= size
        if self._in_flight[group] <= 0:
            del self._in_flight[group]

    def require_room(self, group: Group) -> None:
        """Raise GroupLimitedError if a group has as many pending and parked transactions as it may have.

        Call it directly before a prepare is stored: from then on the prepare counts.
        """
        limit = group.limits.pending or self._default.pending
        if limit is None:
            return
        served = [number for number in self._shards.served if self._shards.serves(number)]
        if not served:
            return  # another instance stores and counts it
        share = max(1, limit * len(served) // self._shards.count)
        if sum(self._shards.counts_of(group.name, served)) >= share:
            raise GroupLimitedError(group.name, "pending", limit, retry_after_s=_PENDING_RETRY_S)

    def _take_token(self, group: str, rate: float) -> None:
        now = asyncio.get_running_loop().time()
        capacity = max(1.0, rate)
        bucket = self._buckets.get(group)
        if bucket is None:
            self._forget_full(now)
            bucket = self._buckets[group] = _Bucket(capacity, now)
        bucket.tokens = min(capacity, bucket.tokens + (now - bucket.at) * rate)
        bucket.at = now
        if bucket.tokens < 1:
            raise GroupLimitedError(group, "prepares_per_s", rate, retry_after_s=(1 - bucket.tokens) / rate)
        bucket.tokens -= 1
        bucket.full_at = now + capacity / rate

    def _forget_full(self, now: float) -> None:
        """Drop the buckets of groups that have sent nothing for so long that they are full, and of deleted groups."""
        for group in [group for group, bucket in self._buckets.items() if now > bucket.full_at]:
            del self._buckets[group]
