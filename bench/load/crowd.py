"""The crowd: `python -m bench.load.crowd PLAN RESULT`, two files of JSON (`CrowdPlan`, `CrowdResult`).

Callers arrive by the clock, whether or not earlier ones are served, and share a pool of connections. Each prepares and
commits one transaction. If an answer does not arrive within the caller's patience, it closes its connection, as a
client's time-out does. A caller whose prepare is refused gives up. A caller whose end is refused or unanswered sends it
again after the time in `Retry-After`, because its local transaction is committed.

A small load comes first, then the large one, then the small one again, to measure when the small one is served as
before.
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

from bench.audit.journal import Journal
from bench.figures import percentile
from bench.load import event_loop
from bench.load.crowd_connection import Connection, Order
from bench.load.wire import Orders, retry_after

FINISH_S: Final = 30.0
NO_ANSWER: Final = "none"
_CREATED: Final = 201
_OK: Final = 200
_OVERLOADED: Final = 429
_REFUSALS: Final = (_OVERLOADED, 503)
_TICK_S: Final = 0.002
_MAX_CONNECTING: Final = 100
"""The most connections that are opened at the same time."""
_RETRY_S: Final = 1.0
"""After this time an unanswered end is sent again."""
_JOURNAL_BUFFER: Final = 1024 * 1024


class CrowdPlan(msgspec.Struct, frozen=True, kw_only=True):
    """The plan of a crowd; rates are in transactions per second."""

    host: str
    port: int
    topic: str
    name: str
    """The prefix of the callers' own ids."""
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
    """The result of one window: answers to prepares and ends by status, `none` if the caller's patience ended."""

    phase: str
    seconds: float = 0.0
    offered: int = 0
    """Transactions that were due."""
    without_connection: int = 0
    """Those that were given up because every connection of the pool was waiting for an answer."""
    prepares: dict[str, int] = {}
    ends: dict[str, int] = {}
    without_retry_after: int = 0
    """Refusals (429, 503) without a Retry-After."""
    unlike: int = 0
    """Unexpected answers that are not refusals, and broken connections."""
    committed: int = 0
    p50_ms: float = 0.0
    """From the due time of a transaction to its confirmed commit. In phase `after` only its own transactions count."""
    p99_ms: float = 0.0


class CrowdResult(msgspec.Struct, frozen=True, kw_only=True):
    """The result of a crowd."""

    windows: list[CrowdWindow]
    load_ended: float
    """On the monotonic clock."""
    open_at_most: int
    first_unlike: str = ""


class Crowd:
    """All callers of one process."""

    def __init__(self, plan: CrowdPlan, journal: Journal) -> None:
        """Build the requests; nothing connects yet."""
        self._plan = plan
        self._journal = journal
        self._orders = Orders(host=f"{plan.host}:{plan.port}", topic=plan.topic, name=plan.name)
        self._free: deque[Connection] = deque()
        self._open: set[Connection] = set()
        self._connecting = 0
        self._open_at_most = 0
        self._patience: deque[tuple[float, Connection, int]] = deque()
        self._retries: deque[tuple[float, Order]] = deque()
        self._unfinished = 0
        self._tasks: set[asyncio.Task[None]] = set()
        self._first_unexpected = ""
        self._phase = "before"
        self._rate = plan.small_rate_per_s
        self._windows: list[CrowdWindow] = []
        self._begin_window()

    async def run(self) -> CrowdResult:
        """Connect, carry out the plan, and finish the transactions under way."""
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
        for _, order in self._retries:
            self._journal.unconfirmed([(order.content, order.id)])
        return CrowdResult(
            windows=self._windows,
            load_ended=load_ended,
            open_at_most=self._open_at_most,
            first_unlike=self._first_unexpected,
        )

    # --- windows

    def _begin_window(self) -> None:
        self._window = CrowdWindow(phase=self._phase)
        self._window_started = time.perf_counter()
        self._prepares: Counter[str] = Counter()
        self._ends: Counter[str] = Counter()
        self._latencies: list[float] = []

    def _end_window(self) -> None:
        window, ordered = self._window, sorted(self._latencies)
        window.seconds = time.perf_counter() - self._window_started
        window.prepares, window.ends = dict(self._prepares), dict(self._ends)
        window.p50_ms, window.p99_ms = percentile(ordered, 0.5) * 1000, percentile(ordered, 0.99) * 1000
        self._windows.append(window)

    async def _windows_of(self, phase: str, rate: float, seconds: float) -> None:
        self._phase, self._rate = phase, rate
        self._begin_window()
        started = time.perf_counter()
        for number in range(1, round(seconds / self._plan.window_s) + 1):
            await asyncio.sleep(started + number * self._plan.window_s - time.perf_counter())
            self._end_window()
            self._begin_window()

    # --- by the clock

    async def _by_the_clock(self) -> None:
        last, owed = time.perf_counter(), 0.0
        while True:
            await asyncio.sleep(_TICK_S)
            now = time.perf_counter()
            # Use the last time: answers that arrived while this process did not run were in time.
            self._end_patience(last)
            owed += (now - last) * self._rate
            last = now
            self._send_retries(now)
            due, owed = int(owed), owed % 1
            self._window.offered += due
            for left in range(due, 0, -1):
                if not self._free:
                    self._window.without_connection += left
                    break
                self._prepare(now)
            self._connect()

    def _connect(self) -> None:
        missing = self._plan.connections - len(self._open) - self._connecting
        for _ in range(min(missing, _MAX_CONNECTING - self._connecting)):
            self._connecting += 1
            task = asyncio.create_task(self._open_connection())
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _open_connection(self) -> None:
        plan, loop = self._plan, asyncio.get_running_loop()
        try:
            async with asyncio.timeout(plan.patience_s):
                await loop.create_connection(lambda: Connection(self), plan.host, plan.port)
        except OSError as error:
            self._record_unexpected(f"no connection: {error!r}")
            await asyncio.sleep(_RETRY_S)
        finally:
            self._connecting -= 1

    def _end_patience(self, now: float) -> None:
        while self._patience and self._patience[0][0] <= now:
            _, connection, requests = self._patience.popleft()
            if connection.order is not None and connection.requests == requests:
                self._give_up(connection)

    def _send_retries(self, now: float) -> None:
        while self._retries and self._free and self._retries[0][0] <= now:
            self._end(self._free.pop(), self._retries.popleft()[1], now)

    # --- requests

    def _prepare(self, now: float) -> None:
        content, transaction_id, request = self._orders.next_prepare()
        self._unfinished += 1
        connection = self._free.pop()
        connection.send(Order(content, transaction_id, now, self._phase), request, ending=False)
        self._patience.append((now + self._plan.patience_s, connection, connection.requests))

    def _end(self, connection: Connection, order: Order, now: float) -> None:
        connection.send(order, self._orders.end(order.id), ending=True)
        self._patience.append((now + self._plan.patience_s, connection, connection.requests))

    def connected(self, connection: Connection) -> None:
        """Hear that a connection is there."""
        self._open.add(connection)
        self._open_at_most = max(self._open_at_most, len(self._open))
        self._free.append(connection)

    def lost(self, connection: Connection, error: Exception | None) -> None:
        """Hear that the other side closed a connection."""
        order = connection.order
        if order is None:
            self._discard(connection)
            return
        self._record_unexpected(f"a connection was closed before the answer: {error!r}")
        self._unanswered(connection, order)
        self._discard(connection)

    def broken(self, connection: Connection, what: str) -> None:
        """Handle bytes that are not an answer."""
        self._record_unexpected(what)
        self._give_up(connection)

    def _give_up(self, connection: Connection) -> None:
        order = connection.order
        if order is not None:
            (self._ends if connection.ending else self._prepares)[NO_ANSWER] += 1
            self._unanswered(connection, order)
        self._discard(connection)

    def _discard(self, connection: Connection) -> None:
        connection.order = None
        connection.close()
        self._open.discard(connection)
        if connection in self._free:
            self._free.remove(connection)

    def _unanswered(self, connection: Connection, order: Order) -> None:
        if connection.ending:
            self._retry_later(order, _RETRY_S)
        else:
            self._unfinished -= 1
            self._journal.unanswered([order.content], brought=order.id)

    def _retry_later(self, order: Order, after_s: float) -> None:
        self._retries.append((time.perf_counter() + after_s, order))

    def answered(self, connection: Connection, status: int, answer: bytes) -> None:
        """Handle an answer."""
        order, connection.order = connection.order, None
        if order is None:
            self._record_unexpected(f"an answer to nothing: {answer[:200]!r}")
            self._discard(connection)
            return
        (self._ends if connection.ending else self._prepares)[str(status)] += 1
        wait_s = retry_after(answer) if status in _REFUSALS else None
        if status in _REFUSALS and wait_s is None:
            self._window.without_retry_after += 1
        if status in _REFUSALS and b"\r\nContent-Type: application/problem+json" not in answer:
            self._record_unexpected(f"a refusal without a problem document: {answer[-300:]!r}")
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
                self._record_unexpected(f"a prepare was answered {status}: {answer[-300:]!r}")
        if b"\r\nConnection: close\r\n" in answer:
            self._discard(connection)
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
            self._retry_later(order, wait_s or _RETRY_S)
        else:
            self._unfinished -= 1
            self._journal.unconfirmed([(order.content, order.id)])
            self._record_unexpected(f"a commit was answered {status}: {answer[-300:]!r}")

    def _record_unexpected(self, what: str) -> None:
        self._window.unlike += 1
        self._first_unexpected = self._first_unexpected or what


def main(plan_path: str, result_path: str) -> None:
    """Carry out a plan."""
    plan = msgspec.json.decode(Path(plan_path).read_bytes(), type=CrowdPlan)
    os.nice(plan.nice)
    with Path(plan.journal_path).open("wb", buffering=_JOURNAL_BUFFER) as file:
        result = event_loop.run(Crowd(plan, Journal(file)).run())
    Path(result_path).write_bytes(msgspec.json.encode(result))


if __name__ == "__main__":
    main(*sys.argv[1:])
