"""Prepares and ends at a steady rate, past the coordinator: `python -m bench.pipeline.load PLAN RESULT`.

The records are those that a coordinator writes: a half record through one producer, its op marker and tombstone in one
Kafka transaction of another. Real messages are left out, which the ledger does not read.
"""

from __future__ import annotations

import sys
import time
from collections import deque
from pathlib import Path
from typing import Any, Final

import msgspec
import numpy as np
from confluent_kafka import Producer

from bench.pipeline.transactions import (
    COMMITTED,
    GROUP,
    PENDING,
    SHARDS,
    Bytes,
    Contents,
    Transactions,
    half_value,
    op_values,
    transactions,
)
from halfway.domain.records import OpKind
from halfway.kafka.records import codec

EVENTS: Final = 3
"""Of a transaction: half record, op marker, tombstone."""
_TICK_S: Final = 0.1
_AT_ONCE: Final = 50_000
_PATIENCE_S: Final = 60.0


class LoadPlan(msgspec.Struct, frozen=True, kw_only=True):
    """What to write. A transaction ends `end_after_s` after its prepare, one of twenty only `late_after_s` after it."""

    bootstrap_servers: str
    prefix: str
    events_per_s: int
    seconds: float
    end_after_s: float = 1.0
    late_after_s: float = 30.0
    pending: int = 0
    """So many are prepared at once before, and never end."""
    seed: int = 1


class LoadResult(msgspec.Struct, frozen=True, kw_only=True):
    """What was written; `behind_s`: how much later than planned the last tick ended."""

    transactions: int
    seconds: float
    behind_s: float

    @property
    def events_per_s(self) -> float:
        """Records a second; the last prepares end a little later than planned."""
        return self.transactions * EVENTS / self.seconds


class Load:
    """One process's producers."""

    def __init__(self, plan: LoadPlan) -> None:
        """Connect."""
        self._plan = plan
        self._rng = np.random.default_rng(plan.seed)
        self._contents = Contents(self._rng)
        common = {"bootstrap.servers": plan.bootstrap_servers, "compression.type": "lz4", "linger.ms": 20}
        common |= {"queue.buffering.max.messages": 1_000_000, "delivery.report.only.error": True}
        self._prepares = Producer({**common, "enable.idempotence": True})
        self._ends = Producer({**common, "transactional.id": f"{plan.prefix}load"})
        self._ends.init_transactions(_PATIENCE_S)
        self._half = half_value()
        self._due: dict[bool, deque[tuple[float, Transactions]]] = {False: deque(), True: deque()}
        self._made = 0
        self._failed: list[Any] = []

    def run(self) -> LoadResult:
        """Write the transactions that stay pending, then the load by the clock, then the remaining ends."""
        for first in range(0, self._plan.pending, _AT_ONCE):
            number = np.arange(first, min(first + _AT_ONCE, self._plan.pending), dtype=np.int64)
            block = transactions(self._rng, number, np.full(len(number), round(time.time() * 1000), np.int64))
            self._produce(self._prepares, "half", block, None, "prepared")
            self._prepares.flush(_PATIENCE_S)
        plan, began = self._plan, time.monotonic()
        for tick in range(round(plan.seconds / _TICK_S)):
            at = tick * _TICK_S
            if (wait := began + at - time.monotonic()) > 0:
                time.sleep(wait)
            wanted = round((at + _TICK_S) * plan.events_per_s / EVENTS)
            self._prepare(at, wanted - self._made)
            self._end(at)
        behind_s = time.monotonic() - began - plan.seconds
        self._end(float("inf"))
        self._prepares.flush(_PATIENCE_S)
        self._demand_delivered()
        return LoadResult(transactions=self._made, seconds=time.monotonic() - began, behind_s=round(behind_s, 1))

    def _prepare(self, at: float, count: int) -> None:
        number = np.arange(self._made, self._made + count, dtype=np.int64)
        now = np.full(count, round(time.time() * 1000), np.int64)
        block = transactions(self._rng, number, now)
        self._produce(self._prepares, "half", block, None, "prepared")
        self._made += count
        plan = self._plan
        for late, after_s in ((False, plan.end_after_s), (True, plan.late_after_s)):
            chosen = block[(block.state == PENDING) == late]
            if len(chosen):
                self._due[late].append((at + after_s, chosen))

    def _end(self, at: float) -> None:
        due = []
        for waiting in self._due.values():
            while waiting and waiting[0][0] <= at:
                due.append(waiting.popleft()[1])
        if not due:
            return
        self._demand_delivered()
        self._ends.begin_transaction()
        for block in due:
            committed = block.state == COMMITTED
            for kind, state, ended in (
                (OpKind.COMMITTED, "committed", block[committed]),
                (OpKind.ROLLED_BACK, "rolled_back", block[~committed]),
            ):
                if len(ended):
                    now = np.full(len(ended), round(time.time() * 1000), np.int64)
                    self._produce(self._ends, "op", ended, op_values(ended, kind, self._contents, now), state)
                    self._produce(self._ends, "half", ended, None, state)
        self._ends.commit_transaction(_PATIENCE_S)

    def _produce(self, producer: Producer, kind: str, block: Transactions, values: Bytes | None, state: str) -> None:
        """Write a record for each transaction; without values, a half record or its tombstone."""
        topic, headers = self._plan.prefix + kind, codec.record_headers(kind, GROUP, state)
        same = self._half if state == "prepared" else None
        for row, (number, name) in enumerate(zip(block.number.tolist(), block.ids, strict=True)):
            value = same if values is None else values[row].tobytes()
            producer.produce(topic, value, name.tobytes(), number % SHARDS, on_delivery=self._report, headers=headers)
        producer.poll(0)

    def _report(self, error: Any, _message: Any) -> None:
        if error is not None:
            self._failed.append(error)

    def _demand_delivered(self) -> None:
        if self._failed:
            raise RuntimeError(f"not everything was delivered: {self._failed[0]}")


def main(plan_path: str, result_path: str) -> None:
    """Write a load and its result."""
    plan = msgspec.json.decode(Path(plan_path).read_bytes(), type=LoadPlan)
    Path(result_path).write_bytes(msgspec.json.encode(Load(plan).run()))


if __name__ == "__main__":
    main(*sys.argv[1:])
