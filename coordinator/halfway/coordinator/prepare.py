"""Prepare: validate, choose the shard, store the half message (docs/protocol.md#prepare)."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any, Final

import structlog

from halfway.coordinator import prepare_rules, tracing
from halfway.coordinator.changes import Record
from halfway.coordinator.ending import Ending
from halfway.coordinator.operations import Deadlines, Operation, Path, Waits, log_late, tick_of
from halfway.coordinator.ports import Authority, Clock, HalfLog, TopicFacts, Topics
from halfway.coordinator.prepare_rules import GroupLimits
from halfway.coordinator.queries.activity import Activity
from halfway.coordinator.queries.queries import Lookup
from halfway.coordinator.requests import Moment, Prepare, Prepared, ServiceLimits
from halfway.coordinator.shards.groups import Groups, check_at, look_and_check_at
from halfway.coordinator.shards.shard import Shard
from halfway.coordinator.shards.shard_table import ShardTable
from halfway.protocol.entries import Entry, Pending
from halfway.protocol.errors import (
    HalfwayError,
    IdReusedError,
    MessageTooLargeError,
    NotServedError,
    OutcomeExpiredError,
    OutcomeUnknownError,
    RetryableError,
)
from halfway.protocol.ids import IdMaker
from halfway.protocol.principal import Permission, Principal
from halfway.protocol.records import Half, Origin, fingerprint
from halfway.protocol.transactions import State

log = structlog.get_logger(__name__)

_MAX_AMBIGUOUS: Final = 100_000


class Preparation(Operation[Prepared], kw_only=True, eq=False):
    """A prepare, from its request to its answer."""

    request: Prepare
    is_relayed: bool = False
    """Whether another instance has forwarded it."""
    shard: int = -1
    half: Half | None = None
    """The half that is appended to the log."""
    fingerprint: bytes = b""
    """The fingerprint of group and messages."""
    refreshed: bool = False
    """True if the groups were read again for it."""
    facts: Mapping[str, TopicFacts | None] | None = None
    """Facts about its topics, if Kafka was asked for them."""
    has_looked: bool = False
    """True if the tail has reached the end of the log since it came."""
    doubt: object | None = None
    """The mark of an earlier half of its id that may still arrive: the order of the log decides which one counts."""
    queue: deque[Preparation] | None = None
    """The prepares of the same id that wait until this one is stored."""
    held_bytes: int = 0
    """The bytes that it takes of those that its group may have in flight."""
    span: Any = None
    """Its span, if it is traced."""
    traced: Prepare | None = None
    """The request with the context of its span in the messages. The caller's own is what is forwarded."""


class Preparer(Path[Preparation]):
    """Stores half messages."""

    def __init__(  # noqa: PLR0913, PLR0917 - its collaborators, once
        self,
        limits: ServiceLimits,
        authority: Authority,
        shards: ShardTable,
        half_log: HalfLog,
        groups: Groups,
        lookup: Lookup,
        topics: Topics,
        clock: Clock,
        activity: Activity,
        ending: Ending,
    ) -> None:
        super().__init__(authority)
        self._limits = limits
        self._group_limits = GroupLimits(limits, shards, groups)
        self._shards = shards
        self._half_log = half_log
        self._groups = groups
        self._lookup = lookup
        self._topics = topics
        self._clock = clock
        self._ids = IdMaker(shards.count)
        self._activity = activity
        self._ending = ending
        self._reserved: dict[str, Preparation] = {}
        """By id: the prepare whose half is being stored. Others of the id wait."""
        self._deadlines: Deadlines[Preparation] = Deadlines(self._late)
        self._ambiguous: dict[str, object] = {}
        """Ids of prepares whose half may be in the log, each with a mark of the last such prepare."""

    def prepare(
        self,
        request: Prepare,
        *,
        deadline: float,
        principal: Principal,
        forwards: bool = False,
        is_relayed: bool = False,
    ) -> Preparation:
        """Store a half message for a caller, and answer when it is durable.

        If another instance serves its shard, it `forwards` it. One that another instance has forwarded (`is_relayed`)
        takes no token of its group's rate.

        Raises:
            OutcomeUnknownError: it is not known whether the half was stored: roll back, or send the same id again.
            IdReusedError: the id has other content.
            IdInFutureError, OutcomeExpiredError: it is not the id of a new transaction. Nothing was stored.
            UnknownGroupError, ForbiddenError, PreparesRejectedError, TopicNotAllowedError, UnknownTopicError,
            InvalidRequestError, MessageTooLargeError, OverloadedError, NotServedError: nothing was stored.
            UnauthenticatedError, GroupLimitedError: the caller may not make it now.
        """
        preparation = Preparation(
            path=self, request=request, deadline=deadline, principal=principal, forwards=forwards, is_relayed=is_relayed
        )
        self.add(preparation)
        return preparation

    # --- the turn

    def _turn(self) -> None:
        """Take the prepares of this turn as far as they go, and append their halves together."""
        began, unresolved = asyncio.get_running_loop().time(), self._shards.unresolved
        storing: dict[tuple[int, int], list[tuple[Half, Preparation]]] = {}
        appending: list[tuple[Half, Preparation]] = []
        number, deadline = -1, 0.0
        for one in self._take():
            one.began = one.began or began
            try:
                self._step(one, unresolved)
            except Exception as error:  # noqa: BLE001 - the caller gets any error
                self._fail(one, error)
            else:
                if one.half is not None:
                    if one.shard != number or one.deadline != deadline:
                        number, deadline = one.shard, one.deadline
                        appending = storing.setdefault((number, tick_of(deadline)), [])
                    appending.append((one.half, one))
        for (number, _), halves in storing.items():
            try:
                self._half_log.append(number, halves, self._stored, deadline=min([one.deadline for _, one in halves]))
            except Exception as error:  # noqa: BLE001 - the callers get any error
                self._stored([(one, error) for _, one in halves])

    def _step(self, one: Preparation, unresolved: int) -> None:
        """Take a prepare as far as it goes without waiting: up to its `half`, which is to be appended."""
        if one.result is not None:
            return  # its caller is gone
        if not one.allowed:
            group = one.request.group
            if self._permitted is not one.principal or self._permission != group:
                self._authority.require(one.principal, Permission.PREPARE, group)
                self._permitted, self._permission = one.principal, group
            one.held_bytes = self._group_limits.admit(one.request, is_relayed=one.is_relayed)
            one.allowed = True
        self._apply_rules(one, unresolved)

    def _fail(self, one: Preparation, error: BaseException) -> None:
        if isinstance(error, NotServedError) and self._begin_forward(one, error):
            self._release(one)
        else:
            self._answer(one, error if isinstance(error, Exception) else ConnectionAbortedError("halfway is stopped"))

    def abandon(self, one: Preparation) -> None:
        """Let a prepare whose half is not on its way go no further: its caller is gone."""
        if one.forwarded is not None:
            one.forwarded.cancel()
        elif one.half is None:
            self._answer(one, ConnectionAbortedError("the caller is gone"))

    def _apply_rules(self, one: Preparation, unresolved: int) -> None:
        """Apply the rules in order, and make the half. If one of them has to wait, begin again after that."""
        request = one.request
        transaction_id, messages = request.id, request.messages
        names = {message.topic for message in messages}
        group = self._groups.find(request.group)
        if not one.refreshed and (group is None or not names.issubset(group.topics)):
            self._wait(one, Waits.GROUPS, self._refresh(one))  # another instance may have just changed the group
            return
        group = self._groups.get_for_prepare(request.group)
        prepare_rules.require_prepares_accepted(group, self._limits)
        if transaction_id is not None:
            prepare_rules.require_id(transaction_id)
            holder = self._reserved.get(transaction_id)
            if holder is not None and holder is not one:
                self._wait_for_claim(one, holder)
                return
        one.fingerprint = one.fingerprint or fingerprint(request.group, messages, request.check_after_ms)
        if transaction_id is None:
            shard = self._shards.choose()
        else:
            shard = self._shards.of(transaction_id)
            if (known := shard.state.find(transaction_id)) is not None:
                self._answer_known(one, shard, known)
                return
            born = prepare_rules.require_born(transaction_id, self._clock.now_ms())
            if not self._is_new(one, shard, transaction_id, born):
                return
        request = tracing.begin_prepare(one)
        prepare_rules.require_messages_within_limits(request, self._limits)
        if request.check_after_ms is not None:
            prepare_rules.require_check_before_max_age(
                request.check_after_ms, self._groups.policy(group.name).max_age_s
            )
        prepare_rules.require_topics_of_group(request, group)
        facts = one.facts or self._topics.known(names)
        if facts is None:
            self._wait(one, Waits.TOPICS, self._describe(one))
            return
        prepare_rules.require_topics_take_messages(request, facts)
        prepare_rules.require_room(unresolved, self._limits)
        if transaction_id is not None and self._ambiguous.get(transaction_id) is not one.doubt:
            self._wait(one, Waits.TAIL, self._wait_for_fold(transaction_id, one))
            return
        self._group_limits.require_room(group)
        self._make_half(shard, one)

    def _answer_known(self, one: Preparation, shard: Shard, known: Entry) -> None:
        """Answer the prepare of a known id, or wait for what has to be done first."""
        if known.group != one.request.group or known.fingerprint != one.fingerprint:
            raise IdReusedError(known.id)
        self._require_no_write_of_other_content(known)
        if isinstance(known, Pending) and known.origin is Origin.PREPARE and known.barrier < shard.state.barrier:
            self._wait(one, Waits.LANE, self._make_final(known.id, one.deadline))
        else:
            self._answer(one, self._known(known))

    def _is_new(self, one: Preparation, shard: Shard, transaction_id: str, born: int | None) -> bool:
        """Return whether an unknown id has certainly not ended. If it may have, wait for the tail, or refuse it."""
        if not self._lookup.is_past_horizon(born, shard):
            return True
        if one.has_looked:
            raise OutcomeExpiredError(transaction_id, horizon_s=self._limits.outcome_horizon_s, is_prepare=True)
        self._wait(one, Waits.TAIL, self._wait_for_fold(transaction_id, one))
        return False

    async def _refresh(self, preparation: Preparation) -> None:
        """Read the groups again."""
        await self._groups.refresh(deadline=preparation.deadline)
        preparation.refreshed = True

    async def _describe(self, preparation: Preparation) -> None:
        """Read the facts about the topics from Kafka."""
        names = list(dict.fromkeys(message.topic for message in preparation.request.messages))
        preparation.facts = await self._topics.describe(names, deadline=preparation.deadline)

    def _wait_for_claim(self, one: Preparation, holder: Preparation) -> None:
        """Wait until no other prepare of the id is being stored; they come in the order in which they waited."""
        one.waits = Waits.CLAIM
        if holder.queue is None:
            holder.queue = deque()
        holder.queue.append(one)
        self._deadlines.watch(one, tick_of(one.deadline))

    def _late(self, one: Preparation) -> None:
        log_late(one, group=one.request.group)
        self._answer(one, OutcomeUnknownError("another prepare with this id is not decided yet: send it again"))

    def _release(self, one: Preparation) -> None:
        """Give the id to the next prepare that waits for it, or wait for it no more."""
        name = one.request.id
        holder = None if name is None else self._reserved.get(name)
        if name is None or holder is None:
            return
        if holder is not one:
            if one.waits is Waits.CLAIM and holder.queue is not None:
                holder.queue.remove(one)
                self._deadlines.forget(one, tick_of(one.deadline))
            return
        queue, one.queue = one.queue, None
        if not queue:
            del self._reserved[name]
            return
        following = self._reserved[name] = queue.popleft()
        self._deadlines.forget(following, tick_of(following.deadline))
        following.queue, following.waits = queue, Waits.TURN
        self.add(following)

    async def _make_final(self, transaction_id: str, deadline: float) -> None:
        """Let the lane write the half of a former owner again, before its prepare is acknowledged here.

        Until then a half of the same id with other content may still arrive from a later owner than its own, and count.
        """
        try:
            await self._ending.write_again(transaction_id, Record.HALF, deadline=deadline, waits=True)
        except (RetryableError, MessageTooLargeError):  # whatever it is: the former owner has stored it
            raise OutcomeUnknownError("the prepare could not be confirmed now: send it again") from None

    async def _wait_for_fold(self, transaction_id: str, preparation: Preparation) -> None:
        """Wait until the tail has reached the end of the log: an earlier half of this id may be there.

        It may also come behind this end, so the id stays marked until a later half of it is in the log.
        """
        deadline, mark = preparation.deadline, self._ambiguous.get(transaction_id)
        await self._lookup.read_barrier(self._shards.of(transaction_id).number, deadline=deadline)
        preparation.doubt, preparation.has_looked = mark, True

    def _make_half(self, shard: Shard, preparation: Preparation) -> None:
        """Make the half, which goes to the log: its result is applied even if the caller is gone."""
        request, now = tracing.begin_prepare(preparation), self._clock.now_ms()
        transaction_id = request.id
        if transaction_id is None:
            transaction_id = self._ids.make(now, shard.number)
        else:
            self._reserved[transaction_id] = preparation
        half = preparation.half = Half(
            id=transaction_id,
            group=request.group,
            messages=request.messages,
            prepared_at=now,
            since=now,
            fingerprint=preparation.fingerprint,
            check_after_ms=request.check_after_ms,
            barrier=shard.state.barrier,
        )
        preparation.shard = shard.number
        self._shards.preparing[half.group] += 1
        preparation.waits = Waits.LOG

    # --- the answers of the log

    def _stored(self, results: Sequence[tuple[Preparation, int | Exception]]) -> None:
        """Apply the stored halves as the tail would, and answer; answer the others with their errors."""
        now = self._clock.now_ms()
        for preparation, outcome in results:
            half = preparation.half
            if half is None or preparation.waits is not Waits.LOG:
                continue  # it is answered already
            if not isinstance(outcome, int):
                self._finish(preparation, half, outcome)
            elif preparation.doubt is not None:
                preparation.waits = Waits.TAIL
                task = asyncio.get_running_loop().create_task(self._answer_by_log(preparation, half, outcome))
                self._tasks.add(task)
                task.add_done_callback(self._tasks.discard)
            else:
                self._finish(preparation, half, self._applied(preparation, half, outcome, now))

    async def _answer_by_log(self, preparation: Preparation, half: Half, offset: int) -> None:
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

    def _applied(self, preparation: Preparation, half: Half, offset: int, now: int) -> Prepared | Exception:
        """Apply a stored half, and return the answer or its error."""
        try:
            return self._apply(preparation, half, offset, now)
        except Exception as error:  # noqa: BLE001 - the caller gets any error
            return error

    def _finish(self, preparation: Preparation, half: Half, result: Prepared | Exception) -> None:
        """Release the id of a half that was handed to the log, and answer. Until now it counts as on its way."""
        preparing = self._shards.preparing
        preparing[half.group] -= 1
        if not preparing[half.group]:
            del preparing[half.group]
        if isinstance(result, OutcomeUnknownError):
            self._add_ambiguous(half.id)
            result.fields["id"] = half.id
        self._answer(preparation, result)

    def _apply(self, preparation: Preparation, half: Half, offset: int, now: int) -> Prepared:
        """Apply a stored half, if its shard is still served here, and return the answer.

        A half with a client's id counts only if this is still the owner that wrote it: another owner may have taken
        another half of the same id meanwhile.
        """
        shard, entry = self._shards.find(preparation.shard), None
        if preparation.request.id is not None and (shard is None or shard.state.barrier != half.barrier):
            raise _unconfirmed()
        if shard is not None:
            shard.apply_own_half(offset, half.id, half)
            entry = shard.state.find(half.id)
            self._require_no_write_of_other_content(half)
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

    def _require_no_write_of_other_content(self, half: Half | Entry) -> None:
        """Raise if a change of another half of the id is being written: that half may be delivered."""
        claim = self._shards.claims.get(half.id)
        if (
            claim is not None
            and claim.write is not None
            and claim.entry is not None
            and claim.entry.fingerprint != half.fingerprint
        ):
            raise _unconfirmed()

    def _answer(self, preparation: Preparation, result: Prepared | Exception) -> None:
        """Count a prepare, and answer it, unless it has an answer."""
        if preparation.result is not None:
            return
        self._release(preparation)
        preparation.half, preparation.waits = None, Waits.DONE
        if preparation.held_bytes:
            self._group_limits.release(preparation.request.group, preparation.held_bytes)
        group = preparation.request.group
        try:
            if not preparation.allowed or preparation.forwarded is not None:
                pass  # a refused caller is not counted; a forwarded prepare is counted by the owner of the shard
            elif isinstance(result, Prepared):
                self._activity.note_prepare(group, "prepared" if result.created else "repeated", preparation.began)
            elif not isinstance(result, NotServedError | ConnectionAbortedError):
                label = result.code if isinstance(result, HalfwayError) else "internal"
                self._activity.note_prepare("" if self._groups.find(group) is None else group, label, preparation.began)
        finally:
            if preparation.span is not None:
                tracing.end_prepare(preparation.span, result)
            preparation.answer(result)

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
