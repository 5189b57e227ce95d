"""A record for a handler, with the id that identifies it, and its dead letter if it cannot be processed.

The settings of librdkafka that the consumer and the dead letters share are here. Exceptions of handlers, drivers and
libraries are made safe for log lines and headers.
"""

from __future__ import annotations

import hashlib
import json
import random
import re
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from operator import methodcaller
from typing import Any, Final

from confluent_kafka import KafkaError, Message, Producer

from halfway.client.errors import HalfwayError

_OF_CONSUMERS: Final = frozenset(
    {
        "allow.auto.create.topics",
        "check.crcs",
        "consume.callback.max.messages",
        "coordinator.query.interval.ms",
        "default.topic.config",
        "heartbeat.interval.ms",
        "isolation.level",
        "max.partition.fetch.bytes",
        "max.poll.interval.ms",
        "on_commit",
        "partition.assignment.strategy",
        "session.timeout.ms",
    }
)
_PREFIXES_OF_CONSUMERS: Final = ("auto.", "enable.auto.", "enable.partition.", "fetch.", "group.", "offset.", "queued.")


_MAX_IDLE_MS: Final = 120_000
_ANSWER_MS: Final = 10_000
_MARGIN_MS: Final = 1_000
_FETCH_WAIT_MS: Final = 500
"""librdkafka's default of `fetch.wait.max.ms`."""


def with_defaults(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings, with ours where librdkafka's own would wait for minutes.

    A firewall or balancer forgets an idle connection, and then drops what is sent on it without a word. So it is closed
    before that, and a connection on which no answer comes is given up.
    """
    fetch_ms = int(settings.get("fetch.wait.max.ms", _FETCH_WAIT_MS))
    return {
        "connections.max.idle.ms": _MAX_IDLE_MS,
        "socket.timeout.ms": max(_ANSWER_MS, fetch_ms + _MARGIN_MS),  # librdkafka refuses a shorter one
        "socket.keepalive.enable": True,
        **settings,
    }


def connection_settings(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings without those that only consumers have: all that is about connections, as it was given."""
    return {
        name: value
        for name, value in settings.items()
        if name not in _OF_CONSUMERS and not name.startswith(_PREFIXES_OF_CONSUMERS)
    }


class RejectedMessageError(HalfwayError):
    """Raise it in a handler if a retry cannot help: the message becomes a dead letter at once."""


@dataclass(frozen=True, kw_only=True)
class Retries:
    """A message is tried `attempts` times. The pause doubles up to `max_pause_s`, and is shortened at random.

    Only the message's own partition waits.
    """

    attempts: int = 5
    first_pause_s: float = 0.5
    max_pause_s: float = 30.0

    def __post_init__(self) -> None:
        """Raise ValueError for settings without an attempt or without a pause."""
        if self.attempts < 1 or not 0 < self.first_pause_s <= self.max_pause_s:
            raise ValueError(f"{self}: give at least 1 attempt, and 0 < first_pause_s <= max_pause_s")

    def pause_s(self, failures: int) -> float:
        """Return the pause in seconds after this many failures in a row."""
        longest = min(self.first_pause_s * 2.0 ** min(failures - 1, 60), self.max_pause_s)
        return longest * random.uniform(0.5, 1)  # noqa: S311 - spreads consumers that failed at the same time


Headers = tuple[tuple[str, bytes | None], ...]

_TRANSACTION_ID: Final = re.compile(rb"[A-Za-z0-9._~-]{1,128}")
_MESSAGE: Final = re.compile(rb"([1-9][0-9]{0,5})/[1-9][0-9]{0,5}")
_SET_BY_HALFWAY: Final = ("halfway-prefix", "halfway-prepared-at")
_read_headers: Final = methodcaller("headers")
"""Calls `message.headers()` in a way that makes Python check the result. A specialised direct call is not checked."""


@dataclass(frozen=True, kw_only=True)
class Record:
    topic: str
    partition: int
    offset: int
    timestamp_ms: int
    key: bytes | None
    value: bytes | None
    headers: Headers

    @classmethod
    def of(cls, message: Any) -> Record:
        """Convert a Message of confluent_kafka that is not an error, or a ConsumerRecord of aiokafka with bytes."""
        if not isinstance(message, Message):
            for part in ("key", "value"):
                if not isinstance(getattr(message, part), bytes | None):
                    raise TypeError(f"the {part} is no bytes: give the consumer no {part}_deserializer, and use json()")
            return cls(
                topic=message.topic,
                partition=message.partition,
                offset=message.offset,
                timestamp_ms=message.timestamp,
                key=message.key,
                value=message.value,
                headers=tuple(message.headers),
            )
        return cls(
            topic=message.topic() or "",
            partition=message.partition() or 0,
            offset=message.offset() or 0,
            timestamp_ms=message.timestamp()[1],
            key=_data(message.key()),
            value=_data(message.value()),
            headers=_headers(message),
        )

    @property
    def id(self) -> str:
        """The id of the record: that of its message, or its place if halfway did not write it.

        A message is identified by transaction and number, and by a digest of its topic, of the headers that only
        halfway sets, and of its key and value. So a copy of it is recognised, and nothing that another group or another
        producer writes is mistaken for it. A transaction id alone can be chosen by others, once it is forgotten.

        A place is topic, partition, offset and timestamp. The timestamp is needed because a topic that is deleted and
        created again has the same offsets.
        """
        message = self._message
        if message is None:
            return f"#{self.topic}/{self.partition}/{self.offset}/{self.timestamp_ms}"
        digest = hashlib.sha256()
        for part in (self.topic.encode(), *map(self.header, _SET_BY_HALFWAY), self.key, self.value):
            digest.update(b"-" if part is None else b"%d:%b" % (len(part), part))
        return f"#{message}/{digest.hexdigest()}"

    @property
    def _message(self) -> str | None:
        """The transaction and the number of the message in it, None if halfway did not write the record."""
        message = _MESSAGE.fullmatch(self.header("halfway-message") or b"")
        if self.transaction_id is None or message is None:
            return None
        return f"{self.transaction_id}/{message[1].decode()}"

    @property
    def transaction_id(self) -> str | None:
        """The id of the message's transaction, None if halfway did not write the record."""
        transaction_id = self.header("halfway-transaction-id") or b""
        return transaction_id.decode() if _TRANSACTION_ID.fullmatch(transaction_id) else None

    def header(self, name: str) -> bytes | None:
        """Return the last value of a header, None if there is none."""
        return next((value for header, value in reversed(self.headers) if header == name), None)

    def json(self) -> Any:
        """Return the value, parsed as JSON."""
        return json.loads(self.value or b"null")


def _headers(message: Message) -> Headers:
    """Return the headers, none if a name is not UTF-8: every producer of the topic can write such a record."""
    try:
        headers = _read_headers(message) or ()
    except SystemError:
        # confluent_kafka's result is invalid then. Its broken headers would crash the process if they were read.
        message.set_headers([])
        return ()
    return tuple((str(header[0]), _data(header[1])) for header in headers)


def _data(data: str | bytes | None) -> bytes | None:
    return data.encode() if isinstance(data, str) else data


class _StandInError(Exception):
    """Takes the place of an exception whose text cannot be encoded, with its traceback."""


def described(error: BaseException | None) -> str:
    """Return the type and the text of an exception, whatever its class does, as text that can be encoded."""
    kind = type(error).__name__
    try:
        text = f"{kind}: {error}"
    except Exception:  # noqa: BLE001 - its class is not ours
        text = f"{kind}: its text cannot be read"
    return text.encode("utf-8", "backslashreplace").decode()


def loggable(error: BaseException | None) -> BaseException | None:
    """Return an exception for `exc_info`: with a text that cannot be encoded, a log would lose the line."""
    try:
        "".join(traceback.format_exception(error)).encode()
    except Exception:  # noqa: BLE001 - the same
        return _StandInError(described(error)).with_traceback(None if error is None else error.__traceback__)
    return error


Delivered = Callable[[str | None], None]
"""Called with None if the dead letter was delivered, and otherwise with the error."""

_DELIVERY_TIMEOUT_S: Final = 30
_MAX_BYTES: Final = 1_000_000_000
_MAX_REASON_CHARACTERS: Final = 1000


class DeadLetters:
    """Writes dead letters to one topic.

    A dead letter has the key, value and headers of its message, and the headers `dead-letter-…`. If it is produced
    unchanged to the original topic, it is processed again. If it fails again, its new headers replace the old ones.
    """

    def __init__(self, settings: Mapping[str, Any], topic: str, group: str) -> None:
        """Take librdkafka's settings, the topic, and the consumer group that writes the dead letters."""
        self._topic = topic
        self._group = group
        self._producer = Producer(
            {
                **connection_settings(settings),
                "acks": "all",
                "enable.idempotence": True,
                "linger.ms": 0,
                "message.timeout.ms": _DELIVERY_TIMEOUT_S * 1000,
                "message.max.bytes": _MAX_BYTES,  # the topic's limit applies
                "partitioner": "murmur2_random",
            }
        )

    def send(self, record: Record, reason: str, attempts: int, delivered: Delivered) -> None:
        """Send a dead letter. A later `poll` or `close` calls `delivered`; if it cannot be sent at all, this does."""

        def on_delivery(error: KafkaError | None, _: Message) -> None:
            delivered(None if error is None else error.str())

        own = {
            "dead-letter-topic": record.topic,
            "dead-letter-partition": str(record.partition),
            "dead-letter-offset": str(record.offset),
            "dead-letter-group": self._group,
            "dead-letter-attempts": str(attempts),
            "dead-letter-reason": reason[:_MAX_REASON_CHARACTERS],
        }
        headers: list[tuple[str, str | bytes | None]] = [
            *(header for header in record.headers if header[0] not in own),
            *own.items(),
        ]
        try:
            self._producer.produce(
                self._topic, key=record.key, value=record.value, headers=headers, on_delivery=on_delivery
            )
        except Exception as error:  # noqa: BLE001 - of whatever others wrote into the record: it is tried again
            delivered(described(error))

    def poll(self) -> None:
        """Call the delivery callbacks that are due."""
        self._producer.poll(0)

    def close(self) -> None:
        """Wait until all sent dead letters are delivered or have failed."""
        self._producer.flush(_DELIVERY_TIMEOUT_S)
        self._producer.close()
