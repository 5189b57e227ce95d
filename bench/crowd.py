"""The crowd: `python -m bench.crowd PLAN RESULT`, two files of JSON (`CrowdPlan`, `CrowdResult`).

Callers come by the clock, whether earlier ones are served or not, and share a pool of connections. Each prepares, and
commits what was prepared; a caller waits for an answer as long as its patience lasts, and then closes its connection,
as a client's time-out does. Who is refused a prepare gives its transaction up; who is refused an end, or hears nothing,
sends it again after the time that `Retry-After` names, as its local transaction stands.

First comes a small load, then the large one, then the small one again: so it tells when the small one is served as it
was before.
"""

from __future__ import annotations

import asyncio
import gc
import os
import sys
import time
from collections import Counter, deque
from pathlib import Path
from typing import Final

import msgspec

from bench import event_loop
from bench.crowd_connection import Connection, Order
from bench.figures import percentile
from bench.journal import Journal
from bench.wire import Orders, retry_after

FINISH_S: Final = 30.0
NO_ANSWER: Final = "none"
_CREATED: Final = 201
_OK: Final = 200
_OVERLOADED: Final = 429
_REFUSALS: Final = (_OVERLOADED, 503)
_TICK_S: Final = 0.002
_CONNECTING: Final = 100
"""Connections that may be on their way at once."""
_AGAIN_S: Final = 1.0
"""After which an end is sent again that was not answered."""
_JOURNAL_BUFFER: Final = 1024 * 1024


class CrowdPlan(msgspec.Struct, frozen=True, kw_only=True):
    """What a crowd is to do; rates in transactions a second."""

    host: str
    port: int
    topic: str
    name: str
    """Begins the ids that the callers choose."""
    connections: int
    rate_per_s: float
    seconds: float
    small_rate_per_s: float
    before_s: float
    after_s: float
    patience_s: float
    window_s: float
    nice: int
    journal_path: str


class CrowdWindow(msgspec.Struct, kw_only=True):
    """What one window saw; answers to prepares and to ends by status, `none` where the caller's patience ended."""

    phase: str
    seconds: float = 0.0
    offered: int = 0
    """Transactions that came due."""
    without_connection: int = 0
    """Those of them that found every connection of the pool waiting for an answer, and were given up."""
    prepares: dict[str, int] = {}
    ends: dict[str, int] = {}
    without_retry_after: int = 0
    """Refusals (429, 503) that name no time to wait."""
    unlike: int = 0
    """Answers that are neither what was asked for nor a refusal, and connections that broke."""
    committed: int = 0
    p50_ms: float = 0.0
    """From when a transaction was due to its confirmed commit; after the load of those that came after it only."""
    p99_ms: float = 0.0


class CrowdResult(msgspec.Struct, frozen=True, kw_only=True):
    """What a crowd saw."""

    windows: list[CrowdWindow]
    load_ended: float
    """On the monotonic clock."""
    open_at_most: int
    first_unlike: str = ""


class Crowd:
    """All callers of one process."""

    def __init__(self, plan: CrowdPlan, journal: Journal) -> None:
        """Build the requests; nothing is connected."""
        self._plan = plan
        self._journal = journal
        self._orders = Orders(host=f"{plan.host}:{plan.port}", topic=plan.topic, name=plan.name)
        self._free: deque[Connection] = deque()
        self._open: set[Connection] = set()
        self._connecting = 0
        self._open_at_most = 0
        self._patience: deque[tuple[float, Connection, int]] = deque()
        self._again: deque[tuple[float, Order]] = deque()
        self._unfinished = 0
        self._tasks: set[asyncio.Task[None]] = set()
        self._first_unlike = ""
        self._phase = "before"
        self._rate = plan.small_rate_per_s
        self._windows: list[CrowdWindow] = []
        self._begin_window()

    async def run(self) -> CrowdResult:
        """Connect, carry the plan out, finish what is under way."""
        plan = self._plan
        while len(self._open) < plan.connections:
            self._connect()
            await asyncio.sleep(_TICK_S)
        gc.collect()
        gc.freeze()
        load_ended = 0.0
        async with asyncio.TaskGroup() as group:
            ticking = group.create_task(self._by_the_clock())
            await self._windows_of("before", plan.small_rate_per_s, plan.before_s)
            await self._windows_of("load", plan.rate_per_s, plan.seconds)
            load_ended = time.monotonic()
            await self._windows_of("after", plan.small_rate_per_s, plan.after_s)
            self._phase, self._rate = "finish", 0.0
            self._begin_window()
            until = time.monotonic() + FINISH_S
            while self._unfinished and time.monotonic() < until:  # noqa: ASYNC110 - an event for each costs more
                await asyncio.sleep(_TICK_S)
            ticking.cancel()
        self._end_window()
        for connection in list(self._open):
            self._give_up(connection)
        for _, order in self._again:
            self._journal.unconfirmed([(order.content, order.id)])
        return CrowdResult(
            windows=self._windows,
            load_ended=load_ended,
            open_at_most=self._open_at_most,
            first_unlike=self._first_unlike,
        )

    # --- windows

    def _begin_window(self) -> None:
        self._window = CrowdWindow(phase=self._phase)
        self._window_began = time.perf_counter()
        self._prepares: Counter[str] = Counter()
        self._ends: Counter[str] = Counter()
        self._latencies: list[float] = []

    def _end_window(self) -> None:
        window, ordered = self._window, sorted(self._latencies)
        window.seconds = time.perf_counter() - self._window_began
        window.prepares, window.ends = dict(self._prepares), dict(self._ends)
        window.p50_ms, window.p99_ms = percentile(ordered, 0.5) * 1000, percentile(ordered, 0.99) * 1000
        self._windows.append(window)

    async def _windows_of(self, phase: str, rate: float, seconds: float) -> None:
        self._phase, self._rate = phase, rate
        self._begin_window()
        began = time.perf_counter()
        for number in range(1, round(seconds / self._plan.window_s) + 1):
            await asyncio.sleep(began + number * self._plan.window_s - time.perf_counter())
            self._end_window()
            self._begin_window()

    # --- what happens by the clock

    async def _by_the_clock(self) -> None:
        last, owed = time.perf_counter(), 0.0
        while True:
            await asyncio.sleep(_TICK_S)
            now = time.perf_counter()
            # By the time before: what came while this process did not run was in time.
            self._end_patience(last)
            owed += (now - last) * self._rate
            last = now
            self._end_again(now)
            due, owed = int(owed), owed % 1
            self._window.offered += due
            for left in range(due, 0, -1):
                if not self._free:
                    self._window.without_connection += left
                    break
                self._prepare(now)
            self._connect()

    def _connect(self) -> None:
        wanted = self._plan.connections - len(self._open) - self._connecting
        for _ in range(min(wanted, _CONNECTING - self._connecting)):
            self._connecting += 1
            task = asyncio.create_task(self._connected_once())
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _connected_once(self) -> None:
        plan, loop = self._plan, asyncio.get_running_loop()
        try:
            async with asyncio.timeout(plan.patience_s):
                await loop.create_connection(lambda: Connection(self), plan.host, plan.port)
        except OSError as error:
            self._unlike(f"no connection: {error!r}")
            await asyncio.sleep(_AGAIN_S)
        finally:
            self._connecting -= 1

    def _end_patience(self, now: float) -> None:
        while self._patience and self._patience[0][0] <= now:
            _, connection, asked = self._patience.popleft()
            if connection.order is not None and connection.asked == asked:
                self._give_up(connection)

    def _end_again(self, now: float) -> None:
        while self._again and self._free and self._again[0][0] <= now:
            self._end(self._free.pop(), self._again.popleft()[1], now)

    # --- requests

    def _prepare(self, now: float) -> None:
        content, transaction_id, request = self._orders.next_prepare()
        self._unfinished += 1
        connection = self._free.pop()
        connection.ask(Order(content, transaction_id, now, self._phase), request, ending=False)
        self._patience.append((now + self._plan.patience_s, connection, connection.asked))

    def _end(self, connection: Connection, order: Order, now: float) -> None:
        connection.ask(order, self._orders.end(order.id), ending=True)
        self._patience.append((now + self._plan.patience_s, connection, connection.asked))

    def connected(self, connection: Connection) -> None:
        """Hear that a connection is there."""
        self._open.add(connection)
        self._open_at_most = max(self._open_at_most, len(self._open))
        self._free.append(connection)

    def lost(self, connection: Connection, error: Exception | None) -> None:
        """Hear that the other side closed a connection."""
        order = connection.order
        if order is None:
            self._forget(connection)
            return
        self._unlike(f"a connection was closed before the answer: {error!r}")
        self._unanswered(connection, order)
        self._forget(connection)

    def broken(self, connection: Connection, what: str) -> None:
        """Hear that what came is no answer."""
        self._unlike(what)
        self._give_up(connection)

    def _give_up(self, connection: Connection) -> None:
        order = connection.order
        if order is not None:
            (self._ends if connection.ending else self._prepares)[NO_ANSWER] += 1
            self._unanswered(connection, order)
        self._forget(connection)

    def _forget(self, connection: Connection) -> None:
        connection.order = None
        connection.close()
        self._open.discard(connection)
        if connection in self._free:
            self._free.remove(connection)

    def _unanswered(self, connection: Connection, order: Order) -> None:
        if connection.ending:
            self._again_later(order, _AGAIN_S)
        else:
            self._unfinished -= 1
            self._journal.unanswered([order.content], brought=order.id)

    def _again_later(self, order: Order, after_s: float) -> None:
        self._again.append((time.perf_counter() + after_s, order))

    def answered(self, connection: Connection, status: int, answer: bytes) -> None:
        """Take an answer."""
        order, connection.order = connection.order, None
        if order is None:
            self._unlike(f"an answer to nothing: {answer[:200]!r}")
            self._forget(connection)
            return
        (self._ends if connection.ending else self._prepares)[str(status)] += 1
        wait_s = retry_after(answer) if status in _REFUSALS else None
        if status in _REFUSALS and wait_s is None:
            self._window.without_retry_after += 1
        if status in _REFUSALS and b"\r\nContent-Type: application/problem+json" not in answer:
            self._unlike(f"a refusal without a problem document: {answer[-300:]!r}")
        if connection.ending:
            self._end_answered(order, status, answer, wait_s)
        elif status == _CREATED:
            self._end(connection, order, time.perf_counter())
            return
        else:
            self._unfinished -= 1
            if status != _OVERLOADED:
                self._journal.unanswered([order.content], brought=order.id)
            if status not in _REFUSALS:
                self._unlike(f"a prepare was answered {status}: {answer[-300:]!r}")
        if b"\r\nConnection: close\r\n" in answer:
            self._forget(connection)
        else:
            self._free.append(connection)

    def _end_answered(self, order: Order, status: int, answer: bytes, wait_s: float | None) -> None:
        if status == _OK and b'"committed"' in answer:
            self._unfinished -= 1
            self._journal.committed([(order.content, order.id)])
            self._window.committed += 1
            if self._phase != "after" or order.phase == "after":
                self._latencies.append(time.perf_counter() - order.due)
        elif status in _REFUSALS:
            self._again_later(order, wait_s or _AGAIN_S)
        else:
            self._unfinished -= 1
            self._journal.unconfirmed([(order.content, order.id)])
            self._unlike(f"a commit was answered {status}: {answer[-300:]!r}")

    def _unlike(self, what: str) -> None:
        self._window.unlike += 1
        self._first_unlike = self._first_unlike or what


def main(plan_path: str, result_path: str) -> None:
    """Carry out a plan."""
    plan = msgspec.json.decode(Path(plan_path).read_bytes(), type=CrowdPlan)
    os.nice(plan.nice)
    with Path(plan.journal_path).open("wb", buffering=_JOURNAL_BUFFER) as file:
        result = event_loop.run(Crowd(plan, Journal(file)).run())
    Path(result_path).write_bytes(msgspec.json.encode(result))


if __name__ == "__main__":
    main(*sys.argv[1:])
