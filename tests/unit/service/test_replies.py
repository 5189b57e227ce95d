"""Replies that are not done in time get an error, however many share a deadline, and whatever one of them raises."""

import asyncio

import pytest

from halfway.domain.errors import EndUnconfirmedError
from halfway.service.replies import Deadlines, answer_all


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
