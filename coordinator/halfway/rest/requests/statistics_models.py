"""The models of the statistics (docs/rest.md#statistics)."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from halfway.rest.requests.models import GroupName, Timestamp


class StatisticsParameters(msgspec.Struct, frozen=True, kw_only=True):
    """The group to show; all groups if it is left out."""

    group: GroupName | None = None


class EventParameters(msgspec.Struct, frozen=True, kw_only=True):
    """How many events to send; no limit if it is left out."""

    max: Annotated[int, Meta(ge=1, le=1_000_000, description="a whole number from 1 to 1000000")] | None = None


class Away(msgspec.Struct, frozen=True, kw_only=True):
    """A shard that these figures do not include, and why."""

    shard: int | None
    instance: str | None
    """The instance that should serve it; null if none does."""
    detail: str


class Totals(msgspec.Struct, frozen=True, kw_only=True):
    """Totals of all shards that are included."""

    pending: int
    parked: int
    remembered: int
    """Outcomes in memory."""
    oldest_pending_s: float
    resolving: int
    """Transactions that wait for a lane, or are in one."""
    prepares_per_s: float
    ends_per_s: float


class Ends(msgspec.Struct, frozen=True, kw_only=True):
    """Written outcomes, by their cause."""

    outcome: str
    cause: str
    per_s: float
    total: int


class Checks(msgspec.Struct, frozen=True, kw_only=True):
    """Checks, by verdict; `none` means that no verdict came."""

    verdict: str
    per_s: float
    total: int


class EndpointState(msgspec.Struct, frozen=True, kw_only=True):
    """The last answer of a check endpoint."""

    host: str
    well: bool
    """Whether the answer was a verdict."""
    status: int | None
    detail: str | None
    at: Timestamp
    duration_s: float


class GroupState(msgspec.Struct, frozen=True, kw_only=True):
    """One group, over all instances."""

    group: str
    pending: int
    parked: int
    prepares_per_s: float
    ends_per_s: float
    checks_in_flight: int
    checks_due: int
    breaker: str
    """`open` while no endpoint can be reached, otherwise `closed`."""
    breaker_until: Timestamp | None
    endpoints: list[EndpointState]


class LaneFailure(msgspec.Struct, frozen=True, kw_only=True):
    """Why an incarnation ended."""

    at: Timestamp
    reason: str


class LaneState(msgspec.Struct, frozen=True, kw_only=True):
    """The state of a lane."""

    commits_per_s: float
    """Kafka transactions per second."""
    ends_per_s: float
    commit_s: float
    """The mean duration of a Kafka transaction."""
    failures: int
    last_failure: LaneFailure | None


class WarningState(msgspec.Struct, frozen=True, kw_only=True):
    """Something that is unsafe on an instance, although it may serve calls."""

    check: str
    detail: str


class InstanceState(msgspec.Struct, frozen=True, kw_only=True):
    """One instance."""

    url: str
    asked: bool
    """Whether this instance answered the request."""
    since: Timestamp
    shards: list[int]
    resolving: int
    lane: LaneState | None
    warnings: list[WarningState]


class ShardState(msgspec.Struct, frozen=True, kw_only=True):
    """One shard. Its figures are null if they are not included."""

    shard: int
    instance: str | None
    pending: int | None
    parked: int | None
    remembered: int | None
    oldest_pending_s: float | None
    half_lag: int | None
    op_lag: int | None
    due: int | None
    strays: int | None


class FailingTopicState(msgspec.Struct, frozen=True, kw_only=True):
    """A topic to which a write failed, until a write to it succeeds."""

    topic: str
    error_code: str
    detail: str
    refused: int
    first_at: Timestamp
    last_at: Timestamp
    retry_at: Timestamp | None
    first_error_code: str
    first_detail: str
    """The first failure."""


class RefusedState(msgspec.Struct, frozen=True, kw_only=True):
    """A transaction whose end could not be written, until it is written; the transaction is still pending."""

    id: str
    topic: str | None
    error_code: str
    detail: str
    last_at: Timestamp
    retry_at: Timestamp


class QuarantinedState(msgspec.Struct, frozen=True, kw_only=True):
    """A transaction or a topic in quarantine: a Kafka transaction with it failed, so the lane writes it separately."""

    instance: str
    """The instance of the lane."""
    topic: str | None
    """The topic itself; for a transaction, the topic that caused the failure, if it is known."""
    id: str | None
    """The id of the transaction; null for a topic."""
    state: Literal["suspected", "alone", "refused", "watched"]
    """`suspected`: tried separately; `alone`: tried without any other write; `refused`: refused until `until`;
    `watched`: messages of at least `min_bytes` are tried separately until `until`."""
    since: Timestamp
    until: Timestamp | None
    min_bytes: int | None
    error_code: str | None
    detail: str | None
    """The failure when it was tried separately; null if it has not been tried yet."""


class SkippedState(msgspec.Struct, frozen=True, kw_only=True):
    """Unusable records of an internal topic."""

    topic: str
    reason: str
    count: int
    last_at: Timestamp


class Failures(msgspec.Struct, frozen=True, kw_only=True):
    """Failures that need attention: at most the latest 100 of each kind and instance."""

    topics: list[FailingTopicState]
    refused: list[RefusedState]
    quarantined: list[QuarantinedState]
    skipped: list[SkippedState]


class StatisticsResponse(msgspec.Struct, frozen=True, kw_only=True):
    """The statistics of all instances."""

    at: Timestamp
    complete: bool
    """False if a shard is in `away`: the figures do not include it."""
    away: list[Away]
    totals: Totals
    ends: list[Ends]
    checks: list[Checks]
    groups: list[GroupState]
    """At most 100; the groups with the most parked and pending transactions come first."""
    groups_left_out: int
    instances: list[InstanceState]
    shards: list[ShardState]
    failures: Failures
