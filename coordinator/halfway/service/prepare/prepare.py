"""Prepare: validate, pick the shard, store the half message (docs/protocol.md#prepare)."""

from __future__ import annotations

import asyncio
from functools import partial
from typing import TYPE_CHECKING

from uuid_utils import uuid7

from halfway.domain.errors import (
    HalfwayError,
    IdReusedError,
    InvalidRequestError,
    MessageTooLargeError,
    NotServedError,
    OutcomeUnknownError,
    OverloadedError,
    PreparesRejectedError,
    TopicNotAllowedError,
    UnknownTopicError,
)
from halfway.domain.ids import CLIENT_ID, server_id, server_made
from halfway.domain.records import Group, Half, Message, fingerprint
from halfway.domain.shard import Entry, Pending
from halfway.domain.transaction import State
from halfway.service.requests import Prepare, Prepared
from halfway.service.shards.check_schedule import check_at, look_at

if TYPE_CHECKING:
    from collections.abc import Mapping

    from halfway.service.ports import Clock, HalfLog, Observer, TopicFacts, Topics
    from halfway.service.requests import ServiceLimits
    from halfway.service.shards.groups import Groups
    from halfway.service.shards.shard_table import Shard, ShardTable

MIN_TOPIC_MESSAGE_BYTES = 65_536
"""The lane's batches are this large: a topic that takes less would refuse them."""
RECORD_OVERHEAD_BYTES = 512
"""What halfway's headers and Kafka's framing add to a message, at most."""
HEADER_OVERHEAD_BYTES = 10
"""What Kafka's framing adds to each header, at most."""
_AMBIGUOUS_KEPT = 100_000


class _Asked:
    """A prepare on its way."""

    __slots__ = ("answer", "began", "content", "deadline", "request")

    def __init__(self, request: Prepare, deadline: float, answer: asyncio.Future[Prepared], began: float) -> None:
        self.request = request
        self.deadline = deadline
        self.answer = answer
        self.began = began
        self.content = b""


class Preparing:
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
        """Ids that are being produced, or about to be: another prepare of them waits."""
        self._ambiguous: dict[str | None, None] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    def begin(self, request: Prepare, *, deadline: float, credential: str | None) -> asyncio.Future[Prepared]:
        """Store a half message; the answer comes once it is durable. Whoever goes away may cancel the future.

        Nothing here takes a task of its own but what has to wait for something other than the log.

        Raises (through the future):
            OutcomeUnknownError: it is not known whether it was stored: roll back, or send the same id again.
            IdReusedError: the id has other content.
            UnknownGroupError, ForbiddenError, PreparesRejectedError, TopicNotAllowedError, UnknownTopicError,
            InvalidRequestError, MessageTooLargeError, OverloadedError, NotServedError: nothing was stored.

        """
        loop = asyncio.get_running_loop()
        asked = _Asked(request, deadline, loop.create_future(), loop.time())
        try:
            if not self._begun_at_once(asked, credential):
                task = loop.create_task(self._begin_later(asked, credential))
                self._tasks.add(task)
                task.add_done_callback(self._tasks.discard)
        except Exception as error:  # noqa: BLE001 - whoever waits hears of it, whatever it is
            self._tell(asked, error)
        return asked.answer

    def _admitted(self, asked: _Asked, credential: str | None) -> Group:
        request = asked.request
        if self._limits.reject_prepares:
            raise PreparesRejectedError
        group = self._groups.require(request.group, credential=credential, action="prepare")
        if request.id is not None:
            _judge_id(request.id)
        asked.content = fingerprint(request.group, request.messages, request.check_after_ms)
        return group

    def _may_be_new(self, request: Prepare) -> bool:
        """Whether what the group is lacking may have been written by another instance a moment ago."""
        group = self._groups.find(request.group)
        return group is None or not all(message.topic in group.topics for message in request.messages)

    def _begun_at_once(self, asked: _Asked, credential: str | None) -> bool:
        """Produce or answer where nothing has to be waited for first; False where something has."""
        if self._may_be_new(asked.request):
            return False
        group, transaction_id = self._admitted(asked, credential), asked.request.id
        if transaction_id in self._reserved or transaction_id in self._ambiguous:
            return False
        shard = self._shards.choose() if transaction_id is None else self._owner(transaction_id)
        if transaction_id is not None and self._is_repeat(shard, transaction_id, asked):
            return True
        self._judge(group, asked.request)
        facts = self._topics.known({message.topic for message in asked.request.messages})
        if facts is None:
            return False
        self._judge_topics(asked.request, facts)
        if transaction_id is not None:
            self._reserved[transaction_id] = asyncio.get_running_loop().create_future()
        self._store(shard, asked)
        return True

    async def _begin_later(self, asked: _Asked, credential: str | None) -> None:
        """Wait for the group, for another prepare of the id, for what the log says of it, or for facts about topics."""
        transaction_id, deadline = asked.request.id, asked.deadline
        reserved = False
        try:
            if self._may_be_new(asked.request):
                await self._groups.refresh(deadline=deadline)
            group = self._admitted(asked, credential)
            if transaction_id is not None:
                while (other := self._reserved.get(transaction_id)) is not None:
                    await _wait(other, deadline=deadline)
                if self._is_repeat(self._owner(transaction_id), transaction_id, asked):
                    return
                self._reserved[transaction_id] = asyncio.get_running_loop().create_future()
                reserved = True
            self._judge(group, asked.request)
            names = list(dict.fromkeys(message.topic for message in asked.request.messages))
            self._judge_topics(asked.request, await self._topics.describe(names, deadline=deadline))
            ambiguous = transaction_id is not None and transaction_id in self._ambiguous
            if transaction_id is not None and ambiguous and await self._settled(transaction_id, asked):
                return
            if not asked.answer.done():
                # It may be in the middle of a deletion by now, which has not counted this prepare.
                self._groups.require(group.name, credential=credential, action="prepare")
                shard = self._shards.choose() if transaction_id is None else self._owner(transaction_id)
                reserved = False
                self._store(shard, asked)
        except Exception as error:  # noqa: BLE001 - whoever waits hears of it, whatever it is
            self._tell(asked, error)
        finally:
            if reserved:
                self._free(transaction_id)

    async def _settled(self, transaction_id: str, asked: _Asked) -> bool:
        """Answer where an earlier prepare of this id stands: only the log tells, as far as it goes now."""
        number = self._owner(transaction_id).number
        end = await self._half_log.half_end(number, deadline=asked.deadline)
        await self._shards.get(number).tailed(end, deadline=asked.deadline)
        self._ambiguous.pop(transaction_id, None)
        return self._is_repeat(self._shards.get(number), transaction_id, asked)

    def _owner(self, transaction_id: str) -> Shard:
        return self._shards.get(self._shards.number_of(transaction_id))

    def _is_repeat(self, shard: Shard, transaction_id: str, asked: _Asked) -> bool:
        """Answer where the id is known already."""
        known = shard.state.find(transaction_id)
        if known is None:
            return False
        self._tell(asked, self._repeated(known, asked.request, asked.content))
        return True

    def _free(self, transaction_id: str | None) -> None:
        """Let another prepare of a reserved id go on."""
        reserved = None if transaction_id is None else self._reserved.pop(transaction_id, None)
        if reserved is not None:
            reserved.set_result(None)

    def _tell(self, asked: _Asked, result: Prepared | Exception) -> None:
        """Answer, if somebody still waits."""
        if isinstance(result, Prepared):
            told = "prepared" if result.created else "repeated"
            if not asked.answer.done():
                asked.answer.set_result(result)
        else:
            told = result.code if isinstance(result, HalfwayError) else "internal"
            if not asked.answer.done():
                asked.answer.set_exception(result)
            if isinstance(result, NotServedError):
                return  # whoever owns the shard counts it
        name = asked.request.group
        seconds = asyncio.get_running_loop().time() - asked.began
        self._observer.prepared("" if self._groups.find(name) is None else name, told, seconds)

    def _new_id(self, shard: int) -> str:
        now = self._clock.now_ms()
        return server_id(shard, str(uuid7(timestamp=now // 1000, nanos=now % 1000 * 1_000_000)))

    def _judge(self, group: Group, request: Prepare) -> None:
        """Refuse what would fail later, as far as the request and the group tell (docs/protocol.md#prepare)."""
        limits = self._limits
        if not 0 < len(request.messages) <= limits.max_messages:
            raise InvalidRequestError(
                f"messages has {len(request.messages)} items: from 1 to {limits.max_messages}", field="messages"
            )
        size = sum([message.size for message in request.messages])
        if size > limits.max_prepare_bytes:
            raise MessageTooLargeError(
                f"messages are {size} bytes together, more than the limit of {limits.max_prepare_bytes}: send less, "
                "or raise HALFWAY_MAX_PREPARE_BYTES",
                size=size,
                limit=limits.max_prepare_bytes,
            )
        latest = round(self._groups.policy(group.name).max_age_s * 1000)
        if request.check_after_ms is not None and request.check_after_ms >= latest:
            raise InvalidRequestError(
                f"check_after_s {request.check_after_ms / 1000:g} is not below the group's max_age_s {latest / 1000:g}",
                field="check_after_s",
            )
        for number, message in enumerate(request.messages):
            if message.topic not in group.topics:
                raise TopicNotAllowedError(
                    f"topic {message.topic!r} is not among the topics of group {group.name!r}: "
                    f"PUT /v1/groups/{group.name} with it first",
                    field=f"messages[{number}].topic",
                )

    def _judge_topics(self, request: Prepare, facts: Mapping[str, TopicFacts | None]) -> None:
        """Refuse what would fail later by the facts about its topics."""
        for number, message in enumerate(request.messages):
            _judge_message(number, message, facts.get(message.topic))
        if self._shards.pending >= self._limits.max_pending:
            raise OverloadedError(f"{self._limits.max_pending} transactions are pending here already: end some first")

    def _store(self, shard: Shard, asked: _Asked) -> None:
        """Produce the half; it cannot be taken back then: whoever asked for it may go away, its result may not."""
        request, now = asked.request, self._clock.now_ms()
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
        except Exception as error:  # noqa: BLE001 - whoever waits hears of it, whatever it is
            result = error
        self._free(asked.request.id)
        self._tell(asked, result)

    def _applied(self, number: int, half: Half, offset: int) -> Entry | None:
        """Return what is known of a half that was stored, None where its shard is no longer served here."""
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
        self._ambiguous[transaction_id] = None
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


def _judge_id(transaction_id: str) -> None:
    if CLIENT_ID.match(transaction_id) is None:
        raise InvalidRequestError(
            f"id {transaction_id[:140]!r} is not legal: 1 to 128 of letters, digits, and . _ ~ -", field="id"
        )
    if server_made(transaction_id) is not None:
        raise InvalidRequestError(
            f"id {transaction_id!r} has the shape of an id that the server makes: choose another", field="id"
        )


def _judge_message(number: int, message: Message, facts: TopicFacts | None) -> None:
    field = f"messages[{number}]"
    if facts is None:
        raise UnknownTopicError(
            f"topic {message.topic!r} does not exist: create it in Kafka first", field=f"{field}.topic"
        )
    if facts.max_message_bytes < MIN_TOPIC_MESSAGE_BYTES:
        raise InvalidRequestError(
            f"topic {message.topic!r} has max.message.bytes {facts.max_message_bytes}: halfway needs at least "
            f"{MIN_TOPIC_MESSAGE_BYTES}",
            field=f"{field}.topic",
        )
    if facts.compacted and message.key is None:
        raise InvalidRequestError(
            f"topic {message.topic!r} is compacted, which needs a key, and key is null", field=f"{field}.key"
        )
    if message.partition is not None and message.partition >= facts.partitions:
        raise InvalidRequestError(
            f"topic {message.topic!r} has {facts.partitions} partitions, and partition is {message.partition}",
            field=f"{field}.partition",
        )
    size = message.size + RECORD_OVERHEAD_BYTES + HEADER_OVERHEAD_BYTES * len(message.headers)
    if size > facts.max_message_bytes:
        raise MessageTooLargeError(
            f"{field} is {size} bytes with its headers, more than the max.message.bytes {facts.max_message_bytes} of "
            f"topic {message.topic!r}",
            errors=[{"field": field, "detail": f"{size} bytes"}],
        )


async def _wait(reserved: asyncio.Future[None], *, deadline: float) -> None:
    try:
        async with asyncio.timeout_at(deadline):
            await asyncio.shield(reserved)
    except TimeoutError:
        raise OutcomeUnknownError("another prepare with this id is not decided yet: send it again") from None
