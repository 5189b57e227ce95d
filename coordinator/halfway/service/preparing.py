"""Prepare: validate, pick the shard, store the half message (DESIGN section 3)."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING
from uuid import UUID

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
from halfway.service.timing import check_at, look_at

if TYPE_CHECKING:
    from halfway.service.groups import Groups
    from halfway.service.ports import Clock, HalfLog, Observer, TopicFacts, Topics
    from halfway.service.requests import ServiceLimits
    from halfway.service.shards import Shard, ShardTable

MIN_TOPIC_MESSAGE_BYTES = 65_536
"""The lane's batches are this large: a topic that takes less would refuse them."""
RECORD_OVERHEAD_BYTES = 512
"""What halfway's headers and Kafka's framing add to a message, at most."""
HEADER_OVERHEAD_BYTES = 10
"""What Kafka's framing adds to each header, at most."""
_AMBIGUOUS_KEPT = 100_000


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
        self._reserved: dict[str, asyncio.Future[None]] = {}
        self._appending: dict[str, asyncio.Future[Entry | None]] = {}
        self._ambiguous: dict[str, None] = {}

    async def prepare(self, request: Prepare, *, deadline: float, credential: str | None) -> Prepared:
        """Store a half message; what is answered is durable.

        Raises:
            OutcomeUnknownError: it is not known whether it was stored: roll back, or send the same id again.
            IdReusedError: the id has other content.
            UnknownGroupError, ForbiddenError, PreparesRejectedError, TopicNotAllowedError, UnknownTopicError,
            InvalidRequestError, MessageTooLargeError, OverloadedError, NotServedError: nothing was stored.

        """
        loop = asyncio.get_running_loop()
        began = loop.time()
        result: str | None = "prepared"
        try:
            prepared = await self._prepare(request, deadline=deadline, credential=credential)
            result = "prepared" if prepared.created else "repeated"
        except NotServedError:
            result = None  # whoever owns the shard counts it
            raise
        except HalfwayError as error:
            result = error.code
            raise
        else:
            return prepared
        finally:
            if result is not None:
                known = self._groups.find(request.group) is not None
                self._observer.prepared(request.group if known else "", result, loop.time() - began)

    async def _prepare(self, request: Prepare, *, deadline: float, credential: str | None) -> Prepared:
        if self._limits.reject_prepares:
            raise PreparesRejectedError
        if self._groups.find(request.group) is None:
            await self._groups.refresh(deadline=deadline)  # another instance may have registered it a moment ago
        group = self._groups.require(request.group, credential=credential, action="prepare")
        content = fingerprint(request.group, request.messages, request.check_after_ms)
        if request.id is None:
            await self._judge(group, request, deadline=deadline)
            shard = self._shards.choose()
            return await self._store(shard, self._new_id(shard.number), request, content, deadline=deadline)
        self._judge_id(request.id)
        while (reserved := self._reserved.get(request.id)) is not None:
            await _wait(reserved, deadline=deadline)
        shard = self._shards.get(self._shards.number_of(request.id))
        known = shard.state.find(request.id)
        if known is not None:
            return self._repeated(known, request, content)
        with self._reservation(request.id):
            await self._judge(group, request, deadline=deadline)
            if request.id in self._ambiguous:
                # An earlier prepare of this id may stand: only the log tells, as far as it goes now.
                end = await self._half_log.half_end(shard.number, deadline=deadline)
                await shard.tailed(end, deadline=deadline)
                self._ambiguous.pop(request.id, None)
                known = shard.state.find(request.id)
                if known is not None:
                    return self._repeated(known, request, content)
            return await self._store(shard, request.id, request, content, deadline=deadline)

    @contextmanager
    def _reservation(self, transaction_id: str) -> Iterator[None]:
        """Reserve an id: another prepare of it waits, also when this one's caller goes away while it is produced."""
        reservation = asyncio.get_running_loop().create_future()
        self._reserved[transaction_id] = reservation

        def release(_: object = None) -> None:
            if self._reserved.get(transaction_id) is reservation:
                del self._reserved[transaction_id]
                reservation.set_result(None)

        try:
            yield
        finally:
            append = self._appending.get(transaction_id)
            if append is None:
                release()
            else:
                append.add_done_callback(release)

    def _new_id(self, shard: int) -> str:
        now = self._clock.now_ms()
        made = uuid7(timestamp=now // 1000, nanos=now % 1000 * 1_000_000)
        return server_id(shard, UUID(int=made.int))

    @staticmethod
    def _judge_id(transaction_id: str) -> None:
        if CLIENT_ID.match(transaction_id) is None:
            raise InvalidRequestError(
                f"id {transaction_id[:140]!r} is not legal: 1 to 128 of letters, digits, and . _ ~ -", field="id"
            )
        if server_made(transaction_id) is not None:
            raise InvalidRequestError(
                f"id {transaction_id!r} has the shape of an id that the server makes: choose another", field="id"
            )

    async def _judge(self, group: Group, request: Prepare, *, deadline: float) -> None:
        """Refuse what would fail later (DESIGN section 3)."""
        limits = self._limits
        if not 0 < len(request.messages) <= limits.max_messages:
            raise InvalidRequestError(
                f"messages has {len(request.messages)} items: from 1 to {limits.max_messages}", field="messages"
            )
        size = sum(message.size for message in request.messages)
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
        allowed = frozenset(group.topics)
        for number, message in enumerate(request.messages):
            if message.topic not in allowed:
                await self._groups.refresh(deadline=deadline)  # it may have been changed a moment ago
                allowed = frozenset((self._groups.find(group.name) or group).topics)
            if message.topic not in allowed:
                raise TopicNotAllowedError(
                    f"topic {message.topic!r} is not among the topics of group {group.name!r}: "
                    f"PUT /v1/groups/{group.name} with it first",
                    field=f"messages[{number}].topic",
                )
        names = list(dict.fromkeys(message.topic for message in request.messages))
        facts = await self._topics.describe(names, deadline=deadline)
        for number, message in enumerate(request.messages):
            _judge_message(number, message, facts.get(message.topic))
        if self._shards.pending >= limits.max_pending:
            raise OverloadedError(f"{limits.max_pending} transactions are pending here already: end some first")

    async def _store(
        self, shard: Shard, transaction_id: str, request: Prepare, content: bytes, *, deadline: float
    ) -> Prepared:
        now = self._clock.now_ms()
        half = Half(
            id=transaction_id,
            group=request.group,
            messages=request.messages,
            prepared_at=now,
            since=now,
            fingerprint=content,
            check_after_ms=request.check_after_ms,
        )
        # The record cannot be taken back once it is produced: whoever asked for it may go away, its result may not.
        append = asyncio.ensure_future(self._append(shard.number, half, deadline))
        self._appending[transaction_id] = append
        append.add_done_callback(lambda _: self._appending.pop(transaction_id, None))
        try:
            entry = await asyncio.shield(append)
        except asyncio.CancelledError:
            append.add_done_callback(_take_exception)
            raise
        return self._answer(entry, half, created=True)

    async def _append(self, number: int, half: Half, deadline: float) -> Entry | None:
        try:
            with self._shards.preparing(half.group):
                offset = await self._half_log.append(number, half, deadline=deadline)
        except OutcomeUnknownError as error:
            self._note_ambiguous(half.id)
            error.fields["id"] = half.id
            raise
        shard = self._shards.find(number)
        if shard is None:
            return None
        shard.state.apply_half(offset, half.id, half)
        entry = shard.state.find(half.id)
        if isinstance(entry, Pending):
            if entry.fingerprint == half.fingerprint:
                self._shards.payloads.put(half)
            shard.agenda.put(half.id, look_at(self._groups, entry))
        return entry

    def _note_ambiguous(self, transaction_id: str) -> None:
        self._ambiguous[transaction_id] = None
        if len(self._ambiguous) > _AMBIGUOUS_KEPT:
            del self._ambiguous[next(iter(self._ambiguous))]

    def _answer(self, entry: Entry | None, half: Half, *, created: bool) -> Prepared:
        if entry is not None and entry.fingerprint != half.fingerprint:
            raise IdReusedError(half.id)
        due = check_at(self._groups, Pending.of(0, half)) if entry is None else self._next_check(entry)
        return Prepared(
            id=half.id,
            state=State.PREPARED,
            group=half.group,
            prepared_at=half.prepared_at,
            next_check_at=due,
            created=created,
        )

    def _repeated(self, known: Entry, request: Prepare, content: bytes) -> Prepared:
        if known.group != request.group or known.fingerprint != content:
            raise IdReusedError(known.id)
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


def _take_exception(task: asyncio.Future[Entry | None]) -> None:
    """Read the result of a prepare whose caller went away: it is pending then, and check-back resolves it."""
    if not task.cancelled():
        task.exception()
