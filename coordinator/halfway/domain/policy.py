"""When a pending transaction is checked, parked, rolled back or written again: decisions that the service carries out.

All times are milliseconds since the epoch and come in as parameters. docs/protocol.md#scan-and-check-back has the
rules.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, Final, Protocol

import msgspec
from msgspec import Meta

JITTER = 0.2
"""Jitter spreads a delay over this share of it, half below and half above."""


class OnExhausted(StrEnum):
    """What happens when halfway gives up asking."""

    PARK = "park"
    ROLLBACK = "rollback"


MAX_SECONDS: Final = 31_536_000
Seconds = Annotated[float, Meta(gt=0, le=MAX_SECONDS, description=f"seconds, above 0 and at most {MAX_SECONDS}")]
Checks = Annotated[int, Meta(ge=1, le=10_000, description="from 1 to 10000")]


class PolicyOverrides(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """The parts of the policy that a group sets itself; seconds."""

    first_check_after_s: Seconds | None = None
    check_interval_s: Seconds | None = None
    max_interval_s: Seconds | None = None
    max_checks: Checks | None = None
    max_age_s: Seconds | None = None
    on_exhausted: OnExhausted | None = None


class CheckPolicy(msgspec.Struct, frozen=True, kw_only=True):
    """The policy in force for a group; seconds."""

    first_check_after_s: Seconds = 6.0
    check_interval_s: Seconds = 30.0
    max_interval_s: Seconds = 300.0
    max_checks: Checks = 15
    max_age_s: Seconds = 43_200.0
    on_exhausted: OnExhausted = OnExhausted.PARK

    def overridden(self, overrides: PolicyOverrides) -> CheckPolicy:
        """Return this policy with a group's overrides."""
        chosen = {
            name: value for name in overrides.__struct_fields__ if (value := getattr(overrides, name)) is not None
        }
        return msgspec.structs.replace(self, **chosen)

    def contradiction(self) -> tuple[str, str] | None:
        """Return the field that another one contradicts, and what to do about it; None if the times fit together."""
        if self.max_interval_s < self.check_interval_s:
            return "max_interval_s", (
                f"max_interval_s {self.max_interval_s:g} is below check_interval_s {self.check_interval_s:g}: "
                "raise the one or lower the other"
            )
        if self.first_check_after_s >= self.max_age_s:
            return "first_check_after_s", (
                f"first_check_after_s {self.first_check_after_s:g} is not below max_age_s {self.max_age_s:g}: "
                "no check would ever be sent"
            )
        return None

    def no_faster_than(self, interval_s: float) -> CheckPolicy:
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
    """Ask the producer group now."""


class Park(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """Stop asking and keep it for an operator."""

    reason: str


class RollBack(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """Stop asking and roll back, as the group chose."""

    reason: str


class ReAnchor(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """Write the half again at the tail, so that the cursor can move."""


Decision = Wait | Check | Park | RollBack | ReAnchor


class Facts(Protocol):
    """What the policy reads of a pending transaction."""

    @property
    def offset(self) -> int:
        """The offset of its half."""

    @property
    def since(self) -> int:
        """When the counts of checks and age begin."""

    @property
    def checks(self) -> int:
        """Checks sent since then."""

    @property
    def checked_at(self) -> int | None:
        """When the last attempt to check ended."""

    @property
    def attempts(self) -> int:
        """Checks that were sent or could not be sent; only for the back-off."""

    @property
    def check_after_ms(self) -> int | None:
        """The transaction's own time of the first check."""

    @property
    def commit_verdict(self) -> bool:
        """Whether a check has said commit, so that it may never be rolled back by policy."""

    @property
    def asked_here(self) -> bool:
        """Whether this owner of the shard has sent a check: a former owner may have died with the answer to its own."""

    @property
    def offered_at(self) -> int | None:
        """When this owner last queued a check to be sent, None if it never has."""

    @property
    def offered_since(self) -> int | None:
        """When this owner first queued a check to be sent, None if it never has."""


COMMIT_SAID = "a check said commit, which could not be written"
"""Why something is parked although its group chose rollback."""
AHEAD_MS = 60_000
"""How far the clocks of instances may differ; a time further ahead was written by a wrong clock."""


def _last_attempt(facts: Facts) -> int | None:
    """Return when the last attempt to check ended, of the attempts that count."""
    return facts.checked_at if facts.attempts else None


def is_of_wrong_clock(facts: Facts, now: int) -> bool:
    """Whether the time that the next check is counted from lies in the future: waiting for it may take hours."""
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


def next_look_at(policy: CheckPolicy, facts: Facts, *, jitter: float) -> int:
    """Return when `decide` must be called next: at the next check, or at `max_age_s`."""
    return min(next_check_at(policy, facts, jitter=jitter), _too_old_at(policy, facts))


def _too_old_at(policy: CheckPolicy, facts: Facts) -> int:
    return facts.since + round(policy.max_age_s * 1000)


_REANCHOR_FACTOR = 4


def reanchor_distance(least: int, pending: int) -> int:
    """Return how far a half may lie behind the end of its shard: `least`, or several times what is pending there.

    So a recovery reads little more than what is pending, and re-anchoring adds at most a quarter to the writes. With a
    fixed distance, a backlog longer than that would be re-anchored for ever: each round moves the end by as much.
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
    answered. A half that lies more than `reanchor_after` records behind `end_offset` is re-anchored whatever is due.
    """
    due = now if is_of_wrong_clock(facts, now) else next_check_at(policy, facts, jitter=jitter)
    too_old_at = _too_old_at(policy, facts)
    exhausted: str | None = None
    if now >= too_old_at:
        exhausted = f"older than max_age_s {policy.max_age_s:g}"
    elif now >= due and facts.checks >= policy.max_checks:
        exhausted = f"no verdict after {facts.checks} checks (max_checks {policy.max_checks})"
    if exhausted is not None:
        return Wait(until=answer_by) if now < answer_by else _exhausted(policy, facts, exhausted, now)
    if end_offset - facts.offset > reanchor_after:
        return ReAnchor()
    if now >= due:
        return Check()
    return Wait(until=min(due, too_old_at))


def _exhausted(policy: CheckPolicy, facts: Facts, reason: str, now: int) -> Decision:
    """Return what to do with a transaction whose checks are exhausted.

    Park it if the policy says so, if a check said commit, or if no owner has sent a check. Roll it back if this owner
    of the shard has sent one. Else send one more, and try again if it cannot be sent; park if none could be sent within
    `max_interval_s`.
    """
    if policy.on_exhausted is not OnExhausted.ROLLBACK or facts.commit_verdict:
        return Park(reason=f"{reason}; {COMMIT_SAID}" if facts.commit_verdict else reason)
    if not facts.checks:
        return Park(reason=f"{reason}; not rolled back, because no check was sent")
    if facts.asked_here:
        return RollBack(reason=reason)
    last, first = facts.offered_at, facts.offered_since
    if last is None or first is None or max(last, first) > now:  # the clock was set back
        return Check()
    give_up_at = first + round(policy.max_interval_s * 1000)
    again_at = last + round(policy.check_interval_s * 1000)
    if now < give_up_at:
        return Wait(until=min(again_at, give_up_at)) if now < again_at else Check()
    return Park(reason=f"{reason}; not rolled back, because no check could be sent since the shard was taken over")
