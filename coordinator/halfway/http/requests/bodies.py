"""The bodies of requests: how much one may hold, and what is wrong with one.

The first wrong field is named with its value and a remedy: msgspec says where it is, and the model's JSON schema what
is valid there. JSON does not define which of two fields with the same name counts, and msgspec takes the last one, so a
body that may have such fields is parsed once more. The fields and items of a body are counted before it is decoded,
because each of them takes time; JSON data of the caller stays bytes and is not searched.
"""

from __future__ import annotations

import asyncio
import binascii
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from functools import cache, lru_cache
from typing import Any, Final, Literal

import msgspec

from halfway.http.responses.problems import MalformedJsonError, invalid
from halfway.protocol.records import MAX_REMARK_BYTES

MAX_MEMBERS: Final = 25_000
"""A thousand messages with ten headers each."""
_SLICE: Final = 8192
"""Tokens to count before yielding to other requests."""

# The tokens of a body without escaped quotes: the start of JSON data, a bracket, a comma, a string.
_TOKEN: Final = re.compile(rb'[^"\[\]{},]*+(?:"data"\s*+:\s*+([\[{])|([\[{])|([\]}])|(,)|"[^"]*+")')
_TOKEN_IN_DATA: Final = re.compile(rb'[^"\[\]{}]*+(?:()([\[{])|([\]}])|()"[^"]*+")')
_MAX_DEPTH: Final = 1024
"""The decoder refuses deeper nesting."""


def weight(body: bytes) -> int:
    """Estimate how many fields and items a body has, including those of JSON data and of strings."""
    return body.count(b",") + body.count(b"{") + body.count(b"[")


async def demand_few_members(body: bytes) -> None:
    """Refuse a body with more than `MAX_MEMBERS` fields and items. Other requests can run during the count.

    Raises:
        InvalidRequestError: the body has more.

    """
    if body.count(b",") <= MAX_MEMBERS:
        return
    await asyncio.sleep(0)
    plain = body.replace(b"\\\\", b"")
    await asyncio.sleep(0)
    plain = plain.replace(b'\\"', b"")
    members = tokens = position = depth = 0
    data_depth: int | None = None
    while depth <= _MAX_DEPTH:
        token = (_TOKEN if data_depth is None else _TOKEN_IN_DATA).match(plain, position)
        if token is None:
            return  # the end, or not JSON, which the decoder refuses
        position = token.end()
        data, opening, closing, comma = token.groups()
        if closing is not None:
            depth -= 1
            if data_depth == depth:
                data_depth = None
        elif data or opening is not None:
            data_depth = depth if data else data_depth
            depth += 1
        elif comma:
            members += 1
            if members > MAX_MEMBERS:
                raise invalid([("", f"more than {MAX_MEMBERS} fields and items in one body: send fewer at once")])
        tokens += 1
        if tokens % _SLICE == 0:
            await asyncio.sleep(0)


class TypedData(msgspec.Struct, frozen=True, forbid_unknown_fields=True, gc=False):
    """A key or a value with its type, as in Confluent's REST v3."""

    type: Literal["STRING", "JSON", "BINARY"]
    data: msgspec.Raw
    """STRING: a string. JSON: any JSON; its bytes are kept unchanged. BINARY: a string of base64."""


Data = str | TypedData | None

_STRING = msgspec.json.Decoder(str)


def to_bytes(data: Data) -> bytes | None:
    """Return the bytes of a key or a value, None for null.

    Raises:
        ValueError: the data does not fit its type, or is not UTF-8.

    """
    if data is None:
        return None
    if isinstance(data, str):
        return data.encode()
    raw = bytes(data.data)
    if data.type == "JSON":
        raw.decode()  # msgspec does not validate the UTF-8 of raw strings
        return raw
    text = _STRING.decode(raw)
    return text.encode() if data.type == "STRING" else from_base64(text)


def from_base64(text: str) -> bytes:
    """Return the bytes of standard base64 with padding; raise ValueError for anything else."""
    return binascii.a2b_base64(text.encode("ascii"), strict_mode=True)


@lru_cache(maxsize=4096)
def topic_refusal(topic: str, internal_prefix: str) -> str | None:
    """Return why a topic name is refused, None if it is accepted. The pattern validates its characters."""
    if topic in (".", ".."):
        return "Kafka allows no topic with this name"
    if topic.startswith(internal_prefix):
        return f"topics that start with {internal_prefix} are halfway's own"
    return None


def remark_fits(remark: str) -> bool:
    """Return whether a remark is at most 1 KiB in UTF-8."""
    return len(remark) * 4 <= MAX_REMARK_BYTES or len(remark.encode()) <= MAX_REMARK_BYTES


# --- the first wrong field

MAX_COMPARED_BYTES: Final = 1024 * 1024
MAX_COMPARED_WEIGHT: Final = 20_000
"""A body with more bytes, or more fields and items, is not searched for repeated names."""
SHOWN: Final = 60
"""Shown characters of a value or a name."""
_ANY_JSON: Final = msgspec.json.Decoder(msgspec.Raw)
_MEMBERS: Final = msgspec.json.Decoder(dict[str, msgspec.Raw])
_ITEMS: Final = msgspec.json.Decoder(list[msgspec.Raw])
_NAMED_FIELD: Final = re.compile(r"Object (contains unknown|missing required) field `(.*)`", re.DOTALL)
_PART: Final = re.compile(r"\[(\d+)\]|(\w+)")
_DATA: Final = "data"
_SHOWN_MESSAGE_FIELDS: Final = ("topic", "partition")
_NOUNS: Final[Mapping[str, str]] = {
    "object": "an object",
    "array": "a list",
    "string": "a string",
    "integer": "a whole number",
    "number": "a number",
    "boolean": "true or false",
    "null": "null",
}
_TYPES: Final[Mapping[bytes, str]] = {b"{": "object", b"[": "list", b'"': "string", b"t": "boolean", b"f": "boolean"}

Schema = dict[str, Any]
Path = tuple[str | int, ...]


def first_fault(model: type[Any], body: bytes | msgspec.Raw, error: msgspec.ValidationError) -> tuple[str, str]:
    """Return the first wrong field of a body, and what is wrong with it, from the error of its decoder."""
    text, _, place = str(error).rpartition(" - at `$")
    path: Path = tuple(name or int(index) for index, name in _PART.findall(place)) if text else ()
    named = _NAMED_FIELD.fullmatch(text or str(error))
    if named is None:
        return _joined(path), wording(_shown_value(body, path), schemas_at(model, path))
    field = _joined((*path, named[2]))
    if named[1] == "missing required":
        return field, "missing: it is required"
    known = [name for schema in schemas_at(model, path) for name in schema.get("properties", ())]
    return field, f"not a known field; known fields: {', '.join(known)}"


def demand_json(body: bytes | msgspec.Raw, noun: str) -> None:
    """Raise MalformedJsonError if a body is not JSON after its first wrong field."""
    try:
        _ANY_JSON.decode(body)
    except RecursionError:
        raise MalformedJsonError(f"{noun} is nested too deep") from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise MalformedJsonError(f"{noun} is not one JSON document: {error}") from None


@cache
def _schema_of(model: Any) -> tuple[Schema, dict[str, Schema]]:
    (schema,), components = msgspec.json.schema_components((model,), ref_template="{name}")
    return schema, components


def schemas_at(model: Any, path: Path) -> list[Schema]:
    schema, components = _schema_of(model)
    found = list(_choices(schema, components))
    for part in path:
        inner = [one["items"] if isinstance(part, int) else one["properties"][part] for one in found if _has(one, part)]
        found = [choice for one in inner for choice in _choices(one, components)]
    return found


def _has(schema: Schema, part: str | int) -> bool:
    return "items" in schema if isinstance(part, int) else part in schema.get("properties", ())


def _choices(schema: Schema, components: Mapping[str, Schema]) -> Iterator[Schema]:
    """Yield a schema, or each that a value may have instead."""
    if "$ref" in schema:
        yield components[schema["$ref"]]
    else:
        for one in schema.get("anyOf", ()):
            yield from _choices(one, components)
        if "anyOf" not in schema:
            yield schema


def wording(shown: str, valid: Sequence[Schema]) -> str:
    """Return the fault of a value from its text and the schemas of valid values."""
    names = [str(name) for schema in valid for name in schema.get("enum", ())]
    if names:
        return f"{shown} is not one of {', '.join(names)}"
    *rest, last = [_expected(schema) for schema in valid] or [""]
    return mismatch(shown, f"{', '.join(rest)} or {last}" if rest else last)


def _expected(schema: Schema) -> str:
    """Return a description of valid values; that of an object's model would describe the model."""
    kind = str(schema.get("type"))
    if kind == "object":
        return "an object with type and data" if schema.get("title") == TypedData.__name__ else "an object"
    return str(schema.get("description") or _NOUNS.get(kind, ""))


def mismatch(shown: str, expected: str) -> str:
    """Return the fault of a value, from its text and a description of valid values; empty if there is none."""
    return f"{shown} is not valid: expected {expected}" if expected else f"{shown} is not valid"


def short(value: str) -> str:
    """Return a text as JSON, cut to `SHOWN` characters. It can always be encoded."""
    return _cut(json.dumps(value[: 2 * SHOWN]))


def _cut(text: str) -> str:
    return text if len(text) <= SHOWN else text[: SHOWN - 1] + "…"


def _shown_value(body: bytes | msgspec.Raw, path: Path) -> str:
    """Return the wrong value, or only its type if it may contain payload, because errors are logged."""
    value = msgspec.Raw(bytes(body))
    try:
        for part in path:
            value = _ITEMS.decode(value)[part] if isinstance(part, int) else _MEMBERS.decode(value)[part]
    except (msgspec.DecodeError, LookupError):
        return "this value"  # another field of the same name hides it
    text = bytes(value).strip()
    if not path or ("messages" in path and path[-1] not in _SHOWN_MESSAGE_FIELDS):
        return f"this {'null' if text == b'null' else _TYPES.get(text[:1], 'number')}"
    return _cut(" ".join(text[: 4 * SHOWN].decode(errors="replace").split()))


def _joined(path: Path) -> str:
    """Return a place as text; a name of the caller's is cut and can always be encoded."""
    text = ""
    for part in path:
        if isinstance(part, int):
            text += f"[{part}]"
        else:
            name = part[:SHOWN].encode(errors="backslashreplace").decode()
            text += f".{name}" if text else name
    return text


# --- repeated names

_ENCODER: Final = msgspec.json.Encoder()


def may_repeat(request: msgspec.Struct, body: bytes) -> bool:
    """Return whether a body that was read as `request` may repeat a name. It runs for every request.

    A name that is given twice is a string that the request does not have. A default that is given is one, too.
    """
    return _strings_in(body) != _strings_in(_ENCODER.encode(request))


def _strings_in(text: bytes) -> int:
    """Count the quotes in JSON that begin or end a string: a name, or a value."""
    if b"\\" not in text:
        return text.count(b'"')
    if b"\\\\" in text:
        text = text.replace(b"\\\\", b"")
    return text.count(b'"') - text.count(b'\\"')


def demand_single(body: bytes, *, within: bool) -> None:
    """Refuse a repeated name in the outermost object, and with `within` in nested objects too.

    A body that is too large to search is accepted as it was read.

    Raises:
        InvalidRequestError: it names the first one.
        RecursionError: the body is nested too deep.

    """
    if weight(body) > MAX_COMPARED_WEIGHT:
        return
    # Numbers stay text: they are not used, and Python refuses integers with more than 4,300 digits.
    document = json.loads(body, object_pairs_hook=tuple, parse_int=str, parse_float=str)
    for path in _repeated(document, (), within=within):
        raise invalid([(_joined(path), "occurs twice in one object: send it once")])


def _repeated(value: object, path: Path, *, within: bool) -> Iterator[Path]:
    """Yield the place of each repeated name. An object is a tuple of its members."""
    if isinstance(value, list):
        for index, item in enumerate(value):
            yield from _repeated(item, (*path, index), within=within)
    elif isinstance(value, tuple):
        seen = set()
        for name, member in value:
            if name in seen:
                yield (*path, name)
            seen.add(name)
            if within and name != _DATA:
                yield from _repeated(member, (*path, name), within=within)
