"""The one place where bodies and parameters are validated and converted to the service's requests.

It takes one pass of msgspec, the conversion, and a count of strings, which shows that no name is given twice.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any, Final, TypeVar

import msgspec

from halfway.coordinator.requests import End, GroupSpec, ListQuery, Prepare
from halfway.http.requests import bodies, models
from halfway.http.requests.bodies import (
    MAX_COMPARED_BYTES,
    SHOWN,
    demand_json,
    demand_single,
    first_fault,
    may_repeat,
    mismatch,
    schemas_at,
    short,
    to_bytes,
    wording,
)
from halfway.http.responses.problems import EmptyBodyError, MalformedJsonError, invalid
from halfway.protocol.errors import InvalidRequestError
from halfway.protocol.ids import canonical
from halfway.protocol.policy import PolicyOverrides
from halfway.protocol.records import MAX_REMARK_BYTES, CheckMode
from halfway.protocol.records import Message as Payload
from halfway.protocol.transactions import Cause
from halfway.protocol.urls import url_refusal

CAUSE_HEADER: Final = "Halfway-Cause"
MAX_ERRORS: Final = 50
"""Parameters that are named in one error."""

M = TypeVar("M", bound=msgspec.Struct)
R = TypeVar("R")
P = TypeVar("P", bound=msgspec.Struct)
Action = TypeVar("Action", bound=models.ActionRequest)

_CREDENTIALS: Final = re.compile(r"//[^/?#]*@")
_OPERATIONS: Final = (models.StreamPrepare, models.StreamEnd, models.StreamChecks)
_READ_ONE_BY_ONE: Final = (models.BatchRequest, models.StreamFrame)
"""Bodies whose items are read for themselves."""


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
        """Return the service's form of a prepare."""
        after, prefix = request.check_after_s, self._internal_prefix
        return Prepare(
            group=request.group,
            messages=tuple([_payload(number, message, prefix) for number, message in enumerate(request.messages)]),
            id=None if request.id is None else canonical(request.id),
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
    """Return the service's form of an end."""
    _demand_remark(request.remark)
    return End(
        id=canonical(transaction_id),
        outcome=request.outcome,
        remark=request.remark,
        check_id=request.check_id,
        cause=cause,
    )


def to_batch_end(request: models.BatchEnd, cause: Cause) -> End:
    """Return the service's form of one end of a batch."""
    return to_end(request, request.id, cause)


def to_action(request: Action) -> Action:
    """Return a check or a resume whose remark is not too long."""
    _demand_remark(request.remark)
    return request


def _demand_remark(remark: str | None) -> None:
    if remark is not None and not bodies.remark_fits(remark):
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
    meta = _meta(kind)
    if re.search(meta.pattern or "", value) is None:
        raise refused(name, mismatch(short(value), meta.description or ""))
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
            errors.append((name, wording(short(value), valid)))
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
    return invalid([(field, detail)])


def _meta(kind: Any) -> msgspec.Meta:
    meta: msgspec.Meta = kind.__metadata__[0]
    return meta


def _demand_topic(topic: str, internal_prefix: str, field: str) -> None:
    refusal = bodies.topic_refusal(topic, internal_prefix)
    if refusal is not None:
        raise FieldRefusedError(field, f"{short(topic)} is not valid: {refusal}")


def _payload(number: int, message: models.Message, internal_prefix: str) -> Payload:
    topic, key, value, headers = message.topic, message.key, message.value, message.headers
    if bodies.topic_refusal(topic, internal_prefix) is not None:
        _demand_topic(topic, internal_prefix, f"messages[{number}].topic")
    try:
        return Payload(
            topic=topic,
            key=to_bytes(key),
            value=to_bytes(value),
            headers=tuple([(header.name, to_bytes(header.value)) for header in headers]) if headers else (),
            partition=message.partition,
        )
    except UnicodeDecodeError:
        raise
    except (ValueError, msgspec.ValidationError):
        place, expected = _wrong_data(message)
        raise FieldRefusedError(f"messages[{number}].{place}.data", mismatch("this data", expected)) from None


def _wrong_data(message: models.Message) -> tuple[str, str]:
    """Return the place of the first data that does not fit its type, and what is expected there."""
    headers = [(f"headers[{number}].value", header.value) for number, header in enumerate(message.headers)]
    for place, data in (("key", message.key), ("value", message.value), *headers):
        try:
            to_bytes(data)
        except (ValueError, msgspec.ValidationError):
            is_base64 = isinstance(data, bodies.TypedData) and data.type == "BINARY"
            return place, "standard base64 with padding" if is_base64 else "a string"
    raise AssertionError(message)
