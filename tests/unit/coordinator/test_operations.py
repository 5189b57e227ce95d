"""Operations: taken together at the end of a turn, the callers in turn, answered once; late replies get an error."""

import asyncio
import gc
import weakref
from collections.abc import Callable
from functools import partial

import pytest

from halfway.coordinator.access import OpenAccess
from halfway.coordinator.operations import Deadlines, Operation, Path, Waits, results_of, tick_of
from halfway.protocol.errors import NotServedError
from halfway.protocol.principal import Principal, PrincipalKind
from tests.support.waiting import GENEROUS_S


class Named(Operation[str], kw_only=True, eq=False):
    name: str


class Paths(Path[Named]):
    """Takes operations, and answers nothing by itself."""

    def __init__(self) -> None:
        super().__init__(OpenAccess())
        self.turns: list[list[str]] = []
        self.abandoned: list[str] = []

    def begin(self, name: str, group: str = "shop") -> Named:
        principal = Principal(kind=PrincipalKind.GROUP, name=group)
        one = Named(path=self, deadline=1000, principal=principal, name=name)
        self.add(one)
        return one

    def _turn(self) -> None:
        self.turns.append([one.name for one in self._take()])

    def abandon(self, one: Named) -> None:
        self.abandoned.append(one.name)

    def _answer(self, one: Named, result: str | Exception) -> None:
        one.answer(result)

    def forwards(self, one: Named) -> bool:
        return self._begin_forward(one, NotServedError("not here"))


def call(late: Callable[[], object]) -> None:
    late()


async def test_the_operations_of_one_turn_are_taken_together_and_results_keep_their_order() -> None:
    paths = Paths()
    first, second, third = (paths.begin(name) for name in "abc")
    waiting = asyncio.ensure_future(results_of([first, second, third]))
    assert not paths.turns
    await asyncio.sleep(0)
    later = paths.begin("d")
    third.answer("c")
    first.answer(KeyError("a"))
    await asyncio.sleep(0)
    assert paths.turns == [["a", "b", "c"], ["d"]]
    assert not waiting.done()
    assert not later.done()
    second.answer("b")
    error, *rest = await waiting
    assert isinstance(error, KeyError)
    assert rest == ["b", "c"]
    with pytest.raises(KeyError):
        await first


async def test_callers_take_turns_if_one_turn_cannot_take_all() -> None:
    """No caller waits for all the work of another, and each keeps its own order."""
    paths = Paths()
    for number in range(600):
        paths.begin(f"shop-{number}")
    for number in range(3):
        paths.begin(f"other-{number}", "other")
    for _ in range(9):
        await asyncio.sleep(0)
    assert [f"other-{number}" in paths.turns[0] for number in range(3)] == [True] * 3
    assert max(len(turn) for turn in paths.turns) <= 250
    taken = [name for turn in paths.turns for name in turn if name.startswith("shop")]
    assert taken == [f"shop-{number}" for number in range(600)]


async def test_whoever_is_cancelled_while_it_waits_abandons_the_rest() -> None:
    paths = Paths()
    done, waiting = paths.begin("a"), paths.begin("b")
    results = asyncio.ensure_future(results_of([done, waiting]))
    done.answer("0")
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    results.cancel()
    await asyncio.wait([results])
    assert paths.abandoned == ["b"]


async def test_an_answered_operation_is_no_cycle() -> None:
    """Collections are rare, so a cycle would keep the request for long."""
    paths = Paths()
    answered, failed = paths.begin("a"), paths.begin("b")
    await asyncio.sleep(0)
    gc.disable()
    try:
        answered.answer("0")
        failed.answer(NotServedError("not here"))
        gone = [weakref.ref(one) for one in (answered, failed)]
        assert await answered == "0"
        del answered, failed
        await asyncio.sleep(0)
        assert [one() for one in gone] == [None, None]
    finally:
        gc.enable()


async def test_a_listener_hears_of_an_answer_even_if_its_caller_went_away() -> None:
    paths, heard = Paths(), asyncio.Event()
    (one := paths.begin("b")).add_done_callback(lambda _: heard.set())
    one.cancel()
    one.answer("2")
    assert heard.is_set()
    assert paths.abandoned == ["b"]


async def test_an_operation_is_forwarded_once_and_gets_the_answer_of_the_owner() -> None:
    paths, calls = Paths(), 0

    async def ask() -> str:
        return "done"

    def forward(_: Named, __: NotServedError) -> asyncio.Task[str]:
        nonlocal calls
        calls += 1
        return asyncio.create_task(ask())

    paths.forward = forward
    wanted, gone, relayed = (paths.begin(name) for name in "abc")
    wanted.forwards = gone.forwards = True
    gone.cancel()
    assert [paths.forwards(one) for one in (wanted, gone, relayed)] == [True, False, False]
    assert wanted.waits is Waits.OWNER
    assert not paths.forwards(wanted)
    assert await wanted == "done"
    assert calls == 1


async def test_what_is_late_is_called_once_and_nothing_that_was_forgotten() -> None:
    deadlines: Deadlines[Callable[[], None]] = Deadlines(call)
    loop = asyncio.get_running_loop()
    soon, later = loop.time() + 0.05, loop.time() + 3600
    called: list[str] = []
    late, forgotten, with_time = (partial(called.append, name) for name in ("late", "forgotten", "with time"))
    last = loop.create_future()
    for one in (late, forgotten, partial(last.set_result, None)):
        deadlines.watch(one, tick_of(soon))
    deadlines.watch(with_time, tick_of(later))
    deadlines.forget(forgotten, tick_of(soon))
    await asyncio.wait_for(last, GENEROUS_S)
    assert called == ["late"]
    deadlines.forget(late, tick_of(soon))
    deadlines.forget(with_time, tick_of(later))
    assert not deadlines._watched
    assert not deadlines._timers


async def test_a_late_one_that_raises_keeps_no_other_from_being_called() -> None:
    deadlines: Deadlines[Callable[[], object]] = Deadlines(call)
    called, passed = asyncio.Event(), tick_of(asyncio.get_running_loop().time() - 1)

    def broken() -> None:
        raise RuntimeError("broken")

    deadlines.watch(broken, passed)
    deadlines.watch(called.set, passed)
    await asyncio.wait_for(called.wait(), GENEROUS_S)
