"""From request models to the service's requests, and from its answers to response models."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from halfway.domain.message_json import rfc3339, shown_message
from halfway.domain.policy import PolicyOverrides
from halfway.domain.records import CheckMode
from halfway.domain.records import Message as Payload
from halfway.domain.transaction import Cause
from halfway.domain.urls import url_refusal
from halfway.rest.requests import models, schemas
from halfway.rest.requests.data import Data, rfc3339_or_none, to_bytes
from halfway.rest.requests.validation import FieldRefusedError
from halfway.service.requests import End, GroupSpec, ListQuery, Prepare

if TYPE_CHECKING:
    from halfway.service.requests import GroupView, LeasedCheck, Page, Prepared, TransactionView


def prepare(request: models.PrepareRequest, internal_prefix: str) -> Prepare:
    """Return the service's form of a prepare."""
    after = request.check_after_s
    return Prepare(
        group=request.group,
        messages=tuple([_payload(number, message, internal_prefix) for number, message in enumerate(request.messages)]),
        id=request.id,
        check_after_ms=None if after is None else round(after * 1000),
    )


def _payload(number: int, message: models.Message, internal_prefix: str) -> Payload:
    topic = message.topic
    refusal = schemas.topic_refusal(topic, internal_prefix)
    if refusal is not None:
        raise FieldRefusedError(f"messages[{number}].topic", refusal)
    headers = message.headers
    return Payload(
        topic=topic,
        key=_bytes(message.key, number, "key"),
        value=_bytes(message.value, number, "value"),
        headers=tuple([(header.name, _bytes(header.value, number, "headers")) for header in headers])
        if headers
        else (),
        partition=message.partition,
    )


def _bytes(data: Data, number: int, field: str) -> bytes | None:
    try:
        return to_bytes(data)
    except UnicodeDecodeError:
        raise
    except (ValueError, msgspec.ValidationError) as error:
        raise FieldRefusedError(f"messages[{number}].{field}", f"the data does not fit its type: {error}") from None


def end(request: models.EndRequest, transaction_id: str, cause: Cause) -> End:
    """Return the service's form of an end."""
    if request.remark is not None and not schemas.remark_fits(request.remark):
        raise FieldRefusedError("remark", f"larger than {models.MAX_REMARK_BYTES} bytes")
    return End(
        id=transaction_id, outcome=request.outcome, remark=request.remark, check_id=request.check_id, cause=cause
    )


def batch_end(request: models.BatchEnd, cause: Cause) -> End:
    """Return the service's form of one end of a batch."""
    return end(request, request.id, cause)


def group(request: models.GroupRequest, name: str, internal_prefix: str) -> GroupSpec:
    """Return the service's form of a group."""
    check = request.check
    if check.mode == "pull" and check.urls:
        raise FieldRefusedError("check", "mode pull fetches its checks: leave out urls, or the mode")
    if check.mode != "pull" and not check.urls:
        raise FieldRefusedError("check", 'give urls, or "mode": "pull"')
    for number, url in enumerate(check.urls or ()):
        refusal = url_refusal(url)
        if refusal is not None:
            raise FieldRefusedError(f"check.urls[{number}]", refusal)
    for number, topic in enumerate(request.topics):
        refusal = schemas.topic_refusal(topic, internal_prefix)
        if refusal is not None:
            raise FieldRefusedError(f"topics[{number}]", refusal)
    return GroupSpec(
        name=name,
        mode=CheckMode.PULL if check.mode == "pull" else CheckMode.PUSH,
        urls=tuple(dict.fromkeys(check.urls or ())),
        topics=tuple(dict.fromkeys(request.topics)),
        policy=request.policy or PolicyOverrides(),
    )


def list_query(given: models.ListParameters, now: int) -> ListQuery:
    """Return the service's form of a list's filters; `now` in ms since the epoch."""
    return ListQuery(
        state=given.state,
        group=given.group,
        topic=given.topic,
        key=None if given.key is None else given.key.encode(),
        limit=given.limit,
        cursor=given.cursor,
        id=given.id,
        prepared_from=None if given.younger_than_s is None else now - round(given.younger_than_s * 1000),
        prepared_until=None if given.older_than_s is None else now - round(given.older_than_s * 1000),
        cause=given.cause,
        error=given.error,
    )


def prepared(answer: Prepared) -> models.PreparedResponse:
    """Show the answer to a prepare."""
    return models.PreparedResponse(
        id=answer.id,
        state=answer.state,
        group=answer.group,
        prepared_at=rfc3339(answer.prepared_at),
        next_check_at=rfc3339_or_none(answer.next_check_at),
    )


def summary(view: TransactionView) -> models.TransactionSummary:
    """Show a transaction without its payload."""
    return models.TransactionSummary(
        id=view.id,
        state=view.state,
        group=view.group,
        prepared_at=rfc3339(view.prepared_at),
        topics=list(view.topics),
        checks=view.checks,
        size=view.size,
        next_check_at=rfc3339_or_none(view.next_check_at),
        last_check_at=rfc3339_or_none(view.last_check_at),
        last_error=view.last_error,
        commit_verdict=view.commit_verdict,
        parked_at=rfc3339_or_none(view.parked_at),
        reason=view.reason,
        ended_at=rfc3339_or_none(view.ended_at),
        cause=view.cause,
        remark=view.remark,
    )


def transaction(view: TransactionView) -> models.TransactionResponse:
    """Show a transaction with its payload."""
    messages = None if view.messages is None else [shown_message(message) for message in view.messages]
    return models.TransactionResponse(**msgspec.structs.asdict(summary(view)), messages=messages)


def page(answer: Page) -> models.TransactionList:
    """Show a page of a list."""
    return models.TransactionList(transactions=[summary(view) for view in answer.transactions], next=answer.next)


def group_shown(view: GroupView) -> models.GroupResponse:
    """Show a group."""
    return models.GroupResponse(
        group=view.name,
        check=models.GroupCheck(mode="pull" if view.mode is CheckMode.PULL else "push", urls=list(view.urls)),
        topics=list(view.topics),
        policy=view.policy,
        created_at=rfc3339(view.created_at),
        updated_at=rfc3339(view.updated_at),
    )


def fetched(check: LeasedCheck) -> models.FetchedCheck:
    """Show a check that is handed out."""
    return models.FetchedCheck(
        check_id=check.check_id,
        id=check.id,
        group=check.group,
        prepared_at=rfc3339(check.prepared_at),
        attempt=check.attempt,
        lease_until=rfc3339(check.lease_until),
        messages=[shown_message(message) for message in check.messages],
    )
