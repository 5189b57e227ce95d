"""Prepare: validate, pick the shard, store the half message (docs/protocol.md#prepare)."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Final

from uuid_utils import uuid7

from halfway.domain.errors import HalfwayError, IdReusedError, NotServedError, OutcomeUnknownError
from halfway.domain.ids import server_id
from halfway.domain.records import Half, fingerprint
from halfway.domain.shard import Entry, Pending
from halfway.domain.transaction import State
from halfway.service.answers import answer_all
from halfway.service.prepare import rules
from halfway.service.requests import Prepare, Prepared
from halfway.service.shards.check_schedule import check_at, look_at

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Mapping, Sequence

    from halfway.service.activity import Activity
    from halfway.service.answers import Answers
    from halfway.service.ports import Clock, HalfLog, TopicFacts, Topics
    from halfway.service.requests import ServiceLimits
    from halfway.service.shards.groups import Groups
    from halfway.service.shards.shard_table import Shard, ShardTable

_AMBIGUOUS_KEPT: Final = 100_000


class _Asked:
    """A prepare on its way, and what the log answers about its half (an `answers.Reply`)."""

    __slots__ = (
        "answers",
        "began",
        "content",
        "deadline",
        "facts",
        "half",
        "index",
        "is_stored",
        "preparer",
        "refreshed",
        "request",
        "shard",
    )

    half: Half
    shard: int

    def __init__(
        self,
        preparer: Preparer,
        answers: Answers[Prepared],
        index: int,
        request: Prepare,
        deadline: float,
        began: float,
    ) -> None:
        self.preparer = preparer
        self.answers = answers
        self.index = index
        self.request = request
        self.deadline = deadline
        self.began = began
        self.content = b""
        """The fingerprint of group and messages."""
        self.is_stored = False
        """Whether the log has answered, be it with an error."""
        self.refreshed = False
        """Whether the groups were read anew for it."""
        self.facts: Mapping[str, TopicFacts | None] | None = None
        """What Kafka told of its topics, if it was asked."""

    def done(self) -> bool:
        return self.is_stored  # the half is applied, whether the caller waits or not

    def set_result(self, offset: int) -> None:
        self.is_stored = True
        self.preparer.stored(self, offset)

    def set_exception(self, error: BaseException) -> None:
        self.is_stored = True
        self.preparer.stored(self, error)


class Preparer:
    """Stores half messages."""

    def __init__(
        self,
        limits: ServiceLimits,
        shards: ShardTable,
        half_log: HalfLog,
        groups: Groups,
        topics: Topics,
        clock: Clock,
        activity: Activity,
    ) -> None:
        """Keep the parts; nothing is started."""
        self._limits = limits
        self._shards = shards
        self._half_log = half_log
        self._groups = groups
        self._topics = topics
        self._clock = clock
        self._activity = activity
        self._reserved: dict[str | None, asyncio.Future[None]] = {}
        """Ids that are being produced: another prepare of them waits."""
        self._ambiguous: dict[str, object] = {}
        """Ids of prepares whose half may stand in the log, each with a mark of the last such prepare."""
        self._storing: dict[tuple[int, float], list[tuple[Half, _Asked]]] = {}
        """What this turn of the loop hands to the log, by shard and deadline."""
        self._tasks: set[asyncio.Task[None]] = set()

    def begin(
        self,
        requests: Sequence[Prepare],
        answers: Answers[Prepared],
        *,
        deadline: float,
        admit: Callable[[int, Prepare], None],
    ) -> None:
        """Store half messages; each answer comes once its half is durable.

        Those of one turn of the loop go to the log together. Only a prepare that waits for something other than the log
        takes a task of its own. If the answers are abandoned, such a prepare goes no further. `admit` is
        asked first, with the index: HalfwayError is the answer to a prepare that the caller may not make now.

        Answers:
            OutcomeUnknownError: it is not known whether it was stored: roll back, or send the same id again.
            IdReusedError: the id has other content.
            UnknownGroupError, ForbiddenError, PreparesRejectedError, TopicNotAllowedError, UnknownTopicError,
            InvalidRequestError, MessageTooLargeError, OverloadedError, NotServedError: nothing was stored.

        """
        began, unresolved = asyncio.get_running_loop().time(), self._shards.unresolved
        for index, request in enumerate(requests):
            asked = _Asked(self, answers, index, request, deadline, began)
            try:
                admit(index, request)
            except Exception as error:  # noqa: BLE001 - whatever it is, the caller gets it
                answers.answer(index, error)
                continue
            try:
                wait = self._advance(asked, unresolved)
            except Exception as error:  # noqa: BLE001 - whatever it is, the caller gets it
                self._tell(asked, error)
                continue
            if wait is not None:
                task = asyncio.get_running_loop().create_task(self._wait_and_advance(wait, asked))
                self._tasks.add(task)
                task.add_done_callback(self._tasks.discard)

    async def _wait_and_advance(self, wait: Awaitable[None] | None, asked: _Asked) -> None:
        try:
            while wait is not None:
                await wait
                if not asked.answers.waits_for(asked.index):
                    asked.answers.answer(asked.index, ConnectionAbortedError("the caller is gone"))
                    return
                wait = self._advance(asked, self._shards.unresolved)
        except Exception as error:  # noqa: BLE001 - as above
            self._tell(asked, error)
        except asyncio.CancelledError:
            asked.answers.answer(asked.index, ConnectionAbortedError("halfway is stopped"))
            raise

    def _advance(self, asked: _Asked, unresolved: int) -> Awaitable[None] | None:
        """Apply the rules in order, and store the half or answer.

        Returns what to wait for before the rules are applied again, None if the prepare is on its way or answered.
        """
        request, transaction_id = asked.request, asked.request.id
        if not asked.refreshed and self._may_be_new(request):
            return self._refreshed(asked)
        rules.require_prepares_enabled(self._limits)
        group = self._groups.taking_prepares(request.group)
        rules.require_legal_id(transaction_id)
        if (other := self._reserved.get(transaction_id)) is not None:
            return _released(other, deadline=asked.deadline)
        asked.content = asked.content or fingerprint(request.group, request.messages, request.check_after_ms)
        shard = self._shards.choose() if transaction_id is None else self._owner(transaction_id)
        if transaction_id is not None and (known := shard.state.find(transaction_id)) is not None:
            self._tell(asked, self._repeated(known, request, asked.content))
            return None
        rules.require_messages_within_limits(request, self._limits)
        rules.require_check_before_max_age(request, self._groups.policy(group.name).max_age_s)
        rules.require_topics_of_group(request, group)
        facts = asked.facts or self._topics.known({message.topic for message in request.messages})
        if facts is None:
            return self._described(asked)
        rules.require_topics_take_messages(request, facts)
        rules.require_room(unresolved, self._limits)
        if transaction_id is not None and transaction_id in self._ambiguous:
            return self._folded_to_end(transaction_id, asked.deadline)
        self._store(shard, asked)
        return None

    def _may_be_new(self, request: Prepare) -> bool:
        """Whether another instance may have just written what the group lacks here."""
        group = self._groups.find(request.group)
        return group is None or not all(message.topic in group.topics for message in request.messages)

    async def _refreshed(self, asked: _Asked) -> None:
        """Read the groups anew."""
        await self._groups.refresh(deadline=asked.deadline)
        asked.refreshed = True

    async def _described(self, asked: _Asked) -> None:
        """Ask Kafka about the topics."""
        names = list(dict.fromkeys(message.topic for message in asked.request.messages))
        asked.facts = await self._topics.describe(names, deadline=asked.deadline)

    async def _folded_to_end(self, transaction_id: str, deadline: float) -> None:
        """Wait until the fold has reached the end of the log: an earlier prepare of this id may stand there."""
        number, mark = self._owner(transaction_id).number, self._ambiguous.get(transaction_id)
        end = await self._half_log.half_end(number, deadline=deadline)
        await self._shards.get(number).tailed(end, deadline=deadline)
        if self._ambiguous.get(transaction_id) is mark:  # a later one may stand behind this end
            self._ambiguous.pop(transaction_id, None)

    def _owner(self, transaction_id: str) -> Shard:
        return self._shards.get(self._shards.number_of(transaction_id))

    def _free(self, transaction_id: str | None) -> None:
        """Let another prepare of a reserved id go on."""
        reserved = None if transaction_id is None else self._reserved.pop(transaction_id, None)
        if reserved is not None:
            reserved.set_result(None)

    def _tell(self, asked: _Asked, result: Prepared | Exception) -> None:
        """Answer."""
        if isinstance(result, Prepared):
            told = "prepared" if result.created else "repeated"
        else:
            told = result.code if isinstance(result, HalfwayError) else "internal"
        if not isinstance(result, NotServedError):  # else the owner of the shard counts it
            name = asked.request.group
            self._activity.note_prepare("" if self._groups.find(name) is None else name, told, asked.began)
        asked.answers.answer(asked.index, result)

    def _new_id(self, shard: int, now: int) -> str:
        return server_id(shard, str(uuid7(timestamp=now // 1000, nanos=now % 1000 * 1_000_000)))

    def _store(self, shard: Shard, asked: _Asked) -> None:
        """Hand the half to the log. It cannot be taken back: its result is applied even if the caller goes away."""
        request, now = asked.request, self._clock.now_ms()
        half = asked.half = Half(
            id=self._new_id(shard.number, now) if request.id is None else request.id,
            group=request.group,
            messages=request.messages,
            prepared_at=now,
            since=now,
            fingerprint=asked.content,
            check_after_ms=request.check_after_ms,
        )
        if request.id is not None:
            self._reserved[request.id] = asyncio.get_running_loop().create_future()
        asked.shard = shard.number
        self._shards.preparing[half.group] += 1
        if not self._storing:
            asyncio.get_running_loop().call_soon(self._hand_over)
        self._storing.setdefault((shard.number, asked.deadline), []).append((half, asked))

    def _hand_over(self) -> None:
        """Give the log what this turn has for it."""
        storing, self._storing = self._storing, {}
        for (number, deadline), halves in storing.items():
            try:
                self._half_log.append(number, halves, deadline=deadline)
            except Exception as error:  # noqa: BLE001 - whatever it is, the callers get it
                answer_all((asked, error) for _, asked in halves)

    def stored(self, asked: _Asked, outcome: int | BaseException) -> None:
        """Apply what was stored at an offset, as the tail would, and answer; or answer with the error."""
        half = asked.half
        preparing = self._shards.preparing
        preparing[half.group] -= 1
        if not preparing[half.group]:
            del preparing[half.group]
        result: Prepared | Exception
        if isinstance(outcome, int):
            try:
                result = self._answer(self._applied(asked.shard, half, outcome), half)
            except Exception as error:  # noqa: BLE001 - whatever it is, the caller gets it
                result = error
        else:
            result = outcome if isinstance(outcome, Exception) else OutcomeUnknownError("halfway was stopped")
            if isinstance(result, OutcomeUnknownError):
                self._note_ambiguous(half.id)
                result.fields["id"] = half.id
        self._free(asked.request.id)
        self._tell(asked, result)

    def _applied(self, number: int, half: Half, offset: int) -> Entry | None:
        """Apply a half that was stored and return its entry, None if its shard is no longer served here."""
        shard = self._shards.find(number)
        if shard is None:
            return None
        shard.apply_own_half(offset, half.id, half)
        entry = shard.state.find(half.id)
        if isinstance(entry, Pending):
            if entry.fingerprint == half.fingerprint:
                self._shards.payloads.put(half, entry.size)
            shard.agenda.put(half.id, look_at(self._groups, entry, self._clock.now_ms()))
        return entry

    def _note_ambiguous(self, transaction_id: str) -> None:
        self._ambiguous[transaction_id] = object()
        if len(self._ambiguous) > _AMBIGUOUS_KEPT:
            del self._ambiguous[next(iter(self._ambiguous))]

    def _answer(self, entry: Entry | None, half: Half) -> Prepared:
        if entry is not None and entry.fingerprint != half.fingerprint:
            raise IdReusedError(half.id)
        if entry is not None and entry.state is not State.PREPARED:
            return self._known(entry)  # a former owner stored it too, and it was ended before this
        due = check_at(self._groups, Pending.of(0, half)) if entry is None else self._next_check(entry)
        return Prepared(
            id=half.id,
            state=State.PREPARED,
            group=half.group,
            prepared_at=half.prepared_at,
            next_check_at=due,
            created=True,
        )

    def _repeated(self, known: Entry, request: Prepare, content: bytes) -> Prepared:
        if known.group != request.group or known.fingerprint != content:
            raise IdReusedError(known.id)
        return self._known(known)

    def _known(self, known: Entry) -> Prepared:
        return Prepared(
            id=known.id,
            state=known.state,
            group=known.group,
            prepared_at=known.prepared_at,
            next_check_at=self._next_check(known),
            created=False,
        )

    def _next_check(self, entry: Entry) -> int | None:
        return check_at(self._groups, entry) if isinstance(entry, Pending) else None


async def _released(reserved: asyncio.Future[None], *, deadline: float) -> None:
    try:
        async with asyncio.timeout_at(deadline):
            await asyncio.shield(reserved)
    except TimeoutError:
        raise OutcomeUnknownError("another prepare with this id is not decided yet: send it again") from None
