"""The records of statistics. Times are in ms since the epoch, durations in seconds (docs/rest.md#statistics)."""

from __future__ import annotations

import msgspec

from halfway.service.records.job_records import Away


class Tally(msgspec.Struct, frozen=True, kw_only=True):
    """A count of outcomes by outcome and cause, or of checks by verdict: since the start, and per second."""

    names: tuple[str, ...]
    total: int
    per_s: float


class Endpoint(msgspec.Struct, frozen=True, kw_only=True):
    """The last answer of an endpoint. `status` is None if there was no answer."""

    host: str
    well: bool
    status: int | None
    detail: str | None
    at: int
    duration_s: float


class GroupFigures(msgspec.Struct, frozen=True, kw_only=True):
    """The figures of one group, on one instance or on all."""

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
    """The time and the reason of the end of the last incarnation."""

    at: int
    reason: str


class Lane(msgspec.Struct, frozen=True, kw_only=True):
    """The figures of a lane."""

    commits_per_s: float
    ends_per_s: float
    commit_s: float
    failures: int
    last_failure: LaneFailure | None


class ShardFigures(msgspec.Struct, frozen=True, kw_only=True):
    """The figures of one shard."""

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
    """A topic that could not be written to, until a write to it succeeds."""

    topic: str
    error_code: str
    detail: str
    refused: int
    first_at: int
    last_at: int
    retry_at: int | None
    first_error_code: str = ""
    first_detail: str = ""
    """The reason of the first refusal. Later ones may only say that it was tried again in vain."""


class RefusedWrite(msgspec.Struct, frozen=True, kw_only=True):
    """An end that could not be written, until it is written."""

    id: str
    topic: str | None
    error_code: str
    detail: str
    last_at: int
    retry_at: int


class Quarantined(msgspec.Struct, frozen=True, kw_only=True):
    """A topic or a transaction that the lane isolates because a Kafka transaction with it failed (docs/protocol.md).

    `state` is `suspected` (written apart from ends that are not suspects), `alone` (written without any other end),
    `refused` (until `until`) or `watched` (a topic whose messages of at least `min_bytes` are written apart until
    `until`).
    """

    topic: str | None
    """The topic; of a transaction, the topic that caused the failure, if it is known."""
    id: str | None
    """None for a topic."""
    state: str
    since: int
    until: int | None = None
    min_bytes: int | None = None
    error_code: str | None = None
    """The error of the last write apart; None if there was none yet, or it succeeded."""
    detail: str | None = None


class Skipped(msgspec.Struct, frozen=True, kw_only=True):
    """Records of an internal topic that could not be used."""

    topic: str
    reason: str
    count: int
    last_at: int


class HealthWarning(msgspec.Struct, frozen=True, kw_only=True):
    """Something that is unsafe on an instance, although it may serve calls."""

    check: str
    detail: str


class InstanceFigures(msgspec.Struct, frozen=True, kw_only=True):
    """The figures of one instance, of all groups or of one."""

    url: str
    since: int
    shards: tuple[ShardFigures, ...] = ()
    resolving: int = 0
    prepares_per_s: float = 0.0
    ends: tuple[Tally, ...] = ()
    checks: tuple[Tally, ...] = ()
    groups: tuple[GroupFigures, ...] = ()
    lane: Lane | None = None
    topics: tuple[FailingTopic, ...] = ()
    writes: tuple[RefusedWrite, ...] = ()
    quarantined: tuple[Quarantined, ...] = ()
    skipped: tuple[Skipped, ...] = ()
    warnings: tuple[HealthWarning, ...] = ()


class ShardPlace(msgspec.Struct, frozen=True, kw_only=True):
    """A shard, the instance that serves it, and its figures; both are None while it is unavailable."""

    shard: int
    instance: str | None
    figures: ShardFigures | None


class Statistics(msgspec.Struct, frozen=True, kw_only=True):
    """The figures of all instances that answered, and the shards that are unavailable."""

    at: int
    asked: str
    """The instance that received the call."""
    instances: tuple[InstanceFigures, ...]
    shards: tuple[ShardPlace, ...]
    away: tuple[Away, ...]
    groups: tuple[GroupFigures, ...]
    """Those with the most parked and pending transactions first."""
    groups_left_out: int
    ends: tuple[Tally, ...]
    checks: tuple[Tally, ...]
