"""A message for a real topic in its JSON format, and the outcomes of a transaction.

After an exception a database may have committed all the same: that is decided here.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import copy
import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import InitVar, dataclass, field
from typing import Any, Final, Literal, TypedDict

from halfway.client.errors import HalfwayError

Data = str | bytes | None
"""Text is sent as UTF-8, bytes are sent unchanged, None is null."""
Serializer = Callable[[Any, Any], Data]
"""Takes a key or value and a `SerializationContext`, as confluent_kafka's `AvroSerializer` does."""


@dataclass(frozen=True)
class SerializationContext:
    """What a serializer is told, with the names of `confluent_kafka.serialization`."""

    topic: str
    field: Literal["key", "value"]
    headers: dict[str, Data]
    """Those of the message; a serializer may add some."""


Headers = Mapping[str, Data] | Iterable[tuple[str, Data]]
"""Pairs may repeat a name, as Kafka allows it; so may a mapping such as multidict's."""


class MessageOptions(TypedDict, total=False):
    """The keyword parameters of `send`, which are those of `Message`."""

    headers: Headers
    partition: int | None
    serializer: Serializer | None
    key_serializer: Serializer | None


class UnserialisableMessageError(HalfwayError, TypeError):
    """A part of a message cannot be serialised; the error names the part and the accepted types."""


@dataclass(frozen=True, kw_only=True)
class Message:
    """A message that a transaction writes to a topic when it commits."""

    topic: str
    value: Any = None
    """Text, bytes, None (a tombstone), or a mapping or list, which is sent as JSON; any object with a serializer."""
    key: Any = None
    """Text, bytes or None; any object with a serializer."""
    headers: Headers = field(default_factory=dict)
    """A dict afterwards, or a tuple of pairs if a name is repeated."""
    partition: int | None = None
    """None lets halfway choose the partition by the key, as Kafka's Java client does."""
    serializer: InitVar[Serializer | None] = None
    key_serializer: InitVar[Serializer | None] = None

    def __post_init__(self, serializer: Serializer | None, key_serializer: Serializer | None) -> None:
        """Serialise or copy once: a repeat of a prepare has the same content, whatever the caller does with the value.

        Raises what the serializer raises.
        """
        pairs = _pairs(self.headers)
        headers = dict(pairs)
        names = len(headers)
        if key_serializer is not None:
            object.__setattr__(self, "key", key_serializer(self.key, SerializationContext(self.topic, "key", headers)))
        if serializer is not None:
            object.__setattr__(
                self, "value", serializer(self.value, SerializationContext(self.topic, "value", headers))
            )
        added = list(headers.items())[names:]
        object.__setattr__(self, "headers", headers if names == len(pairs) else (*pairs, *added))
        if not isinstance(self.value, str | bytes | None):
            with contextlib.suppress(Exception):  # what cannot be copied is no JSON either, as `as_json` says
                object.__setattr__(self, "value", copy.deepcopy(self.value))

    def as_json(self) -> dict[str, Any]:
        """Return the message in the format of `POST /v1/transactions` (docs/api.md, "Prepare")."""
        document: dict[str, Any] = {"topic": self.topic, "key": _data(self.key, "key"), "value": _value(self.value)}
        if self.headers:
            document["headers"] = [
                {"name": name, "value": _data(value, f"headers[{name!r}]")} for name, value in _pairs(self.headers)
            ]
        if self.partition is not None:
            document["partition"] = self.partition
        return document


def require_messages(messages: Iterable[Message]) -> tuple[Message, ...]:
    """Return the messages; raises TypeError if they are something else."""
    if isinstance(messages, Message | Mapping | str | bytes):
        raise TypeError(f"messages is a {type(messages).__name__}: give a list, [Message(topic=..., value=...)]")
    messages = tuple(messages)
    for number, message in enumerate(messages):
        if not isinstance(message, Message):
            raise TypeError(f"messages[{number}] is a {type(message).__name__}: give Message(topic=..., value=...)")
    return messages


def _pairs(headers: Headers) -> tuple[tuple[str, Data], ...]:
    return tuple(headers.items() if isinstance(headers, Mapping) else headers)


def _data(data: object, part: str) -> object:
    match data:
        case None:
            return data
        case str():
            try:
                data.encode()
            except UnicodeEncodeError as error:
                raise UnserialisableMessageError(f"{part} cannot be encoded as UTF-8 ({error}): give bytes") from None
            return data
        case bytes() | bytearray() | memoryview():
            return {"type": "BINARY", "data": base64.b64encode(data).decode()}
        case _:
            raise UnserialisableMessageError(f"{part} is {type(data).__name__}: give str, bytes or None")


def _value(value: object) -> object:
    if value is None or isinstance(value, str | bytes | bytearray | memoryview):
        return _data(value, "value")
    try:
        json.dumps(value, ensure_ascii=False, allow_nan=False).encode()
    except (TypeError, ValueError, RecursionError) as error:
        raise UnserialisableMessageError(
            f"value cannot be serialised as JSON ({error}): give str, bytes, None, or a value that json.dumps accepts"
        ) from None
    return {"type": "JSON", "data": value}


Outcome = Literal["commit", "rollback", "unknown"]
"""`unknown` leaves the transaction to check-back."""

OUTCOMES: Final = frozenset({"commit", "rollback", "unknown"})


_UNCERTAIN: Final = frozenset({"OperationalError", "InterfaceError", "InternalError", "PostgresConnectionError"})
"""Names of driver errors after which a commit may have succeeded: those of PEP 249, and of asyncpg."""
_UNCERTAIN_STATES: Final = ("08", "57", "58", "F0", "XX", "40003")
"""SQLSTATEs of PostgreSQL that leave a commit uncertain: lost connections, shutdowns, broken servers."""
_ROLLED_BACK_NUMBERS: Final = frozenset({1205, 1213, 3572})
"""Errors of MySQL and MariaDB that answer a statement before the commit: lock waits and deadlocks."""
_CONFLICT_STATES: Final = frozenset({"40001", "40P01", "55P03"})
"""SQLSTATEs of PostgreSQL: a serialization failure, a deadlock, a lock that is not available."""
_CONFLICT_NUMBERS: Final = _ROLLED_BACK_NUMBERS | {1020}
"""Errors of MySQL and MariaDB; 1020 is an outdated snapshot."""
_SQLITE_BUSY: Final = frozenset({5, 6})
"""SQLite's `database is locked` and `table is locked`: nothing was committed."""


def may_have_committed(error: BaseException | None) -> bool:
    """Return whether an exception, or one of its causes, may come from a commit whose answer was lost."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        if _is_uncertain(error):
            return True
        if isinstance(error, BaseExceptionGroup) and any(map(may_have_committed, error.exceptions)):
            return True
        error = error.__cause__ or error.__context__
    return False


def is_conflict(error: BaseException | None) -> bool:
    """Return whether the database refused a statement because of another transaction, so that a retry may succeed."""
    if error is None:
        return False
    original = getattr(error, "orig", None) or error.__cause__  # SQLAlchemy's and Django's errors wrap the driver's
    code = getattr(error, "sqlite_errorcode", None)
    return (
        (isinstance(code, int) and code & 0xFF in _SQLITE_BUSY)
        or _sqlstate(error) in _CONFLICT_STATES
        or bool(error.args and error.args[0] in _CONFLICT_NUMBERS)
        or is_conflict(original)
    )


def _sqlstate(error: BaseException) -> str | None:
    state = getattr(error, "sqlstate", None) or getattr(error, "pgcode", None)  # psycopg2's name
    return state if isinstance(state, str) else None


def _is_uncertain(error: BaseException) -> bool:
    original = getattr(error, "orig", None)  # SQLAlchemy's errors wrap the driver's
    if isinstance(original, BaseException):
        return _is_uncertain(original)
    if not isinstance(error, Exception) or isinstance(error, OSError | asyncio.CancelledError):
        return True
    if (state := _sqlstate(error)) is not None:
        return state.startswith(_UNCERTAIN_STATES)
    if not any(kind.__name__ in _UNCERTAIN for kind in type(error).__mro__):
        return False
    code = getattr(error, "sqlite_errorcode", None)
    if isinstance(code, int):
        return code & 0xFF not in _SQLITE_BUSY
    return not (error.args and error.args[0] in _ROLLED_BACK_NUMBERS)
