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


class _Ended(msgspec.Struct, eq=False):
    """One end of a caller, and what comes of it (an `answers.Reply`)."""

    ends: _Ends
    place: int
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
        if not self.ends.answers.waits_for(self.place):
            note_late(self.request.id, error)
        self._answer(told, error, told.code if isinstance(told, HalfwayError) else "internal")

    def refuse(self, error: Exception) -> None:
        """Answer a caller who may not do this: it is not counted."""
        self.is_answered = True
        self.ends.answers.answer(self.place, error)

    def _answer(self, result: EndResult | Exception, error: BaseException | None, counted: str) -> None:
        self.is_answered = True
        ends = self.ends
        if ends.in_lane.pop(self.place, None) is not None and not ends.in_lane:
            ends.requests.deadlines.forget(ends.answer_late, ends.deadline)
        ends.answers.answer(self.place, result)
        if self.said_commit or self.by is not None:
            ends.requests.note(self, error, changed=counted == "changed")
        if not isinstance(error, NotServedError):  # else the owner of the shard counts it
            ends.activity.note_end(self.group, self.request.outcome, self.act.cause, counted, ends.began)


class _Ends:
    """The ends of one call, which have one deadline."""

    __slots__ = ("activity", "answers", "began", "deadline", "in_lane", "requests")

    def __init__(
        self, requests: CallerRequests, activity: Activity, answers: Answers[EndResult], deadline: float
    ) -> None:
        self.requests = requests
        self.activity = activity
        self.answers = answers
        self.deadline = deadline
        self.began = asyncio.get_running_loop().time()
        self.in_lane: dict[int, _Ended] = {}
        """Those that the resolver has begun, by place."""

    def answer_late(self) -> None:
        """Answer those that are late, each with an error of its own."""
        answer_all([(ended, unconfirmed(ended.request.id)) for ended in self.in_lane.values()])


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
        ends = _Ends(self, self._activity, answers, deadline)
        by_hand = principal.kind is PrincipalKind.OPERATOR
        for place, request in enumerate(requests):
            by = principal if by_hand or request.cause is Cause.OPERATOR else None
            act = Act(
                action=ACTIONS[request.outcome],
                cause=request.cause,
                remark=request.remark,
                prepared_at=request.prepared_at,
            )
            ended = _Ended(ends, place, request, act, by)
            if not self._has_begun(ended, principal):
                task = asyncio.get_running_loop().create_task(self._end(ended, deadline, principal))
                self._tasks.add(task)
                task.add_done_callback(partial(self._over, ended))
                answers.if_abandoned(task.cancel)
        if ends.in_lane:
            self.deadlines.watch(ends.answer_late, deadline)

    def _has_begun(self, ended: _Ended, principal: Principal) -> bool:
        """Begin or refuse an end; False if it has to wait for something other than the lane."""
        request, ends = ended.request, ended.ends
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
            ended.refuse(error)
            return True
        if entry is None or (principal.kind is PrincipalKind.GROUP and entry.group != principal.name):
            return False  # it takes a read barrier to tell
        ended.group = entry.group
        ends.in_lane[ended.place] = ended
        try:
            if request.check_id is not None:
                self._note_check(shard, entry, ended, request.check_id)
            begun = self._resolver.begin(shard, entry, ended.act, kept, deadline=ends.deadline, reply=ended)
        except Exception as error:  # noqa: BLE001 - whatever it is, the caller gets it
            ended.set_exception(error)
            return True
        if not begun:
            del ends.in_lane[ended.place]
        return begun

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
            if request.check_id is not None:
                self._note_check(shard, entry, ended, request.check_id)
            result = await self._resolver.resolve(request.id, ended.act, deadline=deadline)
            if request.remark and isinstance(still := shard.state.find(request.id), Pending):
                still.remark = request.remark
        except BaseException as error:
            ended.set_exception(error)
            if not isinstance(error, Exception):
                raise
        else:
            ended.set_result(result)

    def note(self, ended: _Ended, error: BaseException | None, *, changed: bool) -> None:
        """Record the commit verdict of a fetched check if its commit was not written, and who ended it by hand."""
        request = ended.request
        if ended.said_commit:
            self._verdicts.take_commit_result(request.id, error)
        if ended.by is not None and changed:
            event = State.COMMITTED if request.outcome is Outcome.COMMIT else State.ROLLED_BACK
            self._activity.acted(request.id, event.value, ended.by)

    def _note_check(self, shard: Shard, entry: Entry, ended: _Ended, check_id: str) -> None:
        """Take an end for the answer to a check that was sent; keep its commit, be that check noted or not."""
        if ended.request.outcome is Outcome.COMMIT and check_id.rpartition(":")[0] == entry.id:
            self._verdicts.keep(entry, shard.number, entry.checks)
            ended.said_commit = True
        number = self._number_sent(check_id, entry)
        if number is None:
            return
        ended.act = msgspec.structs.replace(ended.act, cause=Cause.CHECK)
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
