"""What callers do to a transaction: end it, resume it."""

from __future__ import annotations

import asyncio
from functools import partial
from typing import TYPE_CHECKING

from halfway.domain.errors import HalfwayError, NotServedError
from halfway.domain.shard import Entry, Pending
from halfway.domain.transaction import Action, Cause, Outcome
from halfway.service.query.views import view
from halfway.service.requests import End, EndResult, TransactionView
from halfway.service.resolve.effects import ACTIONS, Act

if TYPE_CHECKING:
    from collections.abc import Callable

    from halfway.service.ports import Observer
    from halfway.service.query.lookup import Lookup
    from halfway.service.resolve.commit_verdicts import CommitVerdicts
    from halfway.service.resolve.resolver import Resolver
    from halfway.service.shards.groups import Groups
    from halfway.service.shards.shard_table import Shard

_ATTEMPT_DIGITS = 6


class CallerRequests:
    """Ends and resumes for callers."""

    def __init__(
        self,
        groups: Groups,
        lookup: Lookup,
        resolver: Resolver,
        verdicts: CommitVerdicts,
        asks: Callable[[Entry], bool],
        observer: Observer,
    ) -> None:
        """Keep the parts; `asks` says whether a check of a transaction is under way."""
        self._groups = groups
        self._lookup = lookup
        self._resolver = resolver
        self._verdicts = verdicts
        self._asks = asks
        self._observer = observer

    def begin_end(self, request: End, *, deadline: float, credential: str | None) -> asyncio.Future[EndResult]:
        """End a transaction for a caller; one that brings the id of a check it was sent has the cause `check`.

        A caller that goes away may cancel the future: the end is finished nevertheless.
        """
        answer = self._begin_end(request, deadline=deadline, credential=credential)
        if _says_commit(request):
            answer.add_done_callback(partial(self._settle, request.id))
        return answer

    def _begin_end(self, request: End, *, deadline: float, credential: str | None) -> asyncio.Future[EndResult]:
        loop = asyncio.get_running_loop()
        began = loop.time()
        known = None if request.outcome is Outcome.UNKNOWN else self._lookup.known(request.id)
        if known is None:
            return loop.create_task(self._end(request, deadline=deadline, credential=credential))
        shard, entry = known
        cause = request.cause
        try:
            act = self._act(request, shard, entry, credential)
            cause = act.cause
            answer = self._resolver.begin(shard, entry, act, deadline=deadline)
        except HalfwayError as error:
            answer = loop.create_future()
            answer.set_exception(error)
        if answer is None:
            return loop.create_task(self._end(request, deadline=deadline, credential=credential))
        answer.add_done_callback(partial(self._observe, request.outcome, entry.group, cause, began))
        return answer

    async def _end(self, request: End, *, deadline: float, credential: str | None) -> EndResult:
        """Do the same when it has to wait for something other than the lane."""
        loop = asyncio.get_running_loop()
        began, group, cause = loop.time(), "", request.cause
        result: str | None = "changed"
        try:
            shard, entry = await self._lookup.locate(request.id, deadline=deadline)
            group = entry.group
            act = self._act(request, shard, entry, credential)
            cause = act.cause
            ended = await self._resolver.resolve(request.id, act, deadline=deadline)
            if request.remark and isinstance(still := shard.state.find(request.id), Pending):
                still.remark = request.remark
            result = "changed" if ended.changed else "unchanged"
        except NotServedError:
            result = None  # the owner of the shard counts it
            raise
        except HalfwayError as error:
            result = error.code
            raise
        else:
            if request.outcome is Outcome.UNKNOWN:
                return EndResult(id=ended.id, state=ended.state, changed=False)
            return ended
        finally:
            if result is not None:
                self._observer.ended(group, request.outcome.value, cause.value, result, loop.time() - began)

    def _observe(
        self, outcome: Outcome, group: str, cause: Cause, began: float, answer: asyncio.Future[EndResult]
    ) -> None:
        error = None if answer.cancelled() else answer.exception()
        if isinstance(error, NotServedError):
            return  # the owner of the shard counts it
        if isinstance(error, HalfwayError):
            result = error.code
        else:
            result = "changed" if error is None and not answer.cancelled() and answer.result().changed else "unchanged"
        seconds = asyncio.get_running_loop().time() - began
        self._observer.ended(group, outcome.value, cause.value, result, seconds)

    def _settle(self, transaction_id: str, answer: asyncio.Future[EndResult]) -> None:
        """Record the commit verdict of a fetched check if its commit was not written."""
        error = asyncio.CancelledError() if answer.cancelled() else answer.exception()
        self._verdicts.settle(transaction_id, error)

    def _act(self, request: End, shard: Shard, entry: Entry, credential: str | None) -> Act:
        self._groups.allow(entry.group, credential=credential, action="end")
        if _says_commit(request) and (request.check_id or "").rpartition(":")[0] == entry.id:
            self._verdicts.keep(entry, shard.number, entry.checks)
        checked = request.check_id is not None and self._was_sent(request.check_id, entry)
        if checked and isinstance(entry, Pending):
            entry.leased_until = 0
        return Act(
            action=ACTIONS[request.outcome],
            cause=Cause.CHECK if checked else request.cause,
            remark=request.remark,
        )

    def _was_sent(self, given: str, entry: Entry) -> bool:
        """Whether a check id is one that was sent for this transaction; the last one's count may not be noted yet."""
        name, _, attempt = given.rpartition(":")
        under_way = isinstance(entry, Pending) and (entry.attempts > entry.checks or self._asks(entry))
        number = int(attempt) if attempt.isascii() and attempt.isdigit() and len(attempt) <= _ATTEMPT_DIGITS else 0
        return name == entry.id and 1 <= number <= entry.checks + under_way

    async def resume(self, transaction_id: str, *, deadline: float, credential: str | None) -> TransactionView:
        """Take a parked transaction back among the prepared; one that is prepared is unchanged."""
        shard, entry = await self._lookup.locate(transaction_id, deadline=deadline)
        self._groups.allow(entry.group, credential=credential, action="resume")
        await self._resolver.resolve(transaction_id, Act(action=Action.RESUME, cause=Cause.OPERATOR), deadline=deadline)
        now = shard.state.find(transaction_id)
        return view(self._groups, entry if now is None else now)


def _says_commit(request: End) -> bool:
    """Whether an end answers a check with commit, be that check noted or not."""
    return request.check_id is not None and request.outcome is Outcome.COMMIT
