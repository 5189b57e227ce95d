"""When a pending transaction is checked, given up or re-anchored; the table of states and calls (docs/protocol.md)."""

from typing import Any

import msgspec
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from msgspec.structs import replace

from halfway.protocol.entries import Pending
from halfway.protocol.errors import AlreadyEndedError, NotPendingError
from halfway.protocol.ids import AHEAD_MS
from halfway.protocol.policy import (
    JITTER,
    Check,
    Decision,
    Park,
    ReAnchor,
    RollBack,
    Wait,
    decide,
    next_check_at,
    next_look_at,
    reanchor_distance,
)
from halfway.protocol.records import CheckPolicy, Half, OnExhausted, PolicyOverrides
from halfway.protocol.transactions import TRANSITIONS, Action, State, conflict

FAR = 1_000_000


def pending(**fields: Any) -> Pending:
    """Return a transaction that this owner has asked about, prepared at 1000 s."""
    half = Half(id="one", group="shop", messages=(), prepared_at=1_000_000, since=1_000_000, fingerprint=b"")
    return replace(Pending.of(100, half), **{"checked_here": True, **fields})


def decide_at(
    policy: CheckPolicy,
    facts: Pending,
    now: int,
    *,
    end_offset: int = 200,
    reanchor_after: int = FAR,
    jitter: float = 0.5,
    answer_by: int = 0,
) -> Decision:
    return decide(
        policy, facts, now=now, end_offset=end_offset, reanchor_after=reanchor_after, jitter=jitter, answer_by=answer_by
    )


jitters = st.floats(0, 1, exclude_max=True)
policies = st.builds(
    CheckPolicy,
    first_check_after_s=st.floats(0, 1000),
    check_interval_s=st.floats(0.01, 1000),
    max_interval_s=st.floats(0.01, 5000),
    max_checks=st.integers(1, 20),
    max_age_s=st.floats(1, 100_000),
    on_exhausted=st.sampled_from(OnExhausted),
)


@st.composite
def facts_of(draw: st.DrawFn) -> Pending:
    since = draw(st.integers(0, 2_000_000))
    attempts = draw(st.integers(0, 60))
    offers = draw(st.none() | st.tuples(st.integers(0, 200_000_000), st.integers(0, 200_000_000)))
    first, last = (None, None) if offers is None else (min(offers), max(offers))
    return pending(
        since=since,
        attempts=attempts,
        checks=draw(st.integers(0, attempts)),
        checked_at=since + draw(st.integers(0, 10_000_000)) if attempts else None,
        check_after_ms=draw(st.none() | st.integers(0, 1_000_000)),
        commit_verdict=draw(st.booleans()),
        offset=draw(st.integers(0, 100)),
        checked_here=draw(st.booleans()),
        offered_at=last,
        offered_since=first,
    )


moments = st.integers(0, 200_000_000)


@given(policies, facts_of(), moments, jitters)
def test_nothing_is_asked_before_the_first_check_is_due(
    policy: CheckPolicy, facts: Pending, after: int, jitter: float
) -> None:
    first = policy.first_check_after_s * 1000 if facts.check_after_ms is None else facts.check_after_ms
    fresh = replace(facts, attempts=0, checks=0, checked_at=None)
    asked = isinstance(decide_at(policy, fresh, facts.since + after, jitter=jitter), Check)
    due = after >= round(first)
    if after >= round(policy.max_age_s * 1000):
        assert asked or not due or fresh.offered_at is not None or fresh.checked_here
    else:
        assert asked == due


@given(policies, facts_of(), moments, jitters)
@example(  # at `until` the last check is no longer too far ahead of the clock
    CheckPolicy(
        first_check_after_s=0,
        check_interval_s=1,
        max_interval_s=1,
        max_checks=1,
        max_age_s=1,
        on_exhausted=OnExhausted.ROLLBACK,
    ),
    pending(
        offset=0,
        since=1,
        attempts=1,
        checks=1,
        checked_at=2 + AHEAD_MS,
        checked_here=False,
        offered_at=0,
        offered_since=0,
    ),
    0,
    0.0,
)
def test_what_it_decides_fits_the_time_and_the_counts(
    policy: CheckPolicy, facts: Pending, after: int, jitter: float
) -> None:
    now = facts.since + after
    too_old = after >= round(policy.max_age_s * 1000)
    right_from = 0 if facts.checked_at is None else facts.checked_at - AHEAD_MS
    by_a_wrong_clock = now < right_from
    due = by_a_wrong_clock or now >= next_check_at(policy, facts, jitter=jitter)
    exhausted = too_old or (due and facts.checks >= policy.max_checks)
    may_roll_back = policy.on_exhausted is OnExhausted.ROLLBACK and not facts.commit_verdict
    is_late = facts.offered_since is None or facts.offered_since >= facts.since + round(policy.max_age_s * 1000)
    match decide_at(policy, facts, now, jitter=jitter):
        case Check(afresh=True):
            assert too_old
            due_at = next_check_at(policy, facts, jitter=jitter)
            assert due_at < facts.since + round(policy.max_age_s * 1000)
            assert facts.offered_at is None or facts.offered_at < due_at
        case Check() if exhausted:
            assert may_roll_back or is_late
            assert not facts.checked_here
            again_ms = round(policy.check_interval_s * 1000)
            last = facts.offered_at
            assert last is None or last > now or now >= last + again_ms
        case Check():
            assert due
        case Park() | RollBack() as given_up:
            assert exhausted
            asked = facts.checked_here and facts.checks > is_late
            assert isinstance(given_up, RollBack) == (may_roll_back and asked)
        case Wait(until=until) if exhausted:
            assert may_roll_back or is_late
            assert not facts.checked_here
            assert now < until
            no_longer_due = by_a_wrong_clock and until >= right_from
            assert no_longer_due or isinstance(decide_at(policy, facts, until, jitter=jitter), Park | Check)
        case Wait(until=until):
            check_at = next_check_at(policy, facts, jitter=jitter)
            assert now < until == next_look_at(policy, facts, check_at=check_at)
            assert not isinstance(decide_at(policy, replace(facts, checked_here=True), until, jitter=jitter), Wait)
        case ReAnchor():
            pytest.fail("it lies close to the end")


@given(policies, facts_of(), moments, jitters)
def test_a_verdict_to_commit_is_never_rolled_back(
    policy: CheckPolicy, facts: Pending, after: int, jitter: float
) -> None:
    decision = decide_at(policy, replace(facts, commit_verdict=True), facts.since + after, jitter=jitter)
    assert not isinstance(decision, RollBack)
    if isinstance(decision, Park):
        assert "commit was said" in decision.reason


@given(policies, facts_of(), jitters)
def test_the_back_off_doubles_up_to_its_cap(policy: CheckPolicy, facts: Pending, jitter: float) -> None:
    checked_at = facts.since
    delays = [
        next_check_at(policy, replace(facts, attempts=attempts, checked_at=checked_at), jitter=jitter) - checked_at
        for attempts in range(1, 70)
    ]
    assert delays == sorted(delays)
    assert delays[-1] <= policy.max_interval_s * 1000 * (1 + JITTER / 2) + 1
    shortest = min(policy.check_interval_s, policy.max_interval_s) * 1000 * (1 - JITTER / 2)
    assert delays[0] >= shortest - 1


@given(policies, facts_of(), jitters, jitters)
def test_more_jitter_is_never_earlier(policy: CheckPolicy, facts: Pending, one: float, other: float) -> None:
    early, late = sorted((one, other))
    assert next_check_at(policy, facts, jitter=early) <= next_check_at(policy, facts, jitter=late)


@given(policies, facts_of(), moments, moments, jitters)
def test_once_given_up_it_stays_given_up(
    policy: CheckPolicy, facts: Pending, one: int, other: int, jitter: float
) -> None:
    start = facts.since if facts.checked_at is None else facts.checked_at  # by the right clock
    earlier, later = sorted((start + one, start + other))
    if isinstance(decide_at(policy, facts, earlier, jitter=jitter), Park | RollBack):
        assert isinstance(decide_at(policy, facts, later, jitter=jitter), Park | RollBack)


def test_the_default_schedule() -> None:
    """6 s, then 30 s doubling to 300 s, 15 checks, then parked one interval later."""
    policy, facts, now, asked = CheckPolicy(), pending(), 1_000_000, []
    while isinstance(decision := decide_at(policy, facts, now), Wait | Check):
        if isinstance(decision, Wait):
            now = decision.until
            continue
        asked.append((now - facts.since) // 1000)
        facts = replace(facts, checks=facts.checks + 1, attempts=facts.attempts + 1, checked_at=now)
    assert asked[:7] == [6, 36, 96, 216, 456, 756, 1056]
    assert len(asked) == 15
    assert decision == Park(reason="no verdict after 15 checks (max_checks 15)")
    assert (now - facts.since) // 1000 == asked[-1] + 300


def test_attempts_that_sent_nothing_back_off_but_do_not_exhaust() -> None:
    policy = CheckPolicy(max_checks=2)
    facts = pending(attempts=50, checks=0, checked_at=1_000_000)
    assert next_check_at(policy, facts, jitter=0.5) == 1_300_000
    assert decide_at(policy, facts, 1_300_000) == Check()


def test_a_transactions_own_first_check_goes_before_the_groups() -> None:
    assert next_check_at(CheckPolicy(), pending(check_after_ms=90_000), jitter=0.9) == 1_090_000


@pytest.mark.parametrize("chosen", OnExhausted)
def test_after_an_outage_longer_than_the_largest_age_a_check_is_sent(chosen: OnExhausted) -> None:
    """Then every pending transaction is old, and nobody was asked. It is tried for `max_interval_s`."""
    policy = CheckPolicy(max_age_s=100, on_exhausted=chosen)
    assert decide_at(policy, pending(checked_here=False), 2_000_000) == Check(afresh=True)
    tried = pending(attempts=1, checked_at=2_000_000, checked_here=False, offered_at=2_000_000, offered_since=2_000_000)
    assert decide_at(policy, tried, 2_000_000) == Wait(until=2_030_000)
    assert decide_at(policy, tried, 2_030_000) == Check()
    reason = "older than max_age_s 100"
    if chosen is OnExhausted.ROLLBACK:
        reason += "; not rolled back, because no check was sent"
    assert decide_at(policy, tried, 2_100_000) == Park(reason=reason)
    asked = replace(tried, checks=1, checked_here=True)
    if chosen is OnExhausted.ROLLBACK:
        reason += " before"
    assert decide_at(policy, asked, 2_000_000) == Park(reason=reason)


def test_the_largest_age_gives_up_what_was_asked_or_could_not_be_reached() -> None:
    policy = CheckPolicy(max_age_s=100, on_exhausted=OnExhausted.ROLLBACK)
    asked = pending(attempts=1, checks=1, checked_at=1_080_000, offered_at=1_080_000, offered_since=1_080_000)
    assert decide_at(policy, asked, 1_100_000) == RollBack(reason="older than max_age_s 100")
    unreachable = pending(
        attempts=9, checked_at=1_090_000, checked_here=False, offered_at=1_090_000, offered_since=1_006_000
    )
    assert decide_at(CheckPolicy(max_age_s=100), unreachable, 1_100_000) == Park(reason="older than max_age_s 100")


@pytest.mark.parametrize("offered_at", [None, 1_039_999, 1_040_000])
def test_a_check_that_was_missed_is_sent_before_it_gives_up(offered_at: int | None) -> None:
    """The process stood still: the check that was due at 40 s was not even tried, and the age has come."""
    policy = CheckPolicy(max_age_s=100, on_exhausted=OnExhausted.ROLLBACK)
    facts = pending(attempts=1, checks=1, checked_at=1_010_000, offered_at=offered_at, offered_since=1_006_000)
    tried = offered_at == 1_040_000
    assert decide_at(policy, facts, 1_100_000) == (
        RollBack(reason="older than max_age_s 100") if tried else Check(afresh=True)
    )
    parks = decide_at(msgspec.structs.replace(policy, on_exhausted=OnExhausted.PARK), facts, 1_100_000)
    assert parks == (Park(reason="older than max_age_s 100") if tried else Check(afresh=True))
    # By number no check was missed: the last one was sent, and its interval is over.
    assert decide_at(msgspec.structs.replace(policy, max_checks=1), facts, 1_100_000) == RollBack(
        reason="older than max_age_s 100"
    )


@pytest.mark.parametrize("policy", [CheckPolicy(max_age_s=100), CheckPolicy(max_checks=1)])
def test_nothing_is_given_up_while_the_last_check_may_be_answered(policy: CheckPolicy) -> None:
    """By age as by number: a check that was just leased keeps its lease."""
    facts = pending(attempts=1, checks=1, checked_at=1_099_000)
    assert decide_at(policy, facts, 1_139_999, answer_by=1_140_000) == Wait(until=1_140_000)
    assert isinstance(decide_at(policy, facts, 1_140_000, answer_by=1_140_000), Park)


@pytest.mark.parametrize("behind, decision", [(1000, Wait(until=1_006_000)), (1001, ReAnchor())])
def test_what_lies_far_behind_the_end_is_written_again(behind: int, decision: Decision) -> None:
    assert (
        decide_at(CheckPolicy(), pending(offset=5), 1_000_001, end_offset=5 + behind, reanchor_after=1000) == decision
    )


def test_what_is_pending_may_lie_further_behind_the_more_of_it_there_is() -> None:
    """So re-anchoring adds little, and a recovery still reads little more than the pending transactions."""
    assert [reanchor_distance(1000, pending) for pending in (0, 1, 250, 251, 1000)] == [1000, 1000, 1000, 1004, 4000]


def test_a_group_chooses_parts_of_the_policy() -> None:
    chosen = CheckPolicy().with_overrides(PolicyOverrides(max_checks=3, on_exhausted=OnExhausted.ROLLBACK))
    assert chosen == CheckPolicy(max_checks=3, on_exhausted=OnExhausted.ROLLBACK)
    assert CheckPolicy().with_overrides(PolicyOverrides(first_check_after_s=0.0)).first_check_after_s == 0


@pytest.mark.parametrize("ahead_ms, decision", [(60_000, Wait(until=1_006_000)), (60_001, Check())])
def test_what_a_clock_far_ahead_has_written_is_asked_about_now(ahead_ms: int, decision: Decision) -> None:
    """Clocks may differ by a minute. A wait for a time hours ahead would leave the transaction pending for as long."""
    assert decide_at(CheckPolicy(), pending(), 1_000_000 - ahead_ms) == decision


def test_a_check_noted_by_a_clock_far_ahead_is_followed_by_the_next_one_now() -> None:
    """When the right clock has recorded that, the intervals between checks apply again."""
    facts = pending(attempts=1, checks=1, checked_at=5_000_000)
    assert decide_at(CheckPolicy(), facts, 1_000_000) == Check()
    assert decide_at(CheckPolicy(max_checks=1), facts, 1_000_000) == Park(
        reason="no verdict after 1 checks (max_checks 1)"
    )
    later = replace(facts, attempts=2, checks=2, checked_at=1_000_000)
    assert decide_at(CheckPolicy(), later, 1_000_001) == Wait(until=1_060_000)


def test_no_group_is_checked_faster_than_the_floor() -> None:
    """Both `check_interval_s` and `max_interval_s` are raised to it; larger values stay as they are."""
    hasty = CheckPolicy(check_interval_s=1e-9, max_interval_s=0.5)
    assert hasty.with_min_interval(1.0) == CheckPolicy(check_interval_s=1.0, max_interval_s=1.0)
    assert CheckPolicy().with_min_interval(1.0) == CheckPolicy()


PREPARED, PARKED, COMMITTED, ROLLED_BACK = State.PREPARED, State.PARKED, State.COMMITTED, State.ROLLED_BACK


TABLE: list[tuple[Action, dict[State, State | None]]] = [
    (Action.COMMIT, {PREPARED: COMMITTED, PARKED: COMMITTED, COMMITTED: COMMITTED, ROLLED_BACK: None}),
    (Action.ROLLBACK, {PREPARED: ROLLED_BACK, PARKED: ROLLED_BACK, COMMITTED: None, ROLLED_BACK: ROLLED_BACK}),
    (Action.UNKNOWN, {PREPARED: PREPARED, PARKED: PARKED, COMMITTED: None, ROLLED_BACK: None}),
    (Action.CHECK, {PREPARED: PREPARED, PARKED: None, COMMITTED: None, ROLLED_BACK: None}),
    (Action.RESUME, {PREPARED: PREPARED, PARKED: PREPARED, COMMITTED: None, ROLLED_BACK: None}),
    (Action.PARK, {PREPARED: PARKED, PARKED: PARKED, COMMITTED: None, ROLLED_BACK: None}),
]
CELLS = [(state, action, target) for action, row in TABLE for state, target in row.items()]
CONFLICTS = [(state, action) for state, action, target in CELLS if target is None]


def transition(transaction_id: str, state: State, action: Action) -> State:
    """Return the state that results from an action, or raise the error of an action that is not allowed."""
    target = TRANSITIONS.get((state, action))
    if target is None:
        raise conflict(transaction_id, state)
    return target


@pytest.mark.parametrize(
    "state, action, target", [(state, action, target) for state, action, target in CELLS if target is not None]
)
def test_a_legal_call_leads_to_its_state(state: State, action: Action, target: State) -> None:
    assert transition("t", state, action) is target


@pytest.mark.parametrize("state, action", [cell for cell in CONFLICTS if cell[0].ended])
def test_an_outcome_is_never_changed(state: State, action: Action) -> None:
    with pytest.raises(AlreadyEndedError, match=f"'t' is already {state.value}") as caught:
        transition("t", state, action)
    assert caught.value.fields == {"id": "t", "state": state.value}
    assert caught.value.code == "already_ended"


@pytest.mark.parametrize("state, action", [cell for cell in CONFLICTS if not cell[0].ended])
def test_what_is_parked_must_be_resumed_first(state: State, action: Action) -> None:
    with pytest.raises(NotPendingError, match="resume it or end it first") as caught:
        transition("t", state, action)
    assert caught.value.code == "not_pending"


def test_the_table_is_whole() -> None:
    assert {(state, action) for state, action, _ in CELLS} == {(state, action) for state in State for action in Action}
    assert len(TRANSITIONS) == len(CELLS) - len(CONFLICTS)
