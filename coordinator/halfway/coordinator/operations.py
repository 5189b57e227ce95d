"""Operations: what one request is, from the turn of the event loop in which it comes to its answer."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable, Generator, Iterator, Sequence
from enum import StrEnum
from functools import partial
from typing import Any, Final, Generic, TypeVar

import msgspec
import structlog

from halfway.coordinator.logging import LogSummary
from halfway.coordinator.ports import Authority
from halfway.protocol.errors import HalfwayError, NotServedError
from halfway.protocol.principal import ANYBODY, Principal

log = structlog.get_logger(__name__)
_late: Final = LogSummary(log, "info", "operation_late")

T = TypeVar("T")
R = TypeVar("R")

_TICKS_IN_S: Final = 50
"""Deadlines within one tick share a timer, which fires at most this fraction of a second late."""
_AT_ONCE: Final = 250
"""Operations that are taken as far as they go before other work of the event loop goes on."""


class Waits(StrEnum):
    """What an operation waits for."""

    TURN = "turn"
    """The end of this turn of the event loop, in which it came."""
    OWNER = "owner"
    """An owner of its shard: this instance, or the answer of another one."""
    TAIL = "tail"
    """A read barrier: only what the log held when it came shows whether its id exists."""
    CLAIM = "claim"
    """Another operation on its id."""
    GROUPS = "groups"
    TOPICS = "topics"
    PAYLOAD = "payload"
    """The messages, which are read from Kafka."""
    LOG = "log"
    """The append of a half."""
    LANE = "lane"
    """Its Kafka transaction, or the one that records a commit that could not be written."""
    DONE = "done"


_TURN: Final = Waits.TURN  # to read an attribute of an enum's class takes long


class Operation(msgspec.Struct, Generic[R], kw_only=True, eq=False, weakref=True):
    """One request. The caller awaits it, or cancels it: what has begun is finished all the same.

    Everything runs on the event loop's thread. It is not a future, as nearly all in a list are answered before they are
    awaited.
    """

    path: Path[Any]
    deadline: float
    """A time on the loop's clock."""
    principal: Principal = ANYBODY
    waits: Waits = _TURN
    began: float = 0.0
    """When its turn came, on the loop's clock. The operations of one turn have the same time."""
    allowed: bool = False
    """Whether it is known that the caller may do this. A refused caller is not counted."""
    result: R | Exception | None = None
    """The answer, even if no caller waits for it."""
    is_cancelled: bool = False
    """Whether no caller waits for the answer any more."""
    forwards: bool = False
    """Whether it may go to the owner of its shard, if that is another instance."""
    forwarded: asyncio.Task[R] | None = None
    """The call to that owner."""
    _waiter: asyncio.Future[None] | None = None
    _callbacks: list[Callable[[Any], None]] | None = None

    def done(self) -> bool:
        """Return whether it has its answer, or no caller waits for it."""
        return self.result is not None or self.is_cancelled

    def cancel(self) -> bool:
        """Wait for the answer no more; return False if it has come."""
        if self.result is not None or self.is_cancelled:
            return False
        self.is_cancelled = True
        self.path.abandon(self)
        return True

    def answer(self, result: R | Exception) -> None:
        """Answer it. Further answers must not come."""
        if isinstance(result, HalfwayError):
            result.__traceback__ = None  # its frames refer to this operation, which would be a cycle
        self.result = result
        waiter, callbacks = self._waiter, self._callbacks
        if waiter is not None:
            self._waiter = None
            if not waiter.done():
                waiter.set_result(None)
        if callbacks is not None:
            self._callbacks = None
            for callback in callbacks:
                try:
                    callback(self)
                except Exception:
                    log.exception("reply_failed")  # the others must still get their answers

    def add_done_callback(self, callback: Callable[[Any], None]) -> None:
        """Call `callback` with the operation when it has its answer, at once if it has come already."""
        if self.result is not None:
            callback(self)
        elif self._callbacks is None:
            self._callbacks = [callback]
        else:
            self._callbacks.append(callback)

    def waiter(self) -> asyncio.Future[None]:
        """Return a future that is done when the answer, which has not come yet, is there."""
        if self._waiter is None or self._waiter.done():
            self._waiter = asyncio.get_running_loop().create_future()
        return self._waiter

    def __await__(self) -> Generator[Any, None, R]:
        """Return the answer, or raise it. If this is cancelled, the operation is."""
        while self.result is None:
            try:
                yield from self.waiter()
            except asyncio.CancelledError:
                self.cancel()
                raise
        result = self.result
        try:
            if isinstance(result, Exception):
                raise result
            return result
        finally:
            del self, result  # an error refers to this frame, which would be a cycle


OperationT = TypeVar("OperationT", bound=Operation[Any])


class Path(Generic[OperationT]):
    """The way of operations of one kind. What comes in one turn of the event loop is taken together at its end."""

    def __init__(self, authority: Authority) -> None:
        self._authority = authority
        self._permitted: Principal | None = None
        self._permission: object = None
        """What was permitted last in this turn: once for the operations of one caller that follow each other."""
        self._new: list[OperationT] = []
        self._tasks: set[asyncio.Task[Any]] = set()
        self.forward: Callable[[OperationT, NotServedError], asyncio.Task[Any] | None] = lambda *_: None
        """Sends an operation to the owner of the shard that the error names; returns None if there is no other."""

    def add(self, operation: OperationT) -> None:
        """Take an operation a step further at the end of this turn."""
        if not self._new:
            asyncio.get_running_loop().call_soon(self._turn)
        self._new.append(operation)

    def _take(self) -> Sequence[OperationT]:
        """Return the operations of this turn. If they are too many, the callers take turns, each in its own order."""
        taken, self._new, self._permitted = self._new, [], None
        if len(taken) > _AT_ONCE:
            callers: dict[str | None, list[OperationT]] = {}
            for one in taken:
                callers.setdefault(one.principal.group, []).append(one)
            share = max(1, _AT_ONCE // len(callers))
            taken = [one for mine in callers.values() for one in mine[:share]]
            self._new = [one for mine in callers.values() for one in mine[share:]]
            asyncio.get_running_loop().call_soon(self._turn)
        return taken

    def _turn(self) -> None:
        raise NotImplementedError

    def _fail(self, operation: OperationT, error: BaseException) -> None:
        raise NotImplementedError

    def abandon(self, operation: OperationT) -> None:
        """Let an operation that has not begun go no further: its caller is gone."""
        raise NotImplementedError

    def _wait(self, operation: OperationT, waits: Waits, what: Awaitable[object]) -> None:
        """Take an operation a step further when something is there."""
        operation.waits = waits
        task = asyncio.get_running_loop().create_task(self._go_on(operation, what))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _go_on(self, operation: OperationT, what: Awaitable[object]) -> None:
        try:
            await what
        except BaseException as error:
            self._fail(operation, error)
            if not isinstance(error, Exception):
                raise
        else:
            self.add(operation)

    def _begin_forward(self, operation: OperationT, error: NotServedError) -> bool:
        """Ask the owner of the shard. Return False if it was asked before, or if no caller waits."""
        if not operation.forwards or operation.done():
            return False
        operation.forwards = False
        try:
            task = operation.forwarded = self.forward(operation, error)
        except Exception:
            log.exception("forward_failed")
            return False
        if task is None:
            return False
        operation.waits = Waits.OWNER
        task.add_done_callback(partial(self._take_forwarded, operation))
        return True

    def _take_forwarded(self, operation: OperationT, task: asyncio.Task[Any]) -> None:
        error = ConnectionAbortedError("the caller is gone") if task.cancelled() else task.exception()
        self._answer(operation, task.result() if error is None else error)

    def _answer(self, operation: OperationT, result: Any) -> None:
        raise NotImplementedError


async def results_of(operations: Sequence[Operation[R]]) -> list[R | Exception]:
    """Return all answers in the order of the operations; if this is cancelled, cancel those that have none."""
    results: list[R | Exception] = []
    try:
        for one in operations:
            while one.result is None:
                await one.waiter()
            results.append(one.result)
    except BaseException:
        for one in operations:
            one.cancel()
        raise
    return results


def log_late(operation: Operation[Any], **sample: object) -> None:
    """Log what an operation waits for whose deadline has passed."""
    _late.note({"waits": operation.waits.value}, **sample)


def tick_of(deadline: float) -> int:
    return math.ceil(deadline * _TICKS_IN_S)


class Deadlines(Generic[T]):
    """Calls a function with each item at its deadline (on the loop's own clock), unless it is forgotten before."""

    def __init__(self, late: Callable[[T], None]) -> None:
        self._late = late
        self._watched: dict[int, dict[T, None]] = {}
        """The items by tick."""
        self._timers: dict[int, asyncio.TimerHandle] = {}

    def __iter__(self) -> Iterator[T]:
        return (item for watched in self._watched.values() for item in watched)

    def watch(self, item: T, tick: int) -> None:
        """Call the function with an item at a tick (`tick_of` its deadline)."""
        watched = self._watched.get(tick)
        if watched is None:
            watched = self._watched[tick] = {}
            self._timers[tick] = asyncio.get_running_loop().call_at(tick / _TICKS_IN_S, self._expire, tick)
        watched[item] = None

    def forget(self, item: T, tick: int) -> None:
        """Forget an item. Its deadline may have passed already."""
        watched = self._watched.get(tick)
        if watched is None:
            return
        watched.pop(item, None)
        if not watched:
            del self._watched[tick]
            self._timers.pop(tick).cancel()

    def _expire(self, tick: int) -> None:
        del self._timers[tick]
        for item in self._watched.pop(tick):
            try:
                self._late(item)
            except Exception:
                log.exception("deadline_failed")  # the others must still be called
