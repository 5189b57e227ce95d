"""What a schema error says to a user: the field, what is wrong with it, and the remedy."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

from jsonschema.exceptions import ValidationError

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
SHOWN: Final = 60
"""Characters of a value or a name that are shown."""


def told(error: ValidationError) -> Iterator[tuple[str, str]]:
    """Return (field, what is wrong and the remedy) of an error, of its innermost errors if it has choices."""
    if error.validator in ("anyOf", "oneOf"):
        fitting = [inner for inner in error.context or () if not _wrong_type(error, inner)]
        if len({inner.schema_path[0] for inner in fitting}) == 1:
            for inner in fitting:
                yield from told(inner)
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
