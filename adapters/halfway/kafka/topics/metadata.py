"""The port `Topics`: facts about real topics, cached for a short time, whether they exist now, and accept records.

A partition without a leader accepts nothing. One with fewer in-sync replicas than `min.insync.replicas` accepts neither
records (acks=all) nor the marker that ends a Kafka transaction, so its writers wait until its brokers are back.
"""

from __future__ import annotations

import asyncio
import random
import re
import threading
import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final

import structlog
from confluent_kafka import KafkaError, KafkaException, TopicCollection
from confluent_kafka.admin import (  # type: ignore[attr-defined] # public, but not for mypy
    AclOperation,
    ConfigResource,
    ResourceType,
)

from halfway.coordinator.ports import TopicFacts
from halfway.kafka.clients.config import KafkaConfig
from halfway.kafka.clients.seam import Admin
from halfway.kafka.clients.threads import drop_last
from halfway.protocol.errors import HalfwayError, KafkaUnavailableError, NotAuthorisedError
from halfway.protocol.ids import partition_for_key


@dataclass(frozen=True, slots=True)
class WritablePartitions:
    """The partitions of a topic that can be written now; `closed` maps each of the others to the reason."""

    topic: str
    partitions: int
    closed: Mapping[int, str] = field(default_factory=dict)

    def refusal(self, partition: int | None, key: bytes | None) -> str | None:
        """Return why a message cannot be written now; None if it can."""
        if partition is None:
            if not self.closed:
                return None
            if key is None:
                partition = next(iter(self.closed)) if len(self.closed) >= self.partitions else None
            else:
                partition = partition_for_key(key, self.partitions)
        elif partition >= self.partitions:
            return (
                f"topic {self.topic!r} has no partition {partition}, only {self.partitions}: "
                "add partitions, and the end can be done"
            )
        reason = None if partition is None else self.closed.get(partition)
        if reason is None:
            return None
        return (
            f"partition {partition} of topic {self.topic!r} {reason}: bring its brokers back, and the end can be done"
        )

    def any_open(self) -> int:
        """Return a random open partition, for a message that may go to any; there must be one."""
        return random.choice([number for number in range(self.partitions) if number not in self.closed])  # noqa: S311 - it spreads load


@dataclass(frozen=True, kw_only=True, slots=True)
class PartitionHealth:
    """The partitions of a topic, from one description of it."""

    partitions: int
    leaderless: frozenset[int] = frozenset()
    short: Mapping[int, tuple[int, int]] = field(default_factory=dict)
    """The partitions with a replica out of sync, each with its in-sync replicas and all of its replicas."""

    @classmethod
    def of(cls, described: Sequence[Any]) -> PartitionHealth:
        """Read confluent-kafka's `TopicPartitionInfo`s."""
        return cls(
            partitions=len(described),
            leaderless=frozenset(info.id for info in described if info.leader is None or info.leader.id < 0),
            short={
                info.id: (len(info.isr), len(info.replicas)) for info in described if len(info.isr) < len(info.replicas)
            },
        )

    def writable(self, topic: str, min_insync: int) -> WritablePartitions:
        """Return the writable partitions; `min_insync` matters only for partitions with a replica out of sync."""
        closed: dict[int, str] = {}
        for partition, (in_sync, replicas) in self.short.items():
            needed = min(min_insync, replicas)  # a broker does not require more replicas than there are
            if in_sync < needed:
                closed[partition] = f"has {in_sync} replicas in sync, and min.insync.replicas asks for {needed}"
        return WritablePartitions(topic, self.partitions, closed | dict.fromkeys(self.leaderless, "has no leader"))


log = structlog.get_logger()

FACTS_S: Final = 30.0
EXISTENCE_S: Final = 1.0
_REFRESH_S: Final = 0.5
_NAME: Final = re.compile(r"[A-Za-z0-9._-]{1,249}\Z")
_MAX_CACHED: Final = 10_000
"""The most names that are cached: a request may contain any name."""
_REQUEST_S: Final = 2.0
_LOST_S: Final = _REQUEST_S + 1
"""A request without an answer for so long gets none: librdkafka drops requests of a client that is dropped."""
_TRIES: Final = 3
"""How often topics are looked up for one call; each try after one without an answer uses a new connection."""
_NO_TOPIC: Final = frozenset({KafkaError.UNKNOWN_TOPIC_OR_PART, KafkaError.TOPIC_EXCEPTION})
_UNAUTHORISED: Final = frozenset({KafkaError.TOPIC_AUTHORIZATION_FAILED, KafkaError.CLUSTER_AUTHORIZATION_FAILED})
_MAY_WRITE: Final = frozenset({AclOperation.WRITE, AclOperation.ALL})

Partitions = PartitionHealth | None | HalfwayError
"""A topic's partitions, None if there is no such topic, or the error if they are unknown."""
Described = TopicFacts | None | HalfwayError


@dataclass(frozen=True, slots=True)
class _Existence:
    requested_at: float
    health: PartitionHealth | None


@dataclass(frozen=True, slots=True)
class _Facts:
    requested_at: float
    facts: TopicFacts
    min_insync: int


class TopicMetadata:
    """Describes topics with an admin client, which never creates a topic.

    Requests do not block: librdkafka's thread completes them. Call `describe` on the loop's thread, `fresh` on others.
    Concurrent look-ups of one topic share a single request if its answer is recent enough.
    """

    def __init__(self, config: KafkaConfig) -> None:
        self._config = config
        self._client: Admin | None = None
        self._is_silent = False
        """A request of this client got no answer. Set on librdkafka's thread, which must not drop the client."""
        self._lock = threading.Lock()
        self._existence: dict[str, _Existence] = {}
        self._facts: dict[str, _Facts] = {}
        self._describing: dict[str, tuple[float, Future[Partitions]]] = {}
        self._configuring: dict[str, tuple[float, Future[Described]]] = {}

    # --- on the loop's thread

    def known(self, names: Collection[str]) -> Mapping[str, TopicFacts] | None:
        """Return facts by name, at most 30 s old, if all of them are known; None otherwise."""
        now = time.monotonic()
        by_name: dict[str, TopicFacts] = {}
        for name in names:
            known = self._facts.get(name)
            if known is None or now >= known.requested_at + FACTS_S:
                return None
            by_name[name] = known.facts
        return by_name

    async def describe(self, names: Sequence[str], *, deadline: float) -> Mapping[str, TopicFacts | None]:
        by_name: dict[str, TopicFacts | None] = {}
        now = time.monotonic()
        for name in dict.fromkeys(names):
            if not is_valid_name(name):
                by_name[name] = None
                continue
            known = self._facts.get(name)
            if known is not None and now < known.requested_at + FACTS_S:
                by_name[name] = known.facts
        missing = [name for name in dict.fromkeys(names) if name not in by_name]
        if missing:
            try:
                async with asyncio.timeout_at(deadline):
                    by_name.update(await self._request_again(missing))
            except TimeoutError:
                raise KafkaUnavailableError(f"Kafka did not describe {', '.join(missing)} in time") from None
        return {name: by_name[name] for name in names}

    async def _request_again(self, names: Sequence[str]) -> dict[str, TopicFacts | None]:
        for tries_left in reversed(range(_TRIES)):
            try:
                return await self._request_facts(names)
            except KafkaUnavailableError:
                if not tries_left:
                    raise
        raise AssertionError

    async def _request_facts(self, names: Sequence[str]) -> dict[str, TopicFacts | None]:
        partitions = self._partitions(names, EXISTENCE_S)
        partition_counts: dict[str, int] = {}
        for name, answer in partitions.items():
            health = await asyncio.shield(asyncio.wrap_future(answer))
            if isinstance(health, HalfwayError):
                raise health
            if health is not None:
                partition_counts[name] = health.partitions
        configured = self._configure(partition_counts)
        by_name: dict[str, TopicFacts | None] = dict.fromkeys(names)
        for name, future in configured.items():
            facts = await asyncio.shield(asyncio.wrap_future(future))
            if isinstance(facts, HalfwayError):
                raise facts
            by_name[name] = facts
        return by_name

    # --- on any thread

    def fresh(self, names: Iterable[str], timeout: float) -> Mapping[str, WritablePartitions | None]:
        """Return the writable partitions of each topic, None if it does not exist; blocks for up to `timeout` seconds.

        Metadata are at most a second old. `min.insync.replicas` may be 30 s old, and is requested only if a replica is
        out of sync. Metadata are refreshed ahead of time, so that a busy lane hardly ever waits here.

        Raises:
            KafkaUnavailableError: the broker did not answer in time.
            NotAuthorisedError: the broker does not let halfway see a topic, or write to it.
        """
        until = time.monotonic() + timeout
        writable_by_name: dict[str, WritablePartitions | None] = dict.fromkeys(names)
        valid_names = [name for name in writable_by_name if is_valid_name(name)]
        answers = self._partitions(valid_names, EXISTENCE_S)
        self._partitions(valid_names, _REFRESH_S)
        _, late = wait(answers.values(), timeout)
        if late:
            raise KafkaUnavailableError("Kafka did not describe the topics of a batch in time")
        short: dict[str, PartitionHealth] = {}
        for name, answer in answers.items():
            health = answer.result()
            if isinstance(health, HalfwayError):
                raise health
            if health is not None and health.short:
                short[name] = health
            elif health is not None:
                writable_by_name[name] = health.writable(name, 1)
        if short:
            self._refresh_facts({name: health.partitions for name, health in short.items()}, until)
            for name, health in short.items():
                known = self._facts.get(name)
                writable_by_name[name] = health.writable(name, 1 if known is None else known.min_insync)
        return writable_by_name

    def max_message_bytes(self, names: Iterable[str], timeout: float) -> Mapping[str, int]:
        """Return `max.message.bytes` of topics as it is now, without those that Kafka does not describe. Blocks."""
        until = time.monotonic() + timeout
        described = self._partitions(names, EXISTENCE_S)
        wait(described.values(), timeout)
        results = {name: answer.result() for name, answer in described.items() if answer.done()}
        counts = {name: found.partitions for name, found in results.items() if isinstance(found, PartitionHealth)}
        configured = self._configure(counts)
        wait(configured.values(), max(0.0, until - time.monotonic()))
        facts = {name: answer.result() for name, answer in configured.items() if answer.done()}
        return {name: found.max_message_bytes for name, found in facts.items() if isinstance(found, TopicFacts)}

    def _refresh_facts(self, partition_counts: Mapping[str, int], until: float) -> None:
        """Refresh facts that are too old. A refused request is ignored: halfway may still be allowed to write."""
        now = time.monotonic()
        facts = self._facts
        since = now - FACTS_S
        old = {
            name: count
            for name, count in partition_counts.items()
            if name not in facts or facts[name].requested_at <= since
        }
        if old:
            wait(self._configure(old).values(), max(0.0, until - now))

    def _admin(self) -> Admin:
        """Return the client; another one, with new connections, after a request without an answer.

        A client keeps the broker that it knows as the controller for minutes, and also a connection that is dead.
        """
        with self._lock:
            if self._client is not None and self._is_silent:
                held, self._client = [self._client], None
                drop_last(held)
            if self._client is None:
                self._client = self._config.make_admin()
                self._is_silent = False
            return self._client

    def _partitions(self, names: Iterable[str], max_age_s: float) -> dict[str, Future[Partitions]]:
        """Return a future for each topic's partitions: known for at most `max_age_s`, or from a request under way."""
        now = time.monotonic()
        answers: dict[str, Future[Partitions]] = {}
        unknown: list[str] = []
        with self._lock:
            for name in names:
                known, running = self._existence.get(name), self._describing.get(name)
                if known is not None and now < known.requested_at + max_age_s:
                    answers[name] = _done(known.health)
                elif running is not None and now < running[0] + max_age_s:
                    answers[name] = running[1]
                else:
                    answers[name] = Future()
                    self._describing[name] = (now, answers[name])
                    unknown.append(name)
        if unknown:
            self._send(unknown, now, answers)
        return answers

    def _send(self, names: list[str], requested_at: float, answers: Mapping[str, Future[Partitions]]) -> None:
        try:
            requests = self._admin().describe_topics(
                TopicCollection(names), include_authorized_operations=True, request_timeout=_REQUEST_S
            )
        except Exception as error:  # noqa: BLE001 - the waiting callers must get it, whatever it is
            for name in names:
                self._complete(name, requested_at, answers[name], KafkaUnavailableError(str(error)))
            return
        for name, request in requests.items():
            request.add_done_callback(partial(self._on_described, name, requested_at, answers[name]))
        self._admin().poll(0)

    def _on_described(self, name: str, requested_at: float, answer: Future[Partitions], done: Future[Any]) -> None:
        self._complete(name, requested_at, answer, _health(name, done))

    def _complete(self, name: str, requested_at: float, answer: Future[Partitions], result: Partitions) -> None:
        with self._lock:
            running = self._describing.get(name)
            if running is not None and running[1] is answer:
                del self._describing[name]
            known = self._existence.get(name)
            if not isinstance(result, HalfwayError) and (known is None or known.requested_at < requested_at):
                _evict(self._existence)
                self._existence[name] = _Existence(requested_at, result)
                if result is None:
                    self._facts.pop(name, None)
        if isinstance(result, KafkaUnavailableError):
            self._is_silent = True
        answer.set_result(result)

    def _configure(self, partition_counts: Mapping[str, int]) -> dict[str, Future[Described]]:
        answers: dict[str, Future[Described]] = {}
        new: dict[str, Future[Described]] = {}
        now = time.monotonic()
        with self._lock:
            for name in partition_counts:
                running = self._configuring.get(name)
                if running is None or now >= running[0] + _LOST_S:
                    new[name] = Future()
                    running = self._configuring[name] = now, new[name]
                answers[name] = running[1]
        if new:
            self._send_configure(partition_counts, new)
        return answers

    def _send_configure(self, partition_counts: Mapping[str, int], answers: Mapping[str, Future[Described]]) -> None:
        now = time.monotonic()
        try:
            requests = self._admin().describe_configs(
                [ConfigResource(ResourceType.TOPIC, name) for name in answers], request_timeout=_REQUEST_S
            )
        except Exception as error:  # noqa: BLE001 - as in _send
            for name, answer in answers.items():
                self._complete_facts(name, answer, KafkaUnavailableError(str(error)))
            return
        for resource, request in requests.items():
            name = resource.name
            request.add_done_callback(partial(self._on_configured, name, now, partition_counts[name], answers[name]))
        self._admin().poll(0)

    def _on_configured(
        self, name: str, requested_at: float, partitions: int, answer: Future[Described], done: Future[Any]
    ) -> None:
        self._complete_facts(name, answer, _facts(name, requested_at, partitions, done))

    def _complete_facts(self, name: str, answer: Future[Described], result: _Facts | HalfwayError | None) -> None:
        with self._lock:
            running = self._configuring.get(name)
            if running is not None and running[1] is answer:
                del self._configuring[name]
            known = self._facts.get(name)
            if isinstance(result, _Facts) and (known is None or known.requested_at < result.requested_at):
                _evict(self._facts)
                self._facts[name] = result
        if isinstance(result, KafkaUnavailableError):
            self._is_silent = True
        answer.set_result(result.facts if isinstance(result, _Facts) else result)


def _facts(name: str, requested_at: float, partitions: int, done: Future[Any]) -> _Facts | HalfwayError | None:
    try:
        entries = done.result()
        facts = TopicFacts(
            partitions=partitions,
            max_message_bytes=int(entries["max.message.bytes"].value),
            compacted="compact" in entries["cleanup.policy"].value,
        )
        return _Facts(requested_at, facts, int(entries["min.insync.replicas"].value))
    except KafkaException as exception:
        return _failure(name, "DescribeConfigs", exception.args[0])
    except Exception as error:  # noqa: BLE001 - as in _send
        return _unavailable(name, error)


def is_valid_name(name: str) -> bool:
    """Return whether Kafka allows a topic with this name; others are never requested."""
    return _NAME.match(name) is not None and name not in (".", "..")


def _health(name: str, done: Future[Any]) -> Partitions:
    try:
        topic = done.result()
        allowed = topic.authorized_operations
        # A broker without access control lists every operation as allowed, or none.
        if allowed and not _MAY_WRITE.intersection(allowed):
            return NotAuthorisedError(
                f"Kafka does not let halfway write to topic {name!r}: allow Write on it", topic=name, operation="Write"
            )
        return PartitionHealth.of(topic.partitions)
    except KafkaException as exception:
        return _failure(name, "Describe", exception.args[0])
    except Exception as error:  # noqa: BLE001 - as in _send
        return _unavailable(name, error)


def _failure(name: str, operation: str, error: KafkaError) -> HalfwayError | None:
    """Return the error of a failed request about a topic, None if there is no such topic."""
    if error.code() in _NO_TOPIC:
        return None
    if error.code() in _UNAUTHORISED:
        return NotAuthorisedError(
            f"Kafka does not let halfway see topic {name!r}: allow {operation} on it", topic=name, operation=operation
        )
    return KafkaUnavailableError(f"Kafka did not describe topic {name!r}: {error.str()}", topic=name)


def _unavailable(name: str, error: Exception) -> HalfwayError:
    return KafkaUnavailableError(f"Kafka did not describe topic {name!r}: {error!r}", topic=name)


def _done(result: Partitions) -> Future[Partitions]:
    future: Future[Partitions] = Future()
    future.set_result(result)
    return future


def _evict(table: dict[str, Any]) -> None:
    """Make room for another entry: evict the oldest one."""
    if len(table) >= _MAX_CACHED:
        del table[next(iter(table))]
