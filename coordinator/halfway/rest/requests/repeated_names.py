"""Finds JSON bodies that may give a name twice, cheaply: it counts strings, so it need not read the body again.

msgspec takes the last of two equal names. A body that may have some is refused, or read a second time.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from halfway.rest.requests import models
from halfway.rest.requests.data import Data, TypedData

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import msgspec

_OF_END: Final = (b"outcome", b"id", b"remark", b"check_id", b"n", b"confirm")


def may_repeat_a_name(request: msgspec.Struct, body: bytes) -> bool:
    """Return whether a body that was read as `request` may repeat a name. It runs for every request."""
    if b"\\\\" not in body and _strings_in(body) == _strings_of(request):
        return False
    # A letter or an underscore of a name may be written as an escape.
    if b"\\u00" in body and (b"\\u005" in body or b"\\u006" in body or b"\\u007" in body):
        return True
    count = body.count
    if isinstance(request, models.PrepareRequest):
        return (
            count(b'"group"') > 1
            or count(b'"messages"') > 1
            or count(b'"id"') > 1
            or count(b'"check_after_s"') > 1
            or count(b'"n"') > 1
            or _messages_may_repeat(request.messages, body)
        )
    if isinstance(request, models.EndRequest):
        return any(count(b'"%b"' % name) > 1 for name in _OF_END)
    if isinstance(request, models.BatchRequest | models.StreamFrame):
        return count(b'"prepare"') > 1 or count(b'"end"') > 1 or count(b'"checks"') > 1
    return True


def _strings_in(body: bytes) -> int:
    """Count the strings, names among them, in JSON that escapes no backslash: each begins and ends with a quote."""
    return (body.count(b'"') - body.count(b'\\"')) // 2


def _strings_of(request: msgspec.Struct) -> int:
    """Return how many strings a request has if it repeats no name: each name, and each value that is a string.

    -1 for a request whose strings are not counted. A name with the value null is not counted either: it needs a second
    look.
    """
    if isinstance(request, models.WholeBatch):
        return _strings_of_each(request.prepare) + _strings_of_each(request.end)
    if isinstance(request, models.WholeStreamFrame):
        items = (request.prepare, request.end, request.checks)
        return sum(_strings_of_each(each) for each in items)
    count = _STRINGS_OF.get(type(request))
    return -1 if count is None else count(request)


def _strings_of_prepare(request: models.PrepareRequest) -> int:
    strings = 3 + isinstance(request, models.StreamPrepare)  # group, its value, messages; n
    strings += 2 * (request.id is not None) + (request.check_after_s is not None)
    for message in request.messages:
        value, key = message.value, message.key
        strings += 3 + (message.partition is not None)  # topic, its value, value
        strings += 1 if value.__class__ is str else _strings_of_data(value)
        if key is not None:
            strings += 2 if key.__class__ is str else 1 + _strings_of_data(key)
        if message.headers:
            strings += 1
            for header in message.headers:
                strings += 2 if header.value is None else 3 + _strings_of_data(header.value)  # name, its value, value
    return strings


def _strings_of_end(request: models.EndRequest) -> int:
    strings = 2 + 2 * (request.remark is not None) + 2 * (request.check_id is not None)  # outcome, its value
    if isinstance(request, models.StreamEnd):
        strings += 1 + (request.confirm is not None)  # n
    return strings + 2 * isinstance(request, models.BatchEnd)  # id, its value


_STRINGS_OF: Final[dict[type, Callable[[Any], int]]] = {
    models.PrepareRequest: _strings_of_prepare,
    models.StreamPrepare: _strings_of_prepare,
    models.EndRequest: _strings_of_end,
    models.BatchEnd: _strings_of_end,
    models.StreamEnd: _strings_of_end,
    models.StreamChecks: lambda _: 4,  # n, group, its value, max
}


def _strings_of_each(items: Sequence[msgspec.Struct]) -> int:
    """Do as `_strings_of` for a list of one kind and its name; an empty one that is given needs a second look."""
    return sum(map(_STRINGS_OF[type(items[0])], items), 1) if items else 0


def _strings_of_data(data: Data) -> int:
    if data.__class__ is str:
        return 1
    return 3 + _strings_in(bytes(data.data)) if isinstance(data, TypedData) else 0  # type, its value, data


def _messages_may_repeat(messages: list[models.Message], body: bytes) -> bool:
    each = len(messages)
    values, keys, partitions, lists, names, typed = each, 0, 0, 0, 0, 0
    for message in messages:
        if message.key is not None:
            keys += 1
            typed += message.key.__class__ is TypedData
        typed += message.value.__class__ is TypedData
        partitions += message.partition is not None
        if message.headers:
            lists += 1
            names += len(message.headers)
            for header in message.headers:
                values += header.value is not None
                typed += header.value.__class__ is TypedData
    count = body.count
    return (
        count(b'"topic"') > each
        or count(b'"value"') > values
        or count(b'"key"') > keys
        or count(b'"partition"') > partitions
        or count(b'"headers"') > lists
        or count(b'"name"') > names
        or count(b'"type"') > typed
        or count(b'"data"') > typed
    )
