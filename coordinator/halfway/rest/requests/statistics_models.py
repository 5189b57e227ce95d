"""What statistics look like (docs/rest.md#statistics)."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from halfway.rest.requests.models import GroupName, Timestamp


class StatisticsParameters(msgspec.Struct, frozen=True, kw_only=True):
    """Of which group; of all if that is left out."""

    group: GroupName | None = None


class EventParameters(msgspec.Struct, frozen=True, kw_only=True):
    """How many events to send; without an end if that is left out."""

    max: Annotated[int, Meta(ge=1, le=1_000_000, description="from 1 to 1000000")] | None = None


class Away(msgspec.Struct, frozen=True, kw_only=True):
    """A shard that is not in these figures, and why."""

    shard: int | None
    instance: str | None
    """The instance that should serve it; null if none does."""
    detail: str


class Totals(msgspec.Struct, frozen=True, kw_only=True):
    """Over all shards that are not away."""

    pending: int
    parked: int
    remembered: int
    """Outcomes."""
    oldest_pending_s: float
    resolving: int
    """Ids that wait for a lane or are in one."""
    prepares_per_s: float
    ends_per_s: float


class Ends(msgspec.Struct, frozen=True, kw_only=True):
    """Outcomes that were written, by what decided them."""

    outcome: str
    cause: str
    per_s: float
    total: int


class Checks(msgspec.Struct, frozen=True, kw_only=True):
    """Checks by what came back; `none` is no verdict."""

    verdict: str
    per_s: float
    total: int


class EndpointState(msgspec.Struct, frozen=True, kw_only=True):
    """How an endpoint answered last."""

    host: str
    well: bool
    """Whether it gave a verdict."""
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
    """`open` while no endpoint could be reached, else `closed`."""
    breaker_until: Timestamp | None
    endpoints: list[EndpointState]


class LaneFailure(msgspec.Struct, frozen=True, kw_only=True):
    """Why an incarnation ended."""

    at: Timestamp
    reason: str


class LaneState(msgspec.Struct, frozen=True, kw_only=True):
    """How a lane does."""

    commits_per_s: float
    """Kafka transactions."""
    ends_per_s: float
    commit_s: float
    """The mean time of a Kafka transaction."""
    failures: int
    last_failure: LaneFailure | None


class InstanceState(msgspec.Struct, frozen=True, kw_only=True):
    """One instance."""

    url: str
    asked: bool
    """Whether it is the one that answers."""
    since: Timestamp
    shards: list[int]
    resolving: int
    lane: LaneState | None


class ShardState(msgspec.Struct, frozen=True, kw_only=True):
    """One shard; its figures are null while it is away."""

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
    """A topic that could not be written, until a write to it is done."""

    topic: str
    error_code: str
    detail: str
    refused: int
    first_at: Timestamp
    last_at: Timestamp
    retry_at: Timestamp | None
    first_error_code: str
    first_detail: str
    """Why it was refused first."""


class RefusedState(msgspec.Struct, frozen=True, kw_only=True):
    """A transaction whose end could not be written, until it is; it is still pending."""

    id: str
    topic: str | None
    error_code: str
    detail: str
    last_at: Timestamp
    retry_at: Timestamp


class QuarantinedState(msgspec.Struct, frozen=True, kw_only=True):
    """What a lane keeps apart from all other writes, since a Kafka transaction with it failed."""

    instance: str
    """Whose lane it is."""
    topic: str | None
    """The topic itself; of a transaction the one that is to blame, if that is known."""
    id: str | None
    """Null for a topic."""
    state: Literal["suspected", "alone", "refused", "watched"]
    """`suspected`: tried apart; `alone`: without any other; `refused` until `until`; `watched`: messages of at least
    `min_bytes` are tried apart until `until`."""
    since: Timestamp
    until: Timestamp | None
    min_bytes: int | None
    error_code: str | None
    detail: str | None
    """Why it was found bad; null if it has not been tried apart yet."""


class SkippedState(msgspec.Struct, frozen=True, kw_only=True):
    """Records of an internal topic that could not be used."""

    topic: str
    reason: str
    count: int
    last_at: Timestamp


class Failures(msgspec.Struct, frozen=True, kw_only=True):
    """What somebody has to look at; 100 of each and instance at most, the latest."""

    topics: list[FailingTopicState]
    refused: list[RefusedState]
    quarantined: list[QuarantinedState]
    skipped: list[SkippedState]


class StatisticsResponse(msgspec.Struct, frozen=True, kw_only=True):
    """What all instances know now."""

    at: Timestamp
    complete: bool
    """False if a shard is away: then the figures are without it."""
    away: list[Away]
    totals: Totals
    ends: list[Ends]
    checks: list[Checks]
    groups: list[GroupState]
    """At most 100, those with the most to look at first."""
    groups_left_out: int
    instances: list[InstanceState]
    shards: list[ShardState]
    failures: Failures
