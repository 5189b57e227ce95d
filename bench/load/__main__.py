"""The load process: `python -m bench.load PLAN RESULT`, two files of JSON (`LoadPlan`, `LoadResult`)."""

from __future__ import annotations

import asyncio
import gc
import os
import sys
import time
from array import array
from collections import Counter, deque
from collections.abc import Coroutine, Sequence
from contextlib import AsyncExitStack, suppress
from pathlib import Path
from typing import Any, Final

import msgspec
import uvloop
from aiohttp import ClientSession

from bench.audit import Journal, SentTransaction
from bench.figures import cpu_us, percentile, standing
from bench.load.callers import Caller, ClientCaller, HttpCaller, StreamCaller, ThreadCaller
from bench.load.wire import Batches, Operations, Singles, messages
from bench.plan import LoadPlan, LoadResult, Phase, Window
from halfway.client import Halfway, SyncHalfway
from halfway.embedded.broker import HOST
from tests.support.coordinator.stream_client import StreamClient

MAX_FAILURES: Final = 1_000
FINISH_S: Final = 30.0
_WRITTEN_S: Final = 1.0
"""How long to wait until the last accepted ends are written."""
_TICK_S: Final = 0.002
_MAX_CONNECTING: Final = 100
"""The most connections that are opened at the same time."""
_JOURNAL_BUFFER: Final = 1024 * 1024


class Load:
    """The desk of all callers: starts transactions, measures them, and records their results in the journal."""

    def __init__(self, plan: LoadPlan, journal: Journal) -> None:
        """Keep the plan; nothing connects yet."""
        self._plan = plan
        self._pids = {**plan.pids, "load": os.getpid()}
        self._journal = journal
        self.unconfirmed, self.unanswered = journal.unconfirmed, journal.unanswered
        self._running = True
        self._rate: float | None = None
        self._failed = 0
        self._first_failure = ""
        self._requests = 0
        self._open = self._open_at_most = 0
        self._idle: deque[Caller] = deque()
        self._waiting: deque[tuple[float, HttpCaller, int]] = deque()
        self._tasks: set[asyncio.Task[None]] = set()
        self._all_idle = asyncio.Event()
        self._windows: list[Window] = []
        self.connecting = asyncio.Semaphore(_MAX_CONNECTING)
        self.patience_s = plan.patience_s
        self.without_retry_after = 0
        self.phase = ""
        self._begin_window()

    async def run(self) -> LoadResult:
        """Connect, carry out the plan, and finish the transactions under way."""
        async with AsyncExitStack() as stack:
            callers = await self._callers(stack)
            gc.collect()
            gc.freeze()
            clock = asyncio.create_task(self._by_the_clock())
            try:
                for phase in self._plan.phases:
                    await self._carry_out(phase)
                await self._finish()
            finally:
                clock.cancel()
            for task in self._tasks:
                task.cancel()
            for caller in callers:
                caller.close()
        return LoadResult(
            windows=self._windows,
            failed=self._failed,
            first_failure=self._first_failure,
            requests=self._requests,
            connections=self._open_at_most,
            without_retry_after=self.without_retry_after,
        )

    async def _callers(self, stack: AsyncExitStack) -> Sequence[Caller]:
        plan, url = self._plan, f"http://{HOST}:{self._plan.ports[0]}"
        if plan.shape in {"client", "client-rest"}:
            on_stream = plan.shape == "client"
            made = [
                await stack.enter_async_context(Halfway(url, plan.groups[0], stream=on_stream))
                for _ in range(plan.streams)
            ]
            ready = messages(plan.topic)
            return [ClientCaller(made[turn % len(made)], ready, self) for turn in range(plan.callers)]
        if plan.shape in {"threads", "threads-rest"}:
            of_threads = SyncHalfway(url, plan.groups[0], stream=plan.shape == "threads")
            stack.push_async_callback(asyncio.to_thread, of_threads.close)
            ready = messages(plan.topic)
            return [ThreadCaller(of_threads, ready, self) for _ in range(plan.callers)]
        if plan.shape in {"stream", "oneway"}:
            session = await stack.enter_async_context(ClientSession())
            streams = [await StreamClient.connect(session, url) for _ in range(plan.streams)]
            for stream in streams:
                stack.push_async_callback(stream.close)
            confirm = plan.shape == "stream"
            if not confirm:
                stack.push_async_callback(asyncio.sleep, _WRITTEN_S)
            operations = Operations(plan.topic, confirm=confirm)
            return [StreamCaller(streams[turn % len(streams)], operations, self) for turn in range(plan.callers)]
        requests = Batches(plan) if plan.shape == "batch" else Singles(plan)
        callers = [HttpCaller(self, requests, plan, turn) for turn in range(plan.callers)]
        await asyncio.gather(*(caller.connect() for caller in callers))
        for caller in callers:
            self.ready(caller)
        return callers

    async def _finish(self) -> None:
        self._rate, self.phase = 0.0, "finish"
        self._all_idle.clear()
        with suppress(TimeoutError):
            async with asyncio.timeout(FINISH_S):
                if len(self._idle) < self._plan.callers:
                    await self._all_idle.wait()
        self._end_window()

    # --- windows

    async def _carry_out(self, phase: Phase) -> None:
        self.phase, self._rate = phase.name, phase.rate_per_s
        length = phase.seconds / phase.windows
        self._begin_window()
        if self._rate is None:
            idle, self._idle = self._idle, deque()
            for caller in idle:
                self.ready(caller)
        started = time.perf_counter()
        for number in range(1, phase.windows + 1):
            await asyncio.sleep(started + number * length - time.perf_counter())
            if self._rate is None and phase.seconds:
                await self._until_confirmed()
            if phase is self._plan.phases[-1] and number == phase.windows:
                self._running = False
            self._end_window()
            self._begin_window()

    async def _until_confirmed(self) -> None:
        """Wait until a transaction that began in this phase has ended, which can take a slow machine longer."""
        with suppress(TimeoutError):
            async with asyncio.timeout(FINISH_S):
                while not self._latencies and self._failed < MAX_FAILURES:  # noqa: ASYNC110 - an event for each costs more
                    await asyncio.sleep(_TICK_S)

    def _begin_window(self) -> None:
        self._latencies, self._window = array("d"), Window(prepares=Counter(), ends=Counter())
        self._window_started = time.perf_counter()
        self._cpu = {name: cpu_us(pid) for name, pid in self._pids.items()}

    def _end_window(self) -> None:
        window, ordered = self._window, sorted(self._latencies)
        window.phase, window.seconds = self.phase, time.perf_counter() - self._window_started
        window.p50_ms, window.p99_ms = (percentile(ordered, share) * 1000 for share in (0.5, 0.99))
        window.cpu_us = {name: cpu_us(pid) - self._cpu[name] for name, pid in self._pids.items()}
        window.held = standing(next(iter(self._pids.values())))
        self._windows.append(window)

    # --- when to begin

    async def _by_the_clock(self) -> None:
        last, owed = time.perf_counter(), 0.0
        while True:
            await asyncio.sleep(_TICK_S)
            now = time.perf_counter()
            # Use the last time: answers that arrived while this process did not run were in time.
            while self._waiting and self._waiting[0][0] <= last:
                _, caller, request = self._waiting.popleft()
                caller.end_patience(request)
            owed += (now - last) * (self._rate or 0.0)
            last, due, owed = now, int(owed), owed % 1
            self._window.offered += due
            for left in range(due, 0, -1):
                if not self._idle:
                    self._window.without_caller += left
                    break
                self._idle.pop().begin(now)

    def ready(self, caller: Caller) -> None:
        """Begin its next transaction, or record that it is idle."""
        if self._running and self._rate is None and self.phase and self._failed < MAX_FAILURES:
            caller.begin(time.perf_counter())
            return
        self._idle.append(caller)
        if len(self._idle) == self._plan.callers:
            self._all_idle.set()

    def gone(self, caller: Caller) -> None:
        """Record that an idle caller lost its connection."""
        with suppress(ValueError):
            self._idle.remove(caller)

    def spawn(self, work: Coroutine[Any, Any, None]) -> None:
        """Run a caller's work beside the others."""
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    # --- results

    def opened(self, change: int) -> None:
        """Record that a connection was opened (1) or closed (-1)."""
        self._open += change
        self._open_at_most = max(self._open_at_most, self._open)

    def sent(self, caller: HttpCaller, request: int) -> None:
        """Record that a caller waits for an answer."""
        self._requests += 1
        if self.patience_s is not None:
            self._waiting.append((time.perf_counter() + self.patience_s, caller, request))

    def answered(self, status: str, *, ending: bool) -> None:
        """Count an answer."""
        (self._window.ends if ending else self._window.prepares)[status] += 1

    def confirmed(self, caller: Caller, transactions: Sequence[SentTransaction]) -> None:
        """Record transactions whose commit was confirmed."""
        if caller.phase == self.phase:
            self._latencies.append(time.perf_counter() - caller.started)
        self._window.transactions += len(transactions)
        self._journal.committed(transactions)

    def failed(self, what: str) -> None:
        """Record an unexpected answer."""
        self._failed += 1
        self._first_failure = self._first_failure or what


def main(plan_path: str, result_path: str) -> None:
    """Carry out a plan."""
    plan = msgspec.json.decode(Path(plan_path).read_bytes(), type=LoadPlan)
    os.nice(plan.nice)
    with Path(plan.journal_path).open("wb", buffering=_JOURNAL_BUFFER) as file:
        result = uvloop.run(Load(plan, Journal(file)).run())
    Path(result_path).write_bytes(msgspec.json.encode(result))


if __name__ == "__main__":
    main(*sys.argv[1:])
