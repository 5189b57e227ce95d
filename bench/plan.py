"""What the processes of a run tell each other, as JSON."""

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
    """Callers, each with one request at a time; `batch` transactions in a request, 0 for requests of one each.

    With `client` they share one `halfway.client`, with `stream` one stream, on which their ends want a confirmation
    unless they are `oneway`; else each has a connection of its own.
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
    """What the load process is to do: `lead_s` without counting, then `windows` times `window_s`."""

    host: str
    port: int
    topic: str
    callers: int
    batch: int
    client: bool = False
    """Whether the callers share one `halfway.client`."""
    stream: bool = False
    """Whether they share one stream."""
    oneway: bool = False
    """Whether an end is done with once it is accepted."""
    groups: tuple[str, ...] = (GROUP,)
    """Whose transactions they are, in turn; of callers with a connection each."""
    lead_s: float
    window_s: float
    windows: int = 1
    rate_per_s: float | None = None
    """Transactions begun in a second, however long they take; None: each caller begins when its last one is done."""
    pids: Mapping[str, int]
    """Whose CPU time to count, beside the load process's own."""
    journal_path: str
    """Where the fate of every transaction goes; see `journal`."""


class Window(msgspec.Struct, frozen=True, kw_only=True):
    """What one window saw: transactions whose commit was confirmed in it, and CPU time in microseconds by process."""

    seconds: float
    transactions: int
    p50_ms: float
    p99_ms: float
    cpu_us: Mapping[str, float]


class LoadResult(msgspec.Struct, frozen=True, kw_only=True):
    """What the load process saw; `failed` counts requests that were not answered as they must be, lead included."""

    windows: list[Window]
    failed: int
    first_failure: str = ""


class RawPlan(msgspec.Struct, frozen=True, kw_only=True):
    """What the process that finds the raw limit is to do; see `raw`."""

    bootstrap_servers: str
    topic: str
    ends: int
    ahead: bool
    shards: int = 1
    """How many shards the ends of one Kafka transaction belong to; groups take turns with them."""
    partitions: int = PARTITIONS
    """How many partitions of the real topic they go to."""
    lead_s: float
    run_s: float
    pids: Mapping[str, int] = {}
    """Whose CPU time to count."""


class RawResult(msgspec.Struct, frozen=True, kw_only=True):
    """What librdkafka alone reached; CPU time in microseconds by process."""

    tx_per_s: float
    kafka_transactions: int
    cpu_us: Mapping[str, float]
