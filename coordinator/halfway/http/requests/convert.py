"""Converts the service's answers to response models."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from halfway.http.requests import models
from halfway.http.requests.bodies import rfc3339_or_none
from halfway.http.responses.slices import with_messages
from halfway.protocol.records import CheckMode, rfc3339, shown_message

if TYPE_CHECKING:
    from collections.abc import Sequence

    from halfway.coordinator.requests import GroupView, LeasedCheck, Page, Prepared, TransactionView
    from halfway.http.responses.slices import GiveWay


def prepared(answer: Prepared) -> models.PreparedResponse:
    """Convert the answer to a prepare."""
    return models.PreparedResponse(
        id=answer.id,
        state=answer.state,
        group=answer.group,
        prepared_at=rfc3339(answer.prepared_at),
        next_check_at=None if answer.next_check_at is None else rfc3339(answer.next_check_at),
    )


def summary(view: TransactionView) -> models.TransactionSummary:
    """Convert a transaction, without its payload."""
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
    """Convert a transaction, with its payload."""
    messages = None if view.messages is None else [shown_message(message) for message in view.messages]
    return models.TransactionResponse(**msgspec.structs.asdict(summary(view)), messages=messages)


def page(answer: Page) -> models.TransactionList:
    """Convert a page of a list."""
    return models.TransactionList(transactions=[summary(view) for view in answer.transactions], next=answer.next)


def group_shown(view: GroupView) -> models.GroupResponse:
    """Convert a group."""
    return models.GroupResponse(
        group=view.name,
        check=models.GroupCheck(mode="pull" if view.mode is CheckMode.PULL else "push", urls=list(view.urls)),
        topics=list(view.topics),
        policy=view.policy,
        created_at=rfc3339(view.created_at),
        updated_at=rfc3339(view.updated_at),
    )


async def fetched_in_pieces(checks: Sequence[LeasedCheck], give_way: GiveWay) -> list[bytes]:
    """Return the JSON of a list of checks with large payloads in pieces."""
    pieces = [b'{"checks":[']
    for number, check in enumerate(checks):
        if number:
            pieces.append(b",")
        without = fetched(msgspec.structs.replace(check, messages=()))
        pieces += await with_messages(without, check.messages, give_way)
    return [*pieces, b"]}"]


def fetched(check: LeasedCheck) -> models.FetchedCheck:
    """Convert a check that a client fetches."""
    return models.FetchedCheck(
        check_id=check.check_id,
        id=check.id,
        group=check.group,
        prepared_at=rfc3339(check.prepared_at),
        attempt=check.attempt,
        lease_until=rfc3339(check.lease_until),
        messages=[shown_message(message) for message in check.messages],
    )
