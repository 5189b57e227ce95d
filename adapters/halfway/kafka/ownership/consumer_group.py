"""Membership of the consumer group `<prefix>members`: liveness and balance, never safety.

See docs/protocol.md#ownership.
"""

from __future__ import annotations

import asyncio
import queue
import threading
import time
from collections.abc import Callable, Iterable
from functools import partial
from typing import Final, Literal, Protocol, TypeVarTuple, Unpack

import structlog
from confluent_kafka import OFFSET_END, KafkaError, KafkaException, TopicPartition

from halfway.kafka.clients.config import KafkaConfig
from halfway.kafka.clients.denials import denial
from halfway.kafka.clients.librdkafka_events import SessionWatch
from halfway.kafka.clients.seam import Consumer
from halfway.kafka.clients.threads import OwnedThread

log = structlog.get_logger()

_POLL_S: Final = 0.1
_HEARTBEAT_S: Final = 0.5
"""The others learn of a move with their next heartbeat, and a session ends up to one heartbeat early."""
_LEAST_HEARTBEATS: Final = 6
"""Heartbeats in a session, however short it is."""
_TRIES: Final = 3
"""Requests without an answer that fit into a session."""
_FETCH_MS: Final = 100
"""Nothing is fetched; but librdkafka demands a second more than this for the answer on a socket."""
_LEAST_SOCKET_MS: Final = _FETCH_MS + 1_000
_LOG_INTERVAL_S: Final = 30.0
_PAUSE_S: Final = 1.0
_NEW_POLLS: Final = 2
_POLL_CHECK_S: Final = 0.05

Command = Literal["join", "leave"]
Ts = TypeVarTuple("Ts")


class GroupEvents(Protocol):
    """Callbacks of a member, called on its own thread."""

    def assigned(self, shards: set[int]) -> None:
        """Add these shards, perhaps none; the instance is a member now."""

    def revoked(self, shards: set[int]) -> None:
        """Release these shards; the group waits until this returns."""

    def dropped(self, shards: set[int], reason: str | None = None) -> None:
        """Drop these shards; other instances may own them already. `reason` is the client's, if it gives one."""

    def left(self) -> None:
        """Record that the instance is no longer a member."""

    def refused(self, reason: str) -> None:
        """Record why the group does not take this instance, with the remedy; it tries again."""


class GroupMember(OwnedThread):
    """A thread that polls a consumer, which never fetches; it joins and leaves the group on request."""

    def __init__(self, config: KafkaConfig, events: GroupEvents) -> None:
        """Keep the configuration; nothing connects before `start`."""
        super().__init__(self._run, "halfway-members")
        self._config = config
        self._events = events
        self._commands: queue.SimpleQueue[Command] = queue.SimpleQueue()
        self._closed = threading.Event()
        self._should_join = False
        self._last_logged: dict[int, float] = {}
        self._polls = 0
        self._session = SessionWatch()

    @property
    def heartbeat_s(self) -> float:
        """The heartbeat interval in seconds."""
        return min(_HEARTBEAT_S, self._config.session_timeout_s / _LEAST_HEARTBEATS)

    def join_group(self) -> None:
        """Subscribe; assignments follow."""
        self._commands.put("join")

    def leave_group(self) -> None:
        """Unsubscribe, so that the other members get the shards at once."""
        self._commands.put("leave")

    async def pause(self, seconds: float) -> None:
        """Wait for a time, then for a new poll: the group may have changed the assignment in the meantime."""
        polls = self._polls
        await asyncio.sleep(seconds)
        while self._polls < polls + _NEW_POLLS:  # noqa: ASYNC110 - a thread counts it that must not wait
            await asyncio.sleep(_POLL_CHECK_S)

    def close(self) -> None:
        """Leave and end the thread; `join` waits for it."""
        self._closed.set()

    def _run(self) -> None:
        while not self._closed.is_set():
            try:
                self._poll_group()
            except Exception:
                log.exception("membership_thread_failed")
                self._closed.wait(_PAUSE_S)

    def _poll_group(self) -> None:
        consumer = self._config.make_consumer(
            **{
                "group.id": self._config.members_group,
                "group.protocol": "classic",
                "partition.assignment.strategy": "cooperative-sticky",
                "session.timeout.ms": round(self._config.session_timeout_s * 1000),
                "heartbeat.interval.ms": round(self.heartbeat_s * 1000),
                # If a heartbeat gets no answer, the next ones go over a new connection while the session lasts.
                "socket.timeout.ms": max(_LEAST_SOCKET_MS, round(self._config.session_timeout_s * 1000 / _TRIES)),
                "fetch.wait.max.ms": _FETCH_MS,
                "logger": self._session,
            }
        )
        subscribed = False
        try:
            while not self._closed.is_set():
                should_join = self._apply_commands()
                if should_join and not subscribed:
                    consumer.subscribe(
                        [self._config.half_topic],
                        on_assign=self._on_assign,
                        on_revoke=self._on_revoke,
                        on_lost=self._on_lost,
                    )
                elif subscribed and not should_join:
                    consumer.unsubscribe()
                    self._notify(self._events.left)
                subscribed = should_join
                message = consumer.poll(_POLL_S)
                self._polls += 1
                error = None if message is None else message.error()
                if error is not None:
                    self._take_error(error)
        finally:
            self._notify(self._events.left)
            consumer.close()

    def _apply_commands(self) -> bool:
        while not self._commands.empty():
            self._should_join = self._commands.get() == "join"
        return self._should_join

    def _take_error(self, error: KafkaError) -> None:
        reason = self._refusal(error)
        if reason is not None:
            self._notify(self._events.refused, reason)
        now = time.monotonic()
        if now - self._last_logged.get(error.code(), -_LOG_INTERVAL_S) >= _LOG_INTERVAL_S:
            self._last_logged[error.code()] = now
            log.warning("group_error", code=error.name(), detail=error.str(), refused=reason)

    def _refusal(self, error: KafkaError) -> str | None:
        """Return what the brokers refuse and the remedy; None for an error that passes."""
        config = self._config
        if error.code() == KafkaError.INVALID_SESSION_TIMEOUT:
            return (
                f"Kafka refuses HALFWAY_SESSION_TIMEOUT_S={config.session_timeout_s:g} ({error.name()}): the brokers' "
                "group.min.session.timeout.ms and group.max.session.timeout.ms allow at least 6 s by default"
            )
        if error.code() == KafkaError.GROUP_AUTHORIZATION_FAILED:
            return denial(error.code(), config, group=config.members_group, operations=("Read",))
        return denial(error.code(), config, topics=(config.half_topic,), operations=("Describe",))

    def _on_assign(self, consumer: Consumer, partitions: list[TopicPartition]) -> None:
        # From the end, and paused: this consumer is only for membership; another one tails.
        partitions = [TopicPartition(entry.topic, entry.partition, OFFSET_END) for entry in partitions]
        consumer.incremental_assign(partitions)
        if partitions:
            consumer.pause(partitions)
        self._notify(self._events.assigned, self._shards(partitions))

    def _on_revoke(self, consumer: Consumer, partitions: list[TopicPartition]) -> None:
        self._return_partitions(consumer, partitions, self._events.revoked)

    def _on_lost(self, consumer: Consumer, partitions: list[TopicPartition]) -> None:
        lost = partial(self._events.dropped, reason=self._session.take())
        self._return_partitions(consumer, partitions, lost)

    def _return_partitions(
        self, consumer: Consumer, partitions: list[TopicPartition], event: Callable[[set[int]], None]
    ) -> None:
        self._notify(event, self._shards(partitions))
        try:
            consumer.incremental_unassign(partitions)
        except KafkaException as error:
            log.info("unassign_failed", error=str(error))

    def _shards(self, partitions: Iterable[TopicPartition]) -> set[int]:
        """Return the assigned shards; a partition that an operator has added to half is not a shard."""
        return {entry.partition for entry in partitions if entry.partition < self._config.shards}

    def _notify(self, event: Callable[[Unpack[Ts]], None], *args: *Ts) -> None:
        try:
            event(*args)
        except Exception:
            log.exception("membership_event_failed")
