"""Decides when a pending transaction is checked, parked, rolled back or written again; the service carries it out.

All times are parameters, in milliseconds since the epoch. docs/protocol.md#scan-and-check-back has the rules.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, Final, Protocol

import msgspec
from msgspec import Meta

from halfway.protocol.ids import AHEAD_MS

JITTER = 0.2
"""Jitter spreads a delay over this share of it, half below and half above."""


class OnExhausted(StrEnum):
    """What happens to a transaction when its checks are exhausted."""

    PARK = "park"
    ROLLBACK = "rollback"


MAX_SECONDS: Final = 31_536_000
Seconds = Annotated[
    float, Meta(gt=0, le=MAX_SECONDS, description=f"a number of seconds above 0 and at most {MAX_SECONDS}")
]
Checks = Annotated[int, Meta(ge=1, le=10_000, description="a whole number from 1 to 10000")]


class PolicyOverrides(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """The parts of the policy that a group sets itself. Times are in seconds."""

    first_check_after_s: Seconds | None = None
    check_interval_s: Seconds | None = None
    max_interval_s: Seconds | None = None
    max_checks: Checks | None = None
    max_age_s: Seconds | None = None
    on_exhausted: OnExhausted | None = None

    def with_overrides(self, overrides: PolicyOverrides) -> PolicyOverrides:
        """Return these overrides with other ones applied."""
        return msgspec.structs.replace(self, **overrides.chosen())

    def chosen(self) -> dict[str, object]:
        return {name: value for name in self.__struct_fields__ if (value := getattr(self, name)) is not None}


Count = Annotated[int, Meta(ge=1, le=1_000_000_000, description="a whole number from 1 to 1000000000")]
Rate = Annotated[float, Meta(gt=0, le=1_000_000, description="a number above 0 and at most 1000000")]


class LimitOverrides(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """The limits that an operator gives a group, in place of those in the settings."""

    pending: Count | None = None
    """Pending and parked transactions over all instances."""
    prepares_per_s: Rate | None = None
    """Prepares per second at one instance."""
    bytes_in_flight: Count | None = None
    """Bytes of payload that one instance is storing."""


class CheckPolicy(msgspec.Struct, frozen=True, kw_only=True):
    """The policy in force for a group. Times are in seconds."""

    first_check_after_s: Seconds = 6.0
    check_interval_s: Seconds = 30.0
    max_interval_s: Seconds = 300.0
    max_checks: Checks = 15
    max_age_s: Seconds = 43_200.0
    on_exhausted: OnExhausted = OnExhausted.PARK

    def with_overrides(self, overrides: PolicyOverrides) -> CheckPolicy:
        """Return this policy with a group's overrides applied."""
        return msgspec.structs.replace(self, **overrides.chosen())

    def contradiction(self) -> tuple[str, str] | None:
        """Return the field that contradicts another one, and the remedy; None if the times fit together."""
        if self.max_interval_s < self.check_interval_s:
            return "max_interval_s", (
                f"max_interval_s {self.max_interval_s:g} is below check_interval_s {self.check_interval_s:g}: "
                "raise the first or lower the second"
            )
        if self.first_check_after_s >= self.max_age_s:
            return "first_check_after_s", (
                f"first_check_after_s {self.first_check_after_s:g} is not below max_age_s {self.max_age_s:g}: "
                "no check would ever be sent"
            )
        return None

    def with_min_interval(self, interval_s: float) -> CheckPolicy:
        """Return this policy with at least `interval_s` between two checks of a transaction, before jitter."""
        if self.check_interval_s >= interval_s and self.max_interval_s >= interval_s:
            return self
        return msgspec.structs.replace(
            self,
            check_interval_s=max(self.check_interval_s, interval_s),
            max_interval_s=max(self.max_interval_s, interval_s),
        )


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


class Facts(Protocol):
    """The fields of a pending transaction that the policy reads."""

    @property
    def offset(self) -> int:
        """The offset of its half."""

    @property
    def since(self) -> int:
        """The time from which checks and age are counted."""

    @property
    def checks(self) -> int:
        """The number of checks sent since then."""

    @property
    def checked_at(self) -> int | None:
        """The time at which the last attempt to check ended."""

    @property
    def attempts(self) -> int:
        """The number of checks that were sent or could not be sent; only for the back-off."""

    @property
    def check_after_ms(self) -> int | None:
        """The transaction's own delay of the first check, None for that of its group."""

    @property
    def commit_verdict(self) -> bool:
        """Return whether a caller, an operator or a check said commit: the policy never rolls it back."""

    @property
    def checked_here(self) -> bool:
        """Return whether this owner of the shard sent a check, and has missed none since.

        A former owner may have died with its own answer.
        """

    @property
    def offered_at(self) -> int | None:
        """The time at which this owner last tried to queue a check to be sent, None if it never has."""

    @property
    def offered_since(self) -> int | None:
        """The time at which this owner first queued a check to be sent, None if it never has."""


COMMIT_SAID = "commit was said, but could not be written"
"""The reason for parking a transaction although its group chose rollback."""
_NOT_ASKED: Final = "no check could be sent since the shard was taken over, or since a jump of the clock"


def _last_attempt(facts: Facts) -> int | None:
    """Return when the last attempt to check ended; None if no attempt has been counted."""
    return facts.checked_at if facts.attempts else None


def is_of_wrong_clock(facts: Facts, now: int) -> bool:
    """Return whether the time from which the next check is counted is in the future: the wait may take hours."""
    last = _last_attempt(facts)
    return (facts.since if last is None else last) - now > AHEAD_MS


def next_check_at(policy: CheckPolicy, facts: Facts, *, jitter: float) -> int:
    """Return when the next check is due; `jitter` in [0, 1) spreads every check but the first."""
    last = _last_attempt(facts)
    if last is None:
        first = facts.check_after_ms
        return facts.since + (round(policy.first_check_after_s * 1000) if first is None else first)
    doublings = min(facts.attempts - 1, 32)
    delay = min(policy.check_interval_s * 2.0**doublings, policy.max_interval_s)
    return last + round(delay * 1000 * (1 + JITTER * (jitter - 0.5)))


def next_look_at(policy: CheckPolicy, facts: Facts, *, check_at: int) -> int:
    """Return when `decide` must be called next: at the next check, which is due at `check_at`, or at `max_age_s`."""
    return min(check_at, _too_old_at(policy, facts))


def _too_old_at(policy: CheckPolicy, facts: Facts) -> int:
    return facts.since + round(policy.max_age_s * 1000)


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
    facts: Facts,
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
    due = now if is_of_wrong_clock(facts, now) else next_check_at(policy, facts, jitter=jitter)
    too_old_at = _too_old_at(policy, facts)
    exhausted: str | None = None
    if now >= too_old_at:
        exhausted = f"older than max_age_s {policy.max_age_s:g}"
    elif now >= due and facts.checks >= policy.max_checks:
        exhausted = f"no verdict after {facts.checks} checks (max_checks {policy.max_checks})"
    if exhausted is not None:
        if now < answer_by:
            return Wait(until=answer_by)
        return _exhausted(policy, facts, exhausted, now, missed=_has_missed_a_check(policy, facts, now, due, answer_by))
    if end_offset - facts.offset > reanchor_after:
        return ReAnchor()
    if now >= due:
        return Check()
    return Wait(until=min(due, too_old_at))


def _has_missed_a_check(policy: CheckPolicy, facts: Facts, now: int, due: int, answer_by: int) -> bool:
    """Return whether a check was due before `max_age_s` ended the checks, and this owner did not try to send it."""
    due = max(due, answer_by)  # no check is sent during a lease
    tried = facts.offered_at is not None and facts.offered_at >= due
    return facts.checks < policy.max_checks and due < min(now, _too_old_at(policy, facts)) and not tried


def _exhausted(policy: CheckPolicy, facts: Facts, reason: str, now: int, *, missed: bool) -> Decision:
    """Return what to do with a transaction whose checks are exhausted (docs/protocol.md, "Giving up").

    1. Ask once more if a check was missed: after a gap, or an outage longer than `max_age_s`, nobody was asked.
    2. Park it, unless this owner of the shard has not asked before its age ended: then first go on to 4.
    3. If the policy says so, and nobody said commit, roll it back instead, but not if the only check came so late.
    4. Ask until a check is sent, for at most `max_interval_s` and `max_age_s`; then park it.
    """
    may_roll_back = policy.on_exhausted is OnExhausted.ROLLBACK and not facts.commit_verdict
    if missed:
        return Check(afresh=True)
    if facts.commit_verdict:
        reason = f"{reason}; {COMMIT_SAID}"
    last, first = facts.offered_at, facts.offered_since
    is_late = first is None or first >= _too_old_at(policy, facts)
    if not may_roll_back and (facts.checked_here or not is_late or facts.checks >= policy.max_checks):
        return Park(reason=reason)
    if facts.checked_here:
        if facts.checks > is_late:
            return RollBack(reason=reason)
        unasked = "no check was sent before"
    else:
        if last is None or first is None or max(last, first) > now:  # the clock was set back
            return Check()
        give_up_at = first + round(min(policy.max_interval_s, policy.max_age_s) * 1000)
        again_at = last + round(policy.check_interval_s * 1000)
        if now < give_up_at:
            return Wait(until=min(again_at, give_up_at)) if now < again_at else Check()
        unasked = _NOT_ASKED if facts.checks else "no check was sent"
    return Park(reason=f"{reason}; not rolled back, because {unasked}" if may_roll_back else reason)
