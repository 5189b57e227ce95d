"""The jobs of this instance, with limits on their number, their items and their rate (docs/rest.md#jobs)."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable
from contextlib import nullcontext
from typing import TYPE_CHECKING, Final, NamedTuple

import structlog

from halfway.coordinator.records import ItemResult, JobItem, JobList, JobPage, JobSpec, JobState, JobView
from halfway.coordinator.requests import Moment
from halfway.protocol.errors import (
    EndUnconfirmedError,
    ForbiddenError,
    HalfwayError,
    IdReplacedError,
    JobIdReusedError,
    NotAuthorisedError,
    OverloadedError,
    RetryableError,
    TopicUnavailableError,
    UnauthenticatedError,
    UnknownJobError,
)
from halfway.protocol.principal import ANYBODY, Principal, PrincipalKind
from halfway.protocol.transactions import State

if TYPE_CHECKING:
    from halfway.coordinator.ports import Clock
    from halfway.coordinator.records import FindResult, JobSpec, JobView
    from halfway.protocol.principal import Principal


log = structlog.get_logger(__name__)

_IN_FLIGHT: Final = 32
_FIND_S: Final = 30.0
_FIND_FOR_S: Final = 300.0
_ITEM_S: Final = 15.0
_ITEM_FOR_S: Final = 60.0
_PAUSE_S: Final = 1.0
_NOT_RETRIED: Final = (TopicUnavailableError, NotAuthorisedError)
"""Errors that need an operator: the item fails, and the job continues."""


class ActResult(NamedTuple):
    """The result of an action: the current state, whether this action changed it, and the group if it is known."""

    state: State | None
    changed: bool
    group: str | None = None


FindItems = Callable[[JobSpec, "Principal", float], Awaitable["FindResult"]]
"""Finds the transactions of a job, with the rights of a principal, by a deadline on the loop's clock."""
ActOnItem = Callable[[JobSpec, JobItem, "Principal", "Principal", float], Awaitable[ActResult]]
"""Acts on one item by a deadline, with the rights of the first principal; the audit trail names the second."""


class Job:
    """One job. When it is stopped, items in progress are finished, and the rest stay waiting."""

    def __init__(self, spec: JobSpec, principal: Principal, by: Principal, clock: Clock, instance: str) -> None:
        """Accept a job that uses the rights of `principal` and was requested by `by`."""
        self.spec = spec
        self.state = JobState.ACCEPTED
        ids = list(dict.fromkeys(spec.ids))
        self.items: list[JobItem] = [JobItem(id=name) for name in ids[: spec.most]]
        self.results: Counter[str] = Counter()
        self.detail: str | None = None
        self._principal = principal
        self._by = by
        self._clock = clock
        self._instance = instance
        self._found: int | None = len(ids) if spec.ids else None
        self._accepted_at = Moment(clock.now_ms())
        self._started_at: Moment | None = None
        self._finished_at: Moment | None = None
        self._stopped = asyncio.Event()
        self._fatal: HalfwayError | None = None
        """The error that ended the job."""

    def view(self, *, created: bool = False) -> JobView:
        """Return the job with its progress."""
        return JobView(
            spec=self.spec,
            by=self._by,
            state=self.state,
            instance=self._instance,
            accepted_at=self._accepted_at,
            started_at=self._started_at,
            finished_at=self._finished_at,
            detail=self.detail,
            found=self._found,
            items=len(self.items),
            results=dict(self.results),
            created=created,
        )

    def stop(self) -> None:
        """Begin no more items. A job that has not started is finished at once."""
        self._stopped.set()
        if self.state is JobState.ACCEPTED:  # it is still waiting for other jobs
            self.state, self._finished_at = JobState.STOPPED, Moment(self._clock.now_ms())
        elif self.state is JobState.RUNNING:
            self.state = JobState.STOPPING

    async def run(self, find: FindItems, act: ActOnItem) -> None:
        """Find the items, act on each, and record the final state."""
        if self.state.is_over:
            return
        self._started_at = Moment(self._clock.now_ms())
        ended = JobState.DONE
        try:
            self.state = JobState.RUNNING
            if not self.spec.ids:
                await self._find_items(find)
            await self._process(act)
            if self._fatal is not None:
                ended, self.detail = JobState.FAILED, f"{self._fatal.code}: {self._fatal.detail}"
            elif any(item.result is ItemResult.WAITING for item in self.items) or self._found is None:
                ended = JobState.STOPPED
        except HalfwayError as error:
            ended, self.detail = JobState.FAILED, f"{error.code}: {error.detail}"
        except asyncio.CancelledError:
            ended, self.detail = JobState.STOPPED, "the instance that ran it was stopped"
            raise
        except Exception:
            log.exception("job_failed", job=self.spec.id)
            ended, self.detail = JobState.FAILED, "internal error: see the log of its instance"
        finally:
            self.state, self._finished_at = ended, Moment(self._clock.now_ms())

    async def _find_items(self, find: FindItems) -> None:
        """Find the items; retry while a shard is unavailable."""
        loop = asyncio.get_running_loop()
        until = loop.time() + _FIND_FOR_S
        while not self._stopped.is_set():
            try:
                result = await find(self.spec, self._principal, loop.time() + _FIND_S)
            except RetryableError as error:
                if loop.time() > until:
                    raise
                self.detail = f"waiting: {error.detail}"
                await self._pause(error.retry_after_s)
            else:
                self.detail = None
                self._found = result.count
                self.items = [JobItem(id=name, prepared_at=prepared_at) for prepared_at, name in result.places]
                return

    async def _process(self, act: ActOnItem) -> None:
        """Act on every item, at the rate of the job."""
        loop = asyncio.get_running_loop()
        slots = asyncio.Semaphore(_IN_FLIGHT)
        next_at = loop.time()
        async with asyncio.TaskGroup() as group:
            for item in self.items:
                next_at = max(next_at + 1 / self.spec.rate, loop.time())
                await self._pause(next_at - loop.time())
                await slots.acquire()
                if self._stopped.is_set():
                    return
                group.create_task(self._process_item(act, item)).add_done_callback(lambda _: slots.release())

    async def _process_item(self, act: ActOnItem, item: JobItem) -> None:
        """Act on one item; retry retryable errors for a bounded time."""
        loop = asyncio.get_running_loop()
        until = loop.time() + _ITEM_FOR_S
        while True:
            try:
                result = await act(self.spec, item, self._principal, self._by, loop.time() + _ITEM_S)
            except HalfwayError as error:
                if isinstance(error, UnauthenticatedError | ForbiddenError):
                    self._fatal = error
                    self._stopped.set()
                    return
                is_retryable = isinstance(error, RetryableError) and not isinstance(error, _NOT_RETRIED)
                if is_retryable and loop.time() < until and not self._stopped.is_set():
                    await self._pause(getattr(error, "retry_after_s", _PAUSE_S))
                    continue
                item.error_code, item.detail = error.code, error.detail
                item.state = _state_of(error)
                self._record_result(
                    item, ItemResult.REPLACED if isinstance(error, IdReplacedError) else ItemResult.FAILED
                )
            else:
                item.state = result.state
                self._record_result(item, ItemResult.DONE if result.changed else ItemResult.UNCHANGED)
            return

    def _record_result(self, item: JobItem, result: ItemResult) -> None:
        item.result, item.at = result, Moment(self._clock.now_ms())
        self.results[result.value] += 1

    async def _pause(self, seconds: float) -> None:
        """Wait for a time, or until the job is stopped."""
        if seconds <= 0:
            return
        try:
            async with asyncio.timeout(seconds):
                await self._stopped.wait()
        except TimeoutError:
            pass


def _state_of(error: HalfwayError) -> State | None:
    """Return the state of the transaction that an error reports, None if it reports none."""
    state = error.fields.get("state")
    return State(state) if isinstance(state, str) and not isinstance(error, EndUnconfirmedError) else None


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
