"""The bodies of requests: their JSON schemas, and what is wrong with one.

Each wrong field is named with its value and a remedy, and so is each repeated name. A refused body is validated again
with the JSON schema that OpenAPI serves. JSON does not define which of two fields with the same name counts, and
msgspec takes the last one, so a body that may have such fields is parsed once more. The fields and items of a body are
counted before it is decoded, because each of them takes time; JSON data of the caller stays bytes and is not searched.
"""

from __future__ import annotations

import asyncio
import binascii
import json
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cache, lru_cache
from itertools import islice
from typing import Any, Final, Literal

import jsonschema
import msgspec
from jsonschema.exceptions import ValidationError

from halfway.http.responses.problems import MalformedJsonError, invalid
from halfway.protocol.errors import InvalidRequestError
from halfway.protocol.records import MAX_REMARK_BYTES, rfc3339
from halfway.protocol.urls import url_refusal

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


def rfc3339_or_none(ms: int | None) -> str | None:
    """Return a time in RFC 3339, None for None."""
    return None if ms is None else rfc3339(ms)


REFERENCE: Final = "#/components/schemas/{name}"
_INTERNAL_NAMES: Final = (".", "..")

TYPED_DATA: Final[dict[str, Any]] = {
    "title": "TypedData",
    "description": "Data with its type: a string; JSON, whose bytes are kept unchanged; or bytes as base64.",
    "type": "object",
    "properties": {"type": {"enum": ["STRING", "JSON", "BINARY"]}, "data": {}},
    "required": ["type", "data"],
    "additionalProperties": False,
    "allOf": [
        {
            "if": {"properties": {"type": {"const": "STRING"}}},
            "then": {"properties": {"data": {"type": "string", "description": "a string"}}},
        },
        {
            "if": {"properties": {"type": {"const": "BINARY"}}},
            "then": {
                "properties": {
                    "data": {
                        "type": "string",
                        "contentEncoding": "base64",
                        "format": "base64",
                        "description": "standard base64 with padding",
                    }
                }
            },
        },
    ],
}


def schema_components(types: Sequence[Any]) -> dict[str, Any]:
    """Return the schemas of models and of all models that they refer to, by name."""
    _, schemas = msgspec.json.schema_components(types, ref_template=REFERENCE)
    schemas["TypedData"] = TYPED_DATA
    batch = schemas.get("BatchRequest")
    if batch is not None:
        batch["properties"]["prepare"]["items"] = {"$ref": REFERENCE.format(name="PrepareRequest")}
        batch["properties"]["end"]["items"] = {"$ref": REFERENCE.format(name="BatchEnd")}
    return schemas


@lru_cache(maxsize=4096)
def topic_refusal(topic: str, internal_prefix: str) -> str | None:
    """Return why a topic name is refused, None if it is accepted. The pattern validates its characters."""
    if topic in _INTERNAL_NAMES:
        return "Kafka allows no topic with this name"
    if topic.startswith(internal_prefix):
        return f"topics that start with {internal_prefix} are halfway's own"
    return None


def remark_fits(remark: str) -> bool:
    """Return whether a remark is at most 1 KiB in UTF-8."""
    return len(remark) * 4 <= MAX_REMARK_BYTES or len(remark.encode()) <= MAX_REMARK_BYTES


def formats(internal_prefix: str) -> dict[str, Any]:
    """Return the predicate of each string format, by its name."""
    return {
        "topic": lambda text: topic_refusal(text, internal_prefix) is None,
        "remark": remark_fits,
        "check-url": lambda text: url_refusal(text) is None,
        "base64": _is_base64,
    }


def _is_base64(text: str) -> bool:
    try:
        from_base64(text)
    except ValueError:
        return False
    return True


MAX_ERRORS: Final = 50
MAX_EXPLAINED_BYTES: Final = 64 * 1024
MAX_EXPLAINED_WEIGHT: Final = 500
"""Limits the wrong bodies of one request. Beyond it, only the first wrong field is named."""
MAX_DETAIL: Final = 500
"""Characters of the message about the first wrong field. The message may contain the name of the field."""
MAX_COMPARED_WEIGHT: Final = 20_000
"""A body with more fields and items is not searched for repeated names."""
SHOWN: Final = 60
"""Shown characters of a value or a name."""
_NAMED_FIELD: Final = re.compile(r"Object (?:contains unknown|missing required) field `([^`]{1,60})`")
_ANY_JSON: Final = msgspec.json.Decoder(msgspec.Raw)
_DATA: Final = "data"
_SHOWN_MESSAGE_FIELDS: Final = ("topic", "partition")
_TYPED_DATA: Final = "an object with type and data"
_NOUNS: Final[Mapping[str, str]] = {
    "object": "an object",
    "array": "a list",
    "string": "a string",
    "integer": "a whole number",
    "number": "a number",
    "boolean": "true or false",
    "null": "null",
}
_TYPES: Final[Mapping[type, str]] = {
    dict: "object",
    list: "list",
    str: "string",
    int: "number",
    float: "number",
    bool: "boolean",
    type(None): "null",
}


class ExplanationBudget:
    """The remaining budget for explanations of one request. To explain a body takes much longer than to read it."""

    def __init__(self) -> None:
        """Start with the budget of one request."""
        self._bytes = MAX_EXPLAINED_BYTES
        self._weight = MAX_EXPLAINED_WEIGHT

    def affords(self, body: bytes) -> bool:
        """Return whether a body may be explained; if so, deduct it from the budget."""
        if len(body) > self._bytes or (body_weight := weight(body)) > self._weight:
            return False
        self._bytes -= len(body)
        self._weight -= body_weight
        return True


@cache
def _schemas_of(bodies: tuple[type[msgspec.Struct], ...]) -> dict[str, Any]:
    """Return the schemas of all bodies. The result is shared, so do not change it."""
    return schema_components(bodies)


class Explainer:
    """Names the wrong fields of bodies."""

    def __init__(self, bodies: tuple[type[msgspec.Struct], ...], internal_prefix: str) -> None:
        """Build the schemas of the models. Topics that begin with `internal_prefix` are refused."""
        checker = jsonschema.FormatChecker(formats=())
        for name, is_valid in formats(internal_prefix).items():
            checker.checks(name)(_strings_only(is_valid))
        components = {"components": {"schemas": _schemas_of(bodies)}}
        self._validators: dict[type, jsonschema.Draft202012Validator] = {
            model: jsonschema.Draft202012Validator(
                {"$ref": REFERENCE.format(name=model.__name__), **components}, format_checker=checker
            )
            for model in bodies
        }

    def refusal(
        self, model: type[Any], body: bytes, first: tuple[str, str], budget: ExplanationBudget, *, noun: str
    ) -> InvalidRequestError:
        """Return the error for a body: with every wrong field, or with only the `first` one if the budget is used up.

        Raises:
            MalformedJsonError: the body is not JSON after its first wrong field.

        """
        if not budget.affords(body):
            _demand_json(body, noun)
            return invalid([first], noun=noun)
        try:
            document = json.loads(body, parse_constant=_no_constant, parse_int=_integer)
            errors = list(islice(_distinct(self._validators[model].iter_errors(document)), MAX_ERRORS))
        except RecursionError:
            raise MalformedJsonError(f"{noun} is nested too deep") from None
        except ValueError as error:
            raise MalformedJsonError(f"{noun} is not one JSON document: {error}") from None
        return invalid(errors or [first], noun=noun)


def located(error: msgspec.ValidationError) -> tuple[str, str]:
    """Split msgspec's message into the field and the fault."""
    fault, _, place = str(error).rpartition(" - at `$")
    field = place.rstrip("`").lstrip(".") if fault else ""
    fault = fault or str(error)
    match = _NAMED_FIELD.match(fault)
    if match is not None:
        field = f"{field}.{match[1]}" if field else match[1]
    return field[:MAX_DETAIL], fault[:MAX_DETAIL].encode(errors="backslashreplace").decode()


def _demand_json(body: bytes, noun: str) -> None:
    """Raise MalformedJsonError if a body is not JSON after its first wrong field."""
    try:
        _ANY_JSON.decode(body)
    except RecursionError:
        raise MalformedJsonError(f"{noun} is nested too deep") from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise MalformedJsonError(f"{noun} is not one JSON document: {error}") from None


def _distinct(errors: Iterable[ValidationError]) -> Iterator[tuple[str, str]]:
    seen = set()
    for error in errors:
        for fault in _faults(error):
            if fault not in seen:
                seen.add(fault)
                yield fault


def _strings_only(is_valid: Callable[[str], bool]) -> Callable[[object], bool]:
    return lambda value: not isinstance(value, str) or is_valid(value)


def _integer(digits: str) -> float:
    """Return a number. An integer with more digits than Python reads becomes a float, which is out of bounds too."""
    return int(digits) if len(digits) <= sys.int_info.default_max_str_digits else float(digits)


def _no_constant(name: str) -> None:
    raise ValueError(f"{name} is not JSON")


def _faults(error: ValidationError) -> Iterator[tuple[str, str]]:
    """Yield (field, fault and remedy) for an error, or for its inner errors if only one of its choices can be meant."""
    if error.validator in ("anyOf", "oneOf"):
        fitting = [inner for inner in error.context or () if not _is_wrong_type(error, inner)]
        if len({inner.schema_path[0] for inner in fitting}) == 1:
            for inner in fitting:
                yield from _faults(inner)
            return
    # msgspec generated the schema, so each value has the type that its keyword requires.
    value: Any = error.validator_value
    schema: Any = error.schema
    field = _path(error)
    match error.validator:
        case "required":
            yield from _missing(field, error.instance, value)
        case "additionalProperties":
            yield from _unknown(field, error.instance, schema.get("properties", {}))
        case "enum":
            yield field, f"{_shown_value(error)} is not one of {', '.join(map(str, value))}"
        case "anyOf" | "oneOf":
            yield field, mismatch(_shown_value(error), _joined_choices(value))
        case _:
            yield field, mismatch(_shown_value(error), _expected(schema))


def mismatch(shown: str, expected: str) -> str:
    """Return the fault of a value, from its text and a description of valid values; empty if there is none."""
    return f"{shown} is not valid: expected {expected}" if expected else f"{shown} is not valid"


def parameter_fault(value: str, kind: Any) -> str:
    """Return the fault of a query parameter that is not a valid `kind`."""
    _, components = msgspec.json.schema_components((msgspec.defstruct("Parameter", [("value", kind)]),))
    schema = components["Parameter"]["properties"]["value"]
    branches = [
        components[branch["$ref"].rpartition("/")[2]] if "$ref" in branch else branch
        for branch in schema.get("anyOf", [schema])
        if branch.get("type") != "null"
    ]
    names = [str(name) for branch in branches for name in branch.get("enum", ()) if name is not None]
    if names:
        return f"{short(value)} is not one of {', '.join(names)}"
    return mismatch(short(value), schema.get("description") or _joined_choices(branches))


def short(value: object) -> str:
    """Return a value as JSON, cut to `SHOWN` characters. The text can always be encoded."""
    text = json.dumps(value[: 2 * SHOWN] if isinstance(value, str) else value)
    return text if len(text) <= SHOWN else text[: SHOWN - 1] + "…"


def _shown_value(error: ValidationError) -> str:
    """Return the wrong value, or only its type if it may contain payload, because errors are logged."""
    path = list(error.absolute_path)
    may_hold_payload = not path or ("messages" in path and path[-1] not in _SHOWN_MESSAGE_FIELDS)
    return f"this {_TYPES[type(error.instance)]}" if may_hold_payload else short(error.instance)


def _missing(field: str, instance: Any, required: Sequence[str]) -> Iterator[tuple[str, str]]:
    for name in required:
        if name not in instance:
            yield _child(field, name), "missing: it is required"


def _unknown(field: str, instance: Any, known: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    for name in instance:
        if name not in known:
            yield _child(field, name), f"not a known field; known fields: {', '.join(known)}"


def _is_wrong_type(outer: ValidationError, inner: ValidationError) -> bool:
    """Return whether a choice is ruled out because the value has another type."""
    return inner.validator == "type" and inner.absolute_path == outer.absolute_path


def _joined_choices(branches: Sequence[Mapping[str, Any]]) -> str:
    """Return descriptions of all choices, joined by "or"."""
    *rest, last = [_expected(branch) for branch in branches]
    return f"{', '.join(rest)} or {last}" if rest else last


def _expected(schema: Mapping[str, Any]) -> str:
    """Return a description of valid values; that of an object's model would describe the model."""
    if "$ref" in schema:
        return _TYPED_DATA if schema["$ref"].endswith("/TypedData") else "an object"
    kind = schema.get("type")
    if kind == "object":
        return _TYPED_DATA if schema.get("title") == "TypedData" else "an object"
    return str(schema.get("description") or _NOUNS.get(str(kind), ""))


def _path(error: ValidationError) -> str:
    path = ""
    for part in error.absolute_path:
        path = f"{path}[{part}]" if isinstance(part, int) else _child(path, str(part))
    return path


def _child(path: str, name: str) -> str:
    safe = name[:SHOWN].encode(errors="backslashreplace").decode()
    return f"{path}.{safe}" if path else safe


# --- repeated names


class _RepeatingObject(dict[str, Any]):
    """A JSON object with repeated names."""

    names: tuple[str, ...]


def demand_single(body: bytes, *, within: bool) -> None:
    """Refuse a body with repeated names. A body that is too large to search is accepted as it was read."""
    if weight(body) > MAX_COMPARED_WEIGHT:
        return
    errors = list(islice(repeated(body, within=within), MAX_ERRORS))
    if errors:
        raise invalid(errors)


def repeated(body: bytes, *, within: bool) -> Iterator[tuple[str, str]]:
    """Yield (field, fault) for each repeated name in the outermost object, and with `within` in nested objects too.

    Raises:
        RecursionError: the body is nested too deep.

    """
    # Numbers stay text: they are not used, and Python refuses integers with more than 4,300 digits.
    document = json.loads(body, object_pairs_hook=_object, parse_int=str, parse_float=str)
    return _search("", document) if within else _repeated_names(document, "")


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    plain = dict(pairs)
    if len(plain) == len(pairs):
        return plain
    repeating = _RepeatingObject(plain)
    repeating.names = tuple(_duplicates(name for name, _ in pairs))
    return repeating


def _duplicates(names: Iterable[str]) -> dict[str, None]:
    seen: set[str] = set()
    return {name: None for name in names if name in seen or seen.add(name)}  # type: ignore[func-returns-value]


def _search(path: str, value: Any) -> Iterator[tuple[str, str]]:
    if isinstance(value, list):
        for index, item in enumerate(value):
            yield from _search(f"{path}[{index}]", item)
    elif isinstance(value, dict):
        yield from _repeated_names(value, path)
        for name, member in value.items():
            if name != _DATA:
                yield from _search(_joined(path, name), member)


def _repeated_names(value: object, path: str) -> Iterator[tuple[str, str]]:
    if isinstance(value, _RepeatingObject):
        for name in value.names:
            yield _joined(path, name), "occurs twice in one object: send it once"


def _joined(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name
