"""Finds names that occur twice in one object of a body. JSON leaves open which counts, and msgspec takes the last.

A body without repeated names has as many quotes as what was decoded from it needs. Counting them shows that for most
bodies, and counting the names for most others; any other body is parsed once more. JSON data of the caller is not
searched.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Final

import msgspec

from halfway.rest.requests import models
from halfway.rest.requests.data import Data, TypedData

_DATA: Final = "data"
_OF_END: Final = (b"outcome", b"id", b"remark", b"check_id", b"n", b"confirm")


class _Repeating(dict[str, Any]):
    """An object with a repeated name."""

    names: tuple[str, ...]


def suspicious(request: msgspec.Struct, body: bytes) -> bool:
    """Whether a body that was read as `request` may repeat a name; on the path of every request."""
    if b"\\\\" not in body and _quotes_in(body) == _quotes_for(request):
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
            or _messages_suspicious(request.messages, body)
        )
    if isinstance(request, models.EndRequest):
        return any(count(b'"%b"' % name) > 1 for name in _OF_END)
    if isinstance(request, models.BatchRequest | models.StreamFrame):
        return count(b'"prepare"') > 1 or count(b'"end"') > 1 or count(b'"checks"') > 1
    return True


def _quotes_in(body: bytes) -> int:
    """Count the quotes that begin or end a string, in JSON that escapes no backslash."""
    return body.count(b'"') - body.count(b'\\"')


def _quotes_for(request: msgspec.Struct) -> int:
    """Return how many such quotes a request has at least: two for each name and each string."""
    if isinstance(request, models.PrepareRequest):
        return _quotes_for_prepare(request)
    if isinstance(request, models.EndRequest):
        return _quotes_for_end(request)
    if isinstance(request, models.StreamChecks):
        return 8
    if isinstance(request, models.WholeBatch):
        return _quotes_for_each(request.prepare) + _quotes_for_each(request.end)
    if isinstance(request, models.WholeStreamFrame):
        items = (request.prepare, request.end, request.checks)
        return sum(_quotes_for_each(each) for each in items)
    return -1


def _quotes_for_prepare(request: models.PrepareRequest) -> int:
    quotes = 6 + 4 * (request.id is not None) + 2 * (request.check_after_s is not None)
    for message in request.messages:
        quotes += 6 + _quotes_for_data(message.value) + 2 * (message.partition is not None)
        if message.key is not None:
            quotes += 2 + _quotes_for_data(message.key)
        if message.headers:
            quotes += 2
            for header in message.headers:
                quotes += 4 if header.value is None else 6 + _quotes_for_data(header.value)
    return quotes + 2 * isinstance(request, models.StreamPrepare)


def _quotes_for_end(request: models.EndRequest) -> int:
    quotes = 4 + 4 * (request.remark is not None) + 4 * (request.check_id is not None)
    if isinstance(request, models.StreamEnd):
        quotes += 2 + 2 * (request.confirm is not None)
    return quotes + 4 * isinstance(request, models.BatchEnd)


def _quotes_for_each(items: Sequence[msgspec.Struct]) -> int:
    """Do as `_quotes_for` for a list and its name; an empty one that is given needs a second look."""
    return sum(map(_quotes_for, items), 2 if items else 0)


def _quotes_for_data(data: Data) -> int:
    if data.__class__ is str:
        return 2
    return 6 + _quotes_in(bytes(data.data)) if isinstance(data, TypedData) else 0


def _messages_suspicious(messages: list[models.Message], body: bytes) -> bool:
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


def repeated(body: bytes, *, within: bool) -> Iterator[tuple[str, str]]:
    """Yield (field, what is wrong) for each repeated name of an object, `within` the outermost one too.

    Raises:
        RecursionError: it is nested too deep.

    """
    # Numbers stay text: none is used, and Python refuses integers of more than 4,300 digits.
    document = json.loads(body, object_pairs_hook=_object, parse_int=str, parse_float=str)
    return _found("", document) if within else _of(document, "")


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    plain = dict(pairs)
    if len(plain) == len(pairs):
        return plain
    repeating = _Repeating(plain)
    repeating.names = tuple(_twice(name for name, _ in pairs))
    return repeating


def _twice(names: Iterable[str]) -> dict[str, None]:
    seen: set[str] = set()
    return {name: None for name in names if name in seen or seen.add(name)}  # type: ignore[func-returns-value]


def _found(path: str, value: Any) -> Iterator[tuple[str, str]]:
    if isinstance(value, list):
        for number, one in enumerate(value):
            yield from _found(f"{path}[{number}]", one)
    elif isinstance(value, dict):
        yield from _of(value, path)
        for name, one in value.items():
            if name != _DATA:
                yield from _found(_under(path, name), one)


def _of(value: object, path: str) -> Iterator[tuple[str, str]]:
    if isinstance(value, _Repeating):
        for name in value.names:
            yield _under(path, name), "given twice in one object: give it once"


def _under(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name
