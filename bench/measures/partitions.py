"""Measures the cost of a Kafka transaction for the broker, by the number of partitions in it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import msgspec

from bench.measures.scenarios import run_raw
from bench.plan import PARTITIONS, SHARDS, RawPlan
from bench.system.rig import Rig

_ENDS: Final = 100
_TOUCHED: Final = ((1, 1), (1, PARTITIONS), (SHARDS, PARTITIONS))
"""Numbers of shards and of partitions of the real topic. A shard is one partition of half and one of op."""


class TouchedLine(msgspec.Struct, frozen=True, kw_only=True):
    """The result for Kafka transactions of 100 ends, by librdkafka alone."""

    partitions: int
    tx_per_s: float
    broker_ms: float | None
    """CPU time of the broker for a Kafka transaction and the 100 half records before it."""


def touched(rig: Rig, run_s: float, *, say: Callable[[str], None]) -> list[TouchedLine]:
    """Measure each number of partitions."""
    lines = []
    for shards, partitions in _TOUCHED:
        say(f"raw: Kafka transactions that touch {2 * shards + partitions} partitions")
        plan = RawPlan(
            bootstrap_servers=rig.bootstrap_servers,
            topic=f"{rig.topic}.raw",
            ends=_ENDS,
            ahead=True,
            shards=shards,
            partitions=partitions,
            lead_s=min(0.5, run_s / 2),
            run_s=run_s,
            pids=rig.pids,
        )
        result = run_raw(rig, plan)
        broker = result.cpu_us.get("broker")
        lines.append(
            TouchedLine(
                partitions=2 * shards + partitions,
                tx_per_s=round(result.tx_per_s, 1),
                broker_ms=None if broker is None else round(broker / max(1, result.kafka_transactions) / 1000, 2),
            )
        )
    return lines
