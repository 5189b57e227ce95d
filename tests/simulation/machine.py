"""A machine with one loop, one clock and one generator, which runs the unchanged code of several processes.

The loop has no selector: if nothing is ready, time jumps to the next timer. A thread is a greenlet, which runs until it
waits, so that each of its turns is a step of the loop. `Machine.installed` puts threads, clocks and chance of this
machine in the place of Python's, in every module that runs on it: `_offers` is all that such a module may use.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import concurrent.futures._base
import contextvars
import gc
import heapq
import os
import queue
import random
import secrets
import sys
import threading
import time
import uuid
import warnings
from collections import deque
from collections.abc import Callable, Container, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from types import ModuleType, SimpleNamespace
from typing import Any, Final, Self

import greenlet

EPOCH_S: Final = 1_760_000_000.0
_STEP_S: Final = 1e-6
"""What a turn of the loop takes: whoever waits without a pause gets there too."""
_SHORT_S: Final = 0.25
"""A wait of a poll that is repeated all the time."""


class DeadlockError(Exception):
    """Nothing will ever happen."""


@dataclass(eq=False)
class Process:
    """What runs together, and ends together. Its clock may be wrong, and it may be stopped for a time."""

    name: str
    clock_s: float = 0.0
    """What its wall clock shows too much."""
    dead: bool = False
    paused: bool = False
    held: list[asyncio.Handle] = field(default_factory=list)
    """What is ready while it is paused."""
    globals: dict[str, Any] = field(default_factory=dict)
    """What Python code keeps for a process, by name."""


OUTSIDE: Final = Process("outside")
PROCESS: Final = contextvars.ContextVar("process", default=OUTSIDE)


class Loop(asyncio.BaseEventLoop):
    """An event loop in virtual time, for the tasks and threads of all processes."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.steps = 0
        self._timers: list[tuple[float, int, asyncio.TimerHandle]] = []
        self._number = 0
        self.bound = float("inf")
        """When the run must have ended."""

    def time(self) -> float:
        return self.now

    def _write_to_self(self) -> None:
        """Wake nobody: there is one thread."""

    def _asyncgen_finalizer_hook(self, agen: object) -> None:
        """Let go: what a killed process has not finished stays unfinished."""

    def _process_events(self, event_list: object) -> None:
        """Do nothing: there are no files."""

    def call_soon_threadsafe(  # type: ignore[override]
        self, callback: Callable[..., object], *args: Any, context: contextvars.Context | None = None
    ) -> asyncio.Handle:
        return self.call_soon(callback, *args, context=context)

    def run_in_executor(self, executor: Any, func: Callable[..., Any], *args: Any) -> asyncio.Future[Any]:  # type: ignore[override]
        pool = executor or PROCESS.get().globals.setdefault("executor", Executor(32))
        return asyncio.wrap_future(pool.submit(func, *args), loop=self)

    def call_at(  # type: ignore[override]
        self, when: float, callback: Callable[..., object], *args: Any, context: contextvars.Context | None = None
    ) -> asyncio.TimerHandle:
        timer = asyncio.TimerHandle(when, callback, args, self, context)
        self._number += 1
        heapq.heappush(self._timers, (when, self._number, timer))
        return timer

    def _timer_handle_cancelled(self, handle: asyncio.TimerHandle) -> None:
        """Leave it where it is: it is dropped when its time has come."""

    def _run_once(self) -> None:
        ready: deque[asyncio.Handle] = self._ready  # type: ignore[attr-defined]
        timers = self._timers
        while timers and timers[0][2]._cancelled:
            heapq.heappop(timers)
        self.now += _STEP_S
        if not ready:
            if not timers:
                raise DeadlockError("nothing will ever happen")
            self.now = max(self.now, timers[0][0])
        if self.now > self.bound:
            raise DeadlockError(f"the run has not ended after {self.bound:g} s")
        while timers and timers[0][0] <= self.now:
            ready.append(heapq.heappop(timers)[2])
        for _ in range(len(ready)):
            one = ready.popleft()
            if one._cancelled:
                continue
            process = one._context.get(PROCESS, OUTSIDE)  # type: ignore[attr-defined]
            if process.dead:
                continue
            if process.paused:
                process.held.append(one)
                continue
            self.steps += 1
            one._run()

    def resume(self, process: Process) -> None:
        """Let a paused process go on, with what has become ready meanwhile."""
        process.paused = False
        self._ready.extend(process.held)  # type: ignore[attr-defined]
        process.held.clear()


class Machine:
    """One run: its loop, its generator, and its threads."""

    current: Machine
    prefixes: tuple[str, ...] = (
        "halfway.kafka",
        "halfway.coordinator",
        "halfway.protocol",
        "halfway.simulated",
        "halfway.app.serve",
    )
    """The modules that run on it."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.loop = Loop()
        self.hub = greenlet.getcurrent()
        self.ident = threading.get_ident()
        self.threads: dict[greenlet.greenlet, Thread] = {}
        self.crashed: list[BaseException] = []
        """What threads have ended with."""
        self.ending = False
        self.oldest = 2
        """Up to which generation garbage is collected at the end."""
        self.late_share, self.late_s = 0.0, 0.0
        """Which share of the threads that could go on do so late, and how late at most."""
        self.stretch = 1.0
        """How many times longer a client's poll takes in which nothing comes: most steps of a run are such polls."""

    # --- for threads

    def wake(self, thread: greenlet.greenlet, answer: object, context: contextvars.Context) -> None:
        """Let a thread go on, soon or late."""
        if self.late_share and self.random.random() < self.late_share:
            self.loop.call_later(self.random.uniform(0, self.late_s), _resume, thread, answer, context=context)
        else:
            self.loop.call_soon(_resume, thread, answer, context=context)

    def monotonic(self) -> float:
        return self.loop.now

    def time(self) -> float:
        return EPOCH_S + self.loop.now + PROCESS.get().clock_s

    def time_ns(self) -> int:
        return round(self.time() * 1e9)

    def sleep(self, seconds: float) -> None:
        if threading.get_ident() == self.ident:
            _Waiter().wait(max(0.0, seconds))
        else:
            time.sleep(seconds)  # a real thread, left by a test before

    # --- in the place of Python's

    @contextmanager
    def installed(self) -> Iterator[Self]:
        """Run what follows on this machine, with the modules of the product that are loaded."""
        Machine.current = self
        undo = list(replace(self))
        asyncio.set_event_loop(self.loop)
        try:
            yield self
        finally:
            self._end()
            asyncio.set_event_loop(None)
            self.loop.close()
            for names, name, value in reversed(undo):
                names[name] = value

    def _end(self) -> None:
        """End what still runs, so that nothing of this run runs in the next one."""
        self.ending = True
        former, sys.unraisablehook = sys.unraisablehook, lambda _: None
        asyncio._set_running_loop(self.loop)  # the ends of tasks ask for it
        try:
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", "coroutine .* was never awaited", RuntimeWarning)
                self._end_all()
        finally:
            asyncio._set_running_loop(None)
            sys.unraisablehook = former

    def _end_all(self) -> None:
        for thread in list(self.threads):
            while not thread.dead:
                thread.throw(greenlet.GreenletExit)
        for task in asyncio.all_tasks(self.loop):
            task._log_destroy_pending = False  # type: ignore[attr-defined]
            coroutine: Any = task.get_coro()
            while getattr(coroutine, "cr_frame", None) is not None:  # it may wait once more at its end
                with suppress(BaseException):
                    coroutine.close()
            del coroutine
        self.loop._ready.clear()  # type: ignore[attr-defined]
        self.loop._timers.clear()
        gc.collect(self.oldest)


def _resume(thread: greenlet.greenlet, answer: object) -> None:
    if not thread.dead:
        thread.switch(answer)


class _Waiter:
    """One thread that waits, until it is woken or for some time."""

    __slots__ = ("answer", "context", "thread", "timer")

    def __init__(self) -> None:
        self.answer = False
        self.timer: asyncio.TimerHandle | None = None

    def wait(self, timeout: float | None) -> bool:
        """Give the loop its turn; return whether this was woken."""
        machine = Machine.current
        self.thread = greenlet.getcurrent()
        if machine.ending:
            raise greenlet.GreenletExit
        if self.thread is machine.hub:
            if timeout is not None and timeout <= 0:
                return False  # it only looks
            raise RuntimeError("the thread of the event loop would be blocked")
        self.context = contextvars.copy_context()
        if timeout is not None:
            self.timer = machine.loop.call_later(max(0.0, timeout), self._time_out, context=self.context)
        machine.hub.switch()
        return self.answer

    def _time_out(self) -> None:
        if not self.answer and self.timer is not None:
            self.timer = None
            _resume(self.thread, None)

    def wake(self) -> bool:
        """Let the thread go on; return False if its time has passed."""
        if self.answer or (self.timer is None and not hasattr(self, "context")):
            return False
        if self.timer is not None:
            self.timer.cancel()
            self.timer = None
        self.answer = True
        Machine.current.wake(self.thread, None, self.context)
        return True


class Lock:
    """`threading.Lock` and `RLock`."""

    reentrant = False

    def __init__(self) -> None:
        self.owner: Any = None
        self.count = 0
        self.waiters: deque[_Waiter] = deque()

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        me = greenlet.getcurrent()
        if self.owner is None or (self.reentrant and self.owner is me):
            self.owner, self.count = me, self.count + 1
            return True
        if not blocking:
            return False
        waiter = _Waiter()
        self.waiters.append(waiter)
        if waiter.wait(None if timeout < 0 else timeout):
            return True  # it was handed over
        self.waiters.remove(waiter)
        return False

    def release(self) -> None:
        self.count -= 1
        if self.count:
            return
        self.owner = None
        if self.waiters:
            waiter = self.waiters.popleft()
            self.owner, self.count = waiter.thread, 1
            waiter.wake()

    def locked(self) -> bool:
        return self.owner is not None

    def __enter__(self) -> bool:
        return self.acquire()

    def __exit__(self, *_: object) -> None:
        self.release()


class RLock(Lock):
    reentrant = True


class Condition:
    """`threading.Condition`."""

    def __init__(self, lock: Lock | None = None) -> None:
        self.lock = lock or RLock()
        self.acquire, self.release = self.lock.acquire, self.lock.release
        self.waiters: deque[_Waiter] = deque()

    def __enter__(self) -> bool:
        return self.lock.acquire()

    def __exit__(self, *_: object) -> None:
        self.lock.release()

    def wait(self, timeout: float | None = None) -> bool:
        waiter = _Waiter()
        self.waiters.append(waiter)
        count = self.lock.count
        self.lock.count = 1
        self.lock.release()
        try:
            return waiter.wait(timeout)
        finally:
            if not waiter.answer:
                self.waiters.remove(waiter)
            if not Machine.current.ending:
                self.lock.acquire()
                self.lock.count = count

    def wait_for(self, predicate: Callable[[], Any], timeout: float | None = None) -> Any:
        until = None if timeout is None else Machine.current.loop.now + timeout
        while not (found := predicate()):
            left = None if until is None else until - Machine.current.loop.now
            if left is not None and left <= 0:
                break
            self.wait(left)
        return found

    def notify(self, n: int = 1) -> None:
        while n and self.waiters:
            n -= self.waiters.popleft().wake()

    def notify_all(self) -> None:
        while self.waiters:
            self.waiters.popleft().wake()


class Event:
    """`threading.Event`."""

    def __init__(self) -> None:
        self._set = False
        self._condition = Condition(Lock())

    def is_set(self) -> bool:
        return self._set

    def set(self) -> None:
        self._set = True
        self._condition.notify_all()

    def clear(self) -> None:
        self._set = False

    def wait(self, timeout: float | None = None) -> bool:
        if not self._set:
            with self._condition:
                self._condition.wait(timeout)
        return self._set


class Semaphore:
    """`threading.Semaphore`."""

    def __init__(self, value: int = 1) -> None:
        self._value = value
        self._condition = Condition(Lock())

    def acquire(self, blocking: bool = True, timeout: float | None = None) -> bool:
        with self._condition:
            if not self._value and blocking:
                self._condition.wait_for(lambda: self._value, timeout)
            if not self._value:
                return False
            self._value -= 1
            return True

    def release(self, n: int = 1) -> None:
        self._value += n
        self._condition.notify(n)

    def __enter__(self) -> bool:
        return self.acquire()

    def __exit__(self, *_: object) -> None:
        self.release()


class Thread:
    """`threading.Thread`: a greenlet, of the process that makes it."""

    def __init__(
        self,
        group: None = None,
        target: Callable[..., object] | None = None,
        name: str | None = None,
        args: Sequence[Any] = (),
        kwargs: dict[str, Any] | None = None,
        *,
        daemon: bool | None = None,
    ) -> None:
        self.name, self.daemon = name or "thread", daemon
        self._work = (target, args, kwargs or {})
        self._greenlet: greenlet.greenlet | None = None
        self._ended = Event()

    def start(self) -> None:
        machine = Machine.current
        self._greenlet = greenlet.greenlet(self._run, parent=machine.hub)
        context = self._greenlet.gr_context = contextvars.copy_context()
        machine.threads[self._greenlet] = self
        machine.wake(self._greenlet, None, context.copy())

    def _run(self, _: object) -> None:
        target, args, kwargs = self._work
        machine = Machine.current
        try:
            if target is not None:
                target(*args, **kwargs)
        except greenlet.GreenletExit:
            pass
        except BaseException as error:  # noqa: BLE001 - whatever it is, the thread has ended with it
            machine.crashed.append(error)
        finally:
            machine.threads.pop(greenlet.getcurrent(), None)
            if not machine.ending:
                self._ended.set()

    def is_alive(self) -> bool:
        return self._greenlet is not None and not self._ended.is_set()

    def join(self, timeout: float | None = None) -> None:
        self._ended.wait(timeout)


class SimpleQueue:
    """`queue.SimpleQueue`."""

    def __init__(self) -> None:
        self._items: deque[Any] = deque()
        self._condition = Condition(Lock())

    def put(self, item: Any, block: bool = True, timeout: float | None = None) -> None:
        self._items.append(item)
        self._condition.notify()

    put_nowait = put

    def get(self, block: bool = True, timeout: float | None = None) -> Any:
        with self._condition:
            if block and not self._items:
                self._condition.wait_for(lambda: self._items, timeout)
        if not self._items:
            raise queue.Empty
        return self._items.popleft()

    def get_nowait(self) -> Any:
        return self.get(block=False)

    def empty(self) -> bool:
        return not self._items

    def qsize(self) -> int:
        return len(self._items)


class Executor(concurrent.futures.Executor):
    """`ThreadPoolExecutor`: a thread lives while there is work."""

    def __init__(self, max_workers: int | None = None, thread_name_prefix: str = "") -> None:
        self._most = max_workers or 32
        self._name = thread_name_prefix
        self._work: deque[Callable[[], None]] = deque()
        self._threads: dict[Thread, None] = {}
        self._is_shut = False

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> concurrent.futures.Future[Any]:
        if self._is_shut:
            raise RuntimeError("cannot schedule new futures after shutdown")
        future: concurrent.futures.Future[Any] = concurrent.futures.Future()
        context = contextvars.copy_context()

        def work() -> None:
            if not future.set_running_or_notify_cancel():
                return
            try:
                result = fn(*args, **kwargs)
            except greenlet.GreenletExit:
                raise
            except BaseException as error:  # noqa: BLE001 - the future has it
                future.set_exception(error)
            else:
                future.set_result(result)

        del context
        self._work.append(work)
        if len(self._threads) < self._most:
            thread = Thread(target=self._run, name=self._name)
            self._threads[thread] = None
            thread._work = (self._run, (thread,), {})
            thread.start()
        return future

    def _run(self, thread: Thread) -> None:
        while self._work:
            self._work.popleft()()
        del self._threads[thread]

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        self._is_shut = True
        if cancel_futures:
            self._work.clear()
        for thread in list(self._threads) if wait else ():
            thread.join()


class Schedule:
    """`halfway.simulated.schedule.Schedule` on the loop: what happens later is a timer, and nobody needs a lock."""

    def __init__(self, clock: Any, random: random.Random) -> None:
        self.clock = clock
        self.random = random
        self.context = contextvars.Context()

    def __enter__(self) -> None:
        """Nothing else runs meanwhile."""

    def __exit__(self, *_: object) -> None:
        """Nothing else has run."""

    def condition(self) -> Condition:
        return Condition(_FREE)

    def after(self, seconds: float, call: Callable[[], None]) -> None:
        Machine.current.loop.call_later(seconds, call, context=self.context)

    def run_due(self) -> None:
        """Leave that to the loop."""

    def wait(self, condition: Condition, timeout: float, look: Callable[[], Any]) -> Any:
        loop = Machine.current.loop
        if 0 < timeout <= _SHORT_S:
            timeout *= Machine.current.stretch
        until = loop.now + timeout if timeout >= 0 else float("inf")
        while True:
            found = look()
            if found is not None or loop.now >= until:
                return found
            condition.wait(None if timeout < 0 else until - loop.now)


class _Free(Lock):
    """A lock that nobody needs."""

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        return True

    def release(self) -> None:
        """Nobody waits for it."""


_FREE: Final = _Free()


class BrokersClock:
    """The clock of the simulated brokers, a `halfway.simulated.Clock`."""

    def wait(self, condition: threading.Condition, seconds: float) -> None:
        """Do nothing: `Schedule` waits by itself."""

    def monotonic(self) -> float:
        return Machine.current.loop.now

    def now_ms(self) -> int:
        return round((EPOCH_S + Machine.current.loop.now) * 1000)


# --- what is replaced, and where


def _offers(machine: Machine) -> dict[ModuleType, dict[str, Any]]:
    """Return what a machine offers in the place of Python's modules."""
    chance = machine.random

    def token_hex(size: int = 16) -> str:
        return chance.randbytes(size).hex()

    return {
        time: {
            "monotonic": machine.monotonic,
            "sleep": machine.sleep,
            "time": machine.time,
            "time_ns": machine.time_ns,
        },
        threading: {
            "Condition": Condition,
            "Event": Event,
            "Lock": Lock,
            "RLock": RLock,
            "Semaphore": Semaphore,
            "Thread": Thread,
            "get_ident": lambda: id(greenlet.getcurrent()),
        },
        queue: {"SimpleQueue": SimpleQueue, "Empty": queue.Empty},
        random: {"Random": random.Random, "choice": chance.choice, "random": chance.random, "uniform": chance.uniform},
        secrets: {"token_hex": token_hex},
        uuid: {"uuid4": lambda: uuid.UUID(bytes=chance.randbytes(16), version=4)},
        os: {"urandom": chance.randbytes},
        concurrent.futures: {"ThreadPoolExecutor": Executor},
    }


def offered() -> set[str]:
    """Return the names that are replaced, with their modules."""
    machine = Machine(0)
    machine.loop.close()
    return {f"{module.__name__}.{name}" for module, names in _offers(machine).items() for name in names}


def replace(machine: Machine) -> Iterator[tuple[dict[str, Any], str, Any]]:
    """Replace names of modules; yield what is to be put back."""
    offers = _offers(machine)
    replacements = {id(getattr(module, name)): new for module, names in offers.items() for name, new in names.items()}
    replacements |= {id(module): SimpleNamespace(**names) for module, names in offers.items() if module is not os}
    modules = [module for name, module in list(sys.modules.items()) if name.startswith(machine.prefixes)]
    for names, name, value in _places(
        (machine.prefixes, len(modules)), replacements, (*modules, concurrent.futures._base)
    ):
        if names.get(name) is value:
            yield names, name, value
            names[name] = replacements.get(id(value), machine.random)


_FOUND: Final[dict[object, list[tuple[dict[str, Any], str, Any]]]] = {}


def _places(
    key: object, replacements: Container[int], modules: Sequence[ModuleType]
) -> list[tuple[dict[str, Any], str, Any]]:
    """Return where something is to be replaced, and what; it is looked for once for the same modules."""
    if key not in _FOUND:
        _FOUND[key] = [
            (vars(module), name, value)
            for module in modules
            for name, value in vars(module).items()
            if id(value) in replacements or isinstance(value, random.SystemRandom)
        ]
    return _FOUND[key]
