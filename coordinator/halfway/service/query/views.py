"""Converts entries to the view that callers get."""

from __future__ import annotations

from typing import TYPE_CHECKING

from halfway.domain.entries import Ended, Entry, ParkedEntry
from halfway.service.requests import TransactionView
from halfway.service.shards.check_schedule import check_at

if TYPE_CHECKING:
    from halfway.domain.records import Message
    from halfway.service.shards.groups import Groups


def view(groups: Groups, entry: Entry, messages: tuple[Message, ...] | None = None) -> TransactionView:
    """Return the view of an entry; `messages` is its payload if it was requested."""
    topics = tuple(topic for topic, _ in entry.index)
    if isinstance(entry, Ended):
        return TransactionView(
            id=entry.id,
            state=entry.state,
            group=entry.group,
            prepared_at=entry.prepared_at,
            topics=topics,
            checks=entry.checks,
            ended_at=entry.at,
            cause=entry.cause,
            remark=entry.remark,
        )
    if isinstance(entry, ParkedEntry):
        return TransactionView(
            id=entry.id,
            state=entry.state,
            group=entry.group,
            prepared_at=entry.prepared_at,
            topics=topics,
            checks=entry.checks,
            size=entry.size,
            messages=messages,
            commit_verdict=entry.commit_verdict,
            parked_at=entry.parked_at,
            reason=entry.reason,
            remark=entry.remark,
        )
    return TransactionView(
        id=entry.id,
        state=entry.state,
        group=entry.group,
        prepared_at=entry.prepared_at,
        topics=topics,
        checks=entry.checks,
        size=entry.size,
        messages=messages,
        next_check_at=check_at(groups, entry),
        last_check_at=entry.checked_at,
        last_error=entry.last_error,
        commit_verdict=entry.commit_verdict,
        remark=entry.remark,
    )
