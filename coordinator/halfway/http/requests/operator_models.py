"""The models of requests and answers about jobs and statistics (docs/rest.md#jobs, docs/rest.md#statistics)."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from halfway.coordinator.records import MAX_RATE, MIN_RATE, RATE, ItemResult, JobAction, JobItem, JobState
from halfway.coordinator.requests import Moment, TransactionView
from halfway.http.requests.models import (
    Age,
    ErrorPart,
    GroupName,
    IdStart,
    MessageKey,
    PageSize,
    Remark,
    TopicName,
    TransactionId,
)

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
    sample: list[TransactionView]
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
    accepted_at: Moment
    started_at: Moment | None
    finished_at: Moment | None
    found: int | None
    """How many transactions the filter matches; null until the search is done."""
    more: bool
    """Whether that is more than `most`: start another job for the rest."""
    finished: int
    """How many transactions have a result."""
    results: dict[str, int]
    """How many transactions have each result."""


class JobPage(JobResponse, frozen=True, kw_only=True):
    """A job and a page of its items, in the order in which they are processed."""

    items: tuple[JobItem, ...]
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
