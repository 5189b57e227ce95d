"""A message for a real topic in its JSON format, and the outcomes of a transaction.

After an exception a database may have committed all the same: that is decided here.
"""

from __future__ import annotations

import asyncio
import base64
import json
import re
from collections.abc import Awaitable, Callable, Generator, Iterable, Mapping
from dataclasses import InitVar, dataclass, field
from functools import partial
from inspect import isawaitable
from typing import Any, Final, Literal, Self, TypedDict, cast

from halfway.client.errors import HalfwayError, demand, matches

Data = str | bytes | None
"""Text is sent as UTF-8, bytes are sent unchanged, None is null."""
Serializer = Callable[[Any, Any], Data | Awaitable[Data]]
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
    """A part of a message is none that halfway accepts; the error names the part, and what to give."""


@dataclass(frozen=True, kw_only=True)
class Message:
    """A message that a transaction writes to a topic when it commits."""

    topic: str
    value: Any = None
    """Text, bytes, None (a tombstone), or a mapping or list, which is sent as JSON; any object with a serializer."""
    key: Any = None
    """Text, bytes or None; any object with a serializer."""
    headers: Headers = field(default_factory=dict)
    """A dict afterwards, or a tuple of pairs if a name is repeated. What is added to it later is not sent."""
    partition: int | None = None
    """None lets halfway choose the partition by the key, as Kafka's Java client does."""
    serializer: InitVar[Serializer | None] = None
    key_serializer: InitVar[Serializer | None] = None
    _document: dict[str, Any] = field(init=False, repr=False, compare=False, default_factory=dict)

    def __post_init__(self, serializer: Serializer | None, key_serializer: Serializer | None) -> None:
        """Serialise once: a repeat of a prepare has the same content, whatever the caller does with the value.

        Raises UnserialisableMessageError, and what the serializer raises.
        """
        _demand(matches(_TOPIC, self.topic), "topic", self.topic, _TOPICS)
        pairs = _pairs(self.headers) if self.headers else ()
        headers = dict(pairs)
        self._set("headers", headers)
        if key_serializer is not None:
            self._set("key", key_serializer(self.key, SerializationContext(self.topic, "key", headers)))
        if serializer is not None:
            self._set("value", serializer(self.value, SerializationContext(self.topic, "value", headers)))
        if (serializer or key_serializer) and (isawaitable(self.key) or isawaitable(self.value)):
            self._set("_document", {"pairs": pairs})
        else:
            self._settle(pairs)

    def __await__(self) -> Generator[Any, None, Self]:
        """Wait for asynchronous serializers, such as confluent_kafka's AsyncAvroSerializer, and return the message."""
        if (pairs := self._document.get("pairs")) is not None:
            for name in ("key", "value"):
                if isawaitable(data := getattr(self, name)):
                    self._set(name, (yield from data.__await__()))
            self._settle(pairs)
        return self

    def as_json(self) -> dict[str, Any]:
        """Return the message in the format of `POST /v1/transactions` (docs/api.md, "Prepare")."""
        if "pairs" in self._document:
            raise UnserialisableMessageError("the serializer is asynchronous: give `await Message(...)`")
        return self._document

    def _settle(self, pairs: tuple[tuple[str, Data], ...]) -> None:
        """Make the JSON format, which keeps a copy of what the caller may change."""
        headers, partition = cast("dict[str, Data]", self.headers), cast("object", self.partition)
        if headers and (names := len(dict(pairs))) < len(pairs):
            self._set("headers", (*pairs, *list(headers.items())[names:]))
        document: dict[str, Any] = {"topic": self.topic, "key": _data(self.key, "key"), "value": _value(self.value)}
        if isinstance(self.value, dict | list | tuple):
            self._set("value", document["value"]["data"])
        if self.headers:
            document["headers"] = [_header(name, value) for name, value in _pairs(self.headers)]
        if partition is not None:
            is_number = isinstance(partition, int) and not isinstance(partition, bool) and 0 <= partition < 2**31
            _demand(is_number, "partition", partition, "a number from 0, or None for the key to choose")
            document["partition"] = partition
        self._set("_document", document)

    def _set(self, name: str, value: object) -> None:
        object.__setattr__(self, name, value)


def require_messages(messages: Iterable[Message]) -> tuple[Message, ...]:
    """Return the messages; raises TypeError if they are something else."""
    if isinstance(messages, Message | Mapping | str | bytes):
        raise TypeError(f"messages is a {type(messages).__name__}: give a list, [Message(topic=..., value=...)]")
    messages = tuple(messages)
    for number, message in enumerate(messages):
        if not isinstance(message, Message):
            raise TypeError(f"messages[{number}] is a {type(message).__name__}: give Message(topic=..., value=...)")
    return messages


_TOPIC: Final = re.compile(r"(?!\.{1,2}\Z)[A-Za-z0-9._-]{1,249}")
_TOPICS: Final = "1 to 249 letters, digits and . _ -"
_MAX_DEPTH: Final = 500
"""Of a JSON value. Python reads and writes almost twice as much, less what the stack already holds."""
_HEADER: Final = re.compile(r"(?!halfway-)[^\x00-\x1f\x7f\ud800-\udfff]{1,255}")


_demand = partial(demand, error=UnserialisableMessageError)


def _pairs(headers: Headers) -> tuple[tuple[str, Data], ...]:
    try:
        pairs = tuple(headers.items() if isinstance(headers, Mapping) else headers)
        return tuple([(name, value) for name, value in pairs])
    except (TypeError, ValueError):
        raise UnserialisableMessageError(f"headers is {type(headers).__name__}: give a dict, or pairs") from None


def _header(name: object, value: Data) -> dict[str, object]:
    _demand(matches(_HEADER, name), "the name of a header", name, "1 to 255 characters that do not start with halfway-")
    return {"name": name, "value": _data(value, f"headers[{name!r}]")}


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
        text = json.dumps(value, ensure_ascii=False, allow_nan=False)
        text.encode()
        data = json.loads(text)
        if text.count("[") + text.count("{") > _MAX_DEPTH:
            _demand_shallow(data)
    except (TypeError, ValueError, RecursionError) as error:
        raise UnserialisableMessageError(
            f"value cannot be serialised as JSON ({error}): give str, bytes, None, or a value that json.dumps accepts,"
            f" nested at most {_MAX_DEPTH} deep"
        ) from None
    return {"type": "JSON", "data": data}


def _demand_shallow(data: object) -> None:
    """Raise RecursionError for what could be serialised here, but not within a request, or not read by halfway."""
    level, depth = [data], 0
    while level := [one for one in level if isinstance(one, dict | list)]:
        level = [inner for one in level for inner in (one.values() if isinstance(one, dict) else one)]
        depth += 1
        if depth > _MAX_DEPTH:
            raise RecursionError("too deep")


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
