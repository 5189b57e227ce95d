"""Ends, and every other change of a transaction after its prepare (docs/protocol.md#end-the-lane).

`_step` takes a change as far as it goes without waiting, and may be called again: it decides by the current state. What
it writes goes to the lane at the end of the turn, with the writes of all others. `_written` applies a write as the tail
would, releases the id, and answers.
"""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Final

import msgspec
import structlog

from halfway.coordinator import tracing
from halfway.coordinator.changes import ACTIONS, Change, Record, decide, note_error, unconfirmed, write_of
from halfway.coordinator.commit_verdicts import CommitVerdicts
from halfway.coordinator.logging import LogSummary
from halfway.coordinator.operations import Deadlines, Path, Waits, log_late, tick_of
from halfway.coordinator.ports import Authority, Clock, Lane, LaneAnswers, LaneWrite, Written
from halfway.coordinator.queries.activity import Activity
from halfway.coordinator.queries.queries import Lookup, view
from halfway.coordinator.requests import End, EndResult, TransactionView
from halfway.coordinator.shards.groups import Groups
from halfway.coordinator.shards.shard import Shard, not_served
from halfway.coordinator.shards.shard_table import CommitVerdict, ShardTable
from halfway.protocol.entries import Ended, Entry, Pending, Unresolved
from halfway.protocol.errors import (
    HalfwayError,
    KafkaUnavailableError,
    LaneLostError,
    MessageTooLargeError,
    NotAuthorisedError,
    NotServedError,
    NotWrittenError,
    OverloadedError,
    OvertakenError,
    RetryableError,
    ShardUnavailableError,
    TopicUnavailableError,
)
from halfway.protocol.ids import canonical
from halfway.protocol.principal import ANYBODY, Permission, Principal, PrincipalKind
from halfway.protocol.transactions import Action, Cause, Outcome

log = structlog.get_logger(__name__)
_late_ends: Final = LogSummary(log, "info", "late_end_failed")

WRITE_LIMIT_S: Final = 30.0
"""How long a change that no caller waits for (of a verdict or the policy) may wait for the lane."""
_PAUSE_S: Final = 0.02
"""How long a change waits before it is decided again, after its lane was lost or dropped the write."""
_RECORDING_S: Final = 2.0
"""The part of a commit's time, at most a quarter of it, that is kept for recording it if it cannot be written."""
_ATTEMPT_DIGITS: Final = 6
_BY_OPERATOR: Final = Cause.OPERATOR  # to read an attribute of an enum's class takes long
_OF_OPERATOR: Final = PrincipalKind.OPERATOR
_OF_GROUP: Final = PrincipalKind.GROUP
_SAID_COMMIT: Final = Outcome.COMMIT
_UNKNOWN: Final = Outcome.UNKNOWN
_END: Final = Permission.END
_LOST: Final = Record.LOST
_CLAIM: Final = Waits.CLAIM
_LANE: Final = Waits.LANE
_DONE: Final = Waits.DONE
_CANNOT_BE_WRITTEN: Final = (TopicUnavailableError, MessageTooLargeError, NotAuthorisedError)


class Ending(Path[Change]):
    """The only way in which the state of a transaction changes after its prepare."""

    def __init__(
        self,
        authority: Authority,
        shards: ShardTable,
        groups: Groups,
        lookup: Lookup,
        lane: Lane,
        clock: Clock,
        activity: Activity,
    ) -> None:
        super().__init__(authority)
        self._shards = shards
        self._groups = groups
        self._lookup = lookup
        self._lane = lane
        self._clock = clock
        self._activity = activity
        self._deadlines: Deadlines[Change] = Deadlines(self._late)
        self._last_deadline = (0.0, 0.0, 0.0, 0)
        """Of the commit that was watched last: its deadline, when it came, until when it may begin, and that tick."""
        self.verdicts = CommitVerdicts(shards, self.record_verdict)
        self.is_checking: Callable[[Entry], bool] = lambda _: False
        """Returns whether a check of a transaction is in flight."""
        self.audit: Callable[[Change, EndResult | Exception], None] = lambda *_: None
        """Records the answer to a manual end."""
        lane.listen(self._written)

    def waiting(self) -> Mapping[str, int]:
        """How many changes without an answer wait for what."""
        return Counter(one.waits.value for one in self._deadlines)

    # --- what is asked for

    def end(
        self,
        request: End,
        *,
        deadline: float,
        principal: Principal = ANYBODY,
        forwards: bool = False,
        is_audited: bool = False,
    ) -> Change:
        """End a transaction for a caller; an end with the id of a check that was sent has the cause `check`.

        If another instance serves its shard, it `forwards` it. If it is manual, it may be audited.
        """
        cause, outcome = request.cause, request.outcome
        by_hand = cause is _BY_OPERATOR
        is_manual = by_hand or principal.kind is _OF_OPERATOR
        change = Change(
            path=self,
            id=request.id,
            action=ACTIONS[outcome],
            cause=cause,
            says_commit=outcome is _SAID_COMMIT,
            deadline=deadline,
            principal=principal,
            permission=Permission.END_BY_HAND if by_hand else _END,
            request=request,
            remark=request.remark,
            check_id=request.check_id,
            forwards=forwards,
            is_manual=is_manual,
            is_audited=is_manual and is_audited,
        )
        self.add(change)
        return change

    async def resume(
        self, transaction_id: str, *, remark: str | None = None, deadline: float, principal: Principal
    ) -> TransactionView:
        """Make a parked transaction prepared again; a prepared one is unchanged."""
        change = Change(
            path=self,
            id=transaction_id,
            action=Action.RESUME,
            cause=Cause.OPERATOR,
            deadline=deadline,
            principal=principal,
            permission=Permission.RESUME,
            remark=remark,
        )
        self.add(change)
        result = await change
        entry = self._current(change) or change.entry
        if entry is None:
            raise unconfirmed(transaction_id)  # its shard has just been lost
        return msgspec.structs.replace(view(self._groups, entry), changed=result.changed)

    def answer_check(
        self, transaction_id: str, outcome: Outcome, *, remark: str | None, checks: int | None, checked_at: int
    ) -> Change:
        """End a transaction as the answer to a check says. Its commit is kept already."""
        says_commit = outcome is _SAID_COMMIT
        return self._begin(
            transaction_id,
            ACTIONS[outcome],
            Cause.CHECK,
            says_commit=says_commit,
            is_commit_kept=says_commit,
            remark=remark,
            checks=checks,
            checked_at=checked_at,
        )

    def note_check(self, transaction_id: str, *, remark: str | None, checks: int, checked_at: int) -> Change:
        """Record that a check was sent, and answered with `unknown`."""
        return self._begin(
            transaction_id, Action.CHECK, Cause.CHECK, remark=remark, checks=checks, checked_at=checked_at
        )

    def give_up(
        self,
        transaction_id: str,
        action: Action,
        reason: str,
        still_decided: Callable[[Unresolved], bool],
        *,
        deadline: float,
    ) -> Change:
        """Park a transaction or roll it back for the policy.

        Raises OvertakenError: the policy no longer decides so at the time of the write.
        """
        return self._begin(transaction_id, action, Cause.POLICY, deadline, remark=reason, still_wanted=still_decided)

    def record_verdict(self, transaction_id: str, verdict: CommitVerdict) -> Change:
        """Record a commit that was said, also in a shard that is being given up, before other changes that wait."""
        holder = self._shards.claims.get(transaction_id)
        return self._begin(
            transaction_id, Record.VERDICT, verdict.cause, behind=holder, checks=verdict.checks, has_begun=True
        )

    def write_again(self, transaction_id: str, record: Record, *, deadline: float, waits: bool = False) -> Change:
        """Write a half again, correct a stray or restore what is lost; unless it `waits`, only if the id is free."""
        return self._begin(transaction_id, record, Cause.POLICY, deadline, waits_for_claim=waits)

    def _begin(
        self,
        transaction_id: str,
        action: Action | Record,
        cause: Cause,
        deadline: float | None = None,
        *,
        behind: Change | None = None,
        **fields: Any,
    ) -> Change:
        """Begin a change that no caller asks for, `behind` one that has claimed the id if there is one."""
        deadline = background_deadline() if deadline is None else deadline
        change = Change(
            path=self, id=transaction_id, action=action, cause=cause, deadline=deadline, allowed=True, **fields
        )
        self._watch(change)
        if behind is None:
            self.add(change)
        else:
            self._wait_for_claim(change, behind)
        return change

    # --- the turn

    def _turn(self) -> None:
        """Take the changes of this turn as far as they go, and submit their writes together."""
        began, now = asyncio.get_running_loop().time(), self._clock.now_ms()
        writes: list[LaneWrite] = []
        for change in self._take():
            if not change.began:
                change.began = began
            try:
                write = self._step(change, now)
            except Exception as error:  # noqa: BLE001 - the caller gets any error
                self._fail(change, error)
            else:
                if write is not None:
                    writes.append(write)
        if writes:
            try:
                self._lane.submit(writes)
            except Exception as error:  # noqa: BLE001 - the callers get any error
                self._written([(write, error) for write in writes])

    def _step(self, change: Change, now: int) -> LaneWrite | None:  # noqa: C901, PLR0911, PLR0912 - all steps, in order
        """Take a change as far as it goes without waiting; return its write if it has come so far."""
        shards, name = self._shards, change.id
        holder = shards.claims.get(name)
        # 1. It was answered before it could begin, because its caller is gone or it was late: it need not begin.
        if change.has_finished:
            self._release(change)
            return None
        # 2. May the caller do this?
        if not change.allowed:
            if self._permitted is not change.principal or self._permission is not change.permission:
                self._authority.require(change.principal, change.permission)
                self._permitted, self._permission = change.principal, change.permission
            change.allowed = True
            self._watch(change)
        # 3. Is its shard served here? What has begun is finished here, also if the shard is being given up.
        number = change.shard
        if number < 0:
            number = change.shard = shards.number_of(name)
        shard = shards.find(number)
        if shard is None and change.has_begun:
            self._wait(change, Waits.OWNER, shards.wait_until_served(number, deadline=change.begin_by))
            return None
        if shard is None or (shard.leaving and not change.has_begun):
            raise not_served(number)
        # 4. Is the id known? For a group, a transaction of another group does not exist.
        entry = shard.state.find(name)
        if entry is None or (change.principal.kind is _OF_GROUP and entry.group != change.principal.name):
            self._look_up(change, shard)
            return None
        change.entry = entry
        if change.meant is None and change.request is not None:
            self._identify(change, shard, entry)
        # 5. One change of an id at a time.
        if holder is not None and holder is not change:
            if change.waits_for_claim:
                self._wait_for_claim(change, holder)
            else:
                self._finish(change, EndResult(id=name, state=entry.state, changed=False))
            return None
        # 6. Does the state allow it, and is a write needed? What the log has lost may have been written meanwhile.
        if change.action is _LOST and name not in shard.unwritten:
            answer: EndResult | None = EndResult(id=name, state=entry.state, changed=False)
        else:
            answer = decide(change, entry)
        if answer is not None:
            self._finish(change, answer)
            return None
        # 7. The payload, if the write needs it.
        half = None
        if not isinstance(entry, Ended) and change.needs_payload(entry) and not change.goes_without_payload:
            half = change.half if change.half_of is entry else shards.payloads.get(name)
            if half is None or (change.half_of is not entry and half.fingerprint != entry.fingerprint):
                self._claim(change, shard)
                self._wait(change, Waits.PAYLOAD, self._read_payload(change, shard, entry))
                return None
        # 8. Claim the id before its write. If the clock was set back, no outcome may look older than its prepare. One
        # Kafka transaction may follow another within a millisecond, and their times must differ.
        self._claim(change, shard)
        at = max(entry.prepared_at, now)
        if change.tried:
            at = max(at, change.tried[-1] + 1)
        write = change.write = write_of(change, entry, half, at=at, now=now)
        change.half = change.half_of = None
        change.written_at, change.waits, change.traced = at, _LANE, tracing.messages_of(half)
        return write

    def _claim(self, change: Change, shard: Shard) -> None:
        self._shards.claims[change.id] = change
        change.has_begun, change.mark = True, shard.mark

    def _look_up(self, change: Change, shard: Shard) -> None:
        """Wait for a read barrier, unless one has passed: only then the id is certainly unknown."""
        if change.has_begun and change.action is not Record.VERDICT:
            raise unconfirmed(change.id)
        if change.looked or change.has_begun:
            raise self._lookup.unknown(change.id, shard)
        change.looked = True
        self._release(change)
        self._wait(change, Waits.TAIL, self._lookup.read_barrier(shard.number, deadline=change.deadline))

    def _identify(self, change: Change, shard: Shard, entry: Entry) -> None:
        """Store which transaction the caller may end, and treat the end as the answer to a check if it is one."""
        change.group = entry.group
        change.meant = entry
        if change.check_id is not None:
            check_id, change.check_id = change.check_id, None
            number = self._number_sent(check_id, entry)
            if number is None:
                return
            change.cause = Cause.CHECK
            if isinstance(entry, Pending) and number >= (entry.leased_check or entry.checks):
                entry.leased_until = 0
                shard.agenda.put(entry.id, 0)  # the scan waited for the end of the lease

    def _number_sent(self, check_id: str, entry: Entry) -> int | None:
        """Return the number of a check by its id, None if no such check was sent for this transaction.

        The last check may not be counted yet.
        """
        name, _, attempt = check_id.rpartition(":")
        in_flight = isinstance(entry, Pending) and (
            max(entry.attempts, entry.leased_check) > entry.checks or self.is_checking(entry)
        )
        number = int(attempt) if attempt.isascii() and attempt.isdigit() and len(attempt) <= _ATTEMPT_DIGITS else 0
        return number if canonical(name) == entry.id and 1 <= number <= entry.checks + in_flight else None

    async def _read_payload(self, change: Change, shard: Shard, entry: Unresolved) -> None:
        """Read the half from Kafka. Another owner may have the shard meanwhile: then it is read again."""
        try:
            change.half = await self._lookup.payload(shard, entry, deadline=change.begin_by)
            change.half_of = entry
        except KafkaUnavailableError:
            if change.needs_whole_payload:
                raise
            log.warning("rolled_back_without_its_payload", id=entry.id, group=entry.group)
            change.goes_without_payload = True

    # --- the claim of an id

    def _wait_for_claim(self, change: Change, holder: Change) -> None:
        """Wait for the release of the id. A commit is kept until it is written: the policy gives way to it."""
        change.waits = Waits.CLAIM
        if holder.queue is None:
            holder.queue = deque()
        if change.action is Record.VERDICT:
            holder.queue.appendleft(change)  # the others could take longer than the caller waits
            return
        holder.queue.append(change)
        if change.says_commit:
            self.verdicts.keep_of(change)

    def _release(self, change: Change) -> None:
        """Give the claim of the id to the next change that waits for it."""
        claims = self._shards.claims
        if claims.get(change.id) is not change:
            return
        queue, change.queue = change.queue, None
        if queue:
            following = claims[change.id] = queue.popleft()
            following.queue, following.shard = queue, change.shard
            following.waits = Waits.TURN
            self.add(following)
        else:
            del claims[change.id]
        change.release()

    # --- the lane's answers

    def _written(self, answers: LaneAnswers) -> None:
        """Apply the writes of a Kafka transaction as the tail would, release their ids, and answer."""
        claims = self._shards.claims
        for write, result in answers:
            change = claims.get(write.id)
            if change is None or change.write is not write:
                continue  # a lane that hung may answer late, when the change has been written again
            change.write = None
            try:
                if isinstance(result, Written):
                    self._shards.apply(write, result)
                    if change.action is not _LOST:  # that was counted when it was written first
                        self._activity.note_write(write)
                    self._finish(change, EndResult(id=write.id, state=write.state, changed=True))
                else:
                    self._note_refusal(change, result)
                    self._fail(change, result)
            except Exception as error:  # noqa: BLE001 - the caller gets any error
                self._finish(change, error)

    def _note_refusal(self, change: Change, error: Exception) -> None:
        if not isinstance(error, HalfwayError) or isinstance(error, LaneLostError | NotWrittenError | OvertakenError):
            return
        if change.entry is not None:
            note_error(change.entry, error)
        if isinstance(error, _CANNOT_BE_WRITTEN):
            named = error.fields.get("topic")
            topic = named if isinstance(named, str) else None
            again_s = error.retry_after_s if isinstance(error, RetryableError) else 0.0
            self._activity.note_refused_write(change.id, topic, error.code, error.detail, again_s)

    def _fail(self, change: Change, error: BaseException) -> None:
        """Decide again if the write may be repeated, or may have been done; else answer with the error.

        After the loss of a lane the fold shows whether the write was done.
        """
        if isinstance(error, LaneLostError):
            change.tried += (change.written_at,)
            self._wait(change, Waits.OWNER, asyncio.sleep(_PAUSE_S))
            return
        if isinstance(error, NotWrittenError):
            if asyncio.get_running_loop().time() < change.begin_by:
                self._wait(change, Waits.OWNER, asyncio.sleep(_PAUSE_S))
                return
            error = unconfirmed(change.id)
        elif isinstance(error, NotServedError) and self._begin_forward(change, error):
            self._release(change)
            return
        elif isinstance(error, ShardUnavailableError) and change.tried:
            error = unconfirmed(change.id)  # the error means that nothing was done, which is not known
        self._finish(change, error)

    # --- the way out

    def _finish(self, change: Change, result: EndResult | BaseException) -> None:
        """Release the id, and answer. If a commit was not written, record first that it was said."""
        if change.has_finished:
            return
        change.has_finished = True
        recording = None
        try:
            if change.is_commit_kept or (change.says_commit and not isinstance(result, EndResult)):
                recording = self.verdicts.settle(change, result)
        except Exception:
            log.exception("commit_not_settled")
            if not isinstance(result, EndResult):
                result = unconfirmed(change.id)  # any other error would mean that the commit is recorded
        if change.waits is _CLAIM:
            self._leave(change)
        self._release(change)
        try:
            if recording is None or change.done() or not isinstance(result, Exception):
                self._answer(change, result)
            else:
                change.waits = Waits.LANE
                recording.add_done_callback(partial(self._take_recorded, change, result))
        except Exception:
            log.exception("reply_failed")  # the others must still get their answers

    def _leave(self, change: Change) -> None:
        """Wait for the claim no more."""
        holder = self._shards.claims.get(change.id)
        if holder is not None and holder.queue is not None and change in holder.queue:
            holder.queue.remove(change)

    def _take_recorded(self, change: Change, error: Exception, recording: Change) -> None:
        """Answer a refused commit. An answer other than 429 and `end_unconfirmed` means that it is recorded."""
        is_known = self.verdicts.is_settled(recording) or isinstance(error, OverloadedError)
        self._answer(change, error if is_known else unconfirmed(change.id))

    def _answer(self, change: Change, result: EndResult | BaseException) -> None:  # noqa: C901, PLR0912 - for speed
        """Answer the caller and count the end, unless it has an answer: it may have been late."""
        if change.done() and isinstance(result, BaseException):
            log_late_error(change.id, result)
        if change.result is not None:
            return
        self._deadlines.forget(change, change.tick)
        if change.has_finished:
            change.waits = _DONE
        request = change.request
        if isinstance(result, EndResult):
            if request is not None and request.outcome is _UNKNOWN:
                self._keep_remark(change, request)
                result = EndResult(id=result.id, state=result.state, changed=False)
        elif not isinstance(result, Exception):
            result = unconfirmed(change.id)
        if change.traced:
            tracing.ended(change, result)
        change.answer(result)
        if request is None:
            return
        if change.is_audited and (change.allowed or not change.is_cancelled):
            self.audit(change, result)
        if not change.allowed or change.forwarded is not None:
            return  # a refused caller is not counted; the owner counts what is forwarded
        if isinstance(result, EndResult):
            label = "changed" if result.changed else "unchanged"
        elif isinstance(result, NotServedError):
            return
        else:
            label = result.code if isinstance(result, HalfwayError) else "internal"
        self._activity.note_end(change.group, request.outcome, change.cause, label, change.began)

    def _keep_remark(self, change: Change, request: End) -> None:
        if request.remark and isinstance(entry := self._current(change), Pending):
            entry.remark = request.remark

    def _current(self, change: Change) -> Entry | None:
        shard = self._shards.find(change.shard)
        return None if shard is None else shard.state.find(change.id)

    # --- callers that wait no more

    def _watch(self, change: Change) -> None:
        """Watch the deadline; a part of a caller's time for a commit is kept for recording it."""
        deadline, began = change.deadline, change.began
        if change.says_commit and change.request is not None:
            if deadline != self._last_deadline[0] or began != self._last_deadline[1]:
                begin_by = deadline - min(_RECORDING_S, max(0.0, deadline - began) / 4)
                self._last_deadline = deadline, began, begin_by, tick_of(begin_by)
            _, _, change.begin_by, tick = self._last_deadline
        else:
            change.begin_by, tick = deadline, tick_of(deadline)
        change.tick = tick
        self._deadlines.watch(change, tick)

    def _late(self, change: Change) -> None:
        """Let a change begin no more; at the deadline, answer. What has begun goes on."""
        end = tick_of(change.deadline)
        is_over = change.tick >= end
        if not is_over:
            change.tick = end
            self._deadlines.watch(change, end)
        if change.waits is Waits.TAIL or change.forwarded is not None:
            return  # what it waits for ends at the deadline
        if not change.has_begun and not change.has_finished:
            log_late(change, id=change.id)
            self._finish(change, unconfirmed(change.id))
        if is_over and change.result is None:
            log_late(change, id=change.id)
            try:
                if change.says_commit:
                    self.verdicts.settle(change, unconfirmed(change.id))
            finally:
                self._answer(change, unconfirmed(change.id))

    def abandon(self, change: Change) -> None:
        """Let a change that has not begun go no further: its caller is gone."""
        if change.forwarded is not None:
            change.forwarded.cancel()
        elif not change.has_begun:
            self._finish(change, unconfirmed(change.id))


def background_deadline() -> float:
    """Return the deadline of a change that no caller waits for."""
    return asyncio.get_running_loop().time() + WRITE_LIMIT_S


def log_late_error(transaction_id: str, error: BaseException) -> None:
    """Log an end that failed when no caller waited any more, unless a repeat of the end would succeed."""
    if isinstance(error, Exception) and not isinstance(error, RetryableError | ConnectionAbortedError):
        _late_ends.note({"error": getattr(error, "code", type(error).__name__)}, id=transaction_id, detail=str(error))
