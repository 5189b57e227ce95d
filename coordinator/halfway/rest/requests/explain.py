"""Explains to the user what is wrong with a body: each wrong field with its value and a remedy, and each repeated name.

A refused body is validated again with the JSON schema that OpenAPI serves. JSON does not define which of two fields
with the same name counts, and msgspec takes the last one, so a body that may have such fields is parsed once more. JSON
data of the caller is not searched.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cache
from itertools import islice
from typing import Any, Final

import jsonschema
import msgspec
from jsonschema.exceptions import ValidationError

from halfway.domain.errors import InvalidRequestError
from halfway.rest.requests import schemas
from halfway.rest.requests.structure import weight
from halfway.rest.responses.errors import MalformedJsonError, invalid

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
    return schemas.components(bodies)


class Explainer:
    """Names the wrong fields of bodies."""

    def __init__(self, bodies: tuple[type[msgspec.Struct], ...], internal_prefix: str) -> None:
        """Build the schemas of the models. Topics that begin with `internal_prefix` are refused."""
        checker = jsonschema.FormatChecker(formats=())
        for name, is_valid in schemas.formats(internal_prefix).items():
            checker.checks(name)(_strings_only(is_valid))
        components = {"components": {"schemas": _schemas_of(bodies)}}
        self._validators: dict[type, jsonschema.Draft202012Validator] = {
            model: jsonschema.Draft202012Validator(
                {"$ref": schemas.REFERENCE.format(name=model.__name__), **components}, format_checker=checker
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
