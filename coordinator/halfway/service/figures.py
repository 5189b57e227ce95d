"""What statistics show: plain records, times in ms since the epoch, durations in seconds (docs/rest.md#statistics)."""

from __future__ import annotations

import msgspec

from halfway.service.job_records import Away


class Tallied(msgspec.Struct, frozen=True, kw_only=True):
    """Outcomes by outcome and cause, or checks by verdict: since the start of each instance, and a second."""

    names: tuple[str, ...]
    total: int
    per_s: float


class Endpoint(msgspec.Struct, frozen=True, kw_only=True):
    """How an endpoint answered last; `status` is None if no answer came."""

    host: str
    well: bool
    status: int | None
    detail: str | None
    at: int
    duration_s: float


class GroupFigures(msgspec.Struct, frozen=True, kw_only=True):
    """One group, on one instance or on all."""

    group: str
    pending: int
    parked: int
    prepares_per_s: float
    ends_per_s: float
    checks_in_flight: int
    checks_due: int
    breaker_until: int | None
    """None if the circuit breaker is closed everywhere."""
    endpoints: tuple[Endpoint, ...]


class LaneFailure(msgspec.Struct, frozen=True, kw_only=True):
    """Why and when the last incarnation ended."""

    at: int
    reason: str


class Lane(msgspec.Struct, frozen=True, kw_only=True):
    """How a lane does."""

    commits_per_s: float
    ends_per_s: float
    commit_s: float
    failures: int
    last_failure: LaneFailure | None


class ShardFigures(msgspec.Struct, frozen=True, kw_only=True):
    """One shard."""

    shard: int
    pending: int
    parked: int
    remembered: int
    oldest_pending_s: float
    half_lag: int
    op_lag: int
    due: int
    strays: int


class FailingTopic(msgspec.Struct, frozen=True, kw_only=True):
    """A topic that could not be written, until a write to it is done."""

    topic: str
    error_code: str
    detail: str
    refused: int
    first_at: int
    last_at: int
    retry_at: int | None
    first_error_code: str = ""
    first_detail: str = ""
    """Why it was refused first: what comes later may only say that it was tried again in vain."""


class RefusedWrite(msgspec.Struct, frozen=True, kw_only=True):
    """An end that could not be written, until it is."""

    id: str
    topic: str | None
    error_code: str
    detail: str
    last_at: int
    retry_at: int


class Quarantined(msgspec.Struct, frozen=True, kw_only=True):
    """A topic or a transaction that the lane keeps apart since a Kafka transaction with it failed (docs/protocol.md).

    `state` is `suspected` (tried apart from all others), `alone` (tried without any other), `refused` (until `until`)
    or `watched` (of a topic: messages of at least `min_bytes` are tried apart until `until`).
    """

    topic: str | None
    """The topic itself; of a transaction the one that is to blame, if that is known."""
    id: str | None
    """None for a topic."""
    state: str
    since: int
    until: int | None = None
    min_bytes: int | None = None
    error_code: str | None = None
    """Why it was found bad; None if it has not been tried apart yet, or was found good."""
    detail: str | None = None


class Skipped(msgspec.Struct, frozen=True, kw_only=True):
    """Records of an internal topic that could not be used."""

    topic: str
    reason: str
    count: int
    last_at: int


class InstanceFigures(msgspec.Struct, frozen=True, kw_only=True):
    """What one instance knows: of all groups, or of one."""

    url: str
    since: int
    shards: tuple[ShardFigures, ...] = ()
    resolving: int = 0
    prepares_per_s: float = 0.0
    ends: tuple[Tallied, ...] = ()
    checks: tuple[Tallied, ...] = ()
    groups: tuple[GroupFigures, ...] = ()
    lane: Lane | None = None
    topics: tuple[FailingTopic, ...] = ()
    writes: tuple[RefusedWrite, ...] = ()
    quarantined: tuple[Quarantined, ...] = ()
    skipped: tuple[Skipped, ...] = ()


class ShardPlace(msgspec.Struct, frozen=True, kw_only=True):
    """A shard, the instance that serves it, and its figures; both None while it is away."""

    shard: int
    instance: str | None
    figures: ShardFigures | None


class Statistics(msgspec.Struct, frozen=True, kw_only=True):
    """All instances that could be asked, and what is away."""

    at: int
    asked: str
    """The instance that put it together."""
    instances: tuple[InstanceFigures, ...]
    shards: tuple[ShardPlace, ...]
    away: tuple[Away, ...]
    groups: tuple[GroupFigures, ...]
    """Those with the most to look at first."""
    groups_left_out: int
    ends: tuple[Tallied, ...]
    checks: tuple[Tallied, ...]
