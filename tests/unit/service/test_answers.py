"""Answers to many operations, told together; replies that are late get an error, whatever one of them raises."""

import asyncio

import pytest

from halfway.domain.errors import EndUnconfirmedError
from halfway.service.answers import Answers, Deadlines, answer_all


async def test_all_waits_for_every_answer_and_keeps_their_places() -> None:
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


async def test_only_raises_what_is_an_error() -> None:
    answers: Answers[str] = Answers([None])
    answers.answer(0, KeyError("a"))
    with pytest.raises(KeyError):
        await answers.only()


async def test_a_listener_is_told_each_place_once_with_others_of_its_turn() -> None:
    """Those that were answered before it listened come first."""
    answers: Answers[int] = Answers([None] * 4)
    told: list[list[int]] = []
    answers.answer(3, 3)
    answers.listen(lambda places: told.append(list(places)))
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
    answers.listen(told.extend)
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
    """One that breaks keeps nobody from the answers."""
    answers: Answers[int] = Answers([None] * 3)
    seen: list[tuple[int, object]] = []

    def watching(place: int, result: object) -> None:
        seen.append((place, result))
        raise RuntimeError

    answers.answer(0, 0)
    answers.watch(watching)
    answers.answer(1, 1)
    answers.abandon()
    answers.answer(2, 2)
    assert seen == [(0, 0), (1, 1), (2, 2)]
    assert answers.results == [0, 1, 2]


def late() -> EndUnconfirmedError:
    return EndUnconfirmedError("late")


async def test_what_is_not_done_by_its_deadline_gets_the_error_and_nothing_else_does() -> None:
    deadlines, loop = Deadlines(), asyncio.get_running_loop()
    soon, later = loop.time() + 0.05, loop.time() + 3600
    done, forgotten, waiting, with_time = (loop.create_future() for _ in range(4))
    for future in (done, forgotten, waiting):
        deadlines.watch(future, soon, late)
    deadlines.watch(with_time, later, late)
    done.set_result(1)
    deadlines.forget(forgotten, soon)
    with pytest.raises(EndUnconfirmedError):
        await asyncio.wait_for(waiting, 30)
    assert done.result() == 1
    assert not forgotten.done()
    assert not with_time.done()
    deadlines.forget(with_time, later)


async def test_a_deadline_that_has_passed_is_noticed_at_once() -> None:
    deadlines, loop = Deadlines(), asyncio.get_running_loop()
    future: asyncio.Future[int] = loop.create_future()
    deadlines.watch(future, loop.time() - 1, late)
    with pytest.raises(EndUnconfirmedError):
        await asyncio.wait_for(future, 30)


class Broken:
    """A reply that raises when it is told."""

    def done(self) -> bool:
        return False

    def set_result(self, _: object) -> None:
        raise RuntimeError("broken")

    def set_exception(self, _: BaseException) -> None:
        raise RuntimeError("broken")


async def test_one_that_raises_costs_no_other_its_error() -> None:
    deadlines, loop = Deadlines(), asyncio.get_running_loop()
    soon, future = loop.time() + 0.01, loop.create_future()
    deadlines.watch(Broken(), soon, late)
    deadlines.watch(future, soon, late)
    with pytest.raises(EndUnconfirmedError):
        await asyncio.wait_for(future, 30)


async def test_one_that_raises_costs_no_other_its_answer() -> None:
    future = asyncio.get_running_loop().create_future()
    answer_all([(Broken(), 1), (future, 2)])
    assert await future == 2
