"""Prepare: validate, choose the shard, store the half message (docs/protocol.md#prepare)."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Final, Protocol
from weakref import WeakValueDictionary

import msgspec
import structlog
from uuid_utils import uuid7

from halfway.coordinator import prepare_rules
from halfway.coordinator.prepare_rules import GroupLimits
from halfway.coordinator.requests import Moment, Prepare, Prepared
from halfway.coordinator.shards.schedule import check_at, look_and_check_at
from halfway.protocol.entries import Entry, Pending
from halfway.protocol.errors import (
    HalfwayError,
    IdReusedError,
    MessageTooLargeError,
    NotServedError,
    OutcomeUnknownError,
    RetryableError,
)
from halfway.protocol.principal import Permission
from halfway.protocol.records import NO_BARRIER, Half, Origin, fingerprint
from halfway.protocol.transactions import State, server_id

if TYPE_CHECKING:
    from collections.abc import Awaitable, Mapping, Sequence

    from halfway.coordinator.answers import Answers
    from halfway.coordinator.ports import Authority, Clock, HalfLog, TopicFacts, Topics
    from halfway.coordinator.queries.activity import Activity
    from halfway.coordinator.requests import ServiceLimits
    from halfway.coordinator.shards.groups import Groups
    from halfway.coordinator.shards.shard_table import Shard, ShardTable
    from halfway.protocol.principal import Principal


log = structlog.get_logger(__name__)

_MAX_AMBIGUOUS: Final = 100_000


class WriteAgain(Protocol):
    """A function that lets the lane write the half of a prepared transaction again, or raises a HalfwayError."""

    async def __call__(self, transaction_id: str, *, deadline: float) -> None:
        """Return when it is written, or the transaction is not prepared any more."""


class _Preparation(msgspec.Struct, eq=False):
    """A prepare, from its request to its answer."""

    answers: Answers[Prepared]
    index: int
    request: Prepare
    deadline: float
    began: float
    shard: int = -1
    half: Half | None = None
    """The half that is appended to the log."""
    fingerprint: bytes = b""
    """The fingerprint of group and messages."""
    refreshed: bool = False
    """True if the groups were read again for it."""
    facts: Mapping[str, TopicFacts | None] | None = None
    """Facts about its topics, if Kafka was asked for them."""
    doubt: object | None = None
    """The mark of an earlier half of its id that may still arrive: the order of the log decides which one counts."""


class Preparer:
    """Stores half messages."""

    def __init__(  # noqa: PLR0913, PLR0917 - its collaborators, once
        self,
        limits: ServiceLimits,
        authority: Authority,
        shards: ShardTable,
        half_log: HalfLog,
        groups: Groups,
        topics: Topics,
        clock: Clock,
        activity: Activity,
        write_again: WriteAgain,
    ) -> None:
        """Store the parts; nothing is started. `write_again` lets the lane write a pending half again."""
        self._limits = limits
        self._authority = authority
        self._group_limits = GroupLimits(limits, shards, groups)
        self._shards = shards
        self._half_log = half_log
        self._groups = groups
        self._topics = topics
        self._clock = clock
        self._activity = activity
        self._write_again = write_again
        self._reserved: dict[str, asyncio.Future[None]] = {}
        """Ids whose halves are being produced. Another prepare of such an id waits."""
        self._turns: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()
        """By id; prepares that wait take turns."""
        self._ambiguous: dict[str, object] = {}
        """Ids of prepares whose half may be in the log, each with a mark of the last such prepare."""
        self._storing: dict[tuple[int, float], list[tuple[Half, _Preparation]]] = {}
        """The halves that this turn of the event loop hands to the log, by shard and deadline."""
        self._tasks: set[asyncio.Task[None]] = set()

    def begin(
        self,
        requests: Sequence[Prepare],
        answers: Answers[Prepared],
        *,
        deadline: float,
        principal: Principal,
        forwarded: bool = False,
    ) -> None:
        """Store half messages for a caller. Each is answered when its half is durable.

        All halves of one turn of the event loop go to the log together. Only a prepare that waits for something other
        than the log has a task of its own; if the answers are abandoned, such a prepare stops. A prepare that
        another instance has `forwarded` takes no token of its group's rate.

        Answers:
            OutcomeUnknownError: it is not known whether the half was stored: roll back, or send the same id again.
            IdReusedError: the id has other content.
            UnknownGroupError, ForbiddenError, PreparesRejectedError, TopicNotAllowedError, UnknownTopicError,
            InvalidRequestError, MessageTooLargeError, OverloadedError, NotServedError: nothing was stored.
            UnauthenticatedError, GroupLimitedError: the caller may not make it now.

        """
        began, unresolved = asyncio.get_running_loop().time(), self._shards.unresolved
        admit = self._group_limits.admission(answers, forwarded=forwarded)
        allowed: set[str] = set()
        for index, request in enumerate(requests):
            try:
                if request.group not in allowed:
                    self._authority.require(principal, Permission.PREPARE, request.group)
                    allowed.add(request.group)
                if admit is not None:
                    admit(index, request)
            except Exception as error:  # noqa: BLE001 - the caller gets any error
                answers.answer(index, error)
            else:
                self._advance(_Preparation(answers, index, request, deadline, began), unresolved)

    def _advance(self, preparation: _Preparation, unresolved: int) -> None:
        """Apply the rules. If one of them has to wait, start again with the first rule after that."""
        try:
            wait = self._apply_rules(preparation, unresolved)
        except Exception as error:  # noqa: BLE001 - the caller gets any error
            self._answer(preparation, error)
            return
        if wait is not None:
            task = asyncio.get_running_loop().create_task(self._wait(preparation, wait))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _wait(self, preparation: _Preparation, wait: Awaitable[None]) -> None:
        try:
            await wait
        except Exception as error:  # noqa: BLE001 - as above
            self._answer(preparation, error)
        except asyncio.CancelledError:
            preparation.answers.answer(preparation.index, ConnectionAbortedError("halfway is stopped"))
            raise
        else:
            if preparation.answers.waits_for(preparation.index):
                self._advance(preparation, self._shards.unresolved)
            else:
                preparation.answers.answer(preparation.index, ConnectionAbortedError("the caller is gone"))

    def _apply_rules(self, preparation: _Preparation, unresolved: int) -> Awaitable[None] | None:
        """Apply the rules in order, and store the half or answer.

        Return what to wait for before the rules are applied again, None if the half is on its way or answered.
        """
        request = preparation.request
        transaction_id, messages = request.id, request.messages
        names = {message.topic for message in messages}
        group = self._groups.find(request.group)
        if not preparation.refreshed and (group is None or not names.issubset(group.topics)):
            return self._refresh(preparation)  # another instance may have just changed the group
        prepare_rules.require_prepares_enabled(self._limits)
        group = self._groups.get_for_prepare(request.group)
        if transaction_id is not None:
            prepare_rules.require_legal_id(transaction_id)
            if transaction_id in self._reserved:
                return self._wait_until_free(transaction_id, preparation.deadline)
        preparation.fingerprint = preparation.fingerprint or fingerprint(
            request.group, messages, request.check_after_ms
        )
        if transaction_id is None:
            shard = self._shards.choose()
        else:
            shard = self._shards.of(transaction_id)
            if (known := shard.state.find(transaction_id)) is not None:
                return self._answer_known(preparation, shard, known)
            prepare_rules.require_outcome_remembered(transaction_id, shard.state, self._limits)
        prepare_rules.require_messages_within_limits(request, self._limits)
        if request.check_after_ms is not None:
            prepare_rules.require_check_before_max_age(
                request.check_after_ms, self._groups.policy(group.name).max_age_s
            )
        prepare_rules.require_topics_of_group(request, group)
        facts = preparation.facts or self._topics.known(names)
        if facts is None:
            return self._describe(preparation)
        prepare_rules.require_topics_take_messages(request, facts)
        prepare_rules.require_room(unresolved, self._limits)
        if transaction_id is not None and self._ambiguous.get(transaction_id) is not preparation.doubt:
            return self._wait_for_fold(transaction_id, preparation)
        self._group_limits.require_room(group.name)
        self._store(shard, preparation)
        return None

    def _answer_known(self, preparation: _Preparation, shard: Shard, known: Entry) -> Awaitable[None] | None:
        """Answer the prepare of a known id, or return what to wait for first."""
        if known.group != preparation.request.group or known.fingerprint != preparation.fingerprint:
            raise IdReusedError(known.id)
        if isinstance(known, Pending) and known.origin is Origin.PREPARE and known.barrier < shard.state.barrier:
            return self._make_final(known.id, preparation.deadline)
        self._answer(preparation, self._known(known))
        return None

    async def _refresh(self, preparation: _Preparation) -> None:
        """Read the groups again."""
        await self._groups.refresh(deadline=preparation.deadline)
        preparation.refreshed = True

    async def _describe(self, preparation: _Preparation) -> None:
        """Read the facts about the topics from Kafka."""
        names = list(dict.fromkeys(message.topic for message in preparation.request.messages))
        preparation.facts = await self._topics.describe(names, deadline=preparation.deadline)

    async def _wait_until_free(self, transaction_id: str, deadline: float) -> None:
        """Wait until no other prepare of an id is being produced.

        Prepares of one id take turns. If each one that fails woke all of them, the cost of many prepares of one id
        would grow with the square of their number.
        """
        try:
            async with asyncio.timeout_at(deadline), self._turns.setdefault(transaction_id, asyncio.Lock()):
                while (other := self._reserved.get(transaction_id)) is not None:
                    await asyncio.shield(other)
        except TimeoutError:
            raise OutcomeUnknownError("another prepare with this id is not decided yet: send it again") from None

    async def _make_final(self, transaction_id: str, deadline: float) -> None:
        """Let the lane write the half of a former owner again, before its prepare is acknowledged here.

        Until then a half of the same id with other content may still arrive from a later owner than its own, and count.
        """
        try:
            await self._write_again(transaction_id, deadline=deadline)
        except (RetryableError, MessageTooLargeError):  # whatever it is: the former owner has stored it
            raise OutcomeUnknownError("the prepare could not be confirmed now: send it again") from None

    async def _wait_for_fold(self, transaction_id: str, preparation: _Preparation) -> None:
        """Wait until the tail has reached the end of the log: an earlier half of this id may be there.

        It may also come behind this end, so the id stays marked until a later half of it is in the log.
        """
        deadline, mark = preparation.deadline, self._ambiguous.get(transaction_id)
        number = self._shards.of(transaction_id).number
        end = await self._half_log.half_end(number, deadline=deadline)
        await self._shards.get(number).wait_for_tail(end, deadline=deadline)
        preparation.doubt = mark

    def _store(self, shard: Shard, preparation: _Preparation) -> None:
        """Hand the half to the log. It cannot be cancelled: its result is applied even if the caller is gone."""
        request, now = preparation.request, self._clock.now_ms()
        transaction_id, prepared_at, barrier = request.id, now, NO_BARRIER
        if transaction_id is None:
            made = uuid7(timestamp=now // 1000, nanos=now % 1000 * 1_000_000)
            transaction_id = server_id(shard.number, str(made))
        else:
            # The clock may have been set back since an outcome was forgotten. Checks go by the clock all the same.
            prepared_at, barrier = max(now, shard.state.reusable_from), shard.state.barrier
            self._reserved[transaction_id] = asyncio.get_running_loop().create_future()
        half = preparation.half = Half(
            id=transaction_id,
            group=request.group,
            messages=request.messages,
            prepared_at=prepared_at,
            since=now,
            fingerprint=preparation.fingerprint,
            check_after_ms=request.check_after_ms,
            barrier=barrier,
        )
        preparation.shard = shard.number
        self._shards.preparing[half.group] += 1
        if not self._storing:
            asyncio.get_running_loop().call_soon(self._hand_over)
        self._storing.setdefault((shard.number, preparation.deadline), []).append((half, preparation))

    def _hand_over(self) -> None:
        """Append the halves of this turn to the log."""
        storing, self._storing = self._storing, {}
        for (number, deadline), halves in storing.items():
            try:
                self._half_log.append(number, halves, self._take_stored, deadline=deadline)
            except Exception as error:  # noqa: BLE001 - the callers get any error
                self._take_stored([(preparation, error) for _, preparation in halves])

    def _take_stored(self, results: Sequence[tuple[_Preparation, int | Exception]]) -> None:
        """Apply the stored halves as the tail would, and answer; answer the others with their errors."""
        now, preparing = self._clock.now_ms(), self._shards.preparing
        for preparation, outcome in results:
            half, preparation.half = preparation.half, None
            if half is None:
                continue  # it is answered already
            preparing[half.group] -= 1
            if not preparing[half.group]:
                del preparing[half.group]
            if not isinstance(outcome, int):
                self._finish(preparation, half, outcome)
            elif preparation.doubt is not None:
                task = asyncio.get_running_loop().create_task(self._answer_by_log(preparation, half, outcome))
                self._tasks.add(task)
                task.add_done_callback(self._tasks.discard)
            else:
                self._finish(preparation, half, self._applied(preparation, half, outcome, now))

    async def _answer_by_log(self, preparation: _Preparation, half: Half, offset: int) -> None:
        """Answer when the tail has read the stored half: an earlier one of its id may have arrived before it."""
        result: Prepared | Exception = _unconfirmed()
        try:
            shard = self._shards.find(preparation.shard)
            if shard is not None and offset >= 0:  # the client does not always know the offset
                await shard.wait_for_tail(offset + 1, deadline=preparation.deadline)
                result = self._applied(preparation, half, offset, self._clock.now_ms())
                if self._ambiguous.get(half.id) is preparation.doubt:
                    self._ambiguous.pop(half.id, None)
        except HalfwayError:
            pass  # it was not read in time, or the shard is lost
        finally:
            self._finish(preparation, half, result)

    def _applied(self, preparation: _Preparation, half: Half, offset: int, now: int) -> Prepared | Exception:
        """Apply a stored half, and return the answer or its error."""
        try:
            return self._apply(preparation, half, offset, now)
        except Exception as error:  # noqa: BLE001 - the caller gets any error
            return error

    def _finish(self, preparation: _Preparation, half: Half, result: Prepared | Exception) -> None:
        """Release the id of a half that was handed to the log, and answer."""
        if isinstance(result, OutcomeUnknownError):
            self._add_ambiguous(half.id)
            result.fields["id"] = half.id
        if preparation.request.id is not None and (reserved := self._reserved.pop(half.id, None)) is not None:
            reserved.set_result(None)
        try:
            self._answer(preparation, result)
        except Exception:
            log.exception("reply_failed")  # the others must still get their answers

    def _apply(self, preparation: _Preparation, half: Half, offset: int, now: int) -> Prepared:
        """Apply a stored half, if its shard is still served here, and return the answer.

        A half with a client's id counts only if this is still the owner that wrote it: another owner may have taken
        another half of the same id meanwhile.
        """
        shard, entry = self._shards.find(preparation.shard), None
        if preparation.request.id is not None and (shard is None or shard.state.barrier != half.barrier):
            raise _unconfirmed()
        if shard is not None:
            claimed = shard.state.find(half.id) if half.id in self._shards.claims else None
            shard.apply_own_half(offset, half.id, half)
            entry = shard.state.find(half.id)
            if isinstance(claimed, Pending) and claimed is not entry:
                raise _unconfirmed()  # a change of the other half is being written
        if entry is not None and entry.fingerprint != half.fingerprint:
            raise IdReusedError(half.id)
        if entry is not None and not isinstance(entry, Pending):
            return self._known(entry)  # a former owner stored it too, and it has ended already
        look, due = look_and_check_at(self._groups, Pending.of(0, half) if entry is None else entry, now)
        if entry is not None and shard is not None:
            self._shards.payloads.put(half, entry.size)
            shard.agenda.put(half.id, look)
        return Prepared(
            id=half.id,
            state=State.PREPARED,
            group=half.group,
            prepared_at=Moment(half.prepared_at if entry is None else entry.prepared_at),
            next_check_at=Moment(due),
            created=True,
        )

    def _answer(self, preparation: _Preparation, result: Prepared | Exception) -> None:
        """Count a prepare, and answer it."""
        group = preparation.request.group
        if isinstance(result, Prepared):
            self._activity.note_prepare(group, "prepared" if result.created else "repeated", preparation.began)
        elif not isinstance(result, NotServedError):  # else the owner of the shard counts it
            label = result.code if isinstance(result, HalfwayError) else "internal"
            self._activity.note_prepare("" if self._groups.find(group) is None else group, label, preparation.began)
        preparation.answers.answer(preparation.index, result)

    def _add_ambiguous(self, transaction_id: str) -> None:
        self._ambiguous[transaction_id] = object()
        if len(self._ambiguous) > _MAX_AMBIGUOUS:
            del self._ambiguous[next(iter(self._ambiguous))]

    def _known(self, known: Entry) -> Prepared:
        return Prepared(
            id=known.id,
            state=known.state,
            group=known.group,
            prepared_at=Moment(known.prepared_at),
            next_check_at=Moment(check_at(self._groups, known)) if isinstance(known, Pending) else None,
            created=False,
        )


def _unconfirmed() -> OutcomeUnknownError:
    return OutcomeUnknownError("the prepare was not confirmed while its shard was served here: send it again")
