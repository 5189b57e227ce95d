"""The client for code without an event loop: it runs the asynchronous client in its own thread."""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import contextvars
import functools
import os
import ssl
import threading
import weakref
from collections import deque
from collections.abc import Callable, Coroutine, Iterable, Sequence
from types import TracebackType
from typing import Any, Concatenate, Generic, ParamSpec, Self, TypedDict, TypeVar, Unpack, cast, overload

from halfway.client.barrier import AsyncBarrier, Barrier
from halfway.client.calls.group import ClientFigures
from halfway.client.calls.transport import Key
from halfway.client.errors import ClientClosedError, HalfwayError
from halfway.client.messages import Message, Outcome
from halfway.client.producer.block import Begin, SyncBlock
from halfway.client.producer.client import BlockOptions, Halfway, TransactionOptions
from halfway.client.producer.transaction import Transaction, WhenAway
from halfway.client.threads import ForkSafeLock, wait_for

P = ParamSpec("P")
T = TypeVar("T")


class Settings(TypedDict, total=False):
    """The keyword parameters of `Halfway`."""

    barrier: Barrier | None
    key: str | Key | None
    tls: ssl.SSLContext | None
    prepare_timeout_s: float
    end_timeout_s: float
    max_waiting: int
    max_in_background: int
    connections: int
    stream: bool


def _blocking(
    call: Callable[Concatenate[Halfway, P], Coroutine[Any, Any, T]],
    *,
    if_interrupted: Callable[..., None] = lambda *_, **__: None,
) -> Callable[Concatenate[SyncHalfway, P], T]:
    """Return the same call for threads, with its parameters and its docstring: it runs in the client's own thread.

    `if_interrupted` gets the parameters if the call has succeeded, but its result is lost (see `_LoopThread.run`).
    """

    @functools.wraps(call)
    def blocking(self: SyncHalfway, /, *args: P.args, **kwargs: P.kwargs) -> T:
        thread = self._running_thread()
        return thread.run(
            lambda: call(thread.client, *args, **kwargs),
            if_interrupted=lambda: if_interrupted(thread.client, *args, **kwargs),
        )

    return blocking


class SyncHalfway:
    """`Halfway` for threads. Any number of threads may share one.

    After a fork, the first call in the child opens a new client: the parent's connections are not used. Only the parent
    continues to run what `start` began.
    """

    def __init__(self, urls: str | Sequence[str], group: str, **settings: Unpack[Settings]) -> None:
        """Take the parameters of `Halfway`; threads share a stream. Nothing is sent and no thread is started yet."""
        self._settings: dict[str, Any] = {"urls": urls, "group": group, "stream": True, **settings}
        self._settings["key"] = Key.resolve(settings.get("key"))
        self._lock = ForkSafeLock()
        self._thread: _LoopThread | None = None
        self._last = ClientFigures()
        self._closed = False
        self.group = group
        _clients.add(self)
        self.barrier: Barrier | None = settings.get("barrier")
        if isinstance(self.barrier, AsyncBarrier):
            raise TypeError("SyncHalfway takes a Barrier: use an AsyncBarrier with Halfway, in its event loop")
        Halfway(**self._settings)  # so that a wrong setting fails here, not at the first call
        if self.barrier is not None:
            self.barrier.join(group, self)

    def __reduce__(self) -> str:
        raise TypeError("a SyncHalfway cannot be given to another process: open one there, or fork")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close the client as `Halfway.close` does, and end its thread."""
        with self._lock:
            self._closed = True
            thread, self._thread = self._thread, None
        if thread is not None and thread.pid == os.getpid():
            self._last = thread.client.figures
            thread.stop()

    register = _blocking(Halfway.register)
    start = _blocking(Halfway.start)
    prepare = _blocking(
        Halfway.prepare, if_interrupted=lambda client, *_, id, new_id=False, **__: client.abandon(id, new_id=new_id)
    )
    end = _blocking(Halfway.end)
    show = _blocking(Halfway.show)
    check_secrets = _blocking(Halfway.check_secrets)
    check_verifier = _blocking(Halfway.check_verifier)

    @overload
    def transaction(self, messages: Iterable[Message], begin: Begin, **options: Unpack[BlockOptions]) -> SyncBlock: ...

    @overload
    def transaction(
        self, messages: Iterable[Message], begin: None = None, **options: Unpack[TransactionOptions]
    ) -> SyncTransaction: ...

    def transaction(
        self, messages: Iterable[Message], begin: Begin | None = None, **options: Unpack[BlockOptions]
    ) -> SyncTransaction | SyncBlock:
        """Return a transaction for `with`; otherwise the same as `Halfway.transaction`."""
        thread = self._running_thread()
        when_away: WhenAway = "raise" if begin is None else options.pop("when_away", "raise")
        plain: TransactionOptions = options  # without `begin`, the client refuses `when_away`
        transaction = thread.client.transaction(messages, **plain)
        sync = SyncTransaction(thread, transaction)
        return sync if begin is None else SyncBlock(sync, transaction, begin, self.barrier, self.group, when_away)

    @property
    def figures(self) -> ClientFigures:
        """What this process has done with the client, for metrics."""
        thread = self._thread
        return self._last if thread is None or thread.pid != os.getpid() else thread.client.figures

    def new_id(self) -> str:
        """Same as `Halfway.new_id`."""
        return self._running_thread().client.new_id()

    def begin_end(self, id: str, outcome: Outcome, *, remark: str | None = None) -> Callable[[], None]:
        """Send an end in the background; return a function that waits until it is final or given up."""
        thread = self._running_thread()

        async def begin() -> asyncio.Task[None] | None:
            return thread.client.begin_end(id, outcome, remark=remark)

        task = thread.run(begin)
        return lambda: None if task is None or task.done() else thread.run(lambda: wait_for(task))

    def demand_no_block(self) -> None:
        """Raise NestedTransactionError if a `transaction` of this client is open in this thread."""
        thread = self._thread
        if thread is not None and thread.pid == os.getpid():
            thread.client.demand_no_block()

    def is_pending_sync(self, id: str, group: str) -> bool:
        """Same as `Halfway.is_pending`."""
        try:
            thread = self._running_thread()
            return thread.run(lambda: thread.client.is_pending(id, group))
        except ClientClosedError:
            return True

    def run_in_background(self, make: Callable[[Halfway], Coroutine[Any, Any, None]]) -> None:
        """Run the coroutine that `make` returns in the background until the client is closed.

        An example is `lambda client: BarrierMaintenance(client, barrier).run()`, or a CheckWorker. After a fork, only
        the parent runs it.
        """
        thread = self._running_thread()

        async def begin() -> None:
            thread.client.keep_running(make(thread.client))

        thread.run(begin)

    def _running_thread(self) -> _LoopThread:
        with self._lock:
            if self._closed:
                raise ClientClosedError("this client was closed: open a new one")
            if self._thread is None or self._thread.pid != os.getpid():
                self._thread = _LoopThread(Halfway(**self._settings))
            return self._thread


class SyncTransaction:
    """`Transaction` for a `with` block."""

    def __init__(self, thread: _LoopThread, transaction: Transaction) -> None:
        self._thread = thread
        self._transaction = transaction

    @property
    def id(self) -> str:
        return self._transaction.id

    def __enter__(self) -> Self:
        self._transaction.enter_scope()
        try:
            self._thread.run(self._transaction.begin, if_interrupted=self._transaction.abandon)
        except BaseException:
            self._transaction.leave_scope()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._transaction.leave_scope()
        # The error of a closed client, or of a fork's child, must not replace the block's exception.
        with contextlib.suppress(*() if error is None else (HalfwayError,)):
            self._thread.run(lambda: self._transaction.finish(error))

    def end(self, outcome: Outcome, remark: str | None = None) -> None:
        self._thread.run(lambda: self._transaction.end(outcome, remark))

    def commit(self, remark: str | None = None) -> None:
        self.end("commit", remark)

    def rollback(self, remark: str | None = None) -> None:
        self.end("rollback", remark)

    def unknown(self, remark: str | None = None) -> None:
        self.end("unknown", remark)


class _Work(Generic[T]):
    """A coroutine that a thread waits for."""

    def __init__(self, make: Callable[[], Coroutine[Any, Any, T]]) -> None:
        self.make = make
        self.context = contextvars.copy_context()  # such as the span of the caller
        self.task: asyncio.Task[T] | None = None
        self._is_done = threading.Lock()
        self._is_done.acquire()

    def start(self, loop: asyncio.AbstractEventLoop) -> None:
        """Run it in this thread, that of the loop."""
        self.task = loop.create_task(self._run(), context=self.context)
        self.task.add_done_callback(lambda _: self._is_done.release())

    async def _run(self) -> T:
        return await self.make()  # here, so that a wrong argument is an error of the task

    def result(self) -> T:
        """Wait for its result; raises CancelledError if the client was closed first."""
        self._is_done.acquire()
        return cast("asyncio.Task[T]", self.task).result()

    def interrupt(self, if_interrupted: Callable[[], None]) -> None:
        """Cancel it, because its thread does not wait any more."""
        if self.task is not None and not self.task.cancel() and not self.task.cancelled() and not self.task.exception():
            if_interrupted()


class _LoopThread:
    """An open client in an event loop in its own thread."""

    def __init__(self, client: Halfway) -> None:
        self.client = client
        self.pid = os.getpid()
        self._lock = threading.RLock()
        self._stopped = False
        self._begun: deque[_Work[Any]] = deque()
        """What threads have begun since the loop was woken. One wake-up serves all of them."""
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="halfway-client", daemon=True)
        self._thread.start()
        self.run(client.open)

    def run(
        self, make: Callable[[], Coroutine[Any, Any, T]], *, if_interrupted: Callable[[], None] = lambda: None
    ) -> T:
        """Run a coroutine and return its result; raises ClientClosedError if the thread is stopped first.

        Ctrl-C cancels it. If it has already succeeded then, its result is lost: `if_interrupted` runs in the thread.
        """
        if threading.current_thread() is self._thread:
            raise RuntimeError("SyncHalfway was called in its own event loop: use Halfway there")
        if self.pid != os.getpid():
            raise ClientClosedError("this transaction was begun before a fork: only the parent can end it")
        work = _Work(make)
        with self._lock:
            if self._stopped:
                raise ClientClosedError("this client was closed: open a new one")
            self._begun.append(work)
            if len(self._begun) == 1:
                self._loop.call_soon_threadsafe(self._start_begun)
        try:
            return work.result()
        except asyncio.CancelledError:
            raise ClientClosedError(
                "this client was closed during the call: check-back resolves its transaction"
            ) from None
        except BaseException:
            # It would continue otherwise, and nobody would end the transaction that it prepares.
            with contextlib.suppress(RuntimeError):  # the loop is closed
                self._loop.call_soon_threadsafe(work.interrupt, if_interrupted)
            raise

    def _start_begun(self) -> None:
        """Start the work without the lock, whose holder may wait for the loop: a signal's handler may `stop`."""
        while self._begun:
            self._begun.popleft().start(self._loop)

    def stop(self) -> None:
        """Close the client and end the thread. Calls under way end with ClientClosedError."""
        with self._lock:
            if self._stopped:
                return
            self._stopped = True
            closing = asyncio.run_coroutine_threadsafe(self._close(), self._loop)
        closing.result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    async def _close(self) -> None:
        await self.client.close()
        others = asyncio.all_tasks() - {asyncio.current_task()}
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)


_clients: weakref.WeakSet[SyncHalfway] = weakref.WeakSet()


def _at_exit() -> None:
    """Send the ends in the background before the process exits."""
    for client in list(_clients):
        client.close()


atexit.register(_at_exit)
