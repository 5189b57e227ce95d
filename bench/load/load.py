"""The load process: `python -m bench.load.load PLAN RESULT`, two files of JSON (`plan.LoadPlan`, `plan.LoadResult`).

Closed loop: each caller begins its next transaction when the last one is confirmed. Open loop (`rate_per_s`):
transactions begin by the clock, whether or not earlier ones are done, and latency counts from their due times.
"""

from __future__ import annotations

import asyncio
import gc
import os
import sys
import time
from array import array
from collections import deque
from collections.abc import Sequence
from contextlib import AsyncExitStack, suppress
from pathlib import Path
from typing import Final

import msgspec
from aiohttp import ClientSession

from bench.audit.journal import Journal, SentTransaction
from bench.figures import cpu_us, percentile
from bench.load import event_loop
from bench.load.callers import BenchCaller, Caller
from bench.load.client_caller import ClientCaller, Messages
from bench.load.stream_caller import Operations, StreamCaller
from bench.load.stream_client import StreamClient
from bench.load.wire import Contents, Requests
from bench.plan import GROUP, LoadPlan, LoadResult, Window
from halfway.client import Halfway

MAX_FAILURES: Final = 1_000
FINISH_S: Final = 30.0
_WRITTEN_S: Final = 1.0
"""How long to wait until the last accepted ends are written."""
_TICK_S: Final = 0.002
_JOURNAL_BUFFER: Final = 1024 * 1024


class Load:
    """The desk of all callers: starts transactions, measures them, and records their results in the journal."""

    def __init__(self, plan: LoadPlan, journal: Journal) -> None:
        """Build the requests; nothing connects yet."""
        self._plan = plan
        self._pids = {**plan.pids, "load": os.getpid()}
        self._requests = Requests(
            host=f"{plan.host}:{plan.port}", topic=plan.topic, batch=plan.batch, groups=plan.groups
        )
        self._journal = journal
        self._latencies = array("d")
        self._transactions = 0
        self._failed = 0
        self._first_failure = ""
        self._running = True
        self._idle: deque[BenchCaller] = deque()
        self._due: deque[float] = deque()
        self._all_idle = asyncio.Event()

    async def run(self) -> LoadResult:
        """Connect, carry out the plan, and finish the transactions under way."""
        async with AsyncExitStack() as stack:
            return await self._load(await self._callers(stack))

    async def _callers(self, stack: AsyncExitStack) -> Sequence[BenchCaller]:
        plan = self._plan
        if plan.client:
            client = await stack.enter_async_context(Halfway(f"http://{plan.host}:{plan.port}", GROUP))
            messages = Messages(plan.topic)
            return [ClientCaller(client, messages, self) for _ in range(plan.callers)]
        if plan.stream:
            session = await stack.enter_async_context(ClientSession())
            stream = await StreamClient.connect(session, f"http://{plan.host}:{plan.port}")
            stack.push_async_callback(stream.close)
            if plan.oneway:
                stack.push_async_callback(asyncio.sleep, _WRITTEN_S)
            operations = Operations(plan.topic, confirm=not plan.oneway)
            return [StreamCaller(stream, operations, self) for _ in range(plan.callers)]
        loop = asyncio.get_running_loop()
        connected = []
        for _ in range(plan.callers):
            _, caller = await loop.create_connection(
                lambda: Caller(self._requests, self, batch=plan.batch > 0), plan.host, plan.port
            )
            connected.append(caller)
        return connected

    async def _load(self, callers: Sequence[BenchCaller]) -> LoadResult:
        plan = self._plan
        gc.collect()
        gc.freeze()
        self._wake()
        clock = None if plan.rate_per_s is None else asyncio.create_task(self._by_the_clock(plan.rate_per_s))
        try:
            await asyncio.sleep(plan.lead_s)
            windows = await self._windows()
        finally:
            if clock is not None:
                clock.cancel()
            self._running = False
        self._due.clear()
        with suppress(TimeoutError):
            async with asyncio.timeout(FINISH_S):
                await self._until_idle()
        for caller in callers:
            caller.close()
        return LoadResult(windows=windows, failed=self._failed, first_failure=self._first_failure)

    async def _windows(self) -> list[Window]:
        windows = []
        self._latencies, self._transactions = array("d"), 0
        started, cpu = time.perf_counter(), self._cpu()
        for number in range(1, self._plan.windows + 1):
            await asyncio.sleep(self._plan.window_s)
            now, used = time.perf_counter(), self._cpu()
            latencies, transactions = self._latencies, self._transactions
            self._latencies, self._transactions = array("d"), 0
            if number == self._plan.windows:
                self._running = False
            ordered = sorted(latencies)
            windows.append(
                Window(
                    seconds=now - started,
                    transactions=transactions,
                    p50_ms=percentile(ordered, 0.5) * 1000,
                    p99_ms=percentile(ordered, 0.99) * 1000,
                    cpu_us={name: used[name] - cpu[name] for name in used},
                )
            )
            started, cpu = now, used
        return windows

    def _cpu(self) -> dict[str, float]:
        return {name: cpu_us(pid) for name, pid in self._pids.items()}

    async def _until_idle(self) -> None:
        self._all_idle.clear()
        if len(self._idle) < self._plan.callers:
            await self._all_idle.wait()

    # --- when to begin

    def _wake(self) -> None:
        """Start the callers that connected before the load began."""
        if self._plan.rate_per_s is None:
            idle, self._idle = self._idle, deque()
            for caller in idle:
                self.ready(caller)

    async def _by_the_clock(self, rate: float) -> None:
        started, count_started = time.perf_counter(), 0
        while True:
            await asyncio.sleep(_TICK_S)
            now = time.perf_counter()
            due = int((now - started) * rate)
            for number in range(count_started, due):
                self._due.append(started + number / rate)
            count_started = due
            while self._due and self._idle:
                self._idle.pop().begin(self._due.popleft())

    def ready(self, caller: BenchCaller) -> None:
        if self._running and self._failed < MAX_FAILURES:
            if self._due:
                caller.begin(self._due.popleft())
                return
            if self._plan.rate_per_s is None:
                caller.begin(time.perf_counter())
                return
        self._idle.append(caller)
        if len(self._idle) == self._plan.callers:
            self._all_idle.set()

    # --- results

    def confirmed(self, started: float, transactions: Sequence[SentTransaction]) -> None:
        self._latencies.append(time.perf_counter() - started)
        self._transactions += len(transactions)
        self._journal.committed(transactions)

    def unconfirmed(self, transactions: Sequence[SentTransaction]) -> None:
        self._journal.unconfirmed(transactions)

    def unanswered(self, contents: Contents) -> None:
        self._journal.unanswered(contents)

    def failed(self, what: str) -> None:
        self._failed += 1
        self._first_failure = self._first_failure or what


def main(plan_path: str, result_path: str) -> None:
    """Carry out a plan."""
    plan = msgspec.json.decode(Path(plan_path).read_bytes(), type=LoadPlan)
    with Path(plan.journal_path).open("wb", buffering=_JOURNAL_BUFFER) as file:
        result = event_loop.run(Load(plan, Journal(file)).run())
    Path(result_path).write_bytes(msgspec.json.encode(result))


if __name__ == "__main__":
    main(*sys.argv[1:])
