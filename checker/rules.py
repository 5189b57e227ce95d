"""The rules: what must hold of every transaction when all has come to rest. Pure, one function a rule.

Each takes one case and gives its findings. A finding belongs to one of these counts:

- lost: something acknowledged is not there, or other bytes stand in its place
- doubled: a message stands more than once
- torn: part of a transaction's messages stands
- contradicted: two outcomes, or an outcome that nobody gave, or an answer that takes back what was told
- leaked: a message stands, or a half was kept, that nobody committed or nobody prepared
- stuck: no outcome, though there was time for it
- disordered: messages of one transaction stand in another order than they were prepared in
- late: a shard was away, or a call took long, and no fault explains it (`checker/waits.py`)
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from typing import Final, Literal, TypeAlias, get_args

import msgspec

from checker.cases import COMMITTED, OUTCOMES, ROLLED_BACK, Case, Told
from checker.content import Content
from checker.records import Real

Count: TypeAlias = Literal["lost", "doubled", "torn", "contradicted", "leaked", "stuck", "disordered", "late"]
COUNTS: Final[tuple[Count, ...]] = get_args(Count)


class Finding(msgspec.Struct, frozen=True, kw_only=True):
    """One violation, with what shows it."""

    count: Count
    rule: str
    id: str
    evidence: tuple[str, ...]


Rule: TypeAlias = Callable[[Case], Iterator[Finding]]


def _found(count: Count, rule: str, case: Case, *evidence: object) -> Finding:
    return Finding(count=count, rule=rule, id=case.id, evidence=tuple(str(piece) for piece in evidence))


def acknowledged_prepare_is_kept(case: Case) -> Iterator[Finding]:
    """A prepare that was acknowledged is pending, parked or ended; it is never unknown, and never just gone."""
    if not case.acknowledged:
        return
    line = f"line {min(case.acknowledged.values())}: prepare acknowledged"
    if not case.halves and not case.parked and not case.ends:
        yield _found("lost", "acknowledged_prepare_is_not_there", case, line)
    elif case.halves and not case.ends and _is_gone(case):
        yield _found("lost", "acknowledged_prepare_went_without_an_outcome", case, line, case.halves[-1].place)
    for told in case.told:
        if told.state == "unknown" and case.acknowledged_at is not None and told.sent_at > case.acknowledged_at:
            if _may_be_forgotten(case, told):
                continue
            yield _found("lost", "acknowledged_prepare_is_unknown", case, line, told)
            return


def _may_be_forgotten(case: Case, told: Told) -> bool:
    return case.forgotten_from is not None and told.at >= case.forgotten_from


def _is_gone(case: Case) -> bool:
    return case.halves[-1].contents is None and (not case.parked or case.parked[-1].tombstone)


def committed_messages_stand(case: Case) -> Iterator[Finding]:
    """Each message of a committed transaction stands in its topic, all of them, with the bytes that were prepared."""
    if COMMITTED not in case.decided_as:
        return
    why = [*_told(case, COMMITTED), *(op.place for op in case.ends if op.outcome == COMMITTED)]
    wanted = case.wanted
    total = len(wanted) if wanted is not None else max((message.total for message in case.messages), default=1)
    by_number = _by_number(case.messages)
    missing = sorted(set(range(1, total + 1)) - set(by_number) - _removed(case))
    if missing and len(missing) == total:
        yield _found("lost", "committed_and_not_there", case, *why)
    elif missing:
        yield _found("torn", "committed_in_part", case, f"missing of {total}: {missing}", *why, *_places(case.messages))
    for number, copies in by_number.items():
        expected = wanted[number - 1] if wanted is not None and 0 < number <= total else None
        others = [copy for copy in copies if wanted is not None and copy.content != expected]
        if others:
            yield _found("lost", "payload_differs", case, f"expected {expected}", f"found {others[0].content}", *why)
        if any(copy.total != total for copy in copies):
            yield _found("torn", "number_of_messages_differs", case, f"{total} were prepared", *_places(copies))


def _removed(case: Case) -> set[int]:
    """Return the numbers of the messages that may have gone with their topic."""
    wanted = enumerate(case.wanted or (), 1)
    return {number for number, content in wanted if content.topic in case.removed}


def messages_stand_in_order(case: Case) -> Iterator[Finding]:
    """Messages of one transaction stand in a partition in the order in which they were prepared."""
    partitions: defaultdict[tuple[str, int], list[Real]] = defaultdict(list)
    for message in case.messages:
        partitions[message.content.topic, message.shard].append(message)
    for messages in partitions.values():
        messages.sort(key=lambda message: message.offset)
        numbers = [message.number for message in messages]
        if numbers != sorted(numbers) and len(set(numbers)) == len(numbers):
            yield _found("disordered", "messages_out_of_order", case, *_places(messages))


def message_stands_once(case: Case) -> Iterator[Finding]:
    """No message of a transaction stands twice; equal messages of one transaction have numbers of their own."""
    for number, copies in _by_number(case.messages).items():
        if len(copies) > 1:
            yield _found("doubled", "message_stands_again", case, f"message {number}", *_places(copies))


def only_committed_messages_stand(case: Case) -> Iterator[Finding]:
    """A message stands only where its transaction was prepared by somebody and is marked as committed."""
    if not case.messages:
        return
    if not case.asked:
        yield _found("leaked", "message_nobody_prepared", case, *_places(case.messages))
    if not any(op.outcome == COMMITTED for op in case.ends):
        markers = [f"{op.kind} {op.place}" for op in case.ops]
        yield _found("leaked", "message_without_commit_marker", case, *markers, *_places(case.messages))
    elif COMMITTED not in case.verdicts:
        yield _found("leaked", "message_nobody_committed", case, *_places(case.messages))


def half_is_what_was_prepared(case: Case) -> Iterator[Finding]:
    """Every half, and the marker of a commit, holds a content that somebody asked to be prepared under this id."""
    for half in case.halves:
        if half.contents is not None and half.contents not in case.asked:
            yield _found("leaked", "half_nobody_prepared", case, half.place)
            break
    marks = [tuple((one.topic, one.key, one.value) for one in contents) for contents in case.asked]
    for op in case.ends:
        if op.messages and op.messages not in marks:
            yield _found("contradicted", "marker_of_another_content", case, op.place)
    if len(case.acknowledged) > 1:
        lines = (f"line {line}: prepare acknowledged" for line in case.acknowledged.values())
        yield _found("contradicted", "two_contents_acknowledged", case, *lines)


def one_outcome(case: Case) -> Iterator[Finding]:
    """One outcome for ever, in every answer and in the markers, written once, and given by somebody entitled to it."""
    if len(case.decided_as) > 1:
        markers = [f"{op.kind} {op.place}" for op in case.ends]
        yield _found("contradicted", "two_outcomes", case, *case.told_outcomes.values(), *markers)
    if len(case.ends) > 1:
        yield _found("contradicted", "resolved_twice", case, *(f"{op.kind} {op.place}" for op in case.ends))
    for op in case.ends:
        by_policy = op.outcome == ROLLED_BACK and op.cause == "policy" and case.policy_rolls_back
        if op.outcome not in case.verdicts and not by_policy:
            yield _found("contradicted", "outcome_nobody_gave", case, f"{op.kind} ({op.cause}) {op.place}")
    if case.told_outcomes and not case.ends:
        yield _found("lost", "told_an_outcome_that_is_not_marked", case, *case.told_outcomes.values())


def policy_decides_what_nobody_did(case: Case) -> Iterator[Finding]:
    """Policy rolls back only what was asked about, and not what a check said to commit."""
    for op in case.ends:
        if op.cause != "policy" or op.outcome != ROLLED_BACK:
            continue
        if op.checks == 0:
            yield _found("contradicted", "policy_before_any_check", case, op.place, "no check was counted")
        elif not case.checked and not case.fetches:
            counted = f"{op.checks} checks were counted and none arrived"
            yield _found("contradicted", "policy_before_any_check", case, op.place, counted)
        written = [one.place for one in case.ops if one.kind == "VERDICT" and one.offset < op.offset]
        if written or case.commits_ignored:
            yield _found("contradicted", "policy_against_a_verdict", case, op.place, *written, *case.commits_ignored)


def outcome_stays(case: Case) -> Iterator[Finding]:
    """A caller that asks after an outcome was told gets that outcome, or no answer."""
    first = next((told for told in case.told if told.state in OUTCOMES), None)
    if first is None:
        return
    for told in case.told:
        if told.state == "unknown" and _may_be_forgotten(case, told):
            continue
        if told.state in ("prepared", "parked", "unknown") and told.sent_at > first.at:
            yield _found("contradicted", "outcome_taken_back", case, first, told)
            return


def nothing_is_left(case: Case) -> Iterator[Finding]:
    """Everything has an outcome, and nothing of it is left in half and parked."""
    half = case.halves[-1] if case.halves and case.halves[-1].contents is not None else None
    parked = case.parked[-1] if case.parked and not case.parked[-1].tombstone else None
    for left in (half, parked):
        if left is not None:
            rule = "ended_and_still_in_the_log" if case.ends else "no_outcome"
            yield _found("stuck", rule, case, left.place, *(f"{op.kind} {op.place}" for op in case.ops))
            return


RULES: Final[tuple[Rule, ...]] = (
    acknowledged_prepare_is_kept,
    committed_messages_stand,
    messages_stand_in_order,
    message_stands_once,
    only_committed_messages_stand,
    half_is_what_was_prepared,
    one_outcome,
    policy_decides_what_nobody_did,
    outcome_stays,
    nothing_is_left,
)


def foreign(message: Real) -> Finding:
    """Return the finding of a message that names no transaction, in a topic that is halfway's alone."""
    return Finding(count="leaked", rule="message_of_no_transaction", id="", evidence=(message.place,))


def _by_number(messages: Iterable[Real]) -> dict[int, list[Real]]:
    found: defaultdict[int, list[Real]] = defaultdict(list)
    for message in messages:
        found[message.number].append(message)
    return found


def _places(messages: Iterable[Real]) -> list[str]:
    return [f"{message.number}/{message.total} {message.place}" for message in messages]


def _told(case: Case, outcome: str) -> list[str]:
    told = case.told_outcomes.get(outcome)
    return [] if told is None else [str(told)]


__all__ = ["COUNTS", "RULES", "Content", "Count", "Finding", "Rule", "foreign"]
