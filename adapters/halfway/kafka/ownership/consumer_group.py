"""Membership of the consumer group `<prefix>members`: liveness and balance, never safety.

See docs/protocol.md#ownership-and-fencing.
"""

from __future__ import annotations

import asyncio
import queue
import threading
import time
from collections.abc import Callable, Iterable
from typing import Final, Literal, Protocol, TypeVarTuple, Unpack

import structlog
from confluent_kafka import OFFSET_END, Consumer, KafkaError, KafkaException, TopicPartition

from halfway.kafka.clients.config import KafkaConfig
from halfway.kafka.clients.owned_thread import OwnedThread

log = structlog.get_logger()

_POLL_S: Final = 0.1
_HEARTBEATS: Final = 6
_SAY_AGAIN_S: Final = 30.0
_PAUSE_S: Final = 1.0
_FRESH_POLLS: Final = 2
_LOOK_AGAIN_S: Final = 0.05

Command = Literal["join", "leave"]
Ts = TypeVarTuple("Ts")


class GroupEvents(Protocol):
    """Callbacks of a member, on its own thread."""

    def assigned(self, shards: set[int]) -> None:
        """Take these shards in addition, perhaps none: it is a member."""

    def revoked(self, shards: set[int]) -> None:
        """Release these shards; the group waits until this returns."""

    def dropped(self, shards: set[int]) -> None:
        """Drop these shards: other instances may own them already."""

    def left(self) -> None:
        """Be no member any more."""


class GroupMember(OwnedThread):
    """A thread that polls a consumer which never fetches. It joins and leaves on request."""

    def __init__(self, config: KafkaConfig, events: GroupEvents) -> None:
        """Keep the configuration; nothing connects before `start`."""
        super().__init__(self._run, "halfway-members")
        self._config = config
        self._events = events
        self._commands: queue.SimpleQueue[Command] = queue.SimpleQueue()
        self._closed = threading.Event()
        self._wanted = False
        self._said: dict[int, float] = {}
        self._polls = 0

    @property
    def heartbeat_s(self) -> float:
        """Seconds between two heartbeats."""
        return self._config.session_timeout_s / _HEARTBEATS

    def join_group(self) -> None:
        """Subscribe; assignments follow."""
        self._commands.put("join")

    def leave_group(self) -> None:
        """Unsubscribe: the other members get the shards at once."""
        self._commands.put("leave")

    async def pause(self, seconds: float) -> None:
        """Wait for a time and then for a fresh poll: the group may have changed the assignment meanwhile."""
        polls = self._polls
        await asyncio.sleep(seconds)
        while self._polls < polls + _FRESH_POLLS:  # noqa: ASYNC110 - it is counted on a thread that must not wait
            await asyncio.sleep(_LOOK_AGAIN_S)

    def close(self) -> None:
        """Leave and end the thread; `join` waits for it."""
        self._closed.set()

    def _run(self) -> None:
        while not self._closed.is_set():
            try:
                self._be_member()
            except Exception:
                log.exception("membership_thread_failed")
                self._closed.wait(_PAUSE_S)

    def _be_member(self) -> None:
        consumer = Consumer(
            self._config.consumer(
                **{
                    "group.id": self._config.members_group,
                    "group.protocol": "classic",
                    "partition.assignment.strategy": "cooperative-sticky",
                    "session.timeout.ms": round(self._config.session_timeout_s * 1000),
                    "heartbeat.interval.ms": round(self.heartbeat_s * 1000),
                }
            )
        )
        subscribed = False
        try:
            while not self._closed.is_set():
                wanted = self._is_wanted()
                if wanted and not subscribed:
                    consumer.subscribe(
                        [self._config.half_topic],
                        on_assign=self._on_assign,
                        on_revoke=self._on_revoke,
                        on_lost=self._on_lost,
                    )
                elif subscribed and not wanted:
                    consumer.unsubscribe()
                    self._tell(self._events.left)
                subscribed = wanted
                message = consumer.poll(_POLL_S)
                self._polls += 1
                error = None if message is None else message.error()
                if error is not None:
                    self._say(error)
        finally:
            self._tell(self._events.left)
            consumer.close()

    def _is_wanted(self) -> bool:
        while not self._commands.empty():
            self._wanted = self._commands.get() == "join"
        return self._wanted

    def _say(self, error: KafkaError) -> None:
        now = time.monotonic()
        if now - self._said.get(error.code(), -_SAY_AGAIN_S) >= _SAY_AGAIN_S:
            self._said[error.code()] = now
            log.warning("group_error", code=error.name(), detail=error.str())

    def _on_assign(self, consumer: Consumer, partitions: list[TopicPartition]) -> None:
        # From the end, and paused: it is for membership only, a separate consumer tails.
        partitions = [TopicPartition(entry.topic, entry.partition, OFFSET_END) for entry in partitions]
        consumer.incremental_assign(partitions)
        if partitions:
            consumer.pause(partitions)
        self._tell(self._events.assigned, self._shards(partitions))

    def _on_revoke(self, consumer: Consumer, partitions: list[TopicPartition]) -> None:
        self._give_back(consumer, partitions, self._events.revoked)

    def _on_lost(self, consumer: Consumer, partitions: list[TopicPartition]) -> None:
        self._give_back(consumer, partitions, self._events.dropped)

    def _give_back(
        self, consumer: Consumer, partitions: list[TopicPartition], event: Callable[[set[int]], None]
    ) -> None:
        self._tell(event, self._shards(partitions))
        try:
            consumer.incremental_unassign(partitions)
        except KafkaException as error:
            log.info("unassign_failed", error=str(error))

    def _shards(self, partitions: Iterable[TopicPartition]) -> set[int]:
        """Return the assigned shards; partitions that an operator has added to half are not shards."""
        return {entry.partition for entry in partitions if entry.partition < self._config.shards}

    def _tell(self, event: Callable[[Unpack[Ts]], None], *args: *Ts) -> None:
        try:
            event(*args)
        except Exception:
            log.exception("membership_event_failed")
