"""The one place where bodies and parameters are validated.

The good path is one pass of msgspec. Only a refused body is validated again, by the JSON schema that OpenAPI serves, so
that every wrong field is named.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cache
from itertools import islice
from typing import Any, Final, TypeVar

import jsonschema
import msgspec
from jsonschema.exceptions import ValidationError as SchemaError

from halfway.domain.errors import InvalidRequestError
from halfway.rest.requests import job_models, key_models, models, schemas
from halfway.rest.requests.explain import SHOWN, short, told
from halfway.rest.requests.repeats import repeated, suspicious
from halfway.rest.requests.structure import weight
from halfway.rest.responses.errors import EmptyBodyError, MalformedJsonError, invalid

MAX_ERRORS: Final = 50
MAX_EXPLAINED_BYTES: Final = 64 * 1024
MAX_EXPLAINED_WEIGHT: Final = 500
"""Of wrong bodies in one request: beyond it only the first wrong field is named."""
MAX_DETAIL: Final = 500
"""Characters of the message about the first wrong field, which may name it."""
MAX_COMPARED_BYTES: Final = 1024 * 1024
MAX_COMPARED_WEIGHT: Final = 20_000
"""A larger body, or one with more fields and items, is not searched for repeated names."""

_NAMED: Final = re.compile(r"Object (?:contains unknown|missing required) field `([^`]{1,60})`")

_ANYTHING: Final = msgspec.json.Decoder(msgspec.Raw)

M = TypeVar("M")
R = TypeVar("R")
P = TypeVar("P", bound=msgspec.Struct)

_BODIES: Final[tuple[type[msgspec.Struct], ...]] = (
    models.PrepareRequest,
    models.EndRequest,
    models.BatchEnd,
    models.BatchRequest,
    models.GroupRequest,
    models.StreamPrepare,
    models.StreamEnd,
    models.StreamChecks,
    key_models.KeyRequest,
    key_models.RotateRequest,
    job_models.JobRequest,
    models.StreamFrame,
    models.WholeStreamFrame,
)
_READ_ONE_BY_ONE: Final = (models.BatchRequest, models.StreamFrame)
"""Bodies whose items are read for themselves."""


_WHOLE: Final[tuple[type[msgspec.Struct], ...]] = (models.WholeBatch,)
"""Of many items that are read at once."""


class FieldRefusedError(Exception):
    """A field is refused for a reason that msgspec cannot check."""

    def __init__(self, field: str, detail: str) -> None:
        """Name the field as a JSON path, and say what is wrong with it."""
        super().__init__(detail)
        self.field = field
        self.detail = detail


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
def _described() -> dict[str, Any]:
    """Return the schemas of all bodies; nothing may change them."""
    return schemas.components(_BODIES)


class Validation:
    """Reads bodies and parameters."""

    def __init__(self, *, internal_prefix: str) -> None:
        """Make decoders and schemas; topics that begin with `internal_prefix` are refused."""
        self.internal_prefix = internal_prefix
        self._decoders: dict[type, msgspec.json.Decoder[Any]] = {
            model: msgspec.json.Decoder(model) for model in (*_BODIES, *_WHOLE)
        }
        checker = jsonschema.FormatChecker(formats=())
        for name, holds in schemas.formats(internal_prefix).items():
            checker.checks(name)(_of_strings(holds))
        components = {"components": {"schemas": _described()}}
        self._judges: dict[type, jsonschema.Draft202012Validator] = {
            model: jsonschema.Draft202012Validator(
                {"$ref": schemas.REFERENCE.format(name=model.__name__), **components}, format_checker=checker
            )
            for model in _BODIES
        }

    def read(
        self,
        model: type[M],
        body: bytes | msgspec.Raw,
        convert: Callable[[M], R],
        *,
        explaining: ExplanationBudget | None = None,
    ) -> R:
        """Return what `convert` makes of a JSON body; the items of a batch share one `ExplanationBudget`.

        Raises:
            EmptyBodyError, MalformedJsonError: the body is not JSON.
            InvalidRequestError: it names every wrong field, or only the first beyond the budget.

        """
        try:
            request = self._decoders[model].decode(body)
            converted = convert(request)
            data = bytes(body)
            if len(data) <= MAX_COMPARED_BYTES and suspicious(request, data):
                _demand_single(data, within=model not in _READ_ONE_BY_ONE)
        except msgspec.ValidationError as error:
            first = _located(error)
        except FieldRefusedError as error:
            first = error.field, error.detail
        except msgspec.DecodeError as error:
            if not bytes(body):
                raise EmptyBodyError from None
            raise MalformedJsonError(f"the body is not one JSON document: {error}") from None
        except RecursionError:
            raise MalformedJsonError("the body is nested too deep") from None
        except UnicodeDecodeError:
            raise MalformedJsonError("the body is not UTF-8") from None
        else:
            return converted
        text = bytes(body)
        if (explaining or ExplanationBudget()).affords(text):
            raise invalid(self._explained(model, text) or [first])
        _demand_json(text)
        raise invalid([first])

    def read_whole(self, model: type[M], body: bytes, convert: Callable[[M], R]) -> R | None:
        """Return what `convert` makes of the many items of a body.

        None if one of them is wrong, or may be: reading them one by one then gives each its own answer.
        """
        try:
            request = self._decoders[model].decode(body)
            converted = convert(request)
        except (msgspec.MsgspecError, FieldRefusedError, RecursionError, UnicodeDecodeError):
            return None
        return None if suspicious(request, body) else converted

    def _explained(self, model: type[Any], body: bytes) -> Sequence[tuple[str, str]]:
        try:
            document = json.loads(body, parse_constant=_no_constant, parse_int=_integer)
            return list(islice(_distinct(self._judges[model].iter_errors(document)), MAX_ERRORS))
        except RecursionError:
            raise MalformedJsonError("the body is nested too deep") from None
        except ValueError as error:
            raise MalformedJsonError(f"the body is not one JSON document: {error}") from None


def _demand_json(body: bytes) -> None:
    """Raise MalformedJsonError if a body is not JSON after its first wrong field."""
    try:
        _ANYTHING.decode(body)
    except RecursionError:
        raise MalformedJsonError("the body is nested too deep") from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise MalformedJsonError(f"the body is not one JSON document: {error}") from None


def _demand_single(body: bytes, *, within: bool) -> None:
    """Refuse repeated names; a body too large to be searched is accepted as it was read."""
    if weight(body) > MAX_COMPARED_WEIGHT:
        return
    errors = list(islice(repeated(body, within=within), MAX_ERRORS))
    if errors:
        raise invalid(errors)


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
        except msgspec.ValidationError as error:
            errors.append((name, f"{short(value)} is not accepted: {error}"))
    if errors:
        raise invalid(errors[:MAX_ERRORS])
    return model(**values)


def path_parameter(name: str, value: str, kind: Any) -> str:
    """Return a part of the path that satisfies the pattern of its type; InvalidRequestError otherwise."""
    try:
        accepted: str = msgspec.convert(value, kind)
    except msgspec.ValidationError:
        raise refused(name, f"{short(value)} is not {_meta(kind).description}") from None
    return accepted


def refused(field: str, detail: str) -> InvalidRequestError:
    """Return the error for one wrong field."""
    return invalid([(field, detail)])


def _meta(kind: Any) -> msgspec.Meta:
    meta: msgspec.Meta = kind.__metadata__[0]
    return meta


def _distinct(errors: Iterable[SchemaError]) -> Iterator[tuple[str, str]]:
    seen = set()
    for error in errors:
        for one in told(error):
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


def _located(error: msgspec.ValidationError) -> tuple[str, str]:
    """Split msgspec's message into the field and what is wrong with it."""
    detail, _, place = str(error).rpartition(" - at `$")
    field = place.rstrip("`").lstrip(".") if detail else ""
    told = detail or str(error)
    named = _NAMED.match(told)
    if named is not None:
        field = f"{field}.{named[1]}" if field else named[1]
    return field[:MAX_DETAIL], told[:MAX_DETAIL].encode(errors="backslashreplace").decode()
