"""What requests and answers about jobs look like."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from halfway.domain.transaction import State
from halfway.rest.requests.models import (
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
from halfway.service.job_records import MAX_RATE, MIN_RATE, RATE, ItemResult, JobAction, JobState

MAX_ITEMS = 100_000
SAMPLE = 20

JobId = Annotated[
    str,
    Meta(
        pattern=r"^(?!\.{1,2}(?:$(?!\n)))[A-Za-z0-9._-]{1,64}$(?!\n)",
        description="1 to 64 of letters, digits and . _ -, not . or ..",
    ),
]


class JobFilter(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """Which transactions; what is left out matches everything that the action may act on."""

    state: Literal["prepared", "parked"] | None = None
    group: GroupName | None = None
    topic: TopicName | None = None
    key: MessageKey | None = None
    id: IdStart | None = None
    older_than_s: Age | None = None
    younger_than_s: Age | None = None
    error: ErrorPart | None = None


class JobRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One action on everything that a filter finds, or on some ids; the ages of a filter count from its start."""

    action: JobAction
    filter: JobFilter | None = None
    ids: Annotated[list[TransactionId], Meta(min_length=1, max_length=1000, description="1 to 1000 ids")] | None = None
    reason: Remark | None = None
    """Kept as the remark of each; only a preview needs none."""
    id: JobId | None = None
    """The same request with the same id again does nothing twice."""
    rate: Annotated[float, Meta(ge=MIN_RATE, le=MAX_RATE, description=f"a second, from {MIN_RATE} to {MAX_RATE}")] = (
        RATE
    )
    most: Annotated[int, Meta(ge=1, le=MAX_ITEMS, description=f"from 1 to {MAX_ITEMS}")] = MAX_ITEMS
    preview: bool = False


class JobParameters(msgspec.Struct, frozen=True, kw_only=True):
    """Which items of a job to show."""

    result: ItemResult | None = None
    limit: PageSize = 100
    cursor: Annotated[int, Meta(ge=0, le=MAX_ITEMS, description="`next` of the page before")] = 0


class JobPreview(msgspec.Struct, frozen=True, kw_only=True):
    """What a job would act on now; nothing is accepted and nothing is done."""

    preview: Literal[True]
    action: JobAction
    count: int
    more: bool
    """Whether there are more than `most`."""
    sample: list[TransactionSummary]
    """The oldest, 20 at most; none if ids were given."""


class JobResponse(msgspec.Struct, frozen=True, kw_only=True):
    """A job as it stands."""

    id: str
    action: JobAction
    filter: JobFilter | None
    ids: int | None
    """How many ids were given in place of a filter."""
    reason: str
    rate: float
    most: int
    by: str
    """Who asked for it."""
    state: JobState
    """`accepted`: nothing is done yet."""
    detail: str | None
    """Why it failed, or what it waits for."""
    instance: str
    """Where it runs."""
    accepted_at: Timestamp
    started_at: Timestamp | None
    finished_at: Timestamp | None
    found: int | None
    """How many the filter found; null until they are found."""
    more: bool
    """Whether that is more than `most`: another job takes the rest."""
    finished: int
    """How many have a result."""
    results: dict[str, int]
    """How many have each result."""


class JobItem(msgspec.Struct, frozen=True, kw_only=True):
    """What came of one transaction; `done` of a check says that the group is asked, not what it said."""

    id: str
    result: ItemResult
    state: State | None
    error_code: str | None
    detail: str | None
    at: Timestamp | None


class JobPage(JobResponse, frozen=True, kw_only=True):
    """A job and a page of its items, in the order in which they are acted on."""

    items: list[JobItem]
    next: int | None


class JobPlace(msgspec.Struct, frozen=True, kw_only=True):
    """An instance that could not be asked, and why."""

    instance: str | None
    detail: str


class JobListResponse(msgspec.Struct, frozen=True, kw_only=True):
    """The jobs of all instances, the newest first."""

    jobs: list[JobResponse]
    away: list[JobPlace]
    """Instances that could not be asked: their jobs are not listed."""
