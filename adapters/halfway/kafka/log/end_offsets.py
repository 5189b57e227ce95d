"""End offsets of partitions: one request serves all waiting callers."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable
from concurrent.futures import Future
from typing import Final

from confluent_kafka import IsolationLevel, KafkaError, KafkaException, TopicPartition
from confluent_kafka.admin import (  # type: ignore[attr-defined] # public, but not for mypy
    AdminClient,
    ListOffsetsResultInfo,
    OffsetSpec,
)

from halfway.domain.errors import KafkaUnavailableError
from halfway.kafka.clients.client_closer import drop_last
from halfway.kafka.clients.config import KafkaConfig
from halfway.kafka.log.partition_reader import LEADER_MOVES, Place, refresh_leaders
from halfway.service.answers import answer_all

RETRY_S: Final = 0.1
_TRY_S: Final = 2.0
"""How long an answer is waited for before the request is sent again over a new connection."""
_LEAST_S: Final = 0.1
_NO_ANSWER: Final = KafkaError._TIMED_OUT  # noqa: SLF001 - the names of librdkafka's own errors start so


class PartitionEnds:
    """End offsets of a topic's partitions.

    An answer is never older than its call: a call that arrives while a request is under way waits for the next request,
    which covers the partitions of all waiting calls.
    """

    def __init__(
        self,
        config: KafkaConfig,
        topic: str,
        *,
        timeout_s: float = 5.0,
        isolation: IsolationLevel = IsolationLevel.READ_UNCOMMITTED,
    ) -> None:
        """Keep the topic; `timeout_s` bounds one request. Under READ_COMMITTED the end is the LSO."""
        self._isolation = isolation
        self._config = config
        self._admin: AdminClient | None = None
        self._topic = topic
        self._timeout_s = timeout_s
        self._waiters: dict[int, list[asyncio.Future[int]]] = {}
        self._running: asyncio.Task[None] | None = None

    async def end(self, partition: int, *, deadline: float) -> int:
        """Return the end offset of a partition, read after this call.

        Raises:
            KafkaUnavailableError: Kafka did not answer in time.

        """
        future: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self._waiters.setdefault(partition, []).append(future)
        if self._running is None:
            self._running = asyncio.create_task(self._run())
        try:
            async with asyncio.timeout_at(deadline):
                return await future
        except TimeoutError:
            raise KafkaUnavailableError(f"Kafka did not return the end offset of {self._topic} in time") from None

    async def stop(self) -> None:
        """Cancel the requests under way."""
        if self._running is not None:
            self._running.cancel()
            await asyncio.wait([self._running])

    async def _run(self) -> None:
        try:
            while self._waiters:
                waiters, self._waiters = self._waiters, {}
                try:
                    ends = await self._request(waiters)
                except Exception as error:  # noqa: BLE001 - every waiting caller must get it
                    ends = dict.fromkeys(waiters, _unavailable(self._topic, str(error)))
                for partition, futures in waiters.items():
                    answer_all((future, ends[partition]) for future in futures)
        finally:
            self._running = None

    async def _request(self, partitions: Iterable[int]) -> dict[int, int | Exception]:
        if self._admin is None:
            self._admin = AdminClient(self._config.admin())
        # Serve the client's queued log lines.
        self._admin.poll(0)
        until = time.monotonic() + self._timeout_s
        ends: dict[int, int | Exception] = {}
        missing = set(partitions)
        while missing:
            places = [(self._topic, partition) for partition in missing]
            left = max(_LEAST_S, until - time.monotonic())
            answers = request_ends(self._admin, places, self._isolation, min(_TRY_S, left))
            silent = False
            for (_, partition), answer in answers.items():
                try:
                    ends[partition] = (await asyncio.wrap_future(answer)).offset
                except KafkaException as exception:
                    error = exception.args[0]
                    ends[partition] = _unavailable(self._topic, error.str())
                    silent = silent or error.code() == _NO_ANSWER
                    if error.code() in LEADER_MOVES or error.code() == _NO_ANSWER:
                        continue
                missing.remove(partition)
            if silent:
                # The connection may be dead without a sign.
                held, self._admin = [self._admin], None
                drop_last(held)
                self._admin = AdminClient(self._config.admin())
            if missing and not await self._refresh(self._admin, until):
                break
        return ends

    async def _refresh(self, admin: AdminClient, until: float) -> bool:
        """Refresh the leaders, and return whether there is time for another request."""
        await asyncio.sleep(RETRY_S)
        left = until - time.monotonic()
        if left <= 0 or not await asyncio.to_thread(refresh_leaders, admin, self._topic, left):
            return False
        return time.monotonic() < until


def request_ends(
    admin: AdminClient, places: Iterable[Place], isolation: IsolationLevel, timeout_s: float
) -> dict[Place, Future[ListOffsetsResultInfo]]:
    """Request end offsets. After an error in LEADER_MOVES, call `refresh_leaders` and request them again."""
    latest = OffsetSpec.latest()  # type: ignore[no-untyped-call] # confluent-kafka leaves it out
    specs = {TopicPartition(*place): latest for place in places}
    answers = admin.list_offsets(specs, isolation_level=isolation, request_timeout=timeout_s)
    return {(place.topic, place.partition): answer for place, answer in answers.items()}


def _unavailable(topic: str, reason: str) -> KafkaUnavailableError:
    return KafkaUnavailableError(f"Kafka did not return the end offset of {topic}: {reason}")
