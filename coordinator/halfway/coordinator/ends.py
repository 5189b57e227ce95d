"""The changes that callers request: ends and resumes."""

from __future__ import annotations

import asyncio
from functools import partial
from typing import TYPE_CHECKING

import msgspec
import structlog

from halfway.coordinator.answers import Deadlines
from halfway.coordinator.changes import ACTIONS, Act, unconfirmed
from halfway.coordinator.commit_verdicts import leaves_nothing_to_keep
from halfway.coordinator.queries.queries import view
from halfway.coordinator.requests import End, EndResult, TransactionView
from halfway.coordinator.resolver import log_late_error
from halfway.protocol.entries import Entry, Pending
from halfway.protocol.errors import HalfwayError, NotServedError, OverloadedError, UnknownTransactionError
from halfway.protocol.principal import Permission, PrincipalKind
from halfway.protocol.transactions import Action, Cause, Outcome, State

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from halfway.coordinator.answers import Answers
    from halfway.coordinator.commit_verdicts import CommitVerdicts
    from halfway.coordinator.ports import Authority
    from halfway.coordinator.queries.activity import Activity
    from halfway.coordinator.queries.queries import Lookup
    from halfway.coordinator.resolver import Resolver
    from halfway.coordinator.shards.groups import Groups
    from halfway.coordinator.shards.shard_table import Shard, ShardTable
    from halfway.protocol.principal import Principal


log = structlog.get_logger(__name__)

_ATTEMPT_DIGITS = 6
_RECORDING_S = 2.0
"""The part of a commit's time, at most a quarter of it, that is kept for recording it if it cannot be written."""


class _EndList(msgspec.Struct, eq=False):
    """The ends of one call, and what they share, such as the deadline."""

    requests: CallerRequests
    activity: Activity
    answers: Answers[EndResult]
    principal: Principal
    deadline: float
    commit_by: float
    """Until when the write of a commit may begin. The rest of its time is for recording it."""
    began: float
    waiting: dict[int, _CallerEnd]
    """By index: the ends that the resolver has begun, and the refused commits that are being recorded."""
    allowed: set[Permission]
    """The permissions of the caller that were checked."""

    def wait_for(self, end: _CallerEnd) -> None:
        """Answer an end at the deadline, unless it is answered before."""
        self.waiting[end.index] = end
        self.requests.deadlines.watch(self.answer_late, self.deadline)

    def answer_late(self) -> None:
        """Answer the ends that are late, each with an error of its own."""
        for end in list(self.waiting.values()):
            try:
                end.answer_late()
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
    entry: Entry | None = None
    """The transaction, once it is known that the caller may end it and means this one: then its commit is kept."""
    is_answered: bool = False

    def identify(self, entry: Entry) -> None:
        """Store the transaction that the caller may end."""
        self.group = entry.group
        if self.request.prepared_at in (None, entry.prepared_at):
            self.entry = entry

    def keep_commit(self) -> None:
        """Keep a commit until it is written: a write of the policy that has claimed the id and not begun gives way."""
        if self.request.outcome is Outcome.COMMIT and self.entry is not None:
            self.ends.requests.verdicts.keep(self.entry, self.entry.checks, self.act.cause)

    def take(self, result: EndResult | BaseException) -> None:
        """Answer with a result of the resolver. If a commit was not written, record first that it was said."""
        if isinstance(result, EndResult) or self.request.outcome is not Outcome.COMMIT:
            self.answer(result)
            return
        recording = self._record_commit(result)
        if recording is None or self.is_answered or not isinstance(result, Exception):  # its caller is gone
            self.answer(result)
        else:
            self.ends.wait_for(self)
            recording.add_done_callback(partial(self._answer_recorded, result))

    def answer_late(self) -> None:
        """Answer at the deadline. A commit may still be written; if it is not, it is recorded after that."""
        error = unconfirmed(self.request.id)
        try:
            if self.request.outcome is Outcome.COMMIT:
                self._record_commit(error)
        finally:
            self.answer(error)

    def _record_commit(self, error: BaseException) -> asyncio.Future[bool] | None:
        """Begin to record a commit that was not written; return None if there is nothing to record."""
        entry, verdicts = self.entry, self.ends.requests.verdicts
        if entry is None:
            return None
        if not leaves_nothing_to_keep(error):
            self.keep_commit()
        return verdicts.take_commit_result(entry.id, error)

    def _answer_recorded(self, error: BaseException, recording: asyncio.Future[bool]) -> None:
        """Answer a refused commit. An answer other than 429 and `end_unconfirmed` means that it is recorded."""
        is_recorded = not recording.cancelled() and recording.result()
        self.answer(error if is_recorded or isinstance(error, OverloadedError) else unconfirmed(self.request.id))

    def answer(self, result: EndResult | BaseException) -> None:
        """Answer the caller and count the end, unless it has an answer: it may have been late."""
        ends, request = self.ends, self.request
        if self.is_answered or not (isinstance(result, EndResult) or ends.answers.waits_for(self.index)):
            log_late_error(request.id, result)
        if self.is_answered:
            return
        self.is_answered = True
        if ends.waiting.pop(self.index, None) is not None and not ends.waiting:
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
        if self.operator is not None and label == "changed":
            ends.requests.note_manual_end(self, self.operator)
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
        self.verdicts = verdicts
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
        began = loop.time()
        commit_by = deadline - min(_RECORDING_S, (deadline - began) / 4)
        ends = _EndList(self, self._activity, answers, principal, deadline, commit_by, began, {}, set())
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
        if ends.waiting:
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
        end.identify(entry)
        ends.waiting[end.index] = end
        try:
            if request.check_id is not None:
                self._note_check(shard, entry, end, request.check_id)
            begin_by = ends.commit_by if request.outcome is Outcome.COMMIT else ends.deadline
            has_begun = self._resolver.begin(shard, entry, end.act, payload, deadline=begin_by, reply=end.take)
        except Exception as error:  # noqa: BLE001 - the caller gets any error
            end.take(error)
            return True
        if not has_begun:
            del ends.waiting[end.index]
            end.keep_commit()
        return has_begun

    def _on_done(self, end: _CallerEnd, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if task.cancelled() and not end.is_answered:  # before it began
            end.take(asyncio.CancelledError())

    async def _end(self, end: _CallerEnd) -> None:
        """End a transaction that may not be known here yet."""
        request, ends = end.request, end.ends
        try:
            shard, entry = await self._lookup.locate(
                request.id, _permission(request), principal=ends.principal, deadline=ends.deadline
            )
            end.identify(entry)
            if request.check_id is not None:
                self._note_check(shard, entry, end, request.check_id)
            end.keep_commit()
            begin_by = ends.commit_by if request.outcome is Outcome.COMMIT else ends.deadline
            result = await self._resolver.resolve(request.id, end.act, deadline=ends.deadline, begin_by=begin_by)
            if request.outcome is Outcome.COMMIT:
                self.verdicts.take_commit_result(request.id, None)
            if request.remark and isinstance(current := shard.state.find(request.id), Pending):
                current.remark = request.remark
        except BaseException as error:
            end.take(error)
            if not isinstance(error, Exception):
                raise
        else:
            end.take(result)

    def note_manual_end(self, end: _CallerEnd, operator: Principal) -> None:
        """Record who sent a manual end that changed the transaction."""
        event = State.COMMITTED if end.request.outcome is Outcome.COMMIT else State.ROLLED_BACK
        self._activity.note_event(end.request.id, event.value, operator)

    def _note_check(self, shard: Shard, entry: Entry, end: _CallerEnd, check_id: str) -> None:
        """Treat an end as the answer to a sent check."""
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
        in_flight = isinstance(entry, Pending) and (
            max(entry.attempts, entry.leased_check) > entry.checks or self._is_checking(entry)
        )
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
