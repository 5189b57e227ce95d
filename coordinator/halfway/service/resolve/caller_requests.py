"""What callers do to a transaction: end it, resume it."""

from __future__ import annotations

import asyncio
from functools import partial
from typing import TYPE_CHECKING

import msgspec

from halfway.domain.errors import HalfwayError, NotServedError
from halfway.domain.principal import Permission, PrincipalKind
from halfway.domain.shard import Entry, Pending
from halfway.domain.transaction import Action, Cause, Outcome, State
from halfway.service.query.views import view
from halfway.service.requests import End, EndResult, TransactionView
from halfway.service.resolve.effects import ACTIONS, Act, unconfirmed
from halfway.service.resolve.resolver import note_late

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from halfway.domain.principal import Principal
    from halfway.service.answers import Answers
    from halfway.service.query.lookup import Lookup
    from halfway.service.resolve.commit_verdicts import CommitVerdicts
    from halfway.service.resolve.resolver import Resolver
    from halfway.service.shards.groups import Groups
    from halfway.service.shards.shard_table import Shard
    from halfway.service.tally import Tally

_ATTEMPT_DIGITS = 6


class _Ended:
    """One end of a caller, and what comes of it (a `replies.Reply`)."""

    __slots__ = ("_answers", "_place", "_requests", "_told", "began", "by", "cause", "group", "request", "said_commit")

    def __init__(
        self, requests: CallerRequests, answers: Answers[EndResult], place: int, request: End, began: float
    ) -> None:
        self._requests = requests
        self._answers = answers
        self._place = place
        self._told = False
        self.began = began
        self.request = request
        self.group = ""
        self.cause = request.cause
        self.by: Principal | None = None
        """Who ends it by hand."""
        self.said_commit = False
        """Whether its commit verdict is kept: that of a caller who may not end the transaction never is."""

    def done(self) -> bool:
        return self._told

    def set_result(self, result: EndResult) -> None:
        self._told = True
        if result.changed and self.request.outcome is Outcome.UNKNOWN:
            result = EndResult(id=result.id, state=result.state, changed=False)
        self._requests.ended(self, None, "changed" if result.changed else "unchanged")
        self._answers.answer(self._place, result)

    def refuse(self, error: Exception) -> None:
        """Answer a caller who may not do this: it is not counted."""
        self._told = True
        self._answers.answer(self._place, error)

    def set_exception(self, error: BaseException) -> None:
        self._told = True
        told = error if isinstance(error, Exception) else unconfirmed(self.request.id)
        self._requests.ended(self, error, told.code if isinstance(told, HalfwayError) else "internal")
        if not self._answers.waits_for(self._place):
            note_late(self.request.id, error)
        self._answers.answer(self._place, told)


class CallerRequests:
    """Ends and resumes for callers."""

    def __init__(
        self,
        groups: Groups,
        lookup: Lookup,
        resolver: Resolver,
        verdicts: CommitVerdicts,
        asks: Callable[[Entry], bool],
        tally: Tally,
    ) -> None:
        """Keep the parts; `asks` says whether a check of a transaction is under way."""
        self._groups = groups
        self._lookup = lookup
        self._resolver = resolver
        self._verdicts = verdicts
        self._asks = asks
        self._tally = tally
        self._tasks: set[asyncio.Task[None]] = set()

    def begin(
        self, requests: Sequence[End], answers: Answers[EndResult], *, deadline: float, principal: Principal
    ) -> None:
        """End transactions for a caller; an end that brings the id of a check it was sent has the cause `check`.

        If the answers are abandoned, what was begun is finished nevertheless, and what waits to begin goes no further.
        Only an end that has to wait for something other than the lane takes a task of its own.
        """
        began = asyncio.get_running_loop().time()
        for place, request in enumerate(requests):
            ended = _Ended(self, answers, place, request, began)
            if request.cause is Cause.OPERATOR or principal.kind is PrincipalKind.OPERATOR:
                ended.by = principal
            if not self._has_begun(ended, deadline, principal):
                task = asyncio.get_running_loop().create_task(self._end(ended, deadline, principal))
                self._tasks.add(task)
                task.add_done_callback(partial(self._over, ended))
                answers.if_abandoned(task.cancel)

    def _has_begun(self, ended: _Ended, deadline: float, principal: Principal) -> bool:
        """Begin or refuse an end; False if it has to wait for something other than the lane."""
        request = ended.request
        try:
            found = self._lookup.known(request.id, _permission(request), principal)
        except Exception as error:  # noqa: BLE001 - whatever it is, the caller gets it
            ended.refuse(error)
            return True
        if found is None or request.outcome is Outcome.UNKNOWN:
            return False
        shard, entry = found
        ended.group = entry.group
        try:
            act = self._act(shard, entry, ended)
            return self._resolver.begin(shard, entry, act, deadline=deadline, reply=ended)
        except Exception as error:  # noqa: BLE001 - whatever it is, the caller gets it
            ended.set_exception(error)
            return True

    def _over(self, ended: _Ended, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if task.cancelled() and not ended.done():  # before it began
            ended.set_exception(asyncio.CancelledError())

    async def _end(self, ended: _Ended, deadline: float, principal: Principal) -> None:
        """Do the same when it has to wait."""
        request = ended.request
        try:
            shard, entry = await self._lookup.locate(
                request.id, _permission(request), principal=principal, deadline=deadline
            )
            ended.group = entry.group
            act = self._act(shard, entry, ended)
            result = await self._resolver.resolve(request.id, act, deadline=deadline)
            if request.remark and isinstance(still := shard.state.find(request.id), Pending):
                still.remark = request.remark
        except BaseException as error:
            ended.set_exception(error)
            if not isinstance(error, Exception):
                raise
        else:
            ended.set_result(result)

    def ended(self, ended: _Ended, error: BaseException | None, counted: str) -> None:
        """Count an end, and record the commit verdict of a fetched check if its commit was not written."""
        request = ended.request
        if ended.said_commit:
            self._verdicts.take_commit_result(request.id, error)
        if ended.by is not None and counted == "changed":
            event = State.COMMITTED if request.outcome is Outcome.COMMIT else State.ROLLED_BACK
            self._tally.activity.acted(request.id, event.value, ended.by)
        if not isinstance(error, NotServedError):  # else the owner of the shard counts it
            self._tally.ended(ended.group, request.outcome, ended.cause, counted, ended.began)

    def _act(self, shard: Shard, entry: Entry, ended: _Ended) -> Act:
        request = ended.request
        if _says_commit(request) and (request.check_id or "").rpartition(":")[0] == entry.id:
            self._verdicts.keep(entry, shard.number, entry.checks)
            ended.said_commit = True
        number = None if request.check_id is None else self._number_sent(request.check_id, entry)
        checked = number is not None
        if number is not None and isinstance(entry, Pending) and number >= (entry.leased_check or entry.checks):
            entry.leased_until = 0
            shard.agenda.put(entry.id, 0)  # the scan waited for the end of the lease
        ended.cause = Cause.CHECK if checked else request.cause
        return Act(
            action=ACTIONS[request.outcome],
            cause=ended.cause,
            remark=request.remark,
            prepared_at=request.prepared_at,
        )

    def _number_sent(self, given: str, entry: Entry) -> int | None:
        """Return the number of a check by its id, None if no such check was sent for this transaction.

        The last one's count may not be noted yet.
        """
        name, _, attempt = given.rpartition(":")
        under_way = isinstance(entry, Pending) and (entry.attempts > entry.checks or self._asks(entry))
        number = int(attempt) if attempt.isascii() and attempt.isdigit() and len(attempt) <= _ATTEMPT_DIGITS else 0
        return number if name == entry.id and 1 <= number <= entry.checks + under_way else None

    async def resume(
        self,
        transaction_id: str,
        *,
        remark: str | None = None,
        prepared_at: int | None = None,
        deadline: float,
        principal: Principal,
    ) -> TransactionView:
        """Take a parked transaction back among the prepared; one that is prepared is unchanged.

        Raises:
            IdReplacedError: the id belongs to a transaction that was not prepared at `prepared_at`.

        """
        shard, entry = await self._lookup.locate(
            transaction_id, Permission.RESUME, principal=principal, deadline=deadline
        )
        act = Act(action=Action.RESUME, cause=Cause.OPERATOR, remark=remark, prepared_at=prepared_at)
        done = await self._resolver.resolve(transaction_id, act, deadline=deadline)
        if done.changed:
            self._tally.activity.acted(transaction_id, "resumed", principal)
        now = shard.state.find(transaction_id)
        shown = view(self._groups, entry if now is None else now)
        return msgspec.structs.replace(shown, changed=done.changed)


def _says_commit(request: End) -> bool:
    """Whether an end answers a check with commit, be that check noted or not."""
    return request.check_id is not None and request.outcome is Outcome.COMMIT


def _permission(request: End) -> Permission:
    return Permission.END_BY_HAND if request.cause is Cause.OPERATOR else Permission.END
