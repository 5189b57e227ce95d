"""Decides when a pending transaction is checked, parked, rolled back or written again; the service carries it out.

All times are parameters, in milliseconds since the epoch. docs/protocol.md#scan-and-check-back has the rules.
"""

from __future__ import annotations

from typing import Final

import msgspec

from halfway.protocol.entries import Pending
from halfway.protocol.ids import AHEAD_MS
from halfway.protocol.records import CheckPolicy, OnExhausted

JITTER = 0.2
"""Jitter spreads a delay over this share of it, half below and half above."""


class Wait(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """Nothing to do before `until`."""

    until: int


class Check(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """Check with the producer group now.

    `afresh` is whether a check was missed, so that earlier ones no longer allow a rollback.
    """

    afresh: bool = False


class Park(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """Stop checking and keep the transaction for an operator."""

    reason: str


class RollBack(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """Stop checking and roll back, as the group chose."""

    reason: str


class ReAnchor(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """Write the half again at the tail, so that the cursor can move."""


Decision = Wait | Check | Park | RollBack | ReAnchor


COMMIT_SAID = "commit was said, but could not be written"
"""The reason for parking a transaction although its group chose rollback."""
_NOT_ASKED: Final = "no check could be sent since the shard was taken over, or since a jump of the clock"


def _last_attempt(entry: Pending) -> int | None:
    """Return when the last attempt to check ended; None if no attempt has been counted."""
    return entry.checked_at if entry.attempts else None


def is_of_wrong_clock(entry: Pending, now: int) -> bool:
    """Return whether the time from which the next check is counted is in the future: the wait may take hours."""
    last = _last_attempt(entry)
    return (entry.since if last is None else last) - now > AHEAD_MS


def next_check_at(policy: CheckPolicy, entry: Pending, *, jitter: float) -> int:
    """Return when the next check is due; `jitter` in [0, 1) spreads every check but the first."""
    last = _last_attempt(entry)
    if last is None:
        first = entry.check_after_ms
        return entry.since + (round(policy.first_check_after_s * 1000) if first is None else first)
    doublings = min(entry.attempts - 1, 32)
    delay = min(policy.check_interval_s * 2.0**doublings, policy.max_interval_s)
    return last + round(delay * 1000 * (1 + JITTER * (jitter - 0.5)))


def next_look_at(policy: CheckPolicy, entry: Pending, *, check_at: int) -> int:
    """Return when `decide` must be called next: at the next check, which is due at `check_at`, or at `max_age_s`."""
    return min(check_at, _too_old_at(policy, entry))


def _too_old_at(policy: CheckPolicy, entry: Pending) -> int:
    return entry.since + round(policy.max_age_s * 1000)


_REANCHOR_FACTOR = 4


def reanchor_distance(least: int, pending: int) -> int:
    """Return how many records a half may lie behind the end of its shard: `least`, or four times the pending ones.

    So a recovery reads little more than the pending transactions, and re-anchoring adds at most a quarter to the
    writes. With a fixed distance, a backlog longer than that would be re-anchored forever: each round moves the end by
    as many records.
    """
    return max(least, _REANCHOR_FACTOR * pending)


def decide(
    policy: CheckPolicy,
    entry: Pending,
    *,
    now: int,
    end_offset: int,
    reanchor_after: int,
    jitter: float,
    answer_by: int = 0,
) -> Decision:
    """Return what to do with one pending transaction now.

    `max_checks` and `max_age_s` each end the checks, but not before `answer_by`: until then the last check may be
    answered. If a check was missed before that, because this process stood still, one is sent before a rollback. A
    half more than `reanchor_after` records behind `end_offset` is re-anchored, even if a check is due.
    """
    due = now if is_of_wrong_clock(entry, now) else next_check_at(policy, entry, jitter=jitter)
    too_old_at = _too_old_at(policy, entry)
    exhausted: str | None = None
    if now >= too_old_at:
        exhausted = f"older than max_age_s {policy.max_age_s:g}"
    elif now >= due and entry.checks >= policy.max_checks:
        exhausted = f"no verdict after {entry.checks} checks (max_checks {policy.max_checks})"
    if exhausted is not None:
        if now < answer_by:
            return Wait(until=answer_by)
        return _exhausted(policy, entry, exhausted, now, missed=_has_missed_a_check(policy, entry, now, due, answer_by))
    if end_offset - entry.offset > reanchor_after:
        return ReAnchor()
    if now >= due:
        return Check()
    return Wait(until=min(due, too_old_at))


def _has_missed_a_check(policy: CheckPolicy, entry: Pending, now: int, due: int, answer_by: int) -> bool:
    """Return whether a check was due before `max_age_s` ended the checks, and this owner did not try to send it."""
    due = max(due, answer_by)  # no check is sent during a lease
    tried = entry.offered_at is not None and entry.offered_at >= due
    return entry.checks < policy.max_checks and due < min(now, _too_old_at(policy, entry)) and not tried


def _exhausted(policy: CheckPolicy, entry: Pending, reason: str, now: int, *, missed: bool) -> Decision:
    """Return what to do with a transaction whose checks are exhausted (docs/protocol.md, "Giving up").

    1. Ask once more if a check was missed: after a gap, or an outage longer than `max_age_s`, nobody was asked.
    2. Park it, unless this owner of the shard has not asked before its age ended: then first go on to 4.
    3. If the policy says so, and nobody said commit, roll it back instead, but not if the only check came so late.
    4. Ask until a check is sent, for at most `max_interval_s` and `max_age_s`; then park it.
    """
    may_roll_back = policy.on_exhausted is OnExhausted.ROLLBACK and not entry.commit_verdict
    if missed:
        return Check(afresh=True)
    if entry.commit_verdict:
        reason = f"{reason}; {COMMIT_SAID}"
    last, first = entry.offered_at, entry.offered_since
    is_late = first is None or first >= _too_old_at(policy, entry)
    if not may_roll_back and (entry.checked_here or not is_late or entry.checks >= policy.max_checks):
        return Park(reason=reason)
    if entry.checked_here:
        if entry.checks > is_late:
            return RollBack(reason=reason)
        unasked = "no check was sent before"
    else:
        if last is None or first is None or max(last, first) > now:  # the clock was set back
            return Check()
        give_up_at = first + round(min(policy.max_interval_s, policy.max_age_s) * 1000)
        again_at = last + round(policy.check_interval_s * 1000)
        if now < give_up_at:
            return Wait(until=min(again_at, give_up_at)) if now < again_at else Check()
        unasked = _NOT_ASKED if entry.checks else "no check was sent"
    return Park(reason=f"{reason}; not rolled back, because {unasked}" if may_roll_back else reason)
