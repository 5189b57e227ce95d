"""The answers to many operations, without a future for each of them."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Final, Generic, TypeVar

import structlog

from halfway.domain.errors import HalfwayError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

log = structlog.get_logger(__name__)

R = TypeVar("R")
_RAISED: Final = RuntimeError("this answer was raised where it was waited for")


class Answers(Generic[R]):
    """The answers to a list of operations, each at its operation's place, in whatever order they come.

    Each place is answered once, whether somebody waits for it or not.

    Everything here happens on the event loop's thread.
    """

    __slots__ = ("_abandoned", "_done", "_fresh", "_if_abandoned", "_told", "_watching", "left", "results")

    def __init__(self, count: int) -> None:
        """Wait for so many answers."""
        self.results: list[R | Exception | None] = [None] * count
        """None for what is not answered yet; an exception is an answer too."""
        self.left = count
        """How many are not answered yet."""
        self._fresh: list[int] = []
        self._told: Callable[[Sequence[int]], None] | None = None
        self._watching: Callable[[int, R | Exception], None] | None = None
        self._done: asyncio.Future[None] | None = None
        self._abandoned = False
        self._if_abandoned: list[Callable[[], object]] = []

    def listen(self, told: Callable[[Sequence[int]], None]) -> None:
        """Call `told` with the places that are answered: now if there are any, and whenever some more are.

        It is called once for each place, with all that were answered in one turn of the loop.
        """
        self._told = told
        if self._fresh:
            self._tell()

    def watch(self, watching: Callable[[int, R | Exception], None]) -> None:
        """Call `watching` with each place and its answer, whether somebody waits for it or not."""
        self._watching = watching
        for place, result in enumerate(self.results):
            if result is not None:
                self._watch(watching, place, result)

    @staticmethod
    def _watch(watching: Callable[[int, R | Exception], None], place: int, result: R | Exception) -> None:
        try:
            watching(place, result)
        except Exception:
            log.exception("answer_not_watched")  # it must not cost the others their answers

    async def all(self) -> Sequence[R | Exception]:
        """Return all answers in the order of the operations; if this is cancelled, the rest is abandoned."""
        if self.left:
            self._done = asyncio.get_running_loop().create_future()
            try:
                await self._done
            except asyncio.CancelledError:
                self.abandon()
                raise
        return self.results  # type: ignore[return-value] # none is None any more

    async def only(self) -> R:
        """Return the answer to a list of one, or raise it."""
        (answer,) = await self.all()
        if isinstance(answer, Exception):
            self.results[0] = _RAISED  # its traceback leads to this frame, so an error that is kept is a cycle
            try:
                raise answer
            finally:
                del answer
        return answer

    def abandon(self) -> None:
        """Wait no longer: what was begun is finished all the same, and nobody is told."""
        self._abandoned = True
        self._told = None
        for call in self._if_abandoned:
            call()

    def if_abandoned(self, call: Callable[[], object]) -> None:
        """Call this if nobody waits any more: what has not begun yet need not begin."""
        self._if_abandoned.append(call)

    def waits_for(self, place: int) -> bool:
        """Whether somebody waits for the answer to an operation."""
        return not self._abandoned and self.results[place] is None

    # --- for those who answer

    def answer(self, place: int, result: R | Exception) -> None:
        """Answer one operation, unless it is answered; those who listen are told with others of the same turn."""
        if self.results[place] is not None:
            return
        if isinstance(result, HalfwayError):
            result.__traceback__ = None  # its frames hold these answers: with them it would be a cycle
        self.results[place] = result
        self.left -= 1
        self._fresh.append(place)
        if self._told is not None and len(self._fresh) == 1:
            # Not at once: whoever listens must not disturb those who are answered next.
            asyncio.get_running_loop().call_soon(self._tell)
        if not self.left and self._done is not None and not self._done.done():
            self._done.set_result(None)
        if self._watching is not None:
            self._watch(self._watching, place, result)

    def _tell(self) -> None:
        told, fresh = self._told, self._fresh
        if told is not None and fresh:
            self._fresh = []
            told(fresh)
