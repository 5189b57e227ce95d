"""Computes when each pending transaction is looked at next."""

from __future__ import annotations

from typing import TYPE_CHECKING
from zlib import crc32

from halfway.protocol.policy import is_of_wrong_clock, next_check_at, next_look_at

if TYPE_CHECKING:
    from halfway.coordinator.shards.groups import Groups
    from halfway.protocol.entries import Pending


def jitter(entry: Pending) -> float:
    """Return the jitter of this attempt, in [0, 1). It is the same at every look, so that a due time does not change.

    The first check has no jitter.
    """
    if not entry.attempts:
        return 0.0
    return crc32(f"{entry.id}:{entry.attempts}".encode()) / 2**32


def look_and_check_at(groups: Groups, entry: Pending, now: int) -> tuple[int, int]:
    """Return when the policy must next decide on a transaction, and when its next check is due, in ms since the epoch.

    The first is 0, which means now, if the transaction was written by a wrong clock that has been corrected since.
    """
    policy = groups.policy(entry.group)
    due = next_check_at(policy, entry, jitter=jitter(entry))
    return 0 if is_of_wrong_clock(entry, now) else next_look_at(policy, entry, check_at=due), due


def look_at(groups: Groups, entry: Pending, now: int) -> int:
    """Return when the policy must next decide on a transaction; see `look_and_check_at`."""
    return look_and_check_at(groups, entry, now)[0]


def check_at(groups: Groups, entry: Pending) -> int:
    """Return when the next check of a transaction is due, in ms since the epoch."""
    return next_check_at(groups.policy(entry.group), entry, jitter=jitter(entry))
