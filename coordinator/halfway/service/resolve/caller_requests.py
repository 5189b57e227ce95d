"""The changes that callers request: ends and resumes."""

from __future__ import annotations

import asyncio
from functools import partial
from typing import TYPE_CHECKING

import msgspec
import structlog

from halfway.domain.entries import Entry, Pending
from halfway.domain.errors import HalfwayError, NotServedError, UnknownTransactionError
from halfway.domain.principal import Permission, PrincipalKind
from halfway.domain.transaction import Action, Cause, Outcome, State
from halfway.service.answers import Deadlines
from halfway.service.query.views import view
from halfway.service.requests import End, EndResult, TransactionView
from halfway.service.resolve.changes import ACTIONS, Act, unconfirmed
from halfway.service.resolve.resolver import log_late_error

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from halfway.domain.principal import Principal
    from halfway.service.activity.activity import Activity
    from halfway.service.answers import Answers
    from halfway.service.ports import Authority
    from halfway.service.query.lookup import Lookup
    from halfway.service.resolve.commit_verdicts import CommitVerdicts
    from halfway.service.resolve.resolver import Resolver
    from halfway.service.shards.groups import Groups
    from halfway.service.shards.shard_table import Shard, ShardTable

log = structlog.get_logger(__name__)

_ATTEMPT_DIGITS = 6


class _EndList(msgspec.Struct, eq=False):
    """The ends of one call, and what they share, such as the deadline."""

    requests: CallerRequests
    activity: Activity
    answers: Answers[EndResult]
    principal: Principal
    deadline: float
    began: float
    in_lane: dict[int, _CallerEnd]
    """The ends that the resolver has begun, by index."""
    allowed: set[Permission]
    """The permissions of the caller that were checked."""

    def answer_late(self) -> None:
        """Answer the ends that are late, each with an error of its own."""
        for end in list(self.in_lane.values()):
            try:
                end.answer(unconfirmed(end.request.id))
            except Exception:
                log.exception("reply_failed")  # the others must still get their answers


class _CallerEnd(msgspec.Struct, eq=False):
    """One end, from its request to its answer."""

    ends: _EndList
    index: int
    request: End
    act: Act
    operator: Principal | None
    """The caller, if it ends the transaction manually."""
    group: str = ""
    keeps_commit_verdict: bool = False
    """True if its commit verdict is kept. The verdict of a caller that may not end the transaction is never kept."""
    is_answered: bool = False

    def answer(self, result: EndResult | BaseException) -> None:
        """Answer the caller and count the end, unless it has an answer: it may have been late."""
        ends, request = self.ends, self.request
        if self.is_answered or not (isinstance(result, EndResult) or ends.answers.waits_for(self.index)):
            log_late_error(request.id, result)
        if self.is_answered:
            return
        self.is_answered = True
        if ends.in_lane.pop(self.index, None) is not None and not ends.in_lane:
            ends.requests.deadlines.forget(ends.answer_late, ends.deadline)
        answer: EndResult | Exception
        if isinstance(result, EndResult):
            answer, error = result, None
            if result.changed and request.outcome is Outcome.UNKNOWN:
                answer = EndResult(id=result.id, state=result.state, changed=False)
            label = "changed" if answer.changed else "unchanged"
        else:
            error = result
            answer = result if isinstance(result, Exception) else unconfirmed(request.id)
            label = answer.code if isinstance(answer, HalfwayError) else "internal"
        ends.answers.answer(self.index, answer)
        if self.keeps_commit_verdict or self.operator is not None:
            ends.requests.note(self, error, changed=label == "changed")
        if not isinstance(error, NotServedError):  # else the owner of the shard counts it
            ends.activity.note_end(self.group, request.outcome, self.act.cause, label, ends.began)


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
        is_checking: Callable[[Entry], bool],
        activity: Activity,
    ) -> None:
        """Store the parts; `is_checking` returns whether a check of a transaction is in flight."""
        self._authority = authority
        self._shards = shards
        self._groups = groups
        self._lookup = lookup
        self._resolver = resolver
        self._verdicts = verdicts
        self._is_checking = is_checking
        self._activity = activity
        self._tasks: set[asyncio.Task[None]] = set()
        self.deadlines = Deadlines()

    def begin(
        self, requests: Sequence[End], answers: Answers[EndResult], *, deadline: float, principal: Principal
    ) -> bool:
        """End transactions for a caller; an end with the id of a check that was sent has the cause `check`.

        If the answers are abandoned, ends in progress are finished, and ends that wait to begin stop. Only an end that
        waits for something other than the lane has a task of its own.

        Return whether one of them is manual.
        """
        loop = asyncio.get_running_loop()
        ends = _EndList(self, self._activity, answers, principal, deadline, loop.time(), {}, set())
        is_operator = principal.kind is PrincipalKind.OPERATOR
        has_manual = False
        for index, request in enumerate(requests):
            act = Act(
                action=ACTIONS[request.outcome],
                cause=request.cause,
                remark=request.remark,
                prepared_at=request.prepared_at,
            )
            operator = None
            if is_operator or request.cause is Cause.OPERATOR:
                operator, has_manual = principal, True
            end = _CallerEnd(ends, index, request, act, operator)
            if not self._has_begun(end):
                task = loop.create_task(self._end(end))
                self._tasks.add(task)
                task.add_done_callback(partial(self._on_done, end))
                answers.on_abandon(index, task.cancel)
        if ends.in_lane:
            self.deadlines.watch(ends.answer_late, deadline)
        return has_manual

    def _has_begun(self, end: _CallerEnd) -> bool:
        """Begin or refuse an end; return False if it has to wait for something other than the lane."""
        request, ends = end.request, end.ends
        principal, permission = ends.principal, _permission(request)
        try:
            if permission not in ends.allowed:
                self._authority.require(principal, permission)
                ends.allowed.add(permission)
            if request.outcome is Outcome.UNKNOWN:
                return False
            payload = self._shards.payloads.get(request.id)
            shard = self._shards.of(request.id)
            entry = shard.state.find(request.id)
        except (UnknownTransactionError, NotServedError):
            return False
        except Exception as error:  # noqa: BLE001 - the caller gets any error
            end.is_answered = True  # it is not counted
            ends.answers.answer(end.index, error)
            return True
        if entry is None or (principal.kind is PrincipalKind.GROUP and entry.group != principal.name):
            return False  # only a read barrier shows whether it exists
        end.group = entry.group
        ends.in_lane[end.index] = end
        try:
            if request.check_id is not None:
                self._note_check(shard, entry, end, request.check_id)
            has_begun = self._resolver.begin(shard, entry, end.act, payload, deadline=ends.deadline, reply=end.answer)
        except Exception as error:  # noqa: BLE001 - the caller gets any error
            end.answer(error)
            return True
        if not has_begun:
            del ends.in_lane[end.index]
        return has_begun

    def _on_done(self, end: _CallerEnd, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if task.cancelled() and not end.is_answered:  # before it began
            end.answer(asyncio.CancelledError())

    async def _end(self, end: _CallerEnd) -> None:
        """End a transaction that may not be known here yet."""
        request, ends = end.request, end.ends
        try:
            shard, entry = await self._lookup.locate(
                request.id, _permission(request), principal=ends.principal, deadline=ends.deadline
            )
            end.group = entry.group
            if request.check_id is not None:
                self._note_check(shard, entry, end, request.check_id)
            result = await self._resolver.resolve(request.id, end.act, deadline=ends.deadline)
            if request.remark and isinstance(current := shard.state.find(request.id), Pending):
                current.remark = request.remark
        except BaseException as error:
            end.answer(error)
            if not isinstance(error, Exception):
                raise
        else:
            end.answer(result)

    def note(self, end: _CallerEnd, error: BaseException | None, *, changed: bool) -> None:
        """Record the commit verdict of a fetched check if its commit was not written, and who sent a manual end."""
        request = end.request
        if end.keeps_commit_verdict:
            self._verdicts.take_commit_result(request.id, error)
        if end.operator is not None and changed:
            event = State.COMMITTED if request.outcome is Outcome.COMMIT else State.ROLLED_BACK
            self._activity.note_event(request.id, event.value, end.operator)

    def _note_check(self, shard: Shard, entry: Entry, end: _CallerEnd, check_id: str) -> None:
        """Treat an end as the answer to a sent check; keep its commit verdict, even if the check is not counted yet."""
        if end.request.outcome is Outcome.COMMIT and check_id.rpartition(":")[0] == entry.id:
            self._verdicts.keep(entry, shard.number, entry.checks)
            end.keeps_commit_verdict = True
        number = self._number_sent(check_id, entry)
        if number is None:
            return
        end.act = msgspec.structs.replace(end.act, cause=Cause.CHECK)
        if isinstance(entry, Pending) and number >= (entry.leased_check or entry.checks):
            entry.leased_until = 0
            shard.agenda.put(entry.id, 0)  # the scan waited for the end of the lease

    def _number_sent(self, check_id: str, entry: Entry) -> int | None:
        """Return the number of a check by its id, None if no such check was sent for this transaction.

        The last check may not be counted yet.
        """
        name, _, attempt = check_id.rpartition(":")
        in_flight = isinstance(entry, Pending) and (entry.attempts > entry.checks or self._is_checking(entry))
        number = int(attempt) if attempt.isascii() and attempt.isdigit() and len(attempt) <= _ATTEMPT_DIGITS else 0
        return number if name == entry.id and 1 <= number <= entry.checks + in_flight else None

    async def resume(
        self,
        transaction_id: str,
        *,
        remark: str | None = None,
        prepared_at: int | None = None,
        deadline: float,
        principal: Principal,
    ) -> TransactionView:
        """Make a parked transaction prepared again; a prepared one is unchanged.

        Raises:
            IdReplacedError: the id belongs to a transaction that was not prepared at `prepared_at`.

        """
        shard, entry = await self._lookup.locate(
            transaction_id, Permission.RESUME, principal=principal, deadline=deadline
        )
        act = Act(action=Action.RESUME, cause=Cause.OPERATOR, remark=remark, prepared_at=prepared_at)
        result = await self._resolver.resolve(transaction_id, act, deadline=deadline)
        if result.changed:
            self._activity.note_event(transaction_id, "resumed", principal)
        current = shard.state.find(transaction_id)
        shown = view(self._groups, entry if current is None else current)
        return msgspec.structs.replace(shown, changed=result.changed)


def _permission(request: End) -> Permission:
    return Permission.END_BY_HAND if request.cause is Cause.OPERATOR else Permission.END
