"""The answers to operations, and their deadlines: many operations share a list, and many deadlines few timers."""

from __future__ import annotations

import asyncio
import math
from functools import partial
from typing import TYPE_CHECKING, Any, Final, Generic, Protocol, TypeVar

import msgspec
import structlog

from halfway.protocol.errors import HalfwayError, NotServedError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from halfway.protocol.principal import Principal

log = structlog.get_logger(__name__)

T = TypeVar("T")
T_contra = TypeVar("T_contra", contravariant=True)
R = TypeVar("R")
R_contra = TypeVar("R_contra", contravariant=True)

_TICKS_IN_S: Final = 50
"""Deadlines within one tick share a timer, which fires at most this fraction of a second late."""
_GIVEN: Final = RuntimeError("this answer was given to its call")


class Reply(Protocol[R_contra]):
    """Takes one answer, as an `asyncio.Future` does. Called on the loop's thread."""

    def done(self) -> bool:
        """Return whether it takes no answer any more."""

    def set_result(self, result: R_contra, /) -> None:
        """Answer."""

    def set_exception(self, error: BaseException, /) -> None:
        """Answer with an error."""


def answer_all(answers: Iterable[tuple[Reply[Any], Any]]) -> None:
    """Pass results or errors to replies. Replies that are done or cancelled are skipped."""
    for reply, result in answers:
        if reply.done():
            continue
        try:
            if isinstance(result, BaseException):
                reply.set_exception(result)
            else:
                reply.set_result(result)
        except Exception:
            log.exception("reply_failed")  # the others must still get their answers


class Deadlines:
    """Calls functions at their deadlines, times on the loop's own clock, unless they are removed before."""

    def __init__(self) -> None:
        """Start without a deadline."""
        self._watched: dict[int, dict[Callable[[], None], None]] = {}
        """The functions to call, by tick."""
        self._timers: dict[int, asyncio.TimerHandle] = {}

    def watch(self, late: Callable[[], None], deadline: float) -> None:
        """Call `late` at a deadline."""
        tick = math.ceil(deadline * _TICKS_IN_S)
        watched = self._watched.get(tick)
        if watched is None:
            watched = self._watched[tick] = {}
            self._timers[tick] = asyncio.get_running_loop().call_at(tick / _TICKS_IN_S, self._expire, tick)
        watched[late] = None

    def forget(self, late: Callable[[], None], deadline: float) -> None:
        """Do not call `late` any more. It may have been called already."""
        tick = math.ceil(deadline * _TICKS_IN_S)
        watched = self._watched.get(tick)
        if watched is None:
            return
        watched.pop(late, None)
        if not watched:
            del self._watched[tick]
            self._timers.pop(tick).cancel()

    def _expire(self, tick: int) -> None:
        del self._timers[tick]
        for late in self._watched.pop(tick):
            try:
                late()
            except Exception:
                log.exception("deadline_failed")  # the others must still be called


class _Awaited(asyncio.Future[Any]):
    """The future of a caller that waits for answers. If it is cancelled, the answers are abandoned."""

    answers: Answers[Any] | None = None
    index: int | None = None
    """The only answer that it waits for; None if it waits for all."""

    def cancel(self, msg: Any | None = None) -> bool:
        if not super().cancel(msg):
            return False
        answers, self.answers = self.answers, None
        if answers is not None:
            answers.abandon(self.index)
        return True


class Answers(msgspec.Struct, Generic[R], eq=False):
    """The answers to a list of operations, by the index of each operation. They come in any order.

    Each operation is answered once, even if no caller waits for it. Everything runs on the event loop's thread.
    """

    results: list[R | Exception | None]
    """The answers, None for each operation that has no answer yet. An exception is an answer too."""
    forward: Callable[[int, NotServedError], asyncio.Task[R] | None] | None = None
    """Forwards the operation at an index to the owner of its shard, which is not served here."""
    _answered: int = 0
    _fresh: list[int] = []
    _forwarded: dict[int, asyncio.Task[R]] = {}
    _on_answers: Callable[[Sequence[int]], None] | None = None
    _on_each: Callable[[int, R | Exception], None] | None = None
    _awaited: _Awaited | None = None
    _abandoned: set[int] = set()
    """The indexes that no caller waits for any more."""
    _on_abandon: dict[int, Callable[[], object]] = {}

    @property
    def left(self) -> int:
        """The number of operations without an answer."""
        return len(self.results) - self._answered

    def on_answers(self, callback: Callable[[Sequence[int]], None]) -> None:
        """Call `callback` with the indexes of the answers so far, if there are any, and later with further ones.

        It gets each index once, with all others of the same turn of the loop.
        """
        self._on_answers = callback
        if self._fresh:
            self._pass_on()

    def on_each_answer(self, callback: Callable[[int, R | Exception], None]) -> None:
        """Call `callback` with each index and its answer, even if no caller waits for it."""
        self._on_each = callback
        for index, result in enumerate(self.results):
            if result is not None:
                self._call_on_each(callback, index, result)

    @staticmethod
    def _call_on_each(callback: Callable[[int, R | Exception], None], index: int, result: R | Exception) -> None:
        try:
            callback(index, result)
        except Exception:
            log.exception("answer_not_watched")  # the other answers must still be passed on

    def all(self) -> asyncio.Future[Sequence[R | Exception]]:
        """Return all answers in the order of the operations. If this is cancelled, the missing ones are abandoned."""
        awaited = self._awaited = _Awaited(loop=asyncio.get_running_loop())
        awaited.answers = self
        if self._answered == len(self.results):
            self._settle(awaited)
        return awaited

    def _settle(self, awaited: _Awaited) -> None:
        self._awaited = None
        if not awaited.done():
            awaited.set_result(self.results)

    def abandon(self, index: int | None = None) -> None:
        """Wait for no more answers, or not for one of them. Operations that have begun are finished all the same."""
        if index is None:
            self._on_answers = None
        for one in range(len(self.results)) if index is None else (index,):
            self._abandoned.add(one)
            if (call := self._on_abandon.pop(one, None)) is not None:
                call()
            if (task := self._forwarded.get(one)) is not None:
                task.cancel()

    def on_abandon(self, index: int, call: Callable[[], object]) -> None:
        """Call this if the answer is abandoned: an operation that has not begun need not begin."""
        self._on_abandon[index] = call

    def waits_for(self, index: int) -> bool:
        """Return whether a caller waits for the answer to an operation."""
        return self.results[index] is None and index not in self._abandoned

    # --- answering

    def answer(self, index: int, result: R | Exception) -> None:
        """Answer one operation, unless it has an answer."""
        if self.results[index] is not None:
            return
        if isinstance(result, HalfwayError):
            if isinstance(result, NotServedError) and self._forward(index, result):
                return
            result.__traceback__ = None  # its frames refer to these answers, which would be a cycle
        self.results[index] = result
        self._on_abandon.pop(index, None)  # it refers to the operation, which would be a cycle
        self._answered += 1
        self._fresh.append(index)
        if self._on_answers is not None and len(self._fresh) == 1:
            # Not at once: the callback must not delay the operations that are answered next.
            asyncio.get_running_loop().call_soon(self._pass_on)
        if self._awaited is not None and self._answered == len(self.results):
            self._settle(self._awaited)
        if self._on_each is not None:
            self._call_on_each(self._on_each, index, result)

    def _pass_on(self) -> None:
        callback, fresh = self._on_answers, self._fresh
        if callback is not None and fresh:
            self._fresh = []
            callback(fresh)

    def _forward(self, index: int, error: NotServedError) -> bool:
        """Ask the owner of the shard. Return False if it was asked before, or if no caller waits."""
        if self.forward is None or index in self._forwarded or index in self._abandoned:
            return False
        task = self.forward(index, error)
        if task is None:
            return False
        self._forwarded[index] = task
        task.add_done_callback(partial(self._take_forwarded, index))
        return True

    def _take_forwarded(self, index: int, task: asyncio.Task[R]) -> None:
        error = ConnectionAbortedError("the caller is gone") if task.cancelled() else task.exception()
        self.answer(index, task.result() if error is None else error)  # type: ignore[arg-type] # no BaseException
        del self._forwarded[index]


class BeginList(Protocol[T_contra, R]):
    """Begins a list of operations."""

    def __call__(self, requests: Sequence[T_contra], /, *, deadline: float, principal: Principal) -> Answers[R]:
        """Return the answers, which may come later."""


class _Call(_Awaited):
    """The future of one call of a turn."""

    request: Any
    deadline: float


class CallsOfTurn(Generic[T, R]):
    """Collects the single calls of one turn of the event loop: what a list does once, they share.

    A list has the calls of one caller whose deadlines are within one tick, and takes the earliest of these.
    """

    def __init__(self, begin: BeginList[T, R]) -> None:
        """Pass the lists to `begin`."""
        self._begin = begin
        self._waiting: dict[tuple[Principal, int], list[_Call]] = {}

    def add(self, request: T, *, deadline: float, principal: Principal) -> asyncio.Future[R]:
        """Return the answer to a call, or raise it. If this is cancelled, it is abandoned."""
        loop = asyncio.get_running_loop()
        call = _Call(loop=loop)
        call.request, call.deadline = request, deadline
        if not self._waiting:
            loop.call_soon(self._hand_over)
        self._waiting.setdefault((principal, math.floor(deadline * _TICKS_IN_S)), []).append(call)
        return call

    def _hand_over(self) -> None:
        waiting, self._waiting = self._waiting, {}
        for (principal, _), added in waiting.items():
            calls = [call for call in added if not call.done()]
            if not calls:
                continue  # nobody waits for them any more
            requests = [call.request for call in calls]
            try:
                answers = self._begin(requests, deadline=min([call.deadline for call in calls]), principal=principal)
            except Exception as error:  # noqa: BLE001 - the callers get any error
                answer_all([(call, error) for call in calls])
                continue
            for index, call in enumerate(calls):
                call.answers, call.index = answers, index
            answers.on_answers(partial(_answer_calls, dict(enumerate(calls)), requests, answers.results))


def _answer_calls(calls: dict[int, _Call], requests: list[Any], results: list[Any], indexes: Sequence[int]) -> None:
    """Answer calls by the index of each, and keep nothing of them: another of their list may wait for long."""
    answered = [(calls.pop(index), results[index]) for index in indexes]
    for index in indexes:
        requests[index], results[index] = None, _GIVEN  # an error that was raised refers to the frames of its caller
    for call, _ in answered:
        call.answers = call.request = None  # the answers refer to the call, which would be a cycle
    answer_all(answered)
