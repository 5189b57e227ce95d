"""The port `Topics`: facts about real topics, cached for a short time, and fresh look-ups of whether they exist."""

from __future__ import annotations

import asyncio
import re
import threading
import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

import structlog
from confluent_kafka import KafkaError, KafkaException, TopicCollection
from confluent_kafka.admin import (  # type: ignore[attr-defined] # public, but not for mypy
    AclOperation,
    AdminClient,
    ConfigResource,
    ResourceType,
)

from halfway.domain.errors import HalfwayError, KafkaUnavailableError, NotAuthorisedError
from halfway.kafka.clients.config import KafkaConfig
from halfway.kafka.topics.partition_availability import PartitionHealth, WritablePartitions
from halfway.service.ports import TopicFacts

log = structlog.get_logger()

FACTS_S: Final = 30.0
EXISTENCE_S: Final = 1.0
_REFRESH_S: Final = 0.5
_NAME: Final = re.compile(r"[A-Za-z0-9._-]{1,249}\Z")
_KEPT: Final = 10_000
"""The most names that are cached; requests may ask for any name."""
_REQUEST_S: Final = 5.0
_UNKNOWN: Final = frozenset({KafkaError.UNKNOWN_TOPIC_OR_PART, KafkaError.TOPIC_EXCEPTION})
_UNAUTHORISED: Final = frozenset({KafkaError.TOPIC_AUTHORIZATION_FAILED, KafkaError.CLUSTER_AUTHORIZATION_FAILED})
_MAY_WRITE: Final = frozenset({AclOperation.WRITE, AclOperation.ALL})

Partitions = PartitionHealth | None | HalfwayError
"""A topic's description: its partitions, None if there is no such topic, or why it is not known."""
Described = TopicFacts | None | HalfwayError


@dataclass(frozen=True, slots=True)
class _Existence:
    asked_at: float
    health: PartitionHealth | None


@dataclass(frozen=True, slots=True)
class _Facts:
    asked_at: float
    facts: TopicFacts
    min_insync: int


class TopicMetadata:
    """Describes topics with an admin client, which never creates one.

    Requests do not block: librdkafka's thread completes them. `describe` is for the loop's thread, `fresh` for others.
    Concurrent look-ups of one topic share a single request if its answer is recent enough.
    """

    def __init__(self, config: KafkaConfig) -> None:
        """Take the configuration; nothing is connected before the first request."""
        self._config = config
        self._client: AdminClient | None = None
        self._lock = threading.Lock()
        self._finding = threading.Lock()
        self._existence: dict[str, _Existence] = {}
        self._facts: dict[str, _Facts] = {}
        self._describing: dict[str, tuple[float, Future[Partitions]]] = {}
        self._configuring: dict[str, Future[Described]] = {}

    # --- on the loop's thread

    def known(self, names: Collection[str]) -> Mapping[str, TopicFacts] | None:
        """Return facts by name, at most 30 s old, if those of all are known; None otherwise."""
        now = time.monotonic()
        found: dict[str, TopicFacts] = {}
        for name in names:
            known = self._facts.get(name)
            if known is None or now >= known.asked_at + FACTS_S:
                return None
            found[name] = known.facts
        return found

    async def describe(self, names: Sequence[str], *, deadline: float) -> Mapping[str, TopicFacts | None]:
        """Return facts by name, at most 30 s old; None for a topic that did not exist within the last second.

        Raises:
            KafkaUnavailableError: the broker did not tell in time.
            NotAuthorisedError: the broker does not let halfway see a topic, or write to it.

        """
        found: dict[str, TopicFacts | None] = {}
        now = time.monotonic()
        for name in dict.fromkeys(names):
            if not possible(name):
                found[name] = None
                continue
            known = self._facts.get(name)
            if known is not None and now < known.asked_at + FACTS_S:
                found[name] = known.facts
        missing = [name for name in dict.fromkeys(names) if name not in found]
        if missing:
            try:
                async with asyncio.timeout_at(deadline):
                    found.update(await self._ask(missing))
            except TimeoutError:
                raise KafkaUnavailableError(f"Kafka did not describe {', '.join(missing)} in time") from None
        return {name: found[name] for name in names}

    async def _ask(self, names: Sequence[str]) -> dict[str, TopicFacts | None]:
        partitions = self._partitions(names, EXISTENCE_S)
        counted: dict[str, int] = {}
        for name, answer in partitions.items():
            health = await asyncio.shield(asyncio.wrap_future(answer))
            if isinstance(health, HalfwayError):
                raise health
            if health is not None:
                counted[name] = health.partitions
        configured = self._configure(counted)
        found: dict[str, TopicFacts | None] = dict.fromkeys(names)
        for name, told in configured.items():
            facts = await asyncio.shield(asyncio.wrap_future(told))
            if isinstance(facts, HalfwayError):
                raise facts
            found[name] = facts
        return found

    # --- on any thread

    def fresh(self, names: Iterable[str], timeout: float) -> Mapping[str, WritablePartitions | None]:
        """Return where in each topic messages may go, None if it does not exist; blocks for `timeout` seconds.

        That is as known at most a second ago, but for `min.insync.replicas`: 30 s, and asked for only where a replica
        is out of sync. What gets old is asked for again ahead of time, so that a lane that is busy hardly ever waits
        here.

        Raises:
            KafkaUnavailableError: the broker did not tell in time.
            NotAuthorisedError: the broker does not let halfway see a topic, or write to it.

        """
        until = time.monotonic() + timeout
        found: dict[str, WritablePartitions | None] = dict.fromkeys(names)
        wanted = [name for name in found if possible(name)]
        answers = self._partitions(wanted, EXISTENCE_S)
        self._partitions(wanted, _REFRESH_S)
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
                found[name] = health.writable(name, 1)
        if short:
            self._demand_facts({name: health.partitions for name, health in short.items()}, until)
            for name, health in short.items():
                known = self._facts.get(name)
                found[name] = health.writable(name, 1 if known is None else known.min_insync)
        return found

    def _demand_facts(self, counted: Mapping[str, int], until: float) -> None:
        """Refresh facts that are too old. A refusal to show them is ignored: halfway may still be allowed to write."""
        now = time.monotonic()
        facts = self._facts
        since = now - FACTS_S
        old = {name: count for name, count in counted.items() if name not in facts or facts[name].asked_at <= since}
        if old:
            wait(self._configure(old).values(), max(0.0, until - now))

    def _admin(self) -> AdminClient:
        with self._lock:
            if self._client is None:
                self._client = AdminClient(self._config.admin())
            return self._client

    def _partitions(self, names: Iterable[str], oldest: float) -> dict[str, Future[Partitions]]:
        """Return, by topic, what is known from the last `oldest` seconds or will be known from a request."""
        now = time.monotonic()
        answers: dict[str, Future[Partitions]] = {}
        ask: list[str] = []
        with self._lock:
            for name in names:
                known, running = self._existence.get(name), self._describing.get(name)
                if known is not None and now < known.asked_at + oldest:
                    answers[name] = _done(known.health)
                elif running is not None and now < running[0] + oldest:
                    answers[name] = running[1]
                else:
                    answers[name] = Future()
                    self._describing[name] = (now, answers[name])
                    ask.append(name)
        if ask:
            self._send(ask, now, answers)
        return answers

    def _send(self, names: list[str], asked_at: float, answers: Mapping[str, Future[Partitions]]) -> None:
        try:
            requests = self._admin().describe_topics(
                TopicCollection(names), include_authorized_operations=True, request_timeout=_REQUEST_S
            )
        except Exception as error:  # noqa: BLE001 - whoever waits for the answer must hear of it, whatever it is
            for name in names:
                self._described(name, asked_at, answers[name], KafkaUnavailableError(str(error)))
            return
        for name, request in requests.items():
            request.add_done_callback(partial(self._counted, name, asked_at, answers[name]))
        self._admin().poll(0)

    def _counted(self, name: str, asked_at: float, answer: Future[Partitions], done: Future[Any]) -> None:
        self._described(name, asked_at, answer, _health(name, done))

    def _described(self, name: str, asked_at: float, answer: Future[Partitions], result: Partitions) -> None:
        with self._lock:
            running = self._describing.get(name)
            if running is not None and running[1] is answer:
                del self._describing[name]
            known = self._existence.get(name)
            if not isinstance(result, HalfwayError) and (known is None or known.asked_at < asked_at):
                _bound(self._existence)
                self._existence[name] = _Existence(asked_at, result)
                if result is None:
                    self._facts.pop(name, None)
        if isinstance(result, KafkaUnavailableError):
            self._find_controller()
        answer.set_result(result)

    def _find_controller(self) -> None:
        """Make the client refresh its metadata, so that it finds another broker to ask; blocks no other request.

        The client asks the broker that it knows as the controller, and by itself does not look for another for minutes.
        """
        if self._finding.acquire(blocking=False):
            threading.Thread(target=self._look_up, name="halfway-find-controller", daemon=True).start()

    def _look_up(self) -> None:
        try:
            self._admin().list_topics(self._config.owners_topic, timeout=_REQUEST_S)
        except KafkaException as error:
            log.info("controller_not_found", error=error.args[0].str())
        finally:
            self._finding.release()

    def _configure(self, counted: Mapping[str, int]) -> dict[str, Future[Described]]:
        """Ask for the configurations of topics that exist."""
        answers: dict[str, Future[Described]] = {}
        ask: dict[str, Future[Described]] = {}
        with self._lock:
            for name in counted:
                running = self._configuring.get(name)
                if running is None:
                    running = self._configuring[name] = ask[name] = Future()
                answers[name] = running
        if ask:
            self._send_configure(counted, ask)
        return answers

    def _send_configure(self, counted: Mapping[str, int], ask: Mapping[str, Future[Described]]) -> None:
        now = time.monotonic()
        try:
            requests = self._admin().describe_configs(
                [ConfigResource(ResourceType.TOPIC, name) for name in ask], request_timeout=_REQUEST_S
            )
        except Exception as error:  # noqa: BLE001 - as in _send
            for name, answer in ask.items():
                self._configured(name, answer, KafkaUnavailableError(str(error)))
            return
        for resource, request in requests.items():
            name = resource.name
            request.add_done_callback(partial(self._told, name, now, counted[name], ask[name]))
        self._admin().poll(0)

    def _told(self, name: str, asked_at: float, partitions: int, answer: Future[Described], done: Future[Any]) -> None:
        self._configured(name, answer, _facts(name, asked_at, partitions, done))

    def _configured(self, name: str, answer: Future[Described], result: _Facts | HalfwayError | None) -> None:
        with self._lock:
            del self._configuring[name]
            if isinstance(result, _Facts):
                _bound(self._facts)
                self._facts[name] = result
        answer.set_result(result.facts if isinstance(result, _Facts) else result)


def _facts(name: str, asked_at: float, partitions: int, done: Future[Any]) -> _Facts | HalfwayError | None:
    try:
        entries = done.result()
        facts = TopicFacts(
            partitions=partitions,
            max_message_bytes=int(entries["max.message.bytes"].value),
            compacted="compact" in entries["cleanup.policy"].value,
        )
        return _Facts(asked_at, facts, int(entries["min.insync.replicas"].value))
    except KafkaException as exception:
        return _failure(name, "DescribeConfigs", exception.args[0])
    except Exception as error:  # noqa: BLE001 - as in _send
        return _not_told(name, error)


def possible(name: str) -> bool:
    """Return whether Kafka allows a topic of that name; what it does not allow is not asked for."""
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
        return _not_told(name, error)


def _failure(name: str, operation: str, error: KafkaError) -> HalfwayError | None:
    """Return why a request about a topic failed, None if there is no such topic."""
    if error.code() in _UNKNOWN:
        return None
    if error.code() in _UNAUTHORISED:
        return NotAuthorisedError(
            f"Kafka does not let halfway see topic {name!r}: allow {operation} on it", topic=name, operation=operation
        )
    return KafkaUnavailableError(f"Kafka did not describe topic {name!r}: {error.str()}", topic=name)


def _not_told(name: str, error: Exception) -> HalfwayError:
    return KafkaUnavailableError(f"Kafka did not describe topic {name!r}: {error!r}", topic=name)


def _done(result: Partitions) -> Future[Partitions]:
    future: Future[Partitions] = Future()
    future.set_result(result)
    return future


def _bound(table: dict[str, Any]) -> None:
    """Make room for one more: evict the oldest."""
    if len(table) >= _KEPT:
        del table[next(iter(table))]
