"""The one place where bodies and parameters are validated and converted to the service's requests.

The good path is one pass of msgspec, the conversion, and a count of strings, which shows that no name is given twice.
Only a refused body is validated again (`explain`), so that every wrong field is named.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any, Final, TypeVar

import msgspec

from halfway.coordinator.requests import End, GroupSpec, ListQuery, Prepare, TransactionFilter
from halfway.http.requests import bodies, models, operator_models
from halfway.http.requests.bodies import (
    MAX_ERRORS,
    SHOWN,
    Data,
    Explainer,
    ExplanationBudget,
    TypedData,
    demand_single,
    located,
    mismatch,
    parameter_fault,
    short,
    to_bytes,
)
from halfway.http.responses.problems import EmptyBodyError, MalformedJsonError, invalid
from halfway.protocol.policy import PolicyOverrides
from halfway.protocol.records import MAX_REMARK_BYTES, CheckMode
from halfway.protocol.records import Message as Payload
from halfway.protocol.transactions import Cause, State
from halfway.protocol.urls import url_refusal

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from halfway.protocol.errors import InvalidRequestError

CAUSE_HEADER: Final = "Halfway-Cause"
MAX_COMPARED_BYTES: Final = 1024 * 1024
"""A larger body is not searched for repeated names."""
_OF_END: Final = (b"outcome", b"id", b"remark", b"check_id", b"n", b"confirm")

M = TypeVar("M")
R = TypeVar("R")
P = TypeVar("P", bound=msgspec.Struct)

_OPERATIONS: Final = (models.StreamPrepare, models.StreamEnd, models.StreamChecks)
_BODIES: Final[tuple[type[msgspec.Struct], ...]] = (
    models.PrepareRequest,
    models.EndRequest,
    models.BatchEnd,
    models.BatchRequest,
    models.GroupAdditions,
    models.GroupRequest,
    models.StreamPrepare,
    models.StreamEnd,
    models.StreamChecks,
    models.KeyRequest,
    models.RotateRequest,
    operator_models.JobRequest,
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


class Validation:
    """Reads bodies."""

    def __init__(self, *, internal_prefix: str) -> None:
        """Make decoders and schemas; topics that begin with `internal_prefix` are refused."""
        self._internal_prefix = internal_prefix
        self._decoders: dict[type, msgspec.json.Decoder[Any]] = {
            model: msgspec.json.Decoder(model) for model in (*_BODIES, *_WHOLE)
        }
        self._explainer = Explainer(_BODIES, internal_prefix)

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
            if len(data) <= MAX_COMPARED_BYTES and _suspicious(request, data):
                demand_single(data, within=model not in _READ_ONE_BY_ONE)
        except msgspec.ValidationError as error:
            first = located(error)
        except FieldRefusedError as error:
            first = error.field, error.detail
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
        budget = explaining or ExplanationBudget()
        raise self._explainer.refusal(model, bytes(body), first, budget, noun=_noun(model))

    def read_whole(self, model: type[M], body: bytes, convert: Callable[[M], R]) -> R | None:
        """Return what `convert` makes of the many items of a body.

        None if one of them is wrong, or may be: reading them one by one then gives each its own answer.
        """
        try:
            request = self._decoders[model].decode(body)
            converted = convert(request)
        except (msgspec.MsgspecError, FieldRefusedError, RecursionError, UnicodeDecodeError):
            return None
        return None if _suspicious(request, body) else converted

    def to_prepare(self, request: models.PrepareRequest) -> Prepare:
        """Return the service's form of a prepare."""
        after, prefix = request.check_after_s, self._internal_prefix
        return Prepare(
            group=request.group,
            messages=tuple([_payload(number, message, prefix) for number, message in enumerate(request.messages)]),
            id=request.id,
            check_after_ms=None if after is None else round(after * 1000),
        )

    def to_group(self, request: models.GroupRequest | models.GroupAdditions, name: str) -> GroupSpec:
        """Return the service's form of a group, or of what is added to it."""
        check = request.check or models.CheckBy(mode="pull")
        if check.mode == "pull" and check.urls:
            raise FieldRefusedError("check", "mode pull fetches its checks: leave out urls, or the mode")
        if check.mode != "pull" and check.urls is not None and not check.urls:
            raise FieldRefusedError("check.urls", mismatch("[]", "1 to 10 URLs"))
        if check.mode != "pull" and check.urls is None:
            raise FieldRefusedError("check", 'give urls, or "mode": "pull"')
        for number, url in enumerate(check.urls or ()):
            refusal = url_refusal(url)
            if refusal is not None:
                raise FieldRefusedError(f"check.urls[{number}]", refusal)
        for number, topic in enumerate(request.topics):
            refusal = bodies.topic_refusal(topic, self._internal_prefix)
            if refusal is not None:
                raise FieldRefusedError(f"topics[{number}]", refusal)
        return GroupSpec(
            name=name,
            mode=CheckMode.PULL if check.mode == "pull" else CheckMode.PUSH,
            urls=tuple(dict.fromkeys(check.urls or ())),
            topics=tuple(dict.fromkeys(request.topics)),
            policy=request.policy or PolicyOverrides(),
            adds=isinstance(request, models.GroupAdditions),
            keeps_checks=request.check is None,
        )


def _noun(model: type) -> str:
    """Return what errors call a whole document."""
    if model is models.StreamFrame:
        return "the frame"
    return "the operation" if model in _OPERATIONS else "the body"


def to_end(request: models.EndRequest, transaction_id: str, cause: Cause) -> End:
    """Return the service's form of an end."""
    if request.remark is not None and not bodies.remark_fits(request.remark):
        raise FieldRefusedError("remark", f"larger than {MAX_REMARK_BYTES} bytes")
    return End(
        id=transaction_id, outcome=request.outcome, remark=request.remark, check_id=request.check_id, cause=cause
    )


def to_batch_end(request: models.BatchEnd, cause: Cause) -> End:
    """Return the service's form of one end of a batch."""
    return to_end(request, request.id, cause)


def to_filter(given: models.ListParameters | operator_models.JobFilter) -> TransactionFilter:
    """Return the service's form of the filters of a list or a job."""
    return TransactionFilter(
        state=None if given.state is None else State(given.state),
        group=given.group,
        topic=given.topic,
        key=None if given.key is None else given.key.encode(),
        id=given.id,
        older_than_s=given.older_than_s,
        younger_than_s=given.younger_than_s,
        error=given.error,
    )


def to_list_query(given: models.ListParameters, now: int) -> ListQuery:
    """Return the service's form of what a list asks for; `now` in ms since the epoch."""
    query = to_filter(given).query(now)
    return msgspec.structs.replace(query, cause=given.cause, limit=given.limit, cursor=given.cursor)


def path_parameter(name: str, value: str, kind: Any) -> str:
    """Return a part of the path that satisfies the pattern of its type; InvalidRequestError otherwise."""
    meta = _meta(kind)
    if re.search(meta.pattern or "", value) is None:
        raise refused(name, mismatch(short(value), meta.description or ""))
    return value


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
            errors.append((name, parameter_fault(value, fields[name].type)))
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


def refused(field: str, detail: str) -> InvalidRequestError:
    """Return the error for one wrong field."""
    return invalid([(field, detail)])


def _meta(kind: Any) -> msgspec.Meta:
    meta: msgspec.Meta = kind.__metadata__[0]
    return meta


def _payload(number: int, message: models.Message, internal_prefix: str) -> Payload:
    topic = message.topic
    refusal = bodies.topic_refusal(topic, internal_prefix)
    if refusal is not None:
        raise FieldRefusedError(f"messages[{number}].topic", refusal)
    key, value, headers = message.key, message.value, message.headers
    return Payload(
        topic=topic,
        key=None if key is None else _bytes(key, number, "key"),
        value=_bytes(value, number, "value"),
        headers=tuple([(header.name, _bytes(header.value, number, "headers")) for header in headers])
        if headers
        else (),
        partition=message.partition,
    )


def _bytes(data: Data, number: int, field: str) -> bytes | None:
    try:
        return to_bytes(data)
    except UnicodeDecodeError:
        raise
    except (ValueError, msgspec.ValidationError) as error:
        raise FieldRefusedError(f"messages[{number}].{field}", f"the data does not fit its type: {error}") from None


# --- names that may be given twice


def _suspicious(request: msgspec.Struct, body: bytes) -> bool:
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
            or _messages_suspicious(request.messages, body)
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
