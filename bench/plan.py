"""The plans and results that the processes of a run exchange as JSON."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final, Literal

import msgspec

from bench.figures import Standing

GROUP: Final = "bench"
PARTITIONS: Final = 6
SHARDS: Final = 4
VALUE_BYTES: Final = 512
KEYS: Final = 256

Shape = Literal["single", "batch", "stream", "oneway", "client", "client-rest", "threads", "threads-rest"]
"""Callers with a connection each and one transaction or a batch in a request; or callers that share one stream, with
ends that are confirmed or accepted; or tasks, or threads, that share one `halfway.client`, on a stream or on REST."""


class Phase(msgspec.Struct, frozen=True, kw_only=True):
    """A part of a load: closed loop, in which a caller begins when its last transaction is done, or by the clock."""

    name: str
    seconds: float
    windows: int = 1
    rate_per_s: float | None = None
    """Transactions begun per second, however long they take; one that finds no idle caller is given up."""


class LoadPlan(msgspec.Struct, frozen=True, kw_only=True):
    """The plan of the load process."""

    ports: tuple[int, ...]
    """The instances: each request goes to the owner of its transaction, or to the next one."""
    owners: tuple[int, ...] = ()
    """The port of each shard's owner; callers then choose the ids."""
    shards: tuple[int, ...] = ()
    """The shards of these ids."""
    to_owner: bool = False
    topic: str
    callers: int
    shape: Shape = "single"
    streams: int = 1
    """The streams, or clients, that callers share, each with others."""
    batch: int = 100
    groups: tuple[str, ...] = (GROUP,)
    """The groups of the transactions, in turn."""
    phases: tuple[Phase, ...]
    patience_s: float | None = None
    """How long a caller waits for an answer; it then gives up a prepare, and repeats an end. Refusals are no failures.
    None: it waits, and a refusal is a failure."""
    nice: int = 0
    pids: Mapping[str, int]
    """The processes to measure the CPU time of, besides the load process; the first one's resources are sampled."""
    journal_path: str
    """The journal for the result of every transaction; see `audit`."""


class Window(msgspec.Struct, kw_only=True):
    """The result of one window of a phase; CPU time in microseconds by process, answers by status."""

    phase: str = ""
    seconds: float = 0.0
    transactions: int = 0
    """Those whose commit was confirmed."""
    p50_ms: float = 0.0
    """From the prepare to the confirmed commit, of transactions that began in this phase."""
    p99_ms: float = 0.0
    cpu_us: Mapping[str, float] = {}
    offered: int = 0
    without_caller: int = 0
    prepares: dict[str, int] = {}
    ends: dict[str, int] = {}
    held: Standing | None = None


class LoadResult(msgspec.Struct, frozen=True, kw_only=True):
    """The result of the load process; `failed` counts unexpected answers and lost connections."""

    windows: list[Window]
    failed: int
    first_failure: str = ""
    requests: int = 0
    connections: int = 0
    """The most that were open at once."""
    without_retry_after: int = 0
    """Refusals (429, 503) without a Retry-After."""

    def of(self, phase: str) -> list[Window]:
        """Return the windows of a phase."""
        return [window for window in self.windows if window.phase == phase]


class RawPlan(msgspec.Struct, frozen=True, kw_only=True):
    """The plan of the process that measures the raw limit; see `raw`."""

    bootstrap_servers: str
    topic: str
    ends: int
    ahead: bool
    lead_s: float
    run_s: float


class RawResult(msgspec.Struct, frozen=True, kw_only=True):
    """The result of librdkafka alone."""

    tx_per_s: float
