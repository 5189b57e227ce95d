"""Membership of the consumer group `<prefix>members`: liveness and balance, never safety.

Also when an instance should leave its shards to others, and when it may take some again. See
docs/protocol.md#ownership.
"""

from __future__ import annotations

import asyncio
import queue
import secrets
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial
from typing import Any, Final, Literal, Protocol, TypeVarTuple, Unpack

import structlog
from confluent_kafka import OFFSET_END, KafkaError, KafkaException, TopicPartition

from halfway.kafka.clients.config import KafkaConfig, denial
from halfway.kafka.clients.librdkafka_events import SessionWatch
from halfway.kafka.clients.seam import Consumer
from halfway.kafka.clients.threads import OwnedThread
from halfway.kafka.clients.transactional_producer import ProducerFailedError, initialised
from halfway.kafka.records.codec import BARRIER_KEY, KIND_BARRIER, encode_barrier, record_headers
from halfway.protocol.records import Barrier

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


USELESS_S: Final = 10.0
"""How long an instance that serves none of its shards tries to acquire them."""
TRY_AGAIN_S: Final = 5.0
_LONGEST_S: Final = 300.0
_REQUEST_S: Final = 5.0
_TRIAL_S: Final = 15.0
"""The time-out of a trial's transaction: until then it would hold up the owners' reading if this process died."""
_ID_BYTES: Final = 8


class Uselessness:
    """Whether this instance has served nothing for so long, although shards are assigned to it, that others should."""

    def __init__(self) -> None:
        """Start as an instance that is of use."""
        self._since: float | None = None
        self._times = 0

    def look(self, *, useless: bool) -> bool:
        """Take the state of this moment; return whether it has lasted for `USELESS_S` now. Then it starts anew."""
        if not useless:
            self._since = None
            return False
        now = time.monotonic()
        self._since = now if self._since is None else self._since
        if now - self._since < USELESS_S:
            return False
        self._since = None
        return True

    def served(self) -> None:
        self._times = 0

    def take_pause(self) -> float:
        """Return how long to stay away at least: longer each time, until a shard is served."""
        self._times += 1
        return min(_LONGEST_S, TRY_AGAIN_S * 4.0 ** (self._times - 1))


def has_members(config: KafkaConfig, more_than: int) -> bool:
    """Return whether the group has more than so many members, as far as Kafka says; blocks."""
    admin = config.make_admin()
    try:
        [described] = admin.describe_consumer_groups([config.members_group]).values()
        return len(described.result(_REQUEST_S).members) > more_than
    except (KafkaException, TimeoutError):
        return False


class Trial:
    """Writes what a claim writes, in Kafka transactions that are always aborted, under an id that claims nothing."""

    def __init__(self, config: KafkaConfig, cancelled: Callable[[], bool]) -> None:
        """Choose the transactional id."""
        self._config = replace(config, transaction_timeout_s=_TRIAL_S)
        self._cancelled = cancelled
        self._transactional_id = f"{config.prefix}trial.{secrets.token_hex(_ID_BYTES)}"

    def refusal(self, shard: int) -> str | None:
        """Try it for one shard; return why Kafka did not take it, None if it did. Blocks."""
        config, deadline, now = self._config, time.monotonic() + _REQUEST_S, time.time_ns() // 1_000_000
        barrier = encode_barrier(Barrier(incarnation=self._transactional_id, at=now))
        headers = record_headers(KIND_BARRIER, "", "trial")
        refusals: list[str] = []

        def report(error: Any, _message: Any) -> None:
            if error is not None:
                refusals.append(f"{error.name()}: {error.str()}")

        try:
            [producer] = initialised(
                config, [self._transactional_id], deadline, self._cancelled, message_timeout_s=_REQUEST_S
            )
        except ProducerFailedError as error:
            return str(error)
        try:
            producer.begin()
            for topic in (config.owners_topic, config.half_topic, config.op_topic, config.parked_topic):
                producer.produce(topic, barrier, BARRIER_KEY, shard, on_delivery=report, timestamp=now, headers=headers)
            taken = producer.flush(deadline, lambda: bool(refusals))
            producer.abort(_REQUEST_S)
        except (ProducerFailedError, KafkaException, BufferError) as error:
            refusals.append(str(error))
            taken = False
        finally:
            producer.abandon()
        return None if taken else refusals[0] if refusals else "Kafka did not answer in time"
