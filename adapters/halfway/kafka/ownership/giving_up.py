"""Tells when an instance should leave its shards to others, and when it may take some again.

See docs/protocol.md#ownership.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any, Final

from confluent_kafka import KafkaException

from halfway.kafka.clients.config import KafkaConfig
from halfway.kafka.clients.transactional_producer import ProducerFailedError, initialised
from halfway.kafka.records.codec import BARRIER_KEY, KIND_BARRIER, encode_barrier, record_headers
from halfway.protocol.records import Barrier

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
