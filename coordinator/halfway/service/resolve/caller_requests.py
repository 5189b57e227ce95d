"""What callers do to a transaction: end it, resume it."""

from __future__ import annotations

import asyncio
from functools import partial
from typing import TYPE_CHECKING

import msgspec

from halfway.domain.errors import HalfwayError, NotServedError, UnknownTransactionError
from halfway.domain.principal import Permission, PrincipalKind
from halfway.domain.shard import Entry, Pending
from halfway.domain.transaction import Action, Cause, Outcome, State
from halfway.service.answers import Deadlines, answer_all
from halfway.service.query.views import view
from halfway.service.requests import End, EndResult, TransactionView
from halfway.service.resolve.changes import ACTIONS, Act, unconfirmed
from halfway.service.resolve.resolver import note_late

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from halfway.domain.principal import Principal
    from halfway.service.activity import Activity
    from halfway.service.answers import Answers
    from halfway.service.ports import Authority
    from halfway.service.query.lookup import Lookup
    from halfway.service.resolve.commit_verdicts import CommitVerdicts
    from halfway.service.resolve.resolver import Resolver
    from halfway.service.shards.groups import Groups
    from halfway.service.shards.shard_table import Shard, ShardTable

_ATTEMPT_DIGITS = 6


class _Asked(msgspec.Struct, eq=False):
    """One end that a caller asks for, and what comes of it (an `answers.Reply`)."""

    call: _Call
    index: int
    request: End
    act: Act
    by: Principal | None = None
    """Who ends it by hand."""
    group: str = ""
    said_commit: bool = False
    """Whether its commit verdict is kept: that of a caller who may not end the transaction never is."""
    is_answered: bool = False

    def done(self) -> bool:
        return self.is_answered

    def set_result(self, result: EndResult) -> None:
        if result.changed and self.request.outcome is Outcome.UNKNOWN:
            result = EndResult(id=result.id, state=result.state, changed=False)
        self._answer(result, None, "changed" if result.changed else "unchanged")

    def set_exception(self, error: BaseException) -> None:
        told = error if isinstance(error, Exception) else unconfirmed(self.request.id)
        if not self.call.answers.waits_for(self.index):
            note_late(self.request.id, error)
        self._answer(told, error, told.code if isinstance(told, HalfwayError) else "internal")

    def refuse(self, error: Exception) -> None:
        """Answer a caller who may not do this: it is not counted."""
        self.is_answered = True
        self.call.answers.answer(self.index, error)

    def _answer(self, result: EndResult | Exception, error: BaseException | None, counted: str) -> None:
        self.is_answered = True
        call = self.call
        if call.in_lane.pop(self.index, None) is not None and not call.in_lane:
            call.requests.deadlines.forget(call.answer_late, call.deadline)
        call.answers.answer(self.index, result)
        if self.said_commit or self.by is not None:
            call.requests.note(self, error, changed=counted == "changed")
        if not isinstance(error, NotServedError):  # else the owner of the shard counts it
            call.activity.note_end(self.group, self.request.outcome, self.act.cause, counted, call.began)


class _Call:
    """What the ends of one call share, such as their deadline."""

    __slots__ = ("activity", "answers", "began", "deadline", "in_lane", "requests")

    def __init__(
        self, requests: CallerRequests, activity: Activity, answers: Answers[EndResult], deadline: float
    ) -> None:
        self.requests = requests
        self.activity = activity
        self.answers = answers
        self.deadline = deadline
        self.began = asyncio.get_running_loop().time()
        self.in_lane: dict[int, _Asked] = {}
        """Those that the resolver has begun, by index."""

    def answer_late(self) -> None:
        """Answer those that are late, each with an error of its own."""
        answer_all([(asked, unconfirmed(asked.request.id)) for asked in self.in_lane.values()])


class CallerRequests:
    """Ends and resumes for callers."""

    def __init__(
        self,
        authority: Authority,
        shards: ShardTable,
        groups: Groups,
        lookup: Lookup,
        resolver: Resolver,
        verdicts: CommitVerdicts,
        asks: Callable[[Entry], bool],
        activity: Activity,
    ) -> None:
        """Keep the parts; `asks` says whether a check of a transaction is under way."""
        self._authority = authority
        self._shards = shards
        self._groups = groups
        self._lookup = lookup
        self._resolver = resolver
        self._verdicts = verdicts
        self._asks = asks
        self._activity = activity
        self._tasks: set[asyncio.Task[None]] = set()
        self.deadlines = Deadlines()

    def begin(
        self, requests: Sequence[End], answers: Answers[EndResult], *, deadline: float, principal: Principal
    ) -> None:
        """End transactions for a caller; an end that brings the id of a check it was sent has the cause `check`.

        If the answers are abandoned, what was begun is finished nevertheless, and what waits to begin goes no further.
        Only an end that has to wait for something other than the lane takes a task of its own.
        """
        call = _Call(self, self._activity, answers, deadline)
        by_hand = principal.kind is PrincipalKind.OPERATOR
        for index, request in enumerate(requests):
            by = principal if by_hand or request.cause is Cause.OPERATOR else None
            act = Act(
                action=ACTIONS[request.outcome],
                cause=request.cause,
                remark=request.remark,
                prepared_at=request.prepared_at,
            )
            asked = _Asked(call, index, request, act, by)
            if not self._has_begun(asked, principal):
                task = asyncio.get_running_loop().create_task(self._end(asked, deadline, principal))
                self._tasks.add(task)
                task.add_done_callback(partial(self._over, asked))
                answers.if_abandoned(task.cancel)
        if call.in_lane:
            self.deadlines.watch(call.answer_late, deadline)

    def _has_begun(self, asked: _Asked, principal: Principal) -> bool:
        """Begin or refuse an end; False if it has to wait for something other than the lane."""
        request, call = asked.request, asked.call
        try:
            self._authority.require(principal, _permission(request))
            if request.outcome is Outcome.UNKNOWN:
                return False
            kept = self._shards.payloads.get(request.id)
            shard = self._shards.of(request.id)
            entry = shard.state.find(request.id)
        except (UnknownTransactionError, NotServedError):
            return False
        except Exception as error:  # noqa: BLE001 - whatever it is, the caller gets it
            asked.refuse(error)
            return True
        if entry is None or (principal.kind is PrincipalKind.GROUP and entry.group != principal.name):
            return False  # it takes a read barrier to tell
        asked.group = entry.group
        call.in_lane[asked.index] = asked
        try:
            if request.check_id is not None:
                self._note_check(shard, entry, asked, request.check_id)
            begun = self._resolver.begin(shard, entry, asked.act, kept, deadline=call.deadline, reply=asked)
        except Exception as error:  # noqa: BLE001 - whatever it is, the caller gets it
            asked.set_exception(error)
            return True
        if not begun:
            del call.in_lane[asked.index]
        return begun

    def _over(self, asked: _Asked, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if task.cancelled() and not asked.done():  # before it began
            asked.set_exception(asyncio.CancelledError())

    async def _end(self, asked: _Asked, deadline: float, principal: Principal) -> None:
        """Do the same when it has to wait."""
        request = asked.request
        try:
            shard, entry = await self._lookup.locate(
                request.id, _permission(request), principal=principal, deadline=deadline
            )
            asked.group = entry.group
            if request.check_id is not None:
                self._note_check(shard, entry, asked, request.check_id)
            result = await self._resolver.resolve(request.id, asked.act, deadline=deadline)
            if request.remark and isinstance(still := shard.state.find(request.id), Pending):
                still.remark = request.remark
        except BaseException as error:
            asked.set_exception(error)
            if not isinstance(error, Exception):
                raise
        else:
            asked.set_result(result)

    def note(self, asked: _Asked, error: BaseException | None, *, changed: bool) -> None:
        """Record the commit verdict of a fetched check if its commit was not written, and who ended it by hand."""
        request = asked.request
        if asked.said_commit:
            self._verdicts.take_commit_result(request.id, error)
        if asked.by is not None and changed:
            event = State.COMMITTED if request.outcome is Outcome.COMMIT else State.ROLLED_BACK
            self._activity.acted(request.id, event.value, asked.by)

    def _note_check(self, shard: Shard, entry: Entry, asked: _Asked, check_id: str) -> None:
        """Take an end for the answer to a check that was sent; keep its commit, be that check noted or not."""
        if asked.request.outcome is Outcome.COMMIT and check_id.rpartition(":")[0] == entry.id:
            self._verdicts.keep(entry, shard.number, entry.checks)
            asked.said_commit = True
        number = self._number_sent(check_id, entry)
        if number is None:
            return
        asked.act = msgspec.structs.replace(asked.act, cause=Cause.CHECK)
        if isinstance(entry, Pending) and number >= (entry.leased_check or entry.checks):
            entry.leased_until = 0
            shard.agenda.put(entry.id, 0)  # the scan waited for the end of the lease

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
            self._activity.acted(transaction_id, "resumed", principal)
        now = shard.state.find(transaction_id)
        shown = view(self._groups, entry if now is None else now)
        return msgspec.structs.replace(shown, changed=done.changed)


def _permission(request: End) -> Permission:
    return Permission.END_BY_HAND if request.cause is Cause.OPERATOR else Permission.END
