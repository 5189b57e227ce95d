"""The rules that every transaction must satisfy when everything has come to rest: one pure function per rule.

A rule takes one case and yields findings. A finding belongs to one of these counts:

- lost: something acknowledged is missing, or has other content
- doubled: a message is written more than once
- torn: only a part of a transaction's messages is written
- contradicted: two outcomes, or an outcome that nobody decided, or an answer that contradicts an earlier one
- leaked: a message or a half that nobody committed or nobody prepared
- stuck: no outcome, although there was time for one
- disordered: messages of one transaction are written in another order than they were prepared in
- late: a shard was unserved, or a call was slow, and no fault explains it (`checker/waits.py`)
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from typing import Final, Literal, TypeAlias, get_args

import msgspec

from checker.cases import COMMITTED, OUTCOMES, ROLLED_BACK, AnsweredState, Case, marks_of
from checker.content import Content
from checker.records import Real

Count: TypeAlias = Literal["lost", "doubled", "torn", "contradicted", "leaked", "stuck", "disordered", "late"]
COUNTS: Final[tuple[Count, ...]] = get_args(Count)


class Finding(msgspec.Struct, frozen=True, kw_only=True):
    """One violation, with its evidence."""

    count: Count
    rule: str
    id: str
    evidence: tuple[str, ...]


Rule: TypeAlias = Callable[[Case], Iterator[Finding]]


def _finding(count: Count, rule: str, case: Case, *evidence: object) -> Finding:
    return Finding(count=count, rule=rule, id=case.id, evidence=tuple(str(piece) for piece in evidence))


def acknowledged_prepare_is_kept(case: Case) -> Iterator[Finding]:
    """An acknowledged prepare is pending, parked or ended; it is never unknown and never missing."""
    if not case.acknowledged:
        return
    line = f"line {min(case.acknowledged.values())}: prepare acknowledged"
    if not case.halves and not case.parked and not case.ends:
        yield _finding("lost", "acknowledged_prepare_is_not_there", case, line)
    elif case.halves and not case.ends and _is_gone(case):
        yield _finding("lost", "acknowledged_prepare_went_without_an_outcome", case, line, case.halves[-1].place)
    for answer in case.answered_states:
        if answer.state == "unknown" and case.acknowledged_at is not None and answer.sent_at > case.acknowledged_at:
            if _may_be_forgotten(case, answer):
                continue
            yield _finding("lost", "acknowledged_prepare_is_unknown", case, line, answer)
            return


def _may_be_forgotten(case: Case, answer: AnsweredState) -> bool:
    return case.forgotten_from is not None and answer.at >= case.forgotten_from


def _is_gone(case: Case) -> bool:
    return case.halves[-1].contents is None and (not case.parked or case.parked[-1].tombstone)


def committed_messages_stand(case: Case) -> Iterator[Finding]:
    """Every message of a committed transaction is in its topic, with the bytes that were prepared."""
    if COMMITTED not in case.outcomes:
        return
    why = [*_answer(case, COMMITTED), *(op.place for op in case.ends if op.outcome == COMMITTED)]
    contents = case.expected
    total = len(contents) if contents is not None else max((message.total for message in case.messages), default=1)
    by_number = _by_number(case.messages)
    missing = sorted(set(range(1, total + 1)) - set(by_number) - _removed(case))
    if missing and len(missing) == total:
        yield _finding("lost", "committed_and_not_there", case, *why)
    elif missing:
        yield _finding(
            "torn", "committed_in_part", case, f"missing of {total}: {missing}", *why, *_places(case.messages)
        )
    for number, copies in by_number.items():
        expected = contents[number - 1] if contents is not None and 0 < number <= total else None
        others = [copy for copy in copies if contents is not None and copy.content != expected]
        if others:
            yield _finding("lost", "payload_differs", case, f"expected {expected}", f"found {others[0].content}", *why)
        if any(copy.total != total for copy in copies):
            yield _finding("torn", "number_of_messages_differs", case, f"{total} were prepared", *_places(copies))


def _removed(case: Case) -> set[int]:
    """Return the numbers of the messages that may have been deleted with their topic."""
    expected_messages = enumerate(case.expected or (), 1)
    return {number for number, content in expected_messages if content.topic in case.removed}


def messages_stand_in_order(case: Case) -> Iterator[Finding]:
    """In each partition the messages of a transaction are in the order in which they were prepared."""
    partitions: defaultdict[tuple[str, int], list[Real]] = defaultdict(list)
    for message in case.messages:
        partitions[message.content.topic, message.shard].append(message)
    for messages in partitions.values():
        messages.sort(key=lambda message: message.offset)
        numbers = [message.number for message in messages]
        if numbers != sorted(numbers) and len(set(numbers)) == len(numbers):
            yield _finding("disordered", "messages_out_of_order", case, *_places(messages))


def message_stands_once(case: Case) -> Iterator[Finding]:
    """No message of a transaction is written twice; equal messages of one transaction have different numbers."""
    if case.ended_in_doubt:
        return
    for number, copies in _by_number(case.messages).items():
        if len(copies) > 1:
            yield _finding("doubled", "message_stands_again", case, f"message {number}", *_places(copies))


def only_committed_messages_stand(case: Case) -> Iterator[Finding]:
    """A message is visible only if its transaction was prepared and has a commit marker."""
    if not case.messages:
        return
    if not case.requested:
        yield _finding("leaked", "message_nobody_prepared", case, *_places(case.messages))
    if not any(op.outcome == COMMITTED for op in case.ends) and not case.ended_in_doubt:
        markers = [f"{op.kind} {op.place}" for op in case.ops]
        yield _finding("leaked", "message_without_commit_marker", case, *markers, *_places(case.messages))
    elif COMMITTED not in case.verdicts:
        yield _finding("leaked", "message_nobody_committed", case, *_places(case.messages))


def half_is_what_was_prepared(case: Case) -> Iterator[Finding]:
    """Every half has a content of a prepare that was sent with this id.

    The marker of an outcome has the content that was acknowledged, if one was.
    """
    for half in case.halves:
        if half.contents is not None and half.contents not in case.requested:
            yield _finding("leaked", "half_nobody_prepared", case, half.place)
            break
    marks = [marks_of(contents) for contents in case.acknowledged or case.requested]
    for op in case.ends:
        if op.messages and op.messages not in marks:
            yield _finding("contradicted", "marker_of_another_content", case, op.place)
    if len(case.acknowledged) > 1:
        lines = (f"line {line}: prepare acknowledged" for line in case.acknowledged.values())
        yield _finding("contradicted", "two_contents_acknowledged", case, *lines)


def one_outcome(case: Case) -> Iterator[Finding]:
    """There is one outcome, in all answers and markers, written once, and decided by an authorised caller.

    A marker that names no message was written again from memory if it is in a later life of op, or the same as one
    before it: what an owner takes for lost may be there.
    """
    known = {(op.kind, op.cause, op.at): op for op in reversed(case.ends) if op.at}
    first = [
        op for op in case.ends if op.messages or not (op.life or known.get((op.kind, op.cause, op.at), op) is not op)
    ]
    if len(case.outcomes) > 1 and not (case.ended_in_doubt and len(case.answered_outcomes) < len(case.outcomes)):
        markers = [f"{op.kind} {op.place}" for op in case.ends]
        yield _finding("contradicted", "two_outcomes", case, *case.answered_outcomes.values(), *markers)
    if len(first) > 1 and not case.ended_in_doubt:
        yield _finding("contradicted", "resolved_twice", case, *(f"{op.kind} {op.place}" for op in case.ends))
    for op in case.ends:
        by_policy = op.outcome == ROLLED_BACK and op.cause == "policy" and case.policy_rolls_back
        if op.outcome not in case.verdicts and not by_policy:
            yield _finding("contradicted", "outcome_nobody_gave", case, f"{op.kind} ({op.cause}) {op.place}")
    if case.answered_outcomes and not case.ends:
        yield _finding("lost", "told_an_outcome_that_is_not_marked", case, *case.answered_outcomes.values())


def policy_decides_what_nobody_did(case: Case) -> Iterator[Finding]:
    """Policy rolls back only checked transactions, and none for which a caller or a check said commit."""
    for op in case.ends:
        if op.cause != "policy" or op.outcome != ROLLED_BACK:
            continue
        if op.checks == 0:
            yield _finding("contradicted", "policy_before_any_check", case, op.place, "no check was counted")
        elif not case.checked and not case.fetches:
            counted = f"{op.checks} checks were counted and none arrived"
            yield _finding("contradicted", "policy_before_any_check", case, op.place, counted)
        written = [verdict.place for verdict in case.ops if verdict.kind == "VERDICT" and verdict.order < op.order]
        said = [*written, *case.commits_recorded, *case.commits_ignored]
        if said:
            yield _finding("contradicted", "policy_against_a_commit", case, op.place, *said)


def outcome_stays(case: Case) -> Iterator[Finding]:
    """Once a caller got an outcome, every later look-up returns this outcome, or no answer."""
    first = next((answer for answer in case.answered_states if answer.state in OUTCOMES), None)
    if first is None:
        return
    for answer in case.answered_states:
        if answer.state == "unknown" and _may_be_forgotten(case, answer):
            continue
        if answer.state in ("prepared", "parked", "unknown") and answer.sent_at > first.at:
            yield _finding("contradicted", "outcome_taken_back", case, first, answer)
            return


def nothing_is_left(case: Case) -> Iterator[Finding]:
    """Every transaction has an outcome, and no record of it is left in half or parked.

    A half that half was cut behind is written again if its owner has the payload. It must have that of a prepare that
    it has acknowledged. One that was lost with its tombstone is not left.
    """
    half = case.halves[-1] if case.halves and case.halves[-1].contents is not None else None
    if half is not None and (case.half_is_lost if case.ends else case.cut_before_an_answer):
        half = None
    parked = case.parked[-1] if case.parked and not case.parked[-1].tombstone else None
    for left in (half, parked):
        if left is not None:
            rule = "ended_and_still_in_the_log" if case.ends else "no_outcome"
            yield _finding("stuck", rule, case, left.place, *(f"{op.kind} {op.place}" for op in case.ops))
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
    """Return the finding for a message without a transaction id, in a topic that only halfway writes to."""
    return Finding(count="leaked", rule="message_of_no_transaction", id="", evidence=(message.place,))


def _by_number(messages: Iterable[Real]) -> dict[int, list[Real]]:
    by_number: defaultdict[int, list[Real]] = defaultdict(list)
    for message in messages:
        by_number[message.number].append(message)
    return by_number


def _places(messages: Iterable[Real]) -> list[str]:
    return [f"{message.number}/{message.total} {message.place}" for message in messages]


def _answer(case: Case, outcome: str) -> list[str]:
    answer = case.answered_outcomes.get(outcome)
    return [] if answer is None else [str(answer)]


__all__ = ["COUNTS", "RULES", "Content", "Count", "Finding", "Rule", "foreign"]
