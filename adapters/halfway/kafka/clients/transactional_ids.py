"""The transactional ids of an incarnation, and a check that Kafka allows halfway to use such ids.

See docs/protocol.md#ownership-and-fencing.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable
from typing import Final

from halfway.domain.errors import ConfigurationError, KafkaUnavailableError
from halfway.kafka.clients.config import KafkaConfig
from halfway.kafka.clients.denials import denial
from halfway.kafka.clients.transactional_producer import ProducerFailedError, initialised

_ID_BYTES: Final = 8


def lane_ids(prefix: str, incarnation: str) -> tuple[str, ...]:
    """Return the ids with which an incarnation writes: the two of its lane and the one of its suspect lane.

    The format must never change: sometimes only the incarnation of a former owner is known.
    """
    return tuple(f"{prefix}{incarnation}.{name}" for name in ("0", "1", "q"))


def rehearsal_id(prefix: str, incarnation: str) -> str:
    """Return the id with which an incarnation tries messages out; it never commits anything.

    No owner record contains it: it follows from the incarnation.
    """
    return f"{prefix}{incarnation}.r"


def verify_transactional_ids(config: KafkaConfig, deadline: float, cancelled: Callable[[], bool]) -> None:
    """Initialise a transactional id that nobody uses, the only way to test the ACL. Blocks.

    If the transaction coordinator is not ready yet, it is waited for until `deadline`, on `time.monotonic()`.

    Raises:
        ConfigurationError: an ACL is missing; the error names the resource and the command that adds the ACL.
        KafkaUnavailableError: Kafka did not initialise the id in time, or the call was cancelled.

    """
    name = f"{config.prefix}verify.{secrets.token_hex(_ID_BYTES)}"
    try:
        producers = initialised(config, [name], deadline, cancelled)
    except ProducerFailedError as error:
        denied = denial(error.code, config)
        if denied is not None:
            raise ConfigurationError(denied) from error
        raise KafkaUnavailableError(f"Kafka did not initialise a transactional id: {error}") from error
    for producer in producers:
        producer.abandon()
