"""Answers to many operations, delivered together; late replies get an error, even if one of them raises."""

import asyncio
import weakref
from collections.abc import Sequence
from functools import partial

import pytest

from halfway.coordinator.answers import Answers, CallsOfTurn, Deadlines, answer_all
from halfway.protocol.principal import ANYBODY, Principal, PrincipalKind
from tests.support.waiting import GENEROUS_S


async def test_all_waits_for_every_answer_and_keeps_their_order() -> None:
    answers: Answers[str] = Answers([None] * 3)
    waiting = asyncio.ensure_future(answers.all())
    await asyncio.sleep(0)
    answers.answer(2, "c")
    answers.answer(0, KeyError("a"))
    await asyncio.sleep(0)
    assert not waiting.done()
    assert answers.left == 1
    answers.answer(1, "b")
    first, *rest = await waiting
    assert isinstance(first, KeyError)
    assert rest == ["b", "c"]


class Lists:
    """Begins lists, and answers nothing by itself."""

    def __init__(self) -> None:
        self.begun: list[tuple[Sequence[str], float, Principal, Answers[int]]] = []
        self.calls = CallsOfTurn(self.begin)

    def begin(self, requests: Sequence[str], /, *, deadline: float, principal: Principal) -> Answers[int]:
        answers: Answers[int] = Answers([None] * len(requests))
        self.begun.append((list(requests), deadline, principal, answers))
        return answers


async def test_the_calls_of_one_turn_become_one_list_and_each_gets_its_own_answer() -> None:
    lists = Lists()
    first, second, third = (lists.calls.add(name, deadline=1000, principal=ANYBODY) for name in "abc")
    assert not lists.begun
    await asyncio.sleep(0)
    ((requests, deadline, principal, answers),) = lists.begun
    assert (list(requests), deadline, principal) == (["a", "b", "c"], 1000, ANYBODY)
    later = lists.calls.add("d", deadline=1000, principal=ANYBODY)
    answers.answer(2, 2)
    answers.answer(0, KeyError("a"))
    assert await third == 2
    with pytest.raises(KeyError):
        await first
    assert not second.done()
    assert not later.done()
    assert [list(requests) for requests, *_ in lists.begun] == [["a", "b", "c"], ["d"]]


async def test_a_list_has_one_caller_and_the_earliest_deadline_of_its_calls() -> None:
    """No call waits longer than its own deadline, and none is given up noticeably earlier."""
    lists, other = Lists(), Principal(kind=PrincipalKind.GROUP, name="shop")
    added = [("a", 10.002, ANYBODY), ("b", 10.001, ANYBODY), ("c", 10.001, other), ("d", 12, ANYBODY)]
    waiting = [lists.calls.add(name, deadline=at, principal=principal) for name, at, principal in added]
    await asyncio.sleep(0)
    assert [(list(requests), at, principal) for requests, at, principal, _ in lists.begun] == [
        (["a", "b"], 10.001, ANYBODY),
        (["c"], 10.001, other),
        (["d"], 12, ANYBODY),
    ]
    assert not any(call.done() for call in waiting)


async def test_a_call_that_is_cancelled_abandons_its_own_answer_only() -> None:
    """Cancelled before the end of its turn, it is not begun."""
    lists = Lists()
    kept, cancelled, early = (lists.calls.add(name, deadline=1000, principal=ANYBODY) for name in "abc")
    early.cancel()
    await asyncio.sleep(0)
    ((requests, *_, answers),) = lists.begun
    assert list(requests) == ["a", "b"]
    stopped: list[int] = []
    for index in range(2):
        answers.on_abandon(index, partial(stopped.append, index))
    cancelled.cancel()
    assert stopped == [1]
    assert [answers.waits_for(index) for index in range(2)] == [True, False]
    answers.answer(1, 1)
    answers.answer(0, 0)
    assert await kept == 0


async def test_a_turn_of_calls_that_nobody_waits_for_begins_nothing() -> None:
    lists = Lists()
    lists.calls.add("a", deadline=1000, principal=ANYBODY).cancel()
    await asyncio.sleep(0)
    assert not lists.begun


async def test_a_list_that_cannot_begin_fails_each_of_its_calls() -> None:
    def broken(requests: Sequence[str], /, *, deadline: float, principal: Principal) -> Answers[int]:
        raise RuntimeError("broken")

    calls = CallsOfTurn(broken)
    for call in [calls.add(name, deadline=1000, principal=ANYBODY) for name in "ab"]:
        with pytest.raises(RuntimeError, match="broken"):
            await call


async def test_an_answered_call_is_no_cycle() -> None:
    """Collections are rare, so a cycle would keep the request for long."""
    lists = Lists()
    call = lists.calls.add("a", deadline=1000, principal=ANYBODY)
    await asyncio.sleep(0)
    lists.begun.pop()[-1].answer(0, 0)
    await call
    gone = weakref.ref(call)
    del call
    await asyncio.sleep(0)
    assert gone() is None


async def test_an_answered_call_keeps_nothing_while_another_of_its_turn_waits() -> None:
    class Request:
        pass

    lists, request = Lists(), Request()
    done = lists.calls.add(request, deadline=1000, principal=ANYBODY)  # type: ignore[arg-type]
    slow = lists.calls.add("slow", deadline=1000, principal=ANYBODY)
    await asyncio.sleep(0)
    answers = lists.begun.pop()[-1]
    answers.answer(0, 0)
    assert await done == 0
    gone = weakref.ref(request)
    del request, done
    await asyncio.sleep(0)
    assert gone() is None
    assert not slow.done()


async def test_a_listener_is_told_each_index_once_with_others_of_its_turn() -> None:
    """Answers from before it listened come first."""
    answers: Answers[int] = Answers([None] * 4)
    told: list[list[int]] = []
    answers.answer(3, 3)
    answers.on_answers(lambda places: told.append(list(places)))
    assert told == [[3]]
    answers.answer(0, 0)
    answers.answer(2, 2)
    assert told == [[3]]
    await asyncio.sleep(0)
    assert told == [[3], [0, 2]]
    answers.answer(1, 1)
    await asyncio.sleep(0)
    assert told == [[3], [0, 2], [1]]


async def test_the_first_answer_stands() -> None:
    answers: Answers[int] = Answers([None])
    answers.answer(0, 1)
    answers.answer(0, 2)
    assert answers.results == [1]
    assert answers.left == 0


async def test_nobody_is_told_of_what_was_abandoned() -> None:
    answers: Answers[int] = Answers([None] * 2)
    told: list[int] = []
    answers.on_answers(told.extend)
    answers.answer(0, 0)
    answers.abandon()
    assert not answers.waits_for(1)
    answers.answer(1, 1)
    await asyncio.sleep(0)
    assert told == []


async def test_whoever_is_cancelled_while_it_waits_abandons_the_rest() -> None:
    answers: Answers[int] = Answers([None])
    waiting = asyncio.ensure_future(answers.all())
    await asyncio.sleep(0)
    waiting.cancel()
    await asyncio.wait([waiting])
    assert not answers.waits_for(0)


async def test_whoever_watches_hears_every_answer_waited_for_or_not() -> None:
    """A watcher that raises delays no answer."""
    answers: Answers[int] = Answers([None] * 3)
    seen: list[tuple[int, object]] = []

    def watching(index: int, result: object) -> None:
        seen.append((index, result))
        raise RuntimeError

    answers.answer(0, 0)
    answers.on_each_answer(watching)
    answers.answer(1, 1)
    answers.abandon()
    answers.answer(2, 2)
    assert seen == [(0, 0), (1, 1), (2, 2)]
    assert answers.results == [0, 1, 2]


async def test_what_is_late_is_called_once_and_nothing_that_was_forgotten() -> None:
    deadlines, loop = Deadlines(), asyncio.get_running_loop()
    soon, later = loop.time() + 0.05, loop.time() + 3600
    called: list[str] = []
    late, forgotten, with_time = (partial(called.append, name) for name in ("late", "forgotten", "with time"))
    last = loop.create_future()
    for one in (late, forgotten, partial(last.set_result, None)):
        deadlines.watch(one, soon)
    deadlines.watch(with_time, later)
    deadlines.forget(forgotten, soon)
    await asyncio.wait_for(last, GENEROUS_S)
    assert called == ["late"]
    deadlines.forget(late, soon)
    deadlines.forget(with_time, later)
    assert not deadlines._watched
    assert not deadlines._timers


async def test_a_deadline_that_has_passed_is_noticed_at_once() -> None:
    deadlines, loop = Deadlines(), asyncio.get_running_loop()
    called = asyncio.Event()
    deadlines.watch(called.set, loop.time() - 1)
    await asyncio.wait_for(called.wait(), GENEROUS_S)


async def test_a_late_one_that_raises_keeps_no_other_from_being_called() -> None:
    deadlines, called = Deadlines(), asyncio.Event()
    soon = asyncio.get_running_loop().time() + 0.01

    def broken() -> None:
        raise RuntimeError("broken")

    deadlines.watch(broken, soon)
    deadlines.watch(called.set, soon)
    await asyncio.wait_for(called.wait(), GENEROUS_S)


class Broken:
    """A reply that raises when it is answered."""

    def done(self) -> bool:
        return False

    def set_result(self, _: object) -> None:
        raise RuntimeError("broken")

    def set_exception(self, _: BaseException) -> None:
        raise RuntimeError("broken")


async def test_one_that_raises_costs_no_other_its_answer() -> None:
    future = asyncio.get_running_loop().create_future()
    answer_all([(Broken(), 1), (future, 2)])
    assert await future == 2
