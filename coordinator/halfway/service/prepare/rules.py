"""The rules for a prepare, in the order in which they are applied (docs/protocol.md#prepare).

Each refuses a prepare that would fail later, and names the field, its value, and the allowed values.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from halfway.domain.errors import (
    InvalidRequestError,
    MessageTooLargeError,
    OverloadedError,
    PreparesRejectedError,
    TopicNotAllowedError,
    UnknownTopicError,
)
from halfway.domain.ids import CLIENT_ID, parse_server_id
from halfway.domain.records import size_of

if TYPE_CHECKING:
    from collections.abc import Mapping

    from halfway.domain.records import Group, Message
    from halfway.domain.shard import ShardState
    from halfway.service.ports import TopicFacts
    from halfway.service.requests import Prepare, ServiceLimits

MIN_TOPIC_MESSAGE_BYTES: Final = 65_536
"""The size of the lane's batches: a topic that accepts less would refuse them."""
RECORD_OVERHEAD_BYTES: Final = 512
"""The most that halfway's headers and Kafka's framing add to a message."""
HEADER_OVERHEAD_BYTES: Final = 10
"""The most that Kafka's framing adds to each header."""


def require_prepares_enabled(limits: ServiceLimits) -> None:
    """Raise PreparesRejectedError if the operator has switched prepares off."""
    if limits.reject_prepares:
        raise PreparesRejectedError


def require_legal_id(transaction_id: str) -> None:
    """Raise InvalidRequestError if an id that the caller chose has a wrong form."""
    if CLIENT_ID.match(transaction_id) is None:
        raise InvalidRequestError(
            f"id {transaction_id[:140]!r} is not valid: use 1 to 128 of letters, digits, and . _ ~ -", field="id"
        )
    if parse_server_id(transaction_id) is not None:
        raise InvalidRequestError(
            f"id {transaction_id!r} has the form of an id that the server makes: choose another", field="id"
        )


def require_outcome_remembered(transaction_id: str, state: ShardState, limits: ServiceLimits) -> None:
    """Raise OverloadedError if an id that the caller chose may have ended lately, with an outcome that was forgotten.

    The prepare could be committed a second time. Whoever folds the log next, and reads the outcome, would remove it.
    """
    if state.may_have_ended(transaction_id):
        raise OverloadedError(
            f"id {transaction_id!r} may have ended within the last {limits.outcome_horizon_s:g} s, and its outcome is "
            f"forgotten: more than {limits.max_outcomes_per_shard} transactions of its shard have ended since. Use "
            "another id, wait, or raise HALFWAY_MAX_OUTCOMES_PER_SHARD"
        )


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
                f"add it with PATCH /v1/groups/{group.name} first",
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
            f"topic {message.topic!r} has {facts.partitions} partitions, but partition is {message.partition}",
            field=f"{field}.partition",
        )
    size = message.size + RECORD_OVERHEAD_BYTES + HEADER_OVERHEAD_BYTES * len(message.headers)
    if size > facts.max_message_bytes:
        raise MessageTooLargeError(
            f"{field} has {size} bytes with its headers, more than the max.message.bytes {facts.max_message_bytes} of "
            f"topic {message.topic!r}",
            errors=[{"field": field, "detail": f"{size} bytes"}],
        )
