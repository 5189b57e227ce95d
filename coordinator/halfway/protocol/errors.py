"""Errors. Each has a message for the user and a code that never changes.

A class's docstring is its message if no detail is given. The REST layer maps each class to one problem document.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar


class HalfwayError(Exception):
    """The request could not be done."""

    code: ClassVar[str] = "internal"

    def __init__(self, detail: str = "", **fields: object) -> None:
        """Store the detail (the cause with its value, and the remedy) and fields for the problem document."""
        super().__init__(detail or (type(self).__doc__ or "").strip())
        self.detail = str(self)
        self.fields = fields


class InvalidRequestError(HalfwayError):
    """A field of the request has a value that cannot be accepted."""

    code = "invalid_request"

    def __init__(self, detail: str, *, field: str, **fields: object) -> None:
        """Name the field as a JSON path, such as `messages[0].topic`."""
        super().__init__(detail, errors=[{"field": field, "detail": detail}], **fields)


class IdInFutureError(InvalidRequestError):
    """The id was born more than a minute after the coordinator's clock."""

    code = "id_in_future"

    def __init__(self, transaction_id: str, *, born: str, now: str) -> None:
        super().__init__(
            f"id {transaction_id!r} was born at {born}, more than a minute after the coordinator's clock ({now}): "
            "make ids by the time of the Date header of halfway's answers, or set the clock that is wrong",
            field="id",
            id=transaction_id,
        )


class UnknownGroupError(HalfwayError):
    """No group of that name is registered."""

    code = "unknown_group"

    def __init__(self, group: str) -> None:
        super().__init__(f"group {group!r} is not registered: PATCH /v1/groups/{group} first", group=group)


class GroupInUseError(HalfwayError):
    """The group still has pending or parked transactions."""

    code = "group_in_use"

    def __init__(self, group: str, *, pending: int, parked: int) -> None:
        super().__init__(
            f"group {group!r} has {pending} pending and {parked} parked transactions: end them first",
            group=group,
            pending=pending,
            parked=parked,
        )


class UnknownTransactionError(HalfwayError):
    """No transaction of that id is known. This does not mean that it was rolled back."""

    code = "unknown_transaction"

    def __init__(self, transaction_id: str) -> None:
        """Name the id, and reveal nothing about the transaction that has it."""
        super().__init__(
            f"transaction {transaction_id!r} is not known here; this does not mean that it was rolled back: "
            f"GET /v1/transactions/{transaction_id}/history may still have its outcome",
            id=transaction_id,
        )


class OutcomeExpiredError(HalfwayError):
    """The id is older than the outcome horizon, and unknown. This does not mean that it was rolled back."""

    code = "outcome_expired"

    def __init__(self, transaction_id: str, *, horizon_s: float, is_prepare: bool = False) -> None:
        if is_prepare:
            detail = f"id {transaction_id!r} is too old: its outcome may be forgotten (outcomes are kept for "
            super().__init__(f"{detail}{horizon_s:g} s); nothing was stored: use a new id", id=transaction_id)
            return
        super().__init__(
            f"transaction {transaction_id!r} is not known here: outcomes are kept for {horizon_s:g} s, and its id is "
            "older; this does not mean that it was rolled back: "
            f"GET /v1/transactions/{transaction_id}/history may still have its outcome",
            id=transaction_id,
        )


class AlreadyEndedError(HalfwayError):
    """The transaction already has its outcome."""

    code = "already_ended"

    def __init__(self, transaction_id: str, *, state: str) -> None:
        super().__init__(
            f"transaction {transaction_id!r} is already {state}; an outcome is never changed",
            id=transaction_id,
            state=state,
        )


class NotPendingError(HalfwayError):
    """The transaction is parked, and the call needs a prepared one."""

    code = "not_pending"

    def __init__(self, transaction_id: str, *, state: str) -> None:
        super().__init__(
            f"transaction {transaction_id!r} is {state}: resume it or end it first", id=transaction_id, state=state
        )


class IdReusedError(HalfwayError):
    """The id is in use for a transaction with other content."""

    code = "id_reused"

    def __init__(self, transaction_id: str) -> None:
        super().__init__(
            f"id {transaction_id!r} is already used with other content: "
            "choose an id that is unique for each transaction",
            id=transaction_id,
        )


class PreparesRejectedError(HalfwayError):
    """The group's new transactions are refused; its ends still work."""

    code = "prepares_rejected"

    def __init__(self, group: str) -> None:
        super().__init__(
            f"an operator has the new transactions of group {group!r} refused, and ends still work: send it to the "
            "deployment that the group moves to, or ask an operator to run halfway groups accept, or to take back "
            "HALFWAY_REJECT_PREPARES",
            group=group,
        )


class UnauthenticatedError(HalfwayError):
    """The request has no key that is valid here."""

    code = "unauthenticated"


class ForbiddenError(HalfwayError):
    """The caller may not do this."""

    code = "forbidden"


class UnknownKeyError(HalfwayError):
    """There is no key of that public id."""

    code = "unknown_key"

    def __init__(self, key_id: str) -> None:
        super().__init__(f"there is no key {key_id!r}: it was revoked, or was never made", id=key_id)


class TooManyKeysError(HalfwayError):
    """The principal already has as many keys as it may have at once."""

    code = "too_many_keys"

    def __init__(self, principal: str, keys: Sequence[str]) -> None:
        super().__init__(
            f"{principal} already has the keys {' and '.join(keys)}: revoke the one that is no longer used",
            keys=list(keys),
        )


class AccessControlOffError(HalfwayError):
    """There are no keys here: set HALFWAY_MASTER_SECRET."""

    code = "access_control_off"


class TopicNotAllowedError(InvalidRequestError):
    """The group may not write to that topic."""

    code = "topic_not_allowed"


class UnknownTopicError(InvalidRequestError):
    """The topic does not exist."""

    code = "unknown_topic"


class MessageTooLargeError(HalfwayError):
    """A message is larger than its topic accepts."""

    code = "message_too_large"


class RetryableError(HalfwayError):
    """Try again later: the answer has a Retry-After header."""

    retry_after_s: float = 1.0


class OutcomeUnknownError(RetryableError):
    """It is not known whether the prepare was stored.

    Roll back the local work, or send the same prepare with the same id again.
    """

    code = "outcome_unknown"


class EndUnconfirmedError(RetryableError):
    """The end was not confirmed in time: send the same end again. It is never done twice."""

    code = "end_unconfirmed"


class ShardUnavailableError(RetryableError):
    """The shard of this transaction is being recovered or moved."""

    code = "shard_unavailable"


class NotServedError(ShardUnavailableError):
    """The shard is not served by this instance, and nothing was begun: the call may go to its owner instead."""

    def __init__(self, detail: str, *, shard: int | None = None) -> None:
        """Store the number of the shard; None if any shard would do."""
        super().__init__(detail, **({} if shard is None else {"shard": shard}))
        self.shard = shard


class OverloadedError(RetryableError):
    """Too much is in flight."""

    code = "overloaded"


class GroupLimitedError(RetryableError):
    """The group has reached one of its limits, which `limit` names."""

    code = "group_limited"

    def __init__(self, group: str, limit: str, most: float, *, retry_after_s: float) -> None:
        super().__init__(
            f"group {group!r} has reached its limit {limit} of {most:g}: {_REMEDIES.get(limit, '')}wait as long as "
            "Retry-After says, or ask an operator to raise the group's own limit, or that of all others "
            f"(HALFWAY_LIMITS__{limit.upper()})",
            group=group,
            limit=limit,
        )
        self.retry_after_s = retry_after_s


_REMEDIES = {"pending": "end some pending or parked transactions, "}


class KafkaUnavailableError(RetryableError):
    """Kafka did not answer in time."""

    code = "kafka_unavailable"


class TopicUnavailableError(RetryableError):
    """A topic of the transaction cannot be written to now; the transaction is still pending."""

    code = "topic_unavailable"


class NotAuthorisedError(RetryableError):
    """Kafka does not let halfway write to a topic of the transaction, which is still pending."""

    code = "not_authorised"


class ShuttingDownError(RetryableError):
    """This coordinator is stopping."""

    code = "shutting_down"


class PeerLostError(HalfwayError):
    """Another instance did not answer a call: the call may have been done."""

    code = "peer_lost"


class LaneLostError(HalfwayError):
    """The lane ended before the result of its write was known. The fold over the log shows the result."""

    code = "lane_lost"


class NotWrittenError(HalfwayError):
    """The write was dropped before its Kafka transaction began: it was certainly not written."""

    code = "not_written"


class OvertakenError(HalfwayError):
    """A decision of the policy no longer holds, because something else came first."""

    code = "overtaken"


class ConfigurationError(HalfwayError):
    """A setting or a topic is wrong: the process cannot start."""

    code = "configuration"
