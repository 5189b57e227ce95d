"""The machines that run the Kafka adapter of a test: in virtual time, or in real time beside real sockets.

Threads are greenlets on the loop of the test, and the wall clock stands still until a test moves it.
"""

from __future__ import annotations

import asyncio
import concurrent.futures._base as futures
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from contextvars import Context
from types import SimpleNamespace
from typing import Any, Final
from unittest.mock import patch

import greenlet

from halfway.kafka.clients import threads, transactional_producer
from halfway.simulated import cluster as clusters
from tests.simulation import machine as machines
from tests.simulation.instances import Closer, surroundings
from tests.simulation.machine import OUTSIDE, PROCESS, Executor, Loop, Machine, Process, Schedule
from tests.support.surroundings import ManualClock

SEED: Final = 1


class StillMachine(Machine):
    """A machine whose wall clock a test moves."""

    running: StillMachine | None = None

    def __init__(self) -> None:
        super().__init__(SEED)
        self.loop.close()
        self.oldest = 1
        self.clock = ManualClock()
        self.killed: list[Process] = []
        OUTSIDE.globals.clear()
        OUTSIDE.globals["closer"] = threads.ClientCloser()

    def time(self) -> float:
        return self.clock.now_ms() / 1000

    def time_ns(self) -> int:
        return self.clock.now_ms() * 1_000_000

    def run(self, instance: object) -> None:
        """Let an instance run on this machine."""

    def kill(self, process: Process) -> None:
        """End a process at once. It is paused, not dead: its tasks must be cancelled at the end."""
        process.paused = True
        self.killed.append(process)

    def leave(self, instance: object) -> None:
        """Record that an instance has ended."""

    @contextmanager
    def hurry(self) -> Iterator[None]:
        """Let short polls take next to no time."""
        self.stretch, before = 0.01, self.stretch
        try:
            yield
        finally:
            self.stretch = before


def machine() -> StillMachine:
    """Return the machine of the test: in virtual time if its loop is that of `new_loop`."""
    found = StillMachine.running
    if isinstance(found, SocketMachine) and found.loop.asyncio is not asyncio.get_running_loop():
        found.end()  # a test has failed
    return StillMachine.running or SocketMachine()


class BrokersClock(machines.BrokersClock):
    def now_ms(self) -> int:
        return Machine.current.time_ns() // 1_000_000


# --- in virtual time


class _VirtualLoop(Loop):
    def run_until_complete(self, future: Any) -> Any:
        """Run a task; what is left is cancelled all at once at the end, with what was killed."""
        if not asyncio.iscoroutine(future) and not isinstance(future, asyncio.Task):
            for process in machine().killed:
                self.resume(process)
        return super().run_until_complete(future)


def _no_world() -> Any:
    raise AssertionError("there are no other instances")


def new_loop() -> Loop:
    """Return the loop of a new machine, which is installed until the loop is closed."""
    new, stack = StillMachine(), ExitStack()
    new.loop = _VirtualLoop()
    stack.enter_context(surroundings(_no_world))
    stack.enter_context(new.installed())
    StillMachine.running = new

    def close() -> None:
        StillMachine.running = None
        del new.loop.close
        stack.close()

    new.loop.close = close  # type: ignore[method-assign]
    return new.loop


# --- beside real sockets


class RealTime:
    """The loop of a test as a machine uses it: nothing of the machine is called any more once it has ended."""

    def __init__(self) -> None:
        self.asyncio = asyncio.get_running_loop()
        self.ahead_s = 0.0
        self.has_ended = False

    def call_soon(self, call: Callable[..., object], *args: Any, context: Context | None = None) -> asyncio.Handle:
        return self.asyncio.call_soon(self._call, call, args, context=context)

    def call_later(
        self, seconds: float, call: Callable[..., object], *args: Any, context: Context | None = None
    ) -> asyncio.TimerHandle:
        return self.asyncio.call_later(seconds, self._call, call, args, context=context)

    def _call(self, call: Callable[..., object], args: Sequence[Any]) -> None:
        if not self.has_ended:
            call(*args)

    @property
    def now(self) -> float:
        return self.asyncio.time() + self.ahead_s

    @now.setter
    def now(self, seconds: float) -> None:
        self.ahead_s = seconds - self.asyncio.time()


class SocketMachine(StillMachine):
    """A machine on the loop of a test that has sockets and threads: only the Kafka adapter and the broker run on it.

    It is installed until all its instances have left.
    """

    prefixes = ("halfway.kafka", "halfway.simulated")

    def __init__(self) -> None:
        super().__init__()
        self.loop: Any = RealTime()
        self._instances: set[object] = set()
        self._stack = ExitStack()
        closer, loop = Closer(), self.loop.asyncio
        for owner, name, value in (
            (threads, "CLOSER", closer),
            (transactional_producer, "CLOSER", closer),
            (clusters, "Schedule", Schedule),
            (loop, "run_in_executor", self._run_in_executor(loop.run_in_executor)),
        ):
            self._stack.enter_context(patch.object(owner, name, value))
        Machine.current = StillMachine.running = self
        self._undo = list(machines.replace(self))
        kinds = {name: self._own_or_real(name) for name in ("Condition", "Event", "Lock", "RLock")}
        futures.threading = SimpleNamespace(**kinds)  # type: ignore[attr-defined,assignment]

    @staticmethod
    def _own_or_real(name: str) -> Callable[..., Any]:
        """Return what makes a lock: the machine's for its processes, a real one for the threads of the test."""
        own, real = getattr(machines, name), getattr(threading, name)

        def make(*args: Any) -> Any:
            return (real if PROCESS.get() is OUTSIDE else own)(*args)

        return make

    @staticmethod
    def _run_in_executor(run: Callable[..., Any]) -> Callable[..., Any]:
        def run_in_executor(executor: Any, work: Callable[..., Any], *args: Any) -> Any:
            if executor is None and PROCESS.get() is not OUTSIDE:
                executor = PROCESS.get().globals.setdefault("executor", Executor(32))
            return run(executor, work, *args)

        return run_in_executor

    def run(self, instance: object) -> None:
        self._instances.add(instance)

    def kill(self, process: Process) -> None:
        """End the threads of a process: what its tasks wait for never comes."""
        super().kill(process)
        self._end_threads([one for one in self.threads if one.gr_context and one.gr_context.get(PROCESS) is process])

    def _end_threads(self, ended: Sequence[greenlet.greenlet]) -> None:
        self.ending = True
        for thread in ended:
            while not thread.dead:
                thread.throw(greenlet.GreenletExit)
        self.ending = False

    def leave(self, instance: object) -> None:
        self._instances.discard(instance)
        if not self._instances:
            self.end()

    def end(self) -> None:
        """End its threads, and put Python's back."""
        self._end_threads(list(self.threads))
        self.ending = True
        for names, name, value in reversed(self._undo):
            names[name] = value
        self._stack.close()
        self.loop.has_ended = True
        StillMachine.running = None
