"""The plans and results that the processes of a run exchange as JSON."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import msgspec

GROUP: Final = "bench"
TOPIC: Final = "bench.orders"
PARTITIONS: Final = 6
SHARDS: Final = 4
VALUE_BYTES: Final = 512
KEYS: Final = 256


class Scenario(msgspec.Struct, frozen=True, kw_only=True):
    """Callers, each with one request at a time; `batch` is the number of transactions in a request, 0 for single ones.

    With `client` the callers share one `halfway.client`, with `stream` one stream, on which ends are confirmed unless
    `oneway`. Otherwise each has its own connection.
    """

    name: str
    callers: int
    batch: int = 0
    client: bool = False
    stream: bool = False
    oneway: bool = False


SCENARIOS: Final = (
    Scenario(name="single-1", callers=1),
    Scenario(name="single-16", callers=16),
    Scenario(name="single-64", callers=64),
    Scenario(name="batch-100", callers=8, batch=100),
    Scenario(name="stream-64", callers=64, stream=True),
    Scenario(name="stream-64-oneway", callers=64, stream=True, oneway=True),
    Scenario(name="stream-256", callers=256, stream=True),
    Scenario(name="stream-1024", callers=1024, stream=True),
)


class LoadPlan(msgspec.Struct, frozen=True, kw_only=True):
    """The plan of the load process: `lead_s` unmeasured, then `windows` times `window_s`."""

    host: str
    port: int
    topic: str
    callers: int
    batch: int
    client: bool = False
    """Whether the callers share one `halfway.client`."""
    stream: bool = False
    """Whether the callers share one stream."""
    oneway: bool = False
    """Whether an end counts as done once it is accepted."""
    groups: tuple[str, ...] = (GROUP,)
    """The groups of the transactions, in turn; only for callers with their own connections."""
    lead_s: float
    window_s: float
    windows: int = 1
    rate_per_s: float | None = None
    """Transactions begun per second, however long they take; None: a caller begins when its last one is done."""
    pids: Mapping[str, int]
    """The processes to measure the CPU time of, besides the load process."""
    journal_path: str
    """The journal for the result of every transaction; see `journal`."""


class Window(msgspec.Struct, frozen=True, kw_only=True):
    """The result of one window: transactions whose commit was confirmed, and CPU time in microseconds by process."""

    seconds: float
    transactions: int
    p50_ms: float
    p99_ms: float
    cpu_us: Mapping[str, float]


class LoadResult(msgspec.Struct, frozen=True, kw_only=True):
    """The result of the load process; `failed` counts requests with an unexpected answer, including the lead."""

    windows: list[Window]
    failed: int
    first_failure: str = ""


class RawPlan(msgspec.Struct, frozen=True, kw_only=True):
    """The plan of the process that measures the raw limit; see `raw`."""

    bootstrap_servers: str
    topic: str
    ends: int
    ahead: bool
    shards: int = 1
    """The number of shards in one Kafka transaction; groups take turns with them."""
    partitions: int = PARTITIONS
    """The number of partitions of the real topic in one Kafka transaction."""
    lead_s: float
    run_s: float
    pids: Mapping[str, int] = {}
    """The processes to measure the CPU time of."""


class RawResult(msgspec.Struct, frozen=True, kw_only=True):
    """The result of librdkafka alone; CPU time in microseconds by process."""

    tx_per_s: float
    kafka_transactions: int
    cpu_us: Mapping[str, float]
