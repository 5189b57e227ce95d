"""What is wrong with a body, for the user: each wrong field with its value and the remedy, and each repeated name.

A refused body is validated again by the JSON schema that OpenAPI serves. JSON leaves open which of two fields of one
name counts, and msgspec takes the last: a body that may have such names is parsed once more. JSON data of the caller is
not searched.
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
"""Of wrong bodies in one request: beyond it only the first wrong field is named."""
MAX_DETAIL: Final = 500
"""Characters of the message about the first wrong field, which may name it."""
MAX_COMPARED_WEIGHT: Final = 20_000
"""A body with more fields and items is not searched for repeated names."""
SHOWN: Final = 60
"""Characters of a value or a name that are shown."""
_NAMED: Final = re.compile(r"Object (?:contains unknown|missing required) field `([^`]{1,60})`")
_ANYTHING: Final = msgspec.json.Decoder(msgspec.Raw)
_DATA: Final = "data"
_SHOWN_OF_MESSAGES: Final = ("topic", "partition")
_TYPES: Final[Mapping[type, str]] = {
    dict: "object",
    list: "list",
    str: "string",
    int: "number",
    float: "number",
    bool: "truth value",
    type(None): "null",
}


class ExplanationBudget:
    """How much of one request may still be explained, which takes much longer than reading it."""

    def __init__(self) -> None:
        """Start with the budget of one request."""
        self._bytes = MAX_EXPLAINED_BYTES
        self._weight = MAX_EXPLAINED_WEIGHT

    def affords(self, body: bytes) -> bool:
        """Whether a body may be explained; if so, it is deducted."""
        if len(body) > self._bytes or (wanted := weight(body)) > self._weight:
            return False
        self._bytes -= len(body)
        self._weight -= wanted
        return True


@cache
def _described(bodies: tuple[type[msgspec.Struct], ...]) -> dict[str, Any]:
    """Return the schemas of all bodies; nothing may change them."""
    return schemas.components(bodies)


class Explainer:
    """Names the wrong fields of bodies."""

    def __init__(self, bodies: tuple[type[msgspec.Struct], ...], internal_prefix: str) -> None:
        """Make the schemas of the models; topics that begin with `internal_prefix` are refused."""
        checker = jsonschema.FormatChecker(formats=())
        for name, holds in schemas.formats(internal_prefix).items():
            checker.checks(name)(_of_strings(holds))
        components = {"components": {"schemas": _described(bodies)}}
        self._judges: dict[type, jsonschema.Draft202012Validator] = {
            model: jsonschema.Draft202012Validator(
                {"$ref": schemas.REFERENCE.format(name=model.__name__), **components}, format_checker=checker
            )
            for model in bodies
        }

    def refusal(
        self, model: type[Any], body: bytes, first: tuple[str, str], budget: ExplanationBudget
    ) -> InvalidRequestError:
        """Return the error for a body: with every wrong field, or only the `first` one beyond the budget.

        Raises:
            MalformedJsonError: the body is not JSON after its first wrong field.

        """
        if not budget.affords(body):
            _demand_json(body)
            return invalid([first])
        try:
            document = json.loads(body, parse_constant=_no_constant, parse_int=_integer)
            errors = list(islice(_distinct(self._judges[model].iter_errors(document)), MAX_ERRORS))
        except RecursionError:
            raise MalformedJsonError("the body is nested too deep") from None
        except ValueError as error:
            raise MalformedJsonError(f"the body is not one JSON document: {error}") from None
        return invalid(errors or [first])


def located(error: msgspec.ValidationError) -> tuple[str, str]:
    """Split msgspec's message into the field and what is wrong with it."""
    detail, _, place = str(error).rpartition(" - at `$")
    field = place.rstrip("`").lstrip(".") if detail else ""
    what = detail or str(error)
    named = _NAMED.match(what)
    if named is not None:
        field = f"{field}.{named[1]}" if field else named[1]
    return field[:MAX_DETAIL], what[:MAX_DETAIL].encode(errors="backslashreplace").decode()


def _demand_json(body: bytes) -> None:
    """Raise MalformedJsonError if a body is not JSON after its first wrong field."""
    try:
        _ANYTHING.decode(body)
    except RecursionError:
        raise MalformedJsonError("the body is nested too deep") from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise MalformedJsonError(f"the body is not one JSON document: {error}") from None


def _distinct(errors: Iterable[ValidationError]) -> Iterator[tuple[str, str]]:
    seen = set()
    for error in errors:
        for one in _told(error):
            if one not in seen:
                seen.add(one)
                yield one


def _of_strings(holds: Callable[[str], bool]) -> Callable[[object], bool]:
    return lambda value: not isinstance(value, str) or holds(value)


def _integer(digits: str) -> float:
    """Return a number; an integer with more digits than Python reads is out of every bound as a float, too."""
    return int(digits) if len(digits) <= sys.int_info.default_max_str_digits else float(digits)


def _no_constant(name: str) -> None:
    raise ValueError(f"{name} is not JSON")


def _told(error: ValidationError) -> Iterator[tuple[str, str]]:
    """Return (field, what is wrong and the remedy) of an error, of its innermost errors if it has choices."""
    if error.validator in ("anyOf", "oneOf"):
        fitting = [inner for inner in error.context or () if not _wrong_type(error, inner)]
        if len({inner.schema_path[0] for inner in fitting}) == 1:
            for inner in fitting:
                yield from _told(inner)
            return
    # The schema was made by msgspec, so each value has the type that its keyword requires.
    value: Any = error.validator_value
    schema: Any = error.schema
    field = _path(error)
    match error.validator:
        case "required":
            yield from _missing(field, error.instance, value)
        case "additionalProperties":
            yield from _unknown(field, error.instance, schema.get("properties", {}))
        case "enum":
            yield field, f"{_given(error)} is not one of {', '.join(map(str, value))}"
        case "anyOf" | "oneOf":
            yield field, f"{_given(error)} is not {' or '.join(_choices(value))}"
        case keyword:
            wanted = schema.get("description") or (f"of type {value}" if keyword == "type" else "accepted")
            yield field, f"{_given(error)} is not {wanted}"


def short(value: object) -> str:
    """Return a value as JSON, cut short, and safe to encode whatever it holds."""
    text = json.dumps(value[: 2 * SHOWN] if isinstance(value, str) else value)
    return text if len(text) <= SHOWN else text[: SHOWN - 1] + "…"


def _given(error: ValidationError) -> str:
    """Return the value that is wrong; of payloads and of what may hold them only its type, as errors end in logs."""
    path = list(error.absolute_path)
    may_hold_payload = not path or ("messages" in path and path[-1] not in _SHOWN_OF_MESSAGES)
    return f"this {_TYPES[type(error.instance)]}" if may_hold_payload else short(error.instance)


def _missing(field: str, instance: Any, required: Sequence[str]) -> Iterator[tuple[str, str]]:
    for name in required:
        if name not in instance:
            yield _under(field, name), "missing: it is required"


def _unknown(field: str, instance: Any, known: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    for name in instance:
        if name not in known:
            yield _under(field, name), f"not a known field; there are {', '.join(known)}"


def _wrong_type(outer: ValidationError, inner: ValidationError) -> bool:
    """Whether a choice is ruled out because the value has another type."""
    return inner.validator == "type" and inner.absolute_path == outer.absolute_path


def _choices(branches: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    for branch in branches:
        if "$ref" in branch:
            yield "an object of " + branch["$ref"].rpartition("/")[2]
        else:
            yield str(branch.get("description") or branch.get("type") or "accepted")


def _path(error: ValidationError) -> str:
    path = ""
    for part in error.absolute_path:
        path = f"{path}[{part}]" if isinstance(part, int) else _under(path, str(part))
    return path


def _under(path: str, name: str) -> str:
    safe = name[:SHOWN].encode(errors="backslashreplace").decode()
    return f"{path}.{safe}" if path else safe


# --- names given twice


class _Repeating(dict[str, Any]):
    """An object with a repeated name."""

    names: tuple[str, ...]


def demand_single(body: bytes, *, within: bool) -> None:
    """Refuse repeated names; a body too large to be searched is accepted as it was read."""
    if weight(body) > MAX_COMPARED_WEIGHT:
        return
    errors = list(islice(repeated(body, within=within), MAX_ERRORS))
    if errors:
        raise invalid(errors)


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
                yield from _found(_joined(path, name), one)


def _of(value: object, path: str) -> Iterator[tuple[str, str]]:
    if isinstance(value, _Repeating):
        for name in value.names:
            yield _joined(path, name), "given twice in one object: give it once"


def _joined(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name
