"""Where answers go, one by one or to a list of operations, and their deadlines: many of them share few timers."""

from __future__ import annotations

import asyncio
import math
from functools import partial
from typing import TYPE_CHECKING, Any, Final, Generic, Protocol, TypeVar

import msgspec
import structlog

from halfway.domain.errors import HalfwayError, NotServedError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

log = structlog.get_logger(__name__)

R = TypeVar("R")
R_contra = TypeVar("R_contra", contravariant=True)

_TICKS_IN_S: Final = 50
"""Deadlines within one tick share a timer: it comes at most this fraction of a second too late."""
_RAISED: Final = RuntimeError("this answer was raised where it was waited for")


class Reply(Protocol[R_contra]):
    """Where one answer goes, an `asyncio.Future` for example; called on the loop's thread, and at most once.

    `done` may be called on any thread.
    """

    def done(self) -> bool:
        """Whether no answer is wanted any more."""

    def set_result(self, result: R_contra, /) -> None:
        """Answer."""

    def set_exception(self, error: BaseException, /) -> None:
        """Answer with an error."""


def answer_all(answers: Iterable[tuple[Reply[Any], Any]]) -> None:
    """Give replies their results or errors; those that are done or cancelled are left alone."""
    for reply, result in answers:
        if reply.done():
            continue
        try:
            if isinstance(result, BaseException):
                reply.set_exception(result)
            else:
                reply.set_result(result)
        except Exception:
            log.exception("reply_failed")  # it must not cost the others their answers


class Deadlines:
    """Calls what is to be called at a deadline, a time on the loop's own clock, unless it is forgotten before."""

    def __init__(self) -> None:
        """Watch nothing."""
        self._watched: dict[int, dict[Callable[[], None], None]] = {}
        """What to call, by tick."""
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
        """Call it no more, whether it was called or not."""
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
                log.exception("deadline_failed")  # it must not cost the others theirs


class _Awaited(asyncio.Future[Any]):
    """The future of one who waits for answers: if it is cancelled, they are abandoned."""

    answers: Answers[Any] | None = None

    def cancel(self, msg: Any | None = None) -> bool:
        if not super().cancel(msg):
            return False
        answers, self.answers = self.answers, None
        if answers is not None:
            answers.abandon()
        return True


class Answers(msgspec.Struct, Generic[R], eq=False):
    """The answers to a list of operations, each by the index of its operation, in whatever order they come.

    Each is answered once, whether somebody waits for it or not.

    Everything here happens on the event loop's thread.
    """

    results: list[R | Exception | None]
    """None for what is not answered yet, as all of it is in the beginning; an exception is an answer too."""
    forward: Callable[[int, NotServedError], asyncio.Task[R] | None] | None = None
    """Asks the owner of a shard that is not served here for the answer at an index."""
    _answered: int = 0
    _fresh: list[int] = []
    _asked: dict[int, asyncio.Task[R]] = {}
    _told: Callable[[Sequence[int]], None] | None = None
    _watching: Callable[[int, R | Exception], None] | None = None
    _awaited: _Awaited | None = None
    _raises: bool = False
    """Whether an error is raised to the one who waits."""
    _abandoned: bool = False
    _if_abandoned: list[Callable[[], object]] = []

    @property
    def left(self) -> int:
        """How many are not answered yet."""
        return len(self.results) - self._answered

    def listen(self, told: Callable[[Sequence[int]], None]) -> None:
        """Call `told` with the indexes of those that are answered: now if there are any, and whenever some more are.

        It is called once for each of them, with all that were answered in one turn of the loop.
        """
        self._told = told
        if self._fresh:
            self._tell()

    def watch(self, watching: Callable[[int, R | Exception], None]) -> None:
        """Call `watching` with each index and its answer, whether somebody waits for it or not."""
        self._watching = watching
        for index, result in enumerate(self.results):
            if result is not None:
                self._watch(watching, index, result)

    @staticmethod
    def _watch(watching: Callable[[int, R | Exception], None], index: int, result: R | Exception) -> None:
        try:
            watching(index, result)
        except Exception:
            log.exception("answer_not_watched")  # it must not cost the others their answers

    def all(self) -> asyncio.Future[Sequence[R | Exception]]:
        """Return all answers in the order of the operations; if this is cancelled, the rest is abandoned."""
        return self._wait()

    def only(self) -> asyncio.Future[R]:
        """Return the answer to a list of one, or raise it; if this is cancelled, it is abandoned."""
        self._raises = True
        return self._wait()

    def _wait(self) -> _Awaited:
        awaited = self._awaited = _Awaited(loop=asyncio.get_running_loop())
        awaited.answers = self
        if self._answered == len(self.results):
            self._settle(awaited)
        return awaited

    def _settle(self, awaited: _Awaited) -> None:
        self._awaited = None
        if awaited.done():
            return
        if not self._raises:
            awaited.set_result(self.results)
        elif isinstance(answer := self.results[0], Exception):
            self.results[0] = _RAISED  # its traceback will lead to frames that may hold these answers: a cycle
            awaited.set_exception(answer)
        else:
            awaited.set_result(answer)

    def abandon(self) -> None:
        """Wait no longer: what was begun is finished all the same, and nobody is told."""
        self._abandoned = True
        self._told = None
        for call in self._if_abandoned:
            call()
        for asked in self._asked.values():
            asked.cancel()

    def if_abandoned(self, call: Callable[[], object]) -> None:
        """Call this if nobody waits any more: what has not begun yet need not begin."""
        self._if_abandoned.append(call)

    def waits_for(self, index: int) -> bool:
        """Whether somebody waits for the answer to an operation."""
        return not self._abandoned and self.results[index] is None

    # --- for those who answer

    def answer(self, index: int, result: R | Exception) -> None:
        """Answer one operation, unless it is answered; those who listen are told with others of the same turn."""
        if self.results[index] is not None:
            return
        if isinstance(result, HalfwayError):
            if isinstance(result, NotServedError) and self._is_forwarded(index, result):
                return
            result.__traceback__ = None  # its frames hold these answers: with them it would be a cycle
        self.results[index] = result
        self._answered += 1
        self._fresh.append(index)
        if self._told is not None and len(self._fresh) == 1:
            # Not at once: whoever listens must not disturb those who are answered next.
            asyncio.get_running_loop().call_soon(self._tell)
        if self._awaited is not None and self._answered == len(self.results):
            self._settle(self._awaited)
        if self._watching is not None:
            self._watch(self._watching, index, result)

    def _tell(self) -> None:
        told, fresh = self._told, self._fresh
        if told is not None and fresh:
            self._fresh = []
            told(fresh)

    def _is_forwarded(self, index: int, error: NotServedError) -> bool:
        """Ask the owner of the shard, unless it was asked before or nobody waits."""
        if self.forward is None or index in self._asked or self._abandoned:
            return False
        asked = self.forward(index, error)
        if asked is None:
            return False
        self._asked[index] = asked
        asked.add_done_callback(partial(self._forwarded, index))
        return True

    def _forwarded(self, index: int, asked: asyncio.Task[R]) -> None:
        error = ConnectionAbortedError("the caller is gone") if asked.cancelled() else asked.exception()
        self.answer(index, asked.result() if error is None else error)  # type: ignore[arg-type] # no BaseException
