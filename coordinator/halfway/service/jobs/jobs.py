"""The jobs of this instance: bounded in number, in items, and in what they do a second (docs/rest.md#jobs)."""

from __future__ import annotations

import asyncio
from contextlib import nullcontext
from typing import TYPE_CHECKING, Final

import structlog

from halfway.domain.errors import JobIdReusedError, OverloadedError, UnknownJobError
from halfway.domain.principal import ANYBODY, Principal, PrincipalKind
from halfway.service.job_records import ItemResult, JobItem, JobList, JobPage
from halfway.service.jobs.job import Job

if TYPE_CHECKING:
    from halfway.service.job_records import JobSpec, JobView
    from halfway.service.jobs.job import Act, Find
    from halfway.service.ports import Clock

log = structlog.get_logger(__name__)

RUNNING: Final = 2
"""Jobs that run at once; further ones wait."""
KEPT: Final = 50
KEPT_ITEMS: Final = 300_000
MOST_OF_GROUP: Final = 10_000
"""Transactions of one job that a group's key asked for."""
_UNFINISHED: Final = 10
_UNFINISHED_OF_GROUPS: Final = 5
"""So that groups leave places to operators; their jobs, which only ask for checks, take none of `RUNNING`."""
_UNFINISHED_OF_ONE_GROUP: Final = 2
_KEPT_OF_GROUPS: Final = 20
_KEPT_ITEMS_OF_GROUPS: Final = 50_000


class Jobs:
    """Keeps the jobs that run here, and the last that did."""

    def __init__(self, find: Find, act: Act, clock: Clock, instance: str) -> None:
        """Keep the parts: `find` finds what a job acts on, `act` does it to one."""
        self._find = find
        self._act = act
        self._clock = clock
        self._instance = instance
        self._jobs: dict[str, Job] = {}
        """By id, in the order of their acceptance."""
        self._places = asyncio.Semaphore(RUNNING)
        self._tasks: dict[asyncio.Task[None], Job] = {}

    def known(self, spec: JobSpec, principal: Principal) -> JobView:
        """Return the job that has the id of a wanted one.

        Raises:
            UnknownJobError: there is none here.
            JobIdReusedError: it is another one, or another caller's.

        """
        job = self._jobs.get(spec.id)
        if job is None:
            raise UnknownJobError(spec.id)
        if job.spec != spec or not _sees(principal, job):
            raise JobIdReusedError(spec.id)
        return job.view()

    def start(self, spec: JobSpec, principal: Principal) -> JobView:
        """Accept a job; the same again is answered with the job as it stands.

        Raises:
            JobIdReusedError: a job of that id does something else.
            OverloadedError: too many jobs are not over.

        """
        if spec.id in self._jobs:
            return self.known(spec, principal)
        self._make_room(spec.of_group)
        # Another instance vouches for a caller of no name, who may do what anybody may.
        by = ANYBODY if principal.kind is PrincipalKind.PEER else principal
        job = self._jobs[spec.id] = Job(spec, principal, by, self._clock, self._instance)
        task = asyncio.create_task(self._run(job))
        self._tasks[task] = job
        task.add_done_callback(self._tasks.pop)
        return job.view(created=True)

    def _make_room(self, group: str | None) -> None:
        """Make room for a job of a group's key, None for that of somebody else."""
        unfinished = [job.spec.of_group for job in self._jobs.values() if not job.state.over]
        if len(unfinished) >= _UNFINISHED:
            raise OverloadedError(f"{len(unfinished)} jobs are not over on this instance: wait for one, or stop one")
        if group is not None:
            of_groups = sum(one is not None for one in unfinished)
            if unfinished.count(group) >= _UNFINISHED_OF_ONE_GROUP or of_groups >= _UNFINISHED_OF_GROUPS:
                raise OverloadedError(f"{of_groups} jobs of groups are not over on this instance: wait for one")
        self._forget(of_groups=group is not None, coming=1)

    def _forget(self, *, of_groups: bool, coming: int = 0) -> None:
        """Forget the oldest that are over: groups push out none but those of groups."""
        kept, most = (_KEPT_OF_GROUPS, _KEPT_ITEMS_OF_GROUPS) if of_groups else (KEPT, KEPT_ITEMS)
        jobs = [job for job in self._jobs.values() if (job.spec.of_group is not None) == of_groups]
        surplus, items = len(jobs) + coming - kept, sum(len(job.items) for job in jobs)
        for job in jobs:
            if job.state.over and (surplus > 0 or items > most):
                del self._jobs[job.spec.id]
                surplus, items = surplus - 1, items - len(job.items)

    async def _run(self, job: Job) -> None:
        of_groups = job.spec.of_group is not None
        async with nullcontext() if of_groups else self._places:
            await job.run(self._find, self._act)
        self._forget(of_groups=of_groups)
        log.info("job_over", job=job.spec.id, state=job.state, results=dict(job.results), detail=job.detail)

    def page(self, job_id: str, *, result: ItemResult | None, start: int, limit: int, principal: Principal) -> JobPage:
        """Show a job with its items from a number on; UnknownJobError if this caller sees none of that id."""
        job = self._get(job_id, principal)
        found: list[JobItem] = []
        following: int | None = None
        for number in range(start, len(job.items)):
            item = job.items[number]
            if result is not None and item.result is not result:
                continue
            if len(found) == limit:
                following = number
                break
            found.append(item)
        return JobPage(job=job.view(), items=tuple(found), next=following)

    def all(self, principal: Principal) -> JobList:
        """Show the jobs that a caller sees."""
        return JobList(jobs=tuple(job.view() for job in self._jobs.values() if _sees(principal, job)))

    def stop(self, job_id: str, principal: Principal) -> JobView:
        """Begin no more items of a job; one that is over is left as it is."""
        job = self._get(job_id, principal)
        job.stop()
        if job.state.over:  # one that waited for its turn waits no longer
            for task in [task for task, run in self._tasks.items() if run is job]:
                task.cancel()
        return job.view()

    def _get(self, job_id: str, principal: Principal) -> Job:
        job = self._jobs.get(job_id)
        if job is None or not _sees(principal, job):
            raise UnknownJobError(job_id)
        return job

    async def close(self) -> None:
        """Stop every job; items that are under way are abandoned, as requests are."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)


def _sees(principal: Principal, job: Job) -> bool:
    return principal.group in (None, job.spec.of_group)
