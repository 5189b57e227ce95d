"""Jobs: one act on everything that a filter finds (docs/rest.md#jobs). Plain records, no HTTP in them."""

from __future__ import annotations

from enum import StrEnum
from typing import Final

import msgspec

from halfway.domain.principal import Principal
from halfway.domain.transaction import State
from halfway.service.requests import ListQuery, TransactionFilter

MIN_RATE: Final = 0.1
MAX_RATE: Final = 500
RATE: Final = 50.0
"""Transactions a second, if a request names no other number."""


class JobAction(StrEnum):
    """What a job does to each transaction."""

    CHECK = "check"
    COMMIT = "commit"
    ROLLBACK = "rollback"
    RESUME = "resume"

    @property
    def states(self) -> tuple[State, ...]:
        """The states that it acts on."""
        if self is JobAction.CHECK:
            return (State.PREPARED,)
        return (State.PARKED,) if self is JobAction.RESUME else (State.PREPARED, State.PARKED)


class JobState(StrEnum):
    """How far a job is; `accepted` never means that anything was done."""

    ACCEPTED = "accepted"
    RUNNING = "running"
    STOPPING = "stopping"
    STOPPED = "stopped"
    DONE = "done"
    FAILED = "failed"

    @property
    def over(self) -> bool:
        """Whether it does nothing any more."""
        return self in (JobState.STOPPED, JobState.DONE, JobState.FAILED)


class ItemResult(StrEnum):
    """What came of one transaction of a job."""

    WAITING = "waiting"
    DONE = "done"
    UNCHANGED = "unchanged"
    """It stood already as the job would have it."""
    FAILED = "failed"
    REPLACED = "replaced"
    """The id belongs to another transaction than the one that was found: nothing was done to it."""


class JobSpec(msgspec.Struct, frozen=True, kw_only=True):
    """What was asked for: either `filter` or `ids`."""

    id: str
    action: JobAction
    filter: TransactionFilter | None = None
    ids: tuple[str, ...] = ()
    reason: str
    rate: float
    """Transactions a second at most."""
    most: int
    """Transactions at most."""
    of_group: str | None = None
    """The group whose key asked for it, which sees it; None for others."""

    def query(self, given: TransactionFilter, now: int, *, limit: int = 100) -> ListQuery:
        """Return the query for what the action may act on; `now` in ms since the epoch."""
        states = self.action.states
        state = states[0] if len(states) == 1 else given.state
        return msgspec.structs.replace(given.query(now), state=state, unresolved=True, limit=limit)


class JobView(msgspec.Struct, frozen=True, kw_only=True):
    """A job as it stands; times in ms since the epoch."""

    spec: JobSpec
    by: Principal
    state: JobState
    instance: str
    """Where it runs."""
    accepted_at: int
    started_at: int | None = None
    finished_at: int | None = None
    detail: str | None = None
    """Why it failed or waits."""
    found: int | None = None
    """How many the filter found; None while they are looked for."""
    items: int = 0
    """How many of them it acts on."""
    results: dict[str, int] = {}
    """How many items have each result, but for `waiting`."""
    created: bool = False
    """Whether this very call made it."""


class JobItem(msgspec.Struct, kw_only=True, gc=False):
    """One transaction of a job."""

    id: str
    prepared_at: int | None = None
    """Of the transaction that was found, ms since the epoch; None if the id was given."""
    result: ItemResult = ItemResult.WAITING
    state: State | None = None
    """The state that stands, if it is known."""
    error_code: str | None = None
    detail: str | None = None
    at: int | None = None
    """When the result came, ms since the epoch."""


class JobPage(msgspec.Struct, frozen=True, kw_only=True):
    """A job with some of its items in their order, and where the next ones begin."""

    job: JobView
    items: tuple[JobItem, ...]
    next: int | None


class JobList(msgspec.Struct, frozen=True, kw_only=True):
    """The jobs of an instance."""

    jobs: tuple[JobView, ...]


class Away(msgspec.Struct, frozen=True, kw_only=True):
    """An instance that could not be asked, or a shard that nobody serves."""

    instance: str | None
    detail: str
    shard: int | None = None


class AllJobs(msgspec.Struct, frozen=True, kw_only=True):
    """The jobs of all instances, the newest first, and the instances that could not be asked."""

    jobs: tuple[JobView, ...]
    away: tuple[Away, ...]
