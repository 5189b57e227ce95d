"""A consumer as librdkafka's: fetching, ends of partitions, committed offsets, and membership of a group."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import Any, Final

from confluent_kafka import (
    OFFSET_BEGINNING,
    OFFSET_END,
    OFFSET_INVALID,
    OFFSET_STORED,
    KafkaError,
    KafkaException,
    Message,
    TopicPartition,
)

from halfway.simulated.client import Client, Host, failure
from halfway.simulated.cluster import SESSION_TIMEOUTS_MS
from halfway.simulated.coordinators import Group, Member, Step
from halfway.simulated.log import APPEND_TIME, CREATE_TIME, Partition, Place, Record, RefusedError

OnRebalance = Callable[[Any, list[TopicPartition]], None]
_FETCHED: Final = 500
"""Records that are taken of one partition before the next one has its turn."""


@dataclass(slots=True)
class _Fetch:
    """How far an assigned partition is fetched; a negative position is a logical one."""

    position: int
    is_paused: bool = False
    ended_at: int | None = None
    """The end that was reported last."""
    is_denied: bool = False
    """It may not be read, which was reported once. It goes on when it may."""
    is_stuck: bool = False
    """Its offset is not there, and the consumer is not to choose another one."""


class SimulatedConsumer(Client):
    """The methods of `confluent_kafka.Consumer` that halfway and its tests use, with the same errors."""

    def __init__(self, host: Host, properties: Mapping[str, Any]) -> None:
        """Connect; nothing is fetched before it is assigned."""
        super().__init__(host, properties)
        self._group_id = str(properties.get("group.id", ""))
        self._committed_only = properties.get("isolation.level", "read_committed") == "read_committed"
        self._reset = str(properties.get("auto.offset.reset", "latest"))
        self._reports_ends = str(properties.get("enable.partition.eof", False)).lower() == "true"
        self._fetches: dict[Place, _Fetch] = {}
        self._ready: deque[Message] = deque()
        self._calls: deque[Callable[[], None]] = deque()
        self._topics: tuple[str, ...] = ()
        self._callbacks: dict[str, OnRebalance | None] = {}
        self._has_assigned = False
        self._refusal: int | None = None

    # --- partitions

    def assign(self, partitions: Sequence[TopicPartition]) -> None:
        with self._schedule:
            self._drop(list(self._fetches))
            self._take(partitions)

    def incremental_assign(self, partitions: Sequence[TopicPartition]) -> None:
        with self._schedule:
            self._take(partitions)

    def incremental_unassign(self, partitions: Sequence[TopicPartition]) -> None:
        with self._schedule:
            self._drop([(one.topic, one.partition) for one in partitions])

    def pause(self, partitions: Sequence[TopicPartition]) -> None:
        with self._schedule:
            for one in partitions:
                self._fetches[one.topic, one.partition].is_paused = True

    def _take(self, partitions: Sequence[TopicPartition]) -> None:
        self._has_assigned = True
        for one in partitions:
            place = (one.topic, one.partition)
            self._fetches[place] = _Fetch(one.offset)
            self._cluster.watch(place, self._condition)
        self._condition.notify_all()

    def _drop(self, places: Sequence[Place]) -> None:
        self._has_assigned = True
        for place in places:
            self._fetches.pop(place, None)
            self._cluster.unwatch(place, self._condition)
        self._ready = deque(one for one in self._ready if (one.topic(), one.partition()) in self._fetches)

    # --- fetching, with the lock

    def _limit(self, partition: Partition) -> int:
        return partition.stable if self._committed_only else partition.end

    def _fetch(self) -> None:
        """Take what each partition has now."""
        for place, fetch in list(self._fetches.items()):
            if fetch.is_paused or fetch.is_stuck:
                continue
            try:
                partition = self._cluster.led(place, "Read")
            except RefusedError as refused:
                if refused.code == KafkaError.TOPIC_AUTHORIZATION_FAILED and not fetch.is_denied:
                    self._ready.append(_event(place, refused.code, fetch.position))
                    fetch.is_denied = True
                continue
            fetch.is_denied = False
            if self._has_position(place, fetch, partition):
                self._fetch_from(place, fetch, partition)

    def _has_position(self, place: Place, fetch: _Fetch, partition: Partition) -> bool:
        if fetch.position in (OFFSET_STORED, OFFSET_INVALID):
            committed = self._cluster.groups[self._group_id].offsets.get(place)
            fetch.position = committed[0] if committed is not None else self._reset_to()
        if fetch.position >= 0 and not partition.start <= fetch.position <= partition.end:
            fetch.position = self._reset_to()
        if fetch.position == OFFSET_INVALID:
            self._ready.append(_event(place, KafkaError._AUTO_OFFSET_RESET, fetch.position))
            fetch.is_stuck = True
            return False
        if fetch.position < 0:
            fetch.position = partition.start if fetch.position == OFFSET_BEGINNING else self._limit(partition)
        return True

    def _reset_to(self) -> int:
        if self._reset in ("error", "none"):
            return OFFSET_INVALID
        return OFFSET_BEGINNING if self._reset in ("earliest", "smallest", "beginning") else OFFSET_END

    def _fetch_from(self, place: Place, fetch: _Fetch, partition: Partition) -> None:
        limit, taken = self._limit(partition), 0
        for record in islice(partition.from_offset(fetch.position), _FETCHED):
            if record.offset >= limit:
                break
            fetch.position = record.offset + 1
            if record.control is None and not (self._committed_only and record.aborted):
                self._ready.append(self._message(place, record))
                taken += 1
        else:
            if fetch.position < limit and next(partition.from_offset(fetch.position), None) is not None:
                return  # more of it has its turn later
        fetch.position = max(fetch.position, limit)  # what compaction has left out is passed
        if self._reports_ends and fetch.ended_at != fetch.position:
            fetch.ended_at = fetch.position
            self._ready.append(_event(place, KafkaError._PARTITION_EOF, fetch.position))

    def _message(self, place: Place, record: Record) -> Message:
        appended = self._cluster.topics[place[0]].settings["message.timestamp.type"] == "LogAppendTime"
        return Message(
            topic=place[0],
            partition=place[1],
            offset=record.offset,
            key=record.key,
            value=record.value,
            headers=list(record.headers) or None,
            timestamp=(APPEND_TIME if appended else CREATE_TIME, record.timestamp),
        )

    # --- polling

    def poll(self, timeout: float = -1) -> Message | None:
        """Return the next record or error, and serve what the group asks for."""
        found = self.consume(1, timeout)
        return found[0] if found else None

    def consume(self, num_messages: int = 1, timeout: float = -1) -> list[Message]:
        """Return up to so many records and errors; wait until there are as many, or for `timeout` seconds."""
        until = self._schedule.clock.monotonic() + timeout
        taken: list[Message] = []
        while True:
            with self._schedule:
                left = max(0.0, until - self._schedule.clock.monotonic()) if timeout >= 0 else -1
                work = self._schedule.wait(self._condition, left, self._next_work)
                while self._ready and len(taken) < num_messages:
                    taken.append(self._ready.popleft())
            if len(taken) >= num_messages or work is None:
                return taken
            if callable(work):
                work()

    def _next_work(self) -> Callable[[], None] | bool | None:
        if self._ready:
            return True
        if self._calls:
            return self._calls.popleft()
        if self.member is not None and (self.member.expelled or not self._host.is_cut):
            step = self._cluster.groups[self._group_id].step(self.member)
            if step is not None:
                return partial(self._rebalance, self.member, step)
        if self._refusal is not None:
            code, self._refusal = self._refusal, None
            self._ready.append(Message(error=KafkaError(code)))
            return True
        if not self._host.is_cut:
            self._fetch()
        return True if self._ready else None

    # --- membership

    def subscribe(
        self,
        topics: Sequence[str],
        on_assign: OnRebalance | None = None,
        on_revoke: OnRebalance | None = None,
        on_lost: OnRebalance | None = None,
    ) -> None:
        with self._schedule:
            self._topics = tuple(topics)
            self._callbacks = {"assign": on_assign, "revoke": on_revoke, "lost": on_lost or on_revoke}
            self._join()

    def _join(self) -> None:
        if not SESSION_TIMEOUTS_MS[0] <= self.session_s * 1000 <= SESSION_TIMEOUTS_MS[1]:
            self._refusal = KafkaError.INVALID_SESSION_TIMEOUT
            return
        try:
            group = self._cluster.group(self._group_id)
        except RefusedError as refused:
            self._refusal = refused.code
            return
        name = f"{self._properties.get('client.id', 'rdkafka')}-{self._cluster.random.getrandbits(64):016x}"
        self.member = Member(
            id=name,
            client=str(self._properties.get("client.id", "rdkafka")),
            topics=self._topics,
            condition=self._condition,
        )
        group.join(self.member)

    def end_session(self) -> None:
        if self.member is not None and not self.member.expelled:
            self._cluster.groups[self._group_id].expel(self.member)

    def unsubscribe(self) -> None:
        """Leave the group; the next poll gives the partitions back."""
        with self._schedule:
            if self.member is not None:
                self.member.leaving = True
                self._condition.notify_all()

    def _rebalance(self, member: Member, step: Step) -> None:
        """Call the subscriber's callback, then tell the coordinator."""
        callback = self._callbacks.get(step.kind)
        partitions = [TopicPartition(*place) for place in sorted(step.places)]
        self._has_assigned = False
        try:
            if callback is not None and (step.kind == "assign" or partitions):
                callback(self, partitions)
            if not self._has_assigned:
                (self.incremental_assign if step.kind == "assign" else self.incremental_unassign)(partitions)
        finally:
            if step.kind != "assign":
                self._given_up(member, step)

    def _given_up(self, member: Member, step: Step) -> None:
        with self._schedule:
            group: Group = self._cluster.groups[self._group_id]
            if member.leaving or member.expelled:
                expelled = member.expelled and not member.leaving
                self.member = None
                group.leave(member)
                if expelled:
                    self._join()
            else:
                group.released(member, step.places)

    def close(self) -> None:
        """Give the partitions back, and leave the group, which does not hear of it if the host is cut off."""
        self.unsubscribe()
        if self.member is not None:
            self._rebalance(self.member, Step("revoke", frozenset(self.member.owned)))
        with self._schedule:
            self._drop(list(self._fetches))

    # --- offsets

    def commit(self, *, offsets: Sequence[TopicPartition], asynchronous: bool) -> Any:
        """Commit offsets; an asynchronous commit is answered in a later poll."""
        with self._schedule:
            if self._host.is_cut:
                return self._answer_late(offsets)
            error: KafkaError | None = None
            try:
                group = self._cluster.group(self._group_id)
                if group.members and self.member not in group.members:
                    raise RefusedError(KafkaError.UNKNOWN_MEMBER_ID)  # noqa: TRY301
                group.offsets |= {(one.topic, one.partition): (one.offset, one.metadata or "") for one in offsets}
            except RefusedError as refused:
                error = KafkaError(refused.code)
            if not asynchronous:
                if error is not None:
                    raise KafkaException(error)
                return list(offsets)
            self._answer(error, offsets)
            return None

    def _answer(self, error: KafkaError | None, offsets: Sequence[TopicPartition]) -> None:
        on_commit = self._properties.get("on_commit")
        if on_commit is not None:
            self._calls.append(partial(on_commit, error, list(offsets)))
        self._condition.notify_all()

    def _answer_late(self, offsets: Sequence[TopicPartition]) -> None:
        """Commit nothing, and say so once the request has timed out."""
        error = KafkaError(KafkaError._TIMED_OUT)
        timeout_s = self._number("socket.timeout.ms", 60_000) / 1000
        self._schedule.after(timeout_s, partial(self._answer, error, list(offsets)))

    def committed(self, partitions: Sequence[TopicPartition], timeout: float = -1) -> list[TopicPartition]:
        """Return the committed offsets with their metadata, OFFSET_INVALID for a partition without one."""
        with self._schedule:
            self._reach(timeout)
            try:
                offsets = self._cluster.group(self._group_id).offsets
            except RefusedError as refused:
                raise failure(refused.code) from refused
            places = [(one.topic, one.partition) for one in partitions]
            return [
                TopicPartition(*place, *offsets[place]) if place in offsets else TopicPartition(*place, OFFSET_INVALID)
                for place in places
            ]

    def _led(self, place: Place, what: str) -> Partition:
        try:
            return self._cluster.led(place, "Describe")
        except RefusedError as refused:
            unknown = refused.code == KafkaError.UNKNOWN_TOPIC_OR_PART
            code = KafkaError._UNKNOWN_PARTITION if unknown else refused.code
            raise failure(code, f"Failed to get {what}: {KafkaError(code).str()}") from refused

    def offsets_for_times(self, partitions: Sequence[TopicPartition], timeout: float = -1) -> list[TopicPartition]:
        """Return the first offset since a time (ms), OFFSET_END if there is none; the times are in `offset`."""
        with self._schedule:
            self._reach(timeout)
            return [TopicPartition(one.topic, one.partition, self._offset_at(one)) for one in partitions]

    def _offset_at(self, asked: TopicPartition) -> int:
        partition = self._led((asked.topic, asked.partition), "offsets")
        if asked.offset == OFFSET_BEGINNING:
            return partition.start
        if asked.offset == OFFSET_END:
            return self._limit(partition)
        found = partition.since(asked.offset, self._limit(partition))
        return OFFSET_END if found is None else found.offset

    def get_watermark_offsets(self, partition: TopicPartition, timeout: float = -1) -> tuple[int, int]:
        """Return the first offset and the end, which is the LSO for a reader of committed records."""
        with self._schedule:
            self._reach(timeout)
            found = self._led((partition.topic, partition.partition), "watermark offsets")
            return found.start, self._limit(found)


def _event(place: Place, code: int, offset: int) -> Message:
    return Message(topic=place[0], partition=place[1], offset=offset, error=KafkaError(code))
