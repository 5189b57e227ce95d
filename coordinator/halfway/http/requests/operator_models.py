"""The models of requests and answers about jobs and statistics (docs/rest.md#jobs, docs/rest.md#statistics)."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from halfway.coordinator.records import MAX_RATE, MIN_RATE, RATE, ItemResult, JobAction, JobState
from halfway.http.requests.models import (
    Age,
    ErrorPart,
    GroupName,
    IdStart,
    MessageKey,
    PageSize,
    Remark,
    Timestamp,
    TopicName,
    TransactionId,
    TransactionSummary,
)
from halfway.protocol.transactions import State

MAX_ITEMS = 100_000
SAMPLE = 20

JobId = Annotated[
    str,
    Meta(
        pattern=r"^(?!\.{1,2}(?:$(?!\n)))[A-Za-z0-9._-]{1,64}$(?!\n)",
        description="1 to 64 letters, digits and . _ -, but not . or ..",
    ),
]


class JobFilter(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """The transactions of a job. A field that is left out does not restrict them."""

    state: Literal["prepared", "parked"] | None = None
    group: GroupName | None = None
    topic: TopicName | None = None
    key: MessageKey | None = None
    id: IdStart | None = None
    older_than_s: Age | None = None
    younger_than_s: Age | None = None
    error: ErrorPart | None = None


class JobRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """One action on every transaction that a filter matches, or on given ids. Ages count from the start of the job."""

    action: JobAction
    filter: JobFilter | None = None
    ids: Annotated[list[TransactionId], Meta(min_length=1, max_length=1000, description="1 to 1000 ids")] | None = None
    reason: Remark | None = None
    """Stored as the remark of each transaction; required except for a preview."""
    id: JobId | None = None
    """If the same request is sent again with the same id, nothing is done twice."""
    rate: Annotated[
        float, Meta(ge=MIN_RATE, le=MAX_RATE, description=f"transactions per second from {MIN_RATE} to {MAX_RATE}")
    ] = RATE
    most: Annotated[int, Meta(ge=1, le=MAX_ITEMS, description=f"a whole number from 1 to {MAX_ITEMS}")] = MAX_ITEMS
    preview: bool = False


class JobParameters(msgspec.Struct, frozen=True, kw_only=True):
    """The items of a job to show."""

    result: ItemResult | None = None
    limit: PageSize = 100
    cursor: Annotated[int, Meta(ge=0, le=MAX_ITEMS, description="`next` of the previous page")] = 0


class JobPreview(msgspec.Struct, frozen=True, kw_only=True):
    """The transactions that a job would act on now. No job is started."""

    preview: Literal[True]
    action: JobAction
    count: int
    more: bool
    """Whether there are more than `most`."""
    sample: list[TransactionSummary]
    """The oldest, at most 20; none if ids were given."""


class JobResponse(msgspec.Struct, frozen=True, kw_only=True):
    """A job and its progress."""

    id: str
    action: JobAction
    filter: JobFilter | None
    ids: int | None
    """How many ids were given instead of a filter."""
    reason: str
    rate: float
    most: int
    by: str
    """The caller that started it."""
    state: JobState
    """`accepted` means that nothing is done yet."""
    detail: str | None
    """Why the job failed, or what it waits for."""
    instance: str | None
    """The instance that runs it; null for a group's key."""
    accepted_at: Timestamp
    started_at: Timestamp | None
    finished_at: Timestamp | None
    found: int | None
    """How many transactions the filter matches; null until the search is done."""
    more: bool
    """Whether that is more than `most`: start another job for the rest."""
    finished: int
    """How many transactions have a result."""
    results: dict[str, int]
    """How many transactions have each result."""


class JobItem(msgspec.Struct, frozen=True, kw_only=True):
    """The result for one transaction. For a check, `done` means that the group was asked, whatever it answers."""

    id: str
    result: ItemResult
    state: State | None
    error_code: str | None
    detail: str | None
    at: Timestamp | None


class JobPage(JobResponse, frozen=True, kw_only=True):
    """A job and a page of its items, in the order in which they are processed."""

    items: list[JobItem]
    next: int | None


class JobPlace(msgspec.Struct, frozen=True, kw_only=True):
    """An instance that did not answer, and why."""

    instance: str | None
    detail: str


class JobListResponse(msgspec.Struct, frozen=True, kw_only=True):
    """The jobs of all instances, newest first."""

    jobs: list[JobResponse]
    away: list[JobPlace]
    """Instances that did not answer: their jobs are not listed."""


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
