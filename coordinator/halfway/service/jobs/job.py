"""One job, from its acceptance to its end."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Final, NamedTuple

import structlog

from halfway.domain.errors import (
    EndUnconfirmedError,
    ForbiddenError,
    HalfwayError,
    IdReplacedError,
    NotAuthorisedError,
    RetryableError,
    TopicUnavailableError,
    UnauthenticatedError,
)
from halfway.domain.transaction import State
from halfway.service.records.job_records import ItemResult, JobItem, JobSpec, JobState, JobView

if TYPE_CHECKING:
    from halfway.domain.principal import Principal
    from halfway.service.ports import Clock
    from halfway.service.records.peer_calls import FindResult

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
        self._accepted_at = clock.now_ms()
        self._started_at: int | None = None
        self._finished_at: int | None = None
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
            self.state, self._finished_at = JobState.STOPPED, self._clock.now_ms()
        elif self.state is JobState.RUNNING:
            self.state = JobState.STOPPING

    async def run(self, find: FindItems, act: ActOnItem) -> None:
        """Find the items, act on each, and record the final state."""
        if self.state.is_over:
            return
        self._started_at = self._clock.now_ms()
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
            self.state, self._finished_at = ended, self._clock.now_ms()

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
        item.result, item.at = result, self._clock.now_ms()
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
