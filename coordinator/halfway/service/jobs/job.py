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
from halfway.service.job_records import ItemResult, JobItem, JobSpec, JobState, JobView

if TYPE_CHECKING:
    from halfway.domain.principal import Principal
    from halfway.service.peer_calls import Found
    from halfway.service.ports import Clock

log = structlog.get_logger(__name__)

_IN_FLIGHT: Final = 32
_FIND_S: Final = 30.0
_FIND_FOR_S: Final = 300.0
_ITEM_S: Final = 15.0
_ITEM_FOR_S: Final = 60.0
_PAUSE_S: Final = 1.0
_LASTING: Final = (TopicUnavailableError, NotAuthorisedError)
"""Errors that wait for an operator: the item has failed, and the job goes on."""


class Acted(NamedTuple):
    """What an act came to: the state that stands, and whether this very act changed it."""

    state: State | None
    changed: bool


Find = Callable[[JobSpec, "Principal", float], Awaitable["Found"]]
"""Finds what a job acts on, for a caller and until a deadline on the loop's clock."""
Act = Callable[[JobSpec, JobItem, "Principal", "Principal", float], Awaitable[Acted]]
"""Acts on one item, with the rights of one principal and on record as of another, until a deadline."""


class Job:
    """One job. What is under way when it is stopped is finished; the rest of its items is left waiting."""

    def __init__(self, spec: JobSpec, principal: Principal, by: Principal, clock: Clock, instance: str) -> None:
        """Accept; `principal` is whose rights it uses, `by` who it says has asked for it."""
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
        self._broken: HalfwayError | None = None

    def view(self, *, created: bool = False) -> JobView:
        """Show it as it stands."""
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
        """Begin no more items; one that has not begun to run is over."""
        self._stopped.set()
        if self.state is JobState.ACCEPTED:  # it waits for others, and need not
            self.state, self._finished_at = JobState.STOPPED, self._clock.now_ms()
        elif self.state is JobState.RUNNING:
            self.state = JobState.STOPPING

    async def run(self, find: Find, act: Act) -> None:
        """Find what it acts on, act on each, and say how it ended."""
        if self.state.over:
            return
        self._started_at = self._clock.now_ms()
        ended = JobState.DONE
        try:
            self.state = JobState.RUNNING
            if not self.spec.ids:
                await self._look(find)
            await self._work(act)
            if self._broken is not None:
                ended, self.detail = JobState.FAILED, f"{self._broken.code}: {self._broken.detail}"
            elif any(item.result is ItemResult.WAITING for item in self.items) or self._found is None:
                ended = JobState.STOPPED
        except HalfwayError as error:
            ended, self.detail = JobState.FAILED, f"{error.code}: {error.detail}"
        except asyncio.CancelledError:
            ended, self.detail = JobState.STOPPED, "the instance that ran it was stopped"
            raise
        except Exception:
            log.exception("job_failed", job=self.spec.id)
            ended, self.detail = JobState.FAILED, "internal: the log of its instance says why"
        finally:
            self.state, self._finished_at = ended, self._clock.now_ms()

    async def _look(self, find: Find) -> None:
        """Find the items; while a shard is away, ask again."""
        loop = asyncio.get_running_loop()
        until = loop.time() + _FIND_FOR_S
        while not self._stopped.is_set():
            try:
                found = await find(self.spec, self._principal, loop.time() + _FIND_S)
            except RetryableError as error:
                if loop.time() > until:
                    raise
                self.detail = f"waiting: {error.detail}"
                await self._pause(error.retry_after_s)
            else:
                self.detail = None
                self._found = found.count
                self.items = [JobItem(id=name, prepared_at=prepared_at) for prepared_at, name in found.places]
                return

    async def _work(self, act: Act) -> None:
        loop = asyncio.get_running_loop()
        places = asyncio.Semaphore(_IN_FLIGHT)
        turn = loop.time()
        async with asyncio.TaskGroup() as group:
            for item in self.items:
                turn = max(turn + 1 / self.spec.rate, loop.time())
                await self._pause(turn - loop.time())
                await places.acquire()
                if self._stopped.is_set():
                    return
                group.create_task(self._item(act, item)).add_done_callback(lambda _: places.release())

    async def _item(self, act: Act, item: JobItem) -> None:
        """Act on one; again while it could not be done and may be, for a bounded time."""
        loop = asyncio.get_running_loop()
        until = loop.time() + _ITEM_FOR_S
        while True:
            try:
                acted = await act(self.spec, item, self._principal, self._by, loop.time() + _ITEM_S)
            except HalfwayError as error:
                if isinstance(error, UnauthenticatedError | ForbiddenError):
                    self._broken = error
                    self._stopped.set()
                    return
                again = isinstance(error, RetryableError) and not isinstance(error, _LASTING)
                if again and loop.time() < until and not self._stopped.is_set():
                    await self._pause(getattr(error, "retry_after_s", _PAUSE_S))
                    continue
                item.error_code, item.detail = error.code, error.detail
                item.state = _state_in(error)
                self._note_result(
                    item, ItemResult.REPLACED if isinstance(error, IdReplacedError) else ItemResult.FAILED
                )
            else:
                item.state = acted.state
                self._note_result(item, ItemResult.DONE if acted.changed else ItemResult.UNCHANGED)
            return

    def _note_result(self, item: JobItem, result: ItemResult) -> None:
        item.result, item.at = result, self._clock.now_ms()
        self.results[result.value] += 1

    async def _pause(self, seconds: float) -> None:
        """Wait, or until it is stopped."""
        if seconds <= 0:
            return
        try:
            async with asyncio.timeout(seconds):
                await self._stopped.wait()
        except TimeoutError:
            pass


def _state_in(error: HalfwayError) -> State | None:
    told = error.fields.get("state")
    return State(told) if isinstance(told, str) and not isinstance(error, EndUnconfirmedError) else None
