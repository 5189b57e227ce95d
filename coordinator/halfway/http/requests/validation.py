"""The one place where bodies and parameters are validated, counted and converted to the service's requests.

The fields and items of a body are counted before it is decoded, because each of them takes time; JSON data of the
caller stays bytes and is not searched. Then msgspec decodes it in one pass. The first wrong field is named with its
value and a remedy: msgspec says where it is, and the model's JSON schema what is valid there. JSON does not define
which of two fields with the same name counts, and msgspec takes the last one, so a body that may have such fields (a
count of its strings shows it) is parsed once more.
"""

from __future__ import annotations

import asyncio
import binascii
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache, lru_cache
from typing import Any, Final, TypeVar

import msgspec
from msgspec import UNSET, UnsetType

from halfway.coordinator.requests import End, GroupSpec, ListQuery, Prepare
from halfway.http.requests import models
from halfway.http.requests.models import Data, TypedData
from halfway.http.responses import EmptyBodyError, MalformedJsonError, invalid
from halfway.protocol.ids import canonical
from halfway.protocol.records import MAX_REMARK_BYTES, CheckMode, PolicyOverrides, url_refusal
from halfway.protocol.records import Message as Payload
from halfway.protocol.transactions import Cause

MAX_MEMBERS: Final = 25_000
"""A thousand messages with ten headers each."""
_SLICE: Final = 8192
"""Tokens to count before yielding to other requests."""

# The tokens of a body without escaped quotes: the start of JSON data, a bracket, a comma, a string.
_TOKEN: Final = re.compile(rb'[^"\[\]{},]*+(?:"data"\s*+:\s*+([\[{])|([\[{])|([\]}])|(,)|"[^"]*+")')
_TOKEN_IN_DATA: Final = re.compile(rb'[^"\[\]{}]*+(?:()([\[{])|([\]}])|()"[^"]*+")')
_MAX_DEPTH: Final = 1024
"""The decoder refuses deeper nesting."""


async def demand_few_members(body: bytes) -> None:
    """Refuse a body with more than `MAX_MEMBERS` fields and items. Other requests can run during the count.

    Raises InvalidRequestError: the body has more.
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


_STRING = msgspec.json.Decoder(str)


def to_bytes(data: Data | UnsetType) -> bytes | None:
    """Return the bytes of a key or a value, None for null, or if it is left out.

    Raises ValueError: the data does not fit its type, or is not UTF-8.
    """
    if data is None or data is UNSET:
        return None
    if isinstance(data, str):
        return data.encode()
    raw = bytes(data.data)
    if data.type == "JSON":
        raw.decode()  # msgspec does not validate the UTF-8 of raw strings
        return raw
    text = _STRING.decode(raw)
    return text.encode() if data.type == "STRING" else binascii.a2b_base64(text.encode("ascii"), strict_mode=True)


@lru_cache(maxsize=4096)
def topic_refusal(topic: str, internal_prefix: str) -> str | None:
    """Return why a topic name is refused, None if it is accepted. The pattern validates its characters."""
    if topic in (".", ".."):
        return "Kafka allows no topic with this name"
    if topic.startswith(internal_prefix):
        return f"topics that start with {internal_prefix} are halfway's own"
    return None


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
        return _joined(path), mismatch(_shown_value(body, path), _expected_of(schemas_at(model, path)))
    field = _joined((*path, named[2]))
    if named[1] == "missing required":
        return field, f"missing: expected {_expected_of(schemas_at(model, (*path, named[2])))}"
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


def _expected_of(valid: Sequence[Schema]) -> str:
    names = [str(name) for schema in valid for name in schema.get("enum", ())]
    return f"one of {', '.join(names)}" if names else _series([_expected(schema) for schema in valid], "or")


def _series(words: Sequence[str], conjunction: str) -> str:
    *rest, last = words or [""]
    return f"{', '.join(rest)} {conjunction} {last}" if rest else last


def _expected(schema: Schema) -> str:
    """Return a description of valid values; that of an object's model would describe the model."""
    kind = str(schema.get("type"))
    if kind == "object":
        return f"an object with {_series(list(schema.get('properties', ())), 'and')}"
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

    A name that is given twice is a string that the request does not have. One that is given as null, or as an empty
    list, is a string that it has: only what was left out is UNSET.
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
    if sum(map(body.count, (b",", b"{", b"["))) > MAX_COMPARED_WEIGHT:  # an estimate: it counts those in strings, too
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


CAUSE_HEADER: Final = "Halfway-Cause"
MAX_ERRORS: Final = 50
"""Parameters that are named in one error."""

M = TypeVar("M", bound=msgspec.Struct)
R = TypeVar("R")
G = TypeVar("G")
P = TypeVar("P", bound=msgspec.Struct)
Action = TypeVar("Action", bound=models.ActionRequest)

_CREDENTIALS: Final = re.compile(r"//[^/?#]*@")
_OPERATIONS: Final = (models.StreamPrepare, models.StreamEnd, models.StreamChecks)
_READ_ONE_BY_ONE: Final = (models.BatchRequest, models.StreamFrame)
"""Bodies whose items are read for themselves."""


class FieldRefusedError(Exception):
    """A field is refused for a reason that msgspec cannot check."""

    def __init__(self, field: str, detail: str) -> None:
        super().__init__(detail)
        self.field = field
        self.detail = detail


class Validation:
    """Reads bodies, and converts them."""

    def __init__(self, *, internal_prefix: str) -> None:
        """Refuse topics that begin with `internal_prefix`."""
        self._internal_prefix = internal_prefix

    def read(self, model: type[M], body: bytes | msgspec.Raw, convert: Callable[[M], R]) -> R:
        """Return what `convert` makes of a JSON body.

        Raises:
            EmptyBodyError, MalformedJsonError: the body is not JSON.
            InvalidRequestError: it names the first wrong field.
        """
        try:
            request = _decoder(model).decode(body)
            converted = convert(request)
            data = bytes(body)
            if len(data) <= MAX_COMPARED_BYTES and may_repeat(request, data):
                demand_single(data, within=model not in _READ_ONE_BY_ONE)
        except msgspec.ValidationError as error:
            demand_json(body, _noun(model))
            fault = first_fault(model, body, error)
        except FieldRefusedError as error:
            fault = error.field, error.detail
        except msgspec.DecodeError as error:
            if not bytes(body):
                raise EmptyBodyError from None
            raise MalformedJsonError(f"{_noun(model)} is not one JSON document: {error}") from None
        except RecursionError:
            raise MalformedJsonError(f"{_noun(model)} is nested too deep") from None
        except UnicodeDecodeError:
            raise MalformedJsonError(f"{_noun(model)} is not UTF-8") from None
        else:
            return converted
        raise invalid([fault], noun=_noun(model))

    def read_whole(self, model: type[M], body: bytes, convert: Callable[[M], R]) -> R | None:
        """Return what `convert` makes of the many items of a body.

        None if one of them is wrong, or may be: reading them one by one then gives each its own answer.
        """
        try:
            request = _decoder(model).decode(body)
            converted = convert(request)
        except (msgspec.MsgspecError, FieldRefusedError, RecursionError, UnicodeDecodeError):
            return None
        return None if may_repeat(request, body) else converted

    def to_prepare(self, request: models.PrepareRequest) -> Prepare:
        after, own, prefix = given(request.check_after_s), given(request.id), self._internal_prefix
        return Prepare(
            group=request.group,
            messages=tuple([_payload(number, message, prefix) for number, message in enumerate(request.messages)]),
            id=None if own is None else canonical(own),
            check_after_ms=None if after is None else round(after * 1000),
        )

    def to_group(self, request: models.GroupRequest | models.GroupAdditions, name: str) -> GroupSpec:
        """Return the service's form of a group, or of what is added to it."""
        check = request.check or models.CheckBy(mode="pull")
        if check.mode == "pull" and check.urls:
            raise FieldRefusedError("check", "mode pull fetches its checks: leave out urls, or the mode")
        if check.mode != "pull" and check.urls is not None and not check.urls:
            raise FieldRefusedError("check.urls", mismatch("[]", "a list of 1 to 10 URLs"))
        if check.mode != "pull" and check.urls is None:
            raise FieldRefusedError("check", 'give urls, or "mode": "pull"')
        for number, url in enumerate(check.urls or ()):
            refusal = url_refusal(url)
            if refusal is not None:
                raise FieldRefusedError(
                    f"check.urls[{number}]", f"{short(_CREDENTIALS.sub('//...@', url))} is not valid: {refusal}"
                )
        for number, topic in enumerate(request.topics or ()):
            _demand_topic(topic, self._internal_prefix, f"topics[{number}]")
        return GroupSpec(
            name=name,
            mode=CheckMode.PULL if check.mode == "pull" else CheckMode.PUSH,
            urls=tuple(dict.fromkeys(check.urls or ())),
            topics=tuple(dict.fromkeys(request.topics or ())),
            policy=request.policy or PolicyOverrides(),
            limits=request.limits,
            reject_prepares=request.reject_prepares,
            adds=isinstance(request, models.GroupAdditions),
            keeps_checks=request.check is None,
            validate_only=request.validate_only,
        )


@cache
def _decoder(model: Any) -> msgspec.json.Decoder[Any]:
    return msgspec.json.Decoder(model)


def _noun(model: type) -> str:
    """Return what errors call a whole document."""
    if model is models.StreamFrame:
        return "the frame"
    return "the operation" if model in _OPERATIONS else "the body"


def to_end(request: models.EndRequest, transaction_id: str, cause: Cause) -> End:
    _demand_remark(request.remark)
    return End(
        id=canonical(transaction_id),
        outcome=request.outcome,
        remark=given(request.remark),
        check_id=given(request.check_id),
        cause=cause,
    )


def given(value: G | UnsetType | None) -> G | None:
    """Return the value of a field, None if it is left out."""
    return None if value is UNSET else value


def to_batch_end(request: models.BatchEnd, cause: Cause) -> End:
    return to_end(request, request.id, cause)


def to_action(request: Action) -> Action:
    """Return a check or a resume whose remark is not too long."""
    _demand_remark(request.remark)
    return request


def _demand_remark(remark: str | UnsetType | None) -> None:
    if isinstance(remark, str) and len(remark) * 4 > MAX_REMARK_BYTES and len(remark.encode()) > MAX_REMARK_BYTES:
        raise FieldRefusedError("remark", mismatch(short(remark), f"at most {MAX_REMARK_BYTES} bytes"))


def to_list_query(given: models.ListParameters, now: int) -> ListQuery:
    """Return the service's form of what a list asks for; `now` in ms since the epoch."""
    younger, older = given.younger_than_s, given.older_than_s
    return ListQuery(
        state=given.state,
        group=given.group,
        topic=given.topic,
        key=None if given.key is None else given.key.encode(),
        id=None if given.id is None else canonical(given.id),
        prepared_from=None if younger is None else now - round(younger * 1000),
        prepared_until=None if older is None else now - round(older * 1000),
        cause=given.cause,
        error=given.error,
        limit=given.limit,
        cursor=given.cursor,
    )


def path_parameter(name: str, value: str, kind: Any) -> str:
    """Return a part of the path that satisfies the pattern of its type; InvalidRequestError otherwise."""
    meta: msgspec.Meta = kind.__metadata__[0]
    if re.search(meta.pattern or "", value) is None:
        raise invalid([(name, mismatch(short(value), meta.description or ""))])
    return value


def transaction_parameter(value: str) -> str:
    """Return the transaction id in the path, in lower case; InvalidRequestError if it is none."""
    return canonical(path_parameter("id", value, models.TransactionId))


def parameters(model: type[P], given: Mapping[str, str], repeated: Sequence[str] = ()) -> P:
    """Return query parameters as a model; every wrong, unknown or repeated one is named."""
    if not given:
        return model()
    fields = {field.name: field for field in msgspec.structs.fields(model)}
    errors = [(name, "given more than once") for name in repeated]
    values = {}
    for name, value in given.items():
        if name not in fields:
            errors.append((name[:SHOWN], f"not a known parameter; there are {', '.join(fields)}"))
            continue
        try:
            values[name] = msgspec.convert(value, fields[name].type, strict=False)
        except msgspec.ValidationError:
            valid = [schema for schema in schemas_at(model, (name,)) if schema.get("type") != "null"]
            errors.append((name, mismatch(short(value), _expected_of(valid))))
    if errors:
        raise invalid(errors[:MAX_ERRORS])
    return model(**values)


def cause_of(headers: Mapping[str, str]) -> Cause:
    """Return the cause of ends by a caller: the producer, unless a header says the operator."""
    value = headers.get(CAUSE_HEADER)
    if value is None or value == Cause.PRODUCER:
        return Cause.PRODUCER
    if value == Cause.OPERATOR:
        return Cause.OPERATOR
    raise invalid([(CAUSE_HEADER, "the header is neither producer nor operator")])


def _demand_topic(topic: str, internal_prefix: str, field: str) -> None:
    refusal = topic_refusal(topic, internal_prefix)
    if refusal is not None:
        raise FieldRefusedError(field, f"{short(topic)} is not valid: {refusal}")


def _payload(number: int, message: models.Message, internal_prefix: str) -> Payload:
    topic, key, value, headers = message.topic, message.key, message.value, message.headers
    if topic_refusal(topic, internal_prefix) is not None:
        _demand_topic(topic, internal_prefix, f"messages[{number}].topic")
    try:
        return Payload(
            topic=topic,
            key=to_bytes(key),
            value=to_bytes(value),
            headers=tuple([(header.name, to_bytes(header.value)) for header in headers]) if headers else (),
            partition=given(message.partition),
        )
    except UnicodeDecodeError:
        raise
    except (ValueError, msgspec.ValidationError):
        place, expected = _wrong_data(message)
        raise FieldRefusedError(f"messages[{number}].{place}.data", mismatch("this data", expected)) from None


def _wrong_data(message: models.Message) -> tuple[str, str]:
    """Return the place of the first data that does not fit its type, and what is expected there."""
    headers = [(f"headers[{number}].value", header.value) for number, header in enumerate(given(message.headers) or ())]
    for place, data in (("key", message.key), ("value", message.value), *headers):
        try:
            to_bytes(data)
        except (ValueError, msgspec.ValidationError):
            is_base64 = isinstance(data, TypedData) and data.type == "BINARY"
            return place, "standard base64 with padding" if is_base64 else "a string"
    raise AssertionError(message)
