"""The jobs of this instance, with limits on their number, their items and their rate (docs/rest.md#jobs)."""

from __future__ import annotations

import asyncio
from contextlib import nullcontext
from typing import TYPE_CHECKING, Final

import structlog

from halfway.domain.errors import JobIdReusedError, OverloadedError, UnknownJobError
from halfway.domain.principal import ANYBODY, Principal, PrincipalKind
from halfway.service.jobs.job import Job
from halfway.service.records.job_records import ItemResult, JobItem, JobList, JobPage

if TYPE_CHECKING:
    from halfway.service.jobs.job import ActOnItem, FindItems
    from halfway.service.ports import Clock
    from halfway.service.records.job_records import JobSpec, JobView

log = structlog.get_logger(__name__)

MAX_RUNNING: Final = 2
"""Jobs that run at once; the others wait."""
MAX_JOBS: Final = 50
MAX_ITEMS: Final = 300_000
MAX_ITEMS_OF_GROUP_JOB: Final = 10_000
"""Transactions of one job that was requested with a group's key."""
_MAX_UNFINISHED: Final = 10
_MAX_UNFINISHED_OF_GROUPS: Final = 5
"""Lower, to leave places for operators. Jobs of groups, which only check, do not count in `MAX_RUNNING`."""
_MAX_UNFINISHED_OF_ONE_GROUP: Final = 2
_MAX_JOBS_OF_GROUPS: Final = 20
_MAX_ITEMS_OF_GROUPS: Final = 50_000


class Jobs:
    """The jobs that run on this instance, and the last finished ones."""

    def __init__(self, find: FindItems, act: ActOnItem, clock: Clock, instance: str) -> None:
        """Store the parts. `find` finds the items of a job, `act` acts on one item."""
        self._find = find
        self._act = act
        self._clock = clock
        self._instance = instance
        self._jobs: dict[tuple[str | None, str], Job] = {}
        """By the group that started it and id, in the order of their acceptance: no group takes the ids of others."""
        self._slots = asyncio.Semaphore(MAX_RUNNING)
        self._tasks: dict[asyncio.Task[None], Job] = {}

    def known(self, spec: JobSpec, principal: Principal) -> JobView:
        """Return the job with the same id and request as `spec`.

        Raises:
            UnknownJobError: this instance has no job with that id.
            JobIdReusedError: the job has another request, or belongs to another caller.

        """
        job = self._jobs.get(_key(spec))
        if job is None:
            raise UnknownJobError(spec.id)
        if job.spec != spec or not _may_read(principal, job):
            raise JobIdReusedError(spec.id)
        return job.view()

    def start(self, spec: JobSpec, principal: Principal) -> JobView:
        """Accept a job. If the same request was accepted before, return that job.

        Raises:
            JobIdReusedError: a job with that id has another request.
            OverloadedError: too many jobs are unfinished.

        """
        if _key(spec) in self._jobs:
            return self.known(spec, principal)
        self._make_room(spec.of_group)
        # PEER stands for a caller without a name, whose call another instance forwarded.
        by = ANYBODY if principal.kind is PrincipalKind.PEER else principal
        job = self._jobs[_key(spec)] = Job(spec, principal, by, self._clock, self._instance)
        task = asyncio.create_task(self._run(job))
        self._tasks[task] = job
        task.add_done_callback(self._tasks.pop)
        return job.view(created=True)

    def _make_room(self, group: str | None) -> None:
        """Make room for a job; `group` is set if it was requested with a group's key."""
        unfinished = [job.spec.of_group for job in self._jobs.values() if not job.state.is_over]
        if len(unfinished) >= _MAX_UNFINISHED:
            raise OverloadedError(f"{len(unfinished)} jobs are unfinished on this instance: wait for one, or stop one")
        if group is not None:
            of_groups = sum(owner is not None for owner in unfinished)
            if unfinished.count(group) >= _MAX_UNFINISHED_OF_ONE_GROUP or of_groups >= _MAX_UNFINISHED_OF_GROUPS:
                raise OverloadedError(f"{of_groups} jobs of groups are unfinished on this instance: wait for one")
        self._forget(of_groups=group is not None, coming=1)

    def _forget(self, *, of_groups: bool, coming: int = 0) -> None:
        """Forget the oldest finished jobs. Jobs of groups replace only jobs of groups."""
        max_jobs, max_items = (_MAX_JOBS_OF_GROUPS, _MAX_ITEMS_OF_GROUPS) if of_groups else (MAX_JOBS, MAX_ITEMS)
        jobs = [job for job in self._jobs.values() if (job.spec.of_group is not None) == of_groups]
        surplus, items = len(jobs) + coming - max_jobs, sum(len(job.items) for job in jobs)
        for job in jobs:
            if job.state.is_over and (surplus > 0 or items > max_items):
                del self._jobs[_key(job.spec)]
                surplus, items = surplus - 1, items - len(job.items)

    async def _run(self, job: Job) -> None:
        of_groups = job.spec.of_group is not None
        async with nullcontext() if of_groups else self._slots:
            await job.run(self._find, self._act)
        self._forget(of_groups=of_groups)
        log.info("job_over", job=job.spec.id, state=job.state, results=dict(job.results), detail=job.detail)

    def page(self, job_id: str, *, result: ItemResult | None, start: int, limit: int, principal: Principal) -> JobPage:
        """Return a job with its items from number `start` on; UnknownJobError if the caller may read no such job."""
        job = self._get(job_id, principal)
        items: list[JobItem] = []
        following: int | None = None
        for number in range(start, len(job.items)):
            item = job.items[number]
            if result is not None and item.result is not result:
                continue
            if len(items) == limit:
                following = number
                break
            items.append(item)
        return JobPage(job=job.view(), items=tuple(items), next=following)

    def all(self, principal: Principal) -> JobList:
        """Return the jobs that a caller may read."""
        return JobList(jobs=tuple(job.view() for job in self._jobs.values() if _may_read(principal, job)))

    def stop(self, job_id: str, principal: Principal) -> JobView:
        """Stop a job: it begins no more items. A finished job is unchanged."""
        job = self._get(job_id, principal)
        job.stop()
        if job.state.is_over:  # cancel the task of a job that was still waiting
            for task in [task for task, run in self._tasks.items() if run is job]:
                task.cancel()
        return job.view()

    def _get(self, job_id: str, principal: Principal) -> Job:
        """Return the caller's own job; for callers without a group also a group's, an unfinished one first."""
        job = self._jobs.get((principal.group, job_id))
        if job is None:
            others = [one for one in self._jobs.values() if one.spec.id == job_id and _may_read(principal, one)]
            job = min(others, key=lambda one: one.state.is_over, default=None)
        if job is None:
            raise UnknownJobError(job_id)
        return job

    async def close(self) -> None:
        """Stop every job. Items in progress are abandoned, as requests are."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)


def _key(spec: JobSpec) -> tuple[str | None, str]:
    return spec.of_group, spec.id


def _may_read(principal: Principal, job: Job) -> bool:
    return principal.group in (None, job.spec.of_group)
