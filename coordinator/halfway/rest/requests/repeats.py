"""Finds names that occur twice in one object of a body. JSON leaves open which counts, and msgspec takes the last.

A name that occurs in the bytes as often as in the decoded request is not repeated. A few searches show that for most
bodies; any other body is parsed once more. JSON data of the caller is not searched.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from typing import Any, Final

import msgspec

from halfway.rest.requests import models
from halfway.rest.requests.data import TypedData

_DATA: Final = "data"


class _Repeating(dict[str, Any]):
    """An object with a repeated name."""

    names: tuple[str, ...]


def suspicious(request: msgspec.Struct, body: bytes) -> bool:
    """Whether a body that was read as `request` may repeat a name; on the path of every request."""
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
            or _messages_suspicious(request.messages, body)
        )
    if isinstance(request, models.EndRequest):
        return count(b'"outcome"') > 1 or count(b'"id"') > 1 or count(b'"remark"') > 1 or count(b'"check_id"') > 1
    if isinstance(request, models.BatchRequest):
        return count(b'"prepare"') > 1 or count(b'"end"') > 1
    return True


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
