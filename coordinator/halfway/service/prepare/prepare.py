"""Prepare: validate, pick the shard, store the half message (docs/protocol.md#prepare)."""

from __future__ import annotations

import asyncio
from functools import partial
from typing import TYPE_CHECKING, Final

from uuid_utils import uuid7

from halfway.domain.errors import HalfwayError, IdReusedError, NotServedError, OutcomeUnknownError
from halfway.domain.ids import server_id
from halfway.domain.records import Half, fingerprint
from halfway.domain.shard import Entry, Pending
from halfway.domain.transaction import State
from halfway.service.prepare import rules
from halfway.service.requests import Prepare, Prepared
from halfway.service.shards.check_schedule import check_at, look_at

if TYPE_CHECKING:
    from collections.abc import Awaitable, Mapping

    from halfway.service.ports import Clock, HalfLog, Observer, TopicFacts, Topics
    from halfway.service.requests import ServiceLimits
    from halfway.service.shards.groups import Groups
    from halfway.service.shards.shard_table import Shard, ShardTable

_AMBIGUOUS_KEPT: Final = 100_000


class _Asked:
    """A prepare on its way."""

    __slots__ = ("answer", "began", "content", "credential", "deadline", "facts", "refreshed", "request")

    def __init__(self, request: Prepare, deadline: float, credential: str | None) -> None:
        loop = asyncio.get_running_loop()
        self.request = request
        self.deadline = deadline
        self.credential = credential
        self.answer: asyncio.Future[Prepared] = loop.create_future()
        self.began = loop.time()
        self.content = b""
        """The fingerprint of group and messages."""
        self.refreshed = False
        """Whether the groups were read anew for it."""
        self.facts: Mapping[str, TopicFacts | None] | None = None
        """What Kafka told of its topics, if it was asked."""


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
        observer: Observer,
    ) -> None:
        """Keep the parts; nothing is started."""
        self._limits = limits
        self._shards = shards
        self._half_log = half_log
        self._groups = groups
        self._topics = topics
        self._clock = clock
        self._observer = observer
        self._reserved: dict[str | None, asyncio.Future[None]] = {}
        """Ids that are being produced: another prepare of them waits."""
        self._ambiguous: dict[str, object] = {}
        """Ids of prepares whose half may stand in the log, each with a mark of the last such prepare."""
        self._tasks: set[asyncio.Task[None]] = set()

    def begin(self, request: Prepare, *, deadline: float, credential: str | None) -> asyncio.Future[Prepared]:
        """Store a half message; the answer comes once it is durable. A caller that goes away may cancel the future.

        Only a prepare that waits for something other than the log takes a task of its own.

        Raises (through the future):
            OutcomeUnknownError: it is not known whether it was stored: roll back, or send the same id again.
            IdReusedError: the id has other content.
            UnknownGroupError, ForbiddenError, PreparesRejectedError, TopicNotAllowedError, UnknownTopicError,
            InvalidRequestError, MessageTooLargeError, OverloadedError, NotServedError: nothing was stored.

        """
        asked = _Asked(request, deadline, credential)
        try:
            wait = self._advance(asked)
        except Exception as error:  # noqa: BLE001 - whatever it is, the caller gets it
            self._tell(asked, error)
        else:
            if wait is not None:
                task = asyncio.get_running_loop().create_task(self._wait_and_advance(wait, asked))
                self._tasks.add(task)
                task.add_done_callback(self._tasks.discard)
        return asked.answer

    async def _wait_and_advance(self, wait: Awaitable[None] | None, asked: _Asked) -> None:
        try:
            while wait is not None:
                await wait
                if asked.answer.done():
                    return  # the caller is gone
                wait = self._advance(asked)
        except Exception as error:  # noqa: BLE001 - as above
            self._tell(asked, error)

    def _advance(self, asked: _Asked) -> Awaitable[None] | None:
        """Apply the rules in order, and store the half or answer.

        Returns what to wait for before the rules are applied again, None if the prepare is on its way or answered.
        """
        request, transaction_id = asked.request, asked.request.id
        if not asked.refreshed and self._may_be_new(request):
            return self._refreshed(asked)
        rules.prepares_are_taken(self._limits)
        group = self._groups.require(request.group, credential=asked.credential, action="prepare")
        rules.id_is_legal(transaction_id)
        if (other := self._reserved.get(transaction_id)) is not None:
            return _released(other, deadline=asked.deadline)
        asked.content = asked.content or fingerprint(request.group, request.messages, request.check_after_ms)
        shard = self._shards.choose() if transaction_id is None else self._owner(transaction_id)
        if transaction_id is not None and (known := shard.state.find(transaction_id)) is not None:
            self._tell(asked, self._repeated(known, request, asked.content))
            return None
        rules.messages_are_within_limits(request, self._limits)
        rules.check_comes_before_max_age(request, self._groups.policy(group.name).max_age_s)
        rules.group_may_write_to_topics(request, group)
        facts = asked.facts or self._topics.known({message.topic for message in request.messages})
        if facts is None:
            return self._described(asked)
        rules.topics_take_messages(request, facts)
        rules.has_room(self._shards.pending, self._limits)
        if transaction_id is not None and transaction_id in self._ambiguous:
            return self._settled(transaction_id, asked.deadline)
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

    async def _settled(self, transaction_id: str, deadline: float) -> None:
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
        """Answer, unless the caller is gone."""
        if isinstance(result, Prepared):
            told = "prepared" if result.created else "repeated"
            if not asked.answer.done():
                asked.answer.set_result(result)
        else:
            told = result.code if isinstance(result, HalfwayError) else "internal"
            if not asked.answer.done():
                asked.answer.set_exception(result)
            if isinstance(result, NotServedError):
                return  # the owner of the shard counts it
        name = asked.request.group
        seconds = asyncio.get_running_loop().time() - asked.began
        self._observer.prepared("" if self._groups.find(name) is None else name, told, seconds)

    def _new_id(self, shard: int) -> str:
        now = self._clock.now_ms()
        return server_id(shard, str(uuid7(timestamp=now // 1000, nanos=now % 1000 * 1_000_000)))

    def _store(self, shard: Shard, asked: _Asked) -> None:
        """Produce the half. It cannot be taken back: its result is applied even if the caller goes away."""
        request, now = asked.request, self._clock.now_ms()
        if request.id is not None:
            self._reserved[request.id] = asyncio.get_running_loop().create_future()
        half = Half(
            id=self._new_id(shard.number) if request.id is None else request.id,
            group=request.group,
            messages=request.messages,
            prepared_at=now,
            since=now,
            fingerprint=asked.content,
            check_after_ms=request.check_after_ms,
        )
        try:
            stored = self._half_log.append(shard.number, half, deadline=asked.deadline)
        except BaseException:
            self._free(request.id)
            raise
        self._shards.preparing[half.group] += 1
        stored.add_done_callback(partial(self._appended, shard.number, half, asked))

    def _appended(self, number: int, half: Half, asked: _Asked, stored: asyncio.Future[int]) -> None:
        """Apply what was stored, as the tail would, and answer."""
        self._shards.preparing[half.group] -= 1
        if not self._shards.preparing[half.group]:
            del self._shards.preparing[half.group]
        try:
            result: Prepared | Exception = self._answer(self._applied(number, half, stored.result()), half)
        except OutcomeUnknownError as error:
            self._note_ambiguous(half.id)
            error.fields["id"] = half.id
            result = error
        except Exception as error:  # noqa: BLE001 - whatever it is, the caller gets it
            result = error
        self._free(asked.request.id)
        self._tell(asked, result)

    def _applied(self, number: int, half: Half, offset: int) -> Entry | None:
        """Apply a half that was stored and return its entry, None if its shard is no longer served here."""
        shard = self._shards.find(number)
        if shard is None:
            return None
        shard.state.apply_half(offset, half.id, half)
        entry = shard.state.find(half.id)
        if isinstance(entry, Pending):
            if entry.fingerprint == half.fingerprint:
                self._shards.payloads.put(half)
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
