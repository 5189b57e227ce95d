"""The records of jobs: one action on every transaction that a filter finds (docs/rest.md#jobs)."""

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
"""The default rate, in transactions per second."""


class JobAction(StrEnum):
    """The action of a job on each transaction."""

    CHECK = "check"
    COMMIT = "commit"
    ROLLBACK = "rollback"
    RESUME = "resume"

    @property
    def states(self) -> tuple[State, ...]:
        """The states of the transactions that it acts on."""
        if self is JobAction.CHECK:
            return (State.PREPARED,)
        return (State.PARKED,) if self is JobAction.RESUME else (State.PREPARED, State.PARKED)


class JobState(StrEnum):
    """The state of a job. `accepted` does not mean that anything was done."""

    ACCEPTED = "accepted"
    RUNNING = "running"
    STOPPING = "stopping"
    STOPPED = "stopped"
    DONE = "done"
    FAILED = "failed"

    @property
    def is_over(self) -> bool:
        """Return whether the job is finished."""
        return self in (JobState.STOPPED, JobState.DONE, JobState.FAILED)


class ItemResult(StrEnum):
    """The result of one transaction of a job."""

    WAITING = "waiting"
    DONE = "done"
    UNCHANGED = "unchanged"
    """It already was in the state that the job asks for."""
    FAILED = "failed"
    REPLACED = "replaced"
    """The id now belongs to another transaction than the one that was found: nothing was done to it."""


class JobSpec(msgspec.Struct, frozen=True, kw_only=True):
    """The request for a job, with either `filter` or `ids`."""

    id: str
    action: JobAction
    filter: TransactionFilter | None = None
    ids: tuple[str, ...] = ()
    reason: str
    rate: float
    """The maximum number of transactions per second."""
    most: int
    """The maximum number of transactions."""
    of_group: str | None = None
    """The group whose key requested the job, and which may read it; None for other callers."""

    def query(self, selection: TransactionFilter, now: int, *, limit: int = 100) -> ListQuery:
        """Return the query for the selected transactions that the action applies to; `now` is in ms since the epoch."""
        states = self.action.states
        state = states[0] if len(states) == 1 else selection.state
        return msgspec.structs.replace(selection.query(now), state=state, unresolved=True, limit=limit)


class JobView(msgspec.Struct, frozen=True, kw_only=True):
    """A job with its progress. Times are in ms since the epoch."""

    spec: JobSpec
    by: Principal
    state: JobState
    instance: str
    """The instance that runs it."""
    accepted_at: int
    started_at: int | None = None
    finished_at: int | None = None
    detail: str | None = None
    """The reason why it failed or waits."""
    found: int | None = None
    """The number of transactions that the filter found; None during the search."""
    items: int = 0
    """The number of transactions that it acts on."""
    results: dict[str, int] = {}
    """The number of items with each result, except `waiting`."""
    created: bool = False
    """Whether this call created it."""


class JobItem(msgspec.Struct, kw_only=True, gc=False):
    """One transaction of a job."""

    id: str
    prepared_at: int | None = None
    """The prepare time of the transaction that was found, ms since the epoch; None if the request named the id."""
    result: ItemResult = ItemResult.WAITING
    state: State | None = None
    """The current state, if it is known."""
    error_code: str | None = None
    detail: str | None = None
    at: int | None = None
    """The time of the result, ms since the epoch."""


class JobPage(msgspec.Struct, frozen=True, kw_only=True):
    """A job with a page of its items, and the number of the first item of the next page."""

    job: JobView
    items: tuple[JobItem, ...]
    next: int | None


class JobList(msgspec.Struct, frozen=True, kw_only=True):
    """The jobs of an instance."""

    jobs: tuple[JobView, ...]


class Away(msgspec.Struct, frozen=True, kw_only=True):
    """An instance that did not answer, or a shard that no instance serves."""

    instance: str | None
    detail: str
    shard: int | None = None


class AllJobs(msgspec.Struct, frozen=True, kw_only=True):
    """The jobs of all instances, the newest first, and the instances that did not answer."""

    jobs: tuple[JobView, ...]
    away: tuple[Away, ...]
