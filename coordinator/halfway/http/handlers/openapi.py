"""Generates the OpenAPI 3.1 document from the table of calls and the models.

Clients are generated from it, so it avoids what generators stumble over: an enum without a type, a default of an
optional field (which some then demand), a choice in place of a nullable type, and the name of an operation with
`Response` behind it, which they give to its answers.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import cache
from http import HTTPStatus
from importlib.metadata import version
from typing import Any, Final

import msgspec

from halfway.coordinator.requests import INTERNAL, Moment
from halfway.http.handlers.handlers import ALWAYS, Operation
from halfway.http.handlers.routes import OPERATIONS
from halfway.http.requests import models
from halfway.http.requests.validation import CAUSE_HEADER
from halfway.http.responses import CONTENT_TYPE, Problem, retry_after, status_of
from halfway.protocol.errors import HalfwayError

_JSON: Final = "application/json"
_SCALARS: Final = ("string", "integer", "number", "boolean")
_REFERENCE: Final = "#/components/schemas/{name}"
_PARTIAL: Final = ("BatchItem", "BinaryData", "CheckAnswer", "CheckPolicy", "FetchedCheck", "Problem")
"""Answers with defaults. Those of all others are for instances of an earlier release, which leave the field out."""
_NAME: Final = re.compile(r'(schemas/|"title":")([\w.]+)"')
_NAMES: Final = {
    "BatchResponse": "BatchResult",
    "Endpoint": "EndpointState",
    "FailingTopic": "FailingTopicState",
    "GroupFigures": "GroupState",
    "GroupPage": "GroupList",
    "GroupView": "GroupResponse",
    "HealthWarning": "WarningState",
    "HistoryView": "HistoryResponse",
    "Page": "TransactionList",
    "Prepared": "PreparedResponse",
    "Quarantined": "QuarantinedState",
    "RefusedWrite": "RefusedState",
    "Skipped": "SkippedState",
    "Statistics": "StatisticsResponse",
    "TransactionView": "TransactionSummary",
    "halfway.http.requests.models.Message": "Message",
}
"""The published names of records. Clients are generated from them, so they never change."""
_TYPED_DATA: Final[dict[str, Any]] = {
    "title": "TypedData",
    "description": "Data with its type: a string; JSON, whose bytes are kept unchanged; or bytes as base64.",
    "type": "object",
    "properties": {"type": {"type": "string", "enum": ["STRING", "JSON", "BINARY"]}, "data": {}},
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
_BEARER: Final = "A key, as `halfway keys create` shows it"
_CERTIFICATE: Final = "A client certificate that is bound to a principal"
_HEADERS: Final = {
    CAUSE_HEADER: {
        "name": CAUSE_HEADER,
        "in": "header",
        "required": False,
        "description": "`operator` if a person ends the transaction: the op marker records it as the cause",
        "schema": {"type": "string", "enum": ["producer", "operator"], "default": "producer"},
    }
}


_EXAMPLES: Final[dict[str, Any]] = {
    "GroupRequest": {"check": {"urls": ["http://shop:9000/check"]}, "topics": ["orders"], "policy": {"max_checks": 15}},
    "GroupAdditions": {"topics": ["coupons"]},
    "PrepareRequest": {
        "group": "shop",
        "messages": [{"topic": "orders", "key": "42", "value": {"type": "JSON", "data": {"total": 9.9}}}],
    },
    "EndRequest": {"outcome": "commit"},
    "BatchRequest": {"end": [{"id": "01a1ee56-5e00-7983-bc65-f04bdd28a60b", "outcome": "commit"}]},
    "ActionRequest": {"remark": "endpoint mended"},
    "KeyRequest": {"kind": "group", "name": "shop", "expires_in_s": 7776000},
    "RotateRequest": {"keep_s": 3600},
    "CheckQuestion": {
        "type": "transaction.check",
        "nonce": "qL4c",
        "id": "01a1ee56-5e00-7983-bc65-f04bdd28a60b",
        "group": "shop",
        "prepared_at": "2026-01-02T03:04:05.678Z",
        "attempt": 1,
        "messages": [],
    },
    "CheckAnswer": {"outcome": "commit", "nonce": "qL4c"},
}
"""A body of each request, and of a check and its answer."""


@cache
def encoded() -> bytes:
    """Return the document as JSON. It is generated once per process."""
    return msgspec.json.encode(document())


def document() -> dict[str, Any]:
    """Return the OpenAPI document of the table of calls."""
    answers = [model for operation in OPERATIONS for _, model in operation.responses.values() if _is_struct(model)]
    bodies = [operation.body for operation in OPERATIONS if operation.body is not None]
    others = [Problem, models.BatchAction, models.BatchEnd, models.CheckAnswer, models.CheckQuestion]
    components = _schema_components([*dict.fromkeys([*answers, *bodies, *others])])
    components["KeyKind"] = components["KeyRequest"]["properties"]["kind"]
    for name in ("KeyRequest", "KeyResponse", "NewKeyResponse"):
        components[name]["properties"]["kind"] = _reference("KeyKind")
    components["CheckMode"] = components["GroupCheck"]["properties"]["mode"]
    components["GroupCheck"]["properties"]["mode"] = _reference("CheckMode")
    components["CheckBy"]["properties"]["mode"] = {"anyOf": [_reference("CheckMode"), {"type": "null"}]}
    for name, example in _EXAMPLES.items():
        components[name]["examples"] = [example]
    components["BatchItem"]["properties"]["body"] = {
        "anyOf": [_reference("PreparedResponse"), _reference("EndResult"), _reference("TransactionSummary")]
    }
    components["BatchItem"]["properties"]["problem"] = _reference("Problem")
    paths: dict[str, Any] = {}
    for operation in OPERATIONS:
        paths.setdefault(operation.path, {})[operation.method.lower()] = _operation(operation)
    described: dict[str, Any] = {
        "openapi": "3.1.0",
        "info": {
            "title": "halfway",
            "version": version("halfway"),
            "description": "Transactional (half) messages for Kafka. Times are RFC 3339 in UTC with milliseconds, "
            "durations are seconds.",
            "license": {"name": "Apache-2.0", "identifier": "Apache-2.0"},
        },
        "paths": paths,
        "webhooks": {"check": {"post": _webhook()}},
        "components": {
            "schemas": components,
            "securitySchemes": {
                "bearer": {"type": "http", "scheme": "bearer", "description": _BEARER},
                "certificate": {"type": "mutualTLS", "description": _CERTIFICATE},
            },
        },
        "security": [{}, {"bearer": []}, {"certificate": []}],
    }
    _suit_generators(described)
    return described


def _webhook() -> dict[str, Any]:
    signature = [
        {"name": name, "in": "header", "required": False, "description": text, "schema": {"type": "string"}}
        for name, text in (
            ("webhook-id", "The same for a repeat of this question"),
            ("webhook-timestamp", "Seconds since 1970"),
            ("webhook-signature", "Signatures of Standard Webhooks, separated by spaces; none without a master secret"),
        )
    ]
    return {
        "operationId": "answerCheck",
        "summary": "halfway asks a service for the outcome of a transaction",
        "description": "Anything but 200 with an answer counts as unknown, and halfway asks again.",
        "parameters": signature,
        "security": [],
        "requestBody": {"required": True, "content": {_JSON: {"schema": _reference("CheckQuestion")}}},
        "responses": {"200": {"description": "The outcome", "content": {_JSON: {"schema": _reference("CheckAnswer")}}}},
    }


def _suit_generators(part: Any) -> None:
    """Give each enum its type, and say of what is null that it may be, in the form that most generators read."""
    if isinstance(part, dict):
        if "enum" in part:
            part.setdefault("type", "string")
        if part.get("default", 0) is None:
            del part["default"]
        choices = [one for one in part.get("anyOf", ()) if one != {"type": "null"}]
        if len(choices) == 1 and choices[0].get("type") in _SCALARS and "enum" not in choices[0]:
            del part["anyOf"]
            part.update(choices[0], type=[choices[0]["type"], "null"])
    for one in part.values() if isinstance(part, dict) else part if isinstance(part, list) else ():
        _suit_generators(one)


def _schema_components(types: Sequence[Any]) -> dict[str, Any]:
    """Return the schemas of models and of all models that they refer to, by their published names."""
    _, found = msgspec.json.schema_components(types, ref_template=_REFERENCE, schema_hook=_schema_of_moment)
    found.pop("halfway.protocol.records.Message", None)  # of internal fields
    for name, schema in found.items():
        if "properties" in schema and "additionalProperties" not in schema:
            _demand_all(schema, partial=name in _PARTIAL)
        else:
            for one in schema.get("properties", {}).values():
                if default := one.pop("default", None):
                    one["description"] = f"{one.get('description', '')}; {default:g} if left out".removeprefix("; ")
    text = _NAME.sub(lambda name: name[1] + _NAMES.get(name[2], name[2]) + '"', msgspec.json.encode(found).decode())
    schemas = {_NAMES.get(name, name): schema for name, schema in msgspec.json.decode(text).items()}
    schemas["TypedData"] = _TYPED_DATA
    items = {"prepare": "PrepareRequest", "end": "BatchEnd", "check": "BatchAction", "resume": "BatchAction"}
    for name, model in items.items():
        schemas["BatchRequest"]["properties"][name]["items"] = _reference(model)
    return schemas


def _demand_all(schema: dict[str, Any], *, partial: bool) -> None:
    """Leave internal fields out of an answer, and say that it has all others."""
    properties = {name: one for name, one in schema["properties"].items() if INTERNAL not in one}
    schema["properties"] = properties
    if not partial:
        schema["required"] = list(properties)
        for one in properties.values():
            one.pop("default", None)


def _schema_of_moment(kind: type) -> dict[str, Any]:
    if kind is not Moment:
        raise NotImplementedError(kind)
    return {
        "type": "string",
        "format": "date-time",
        "description": "RFC 3339 in UTC with milliseconds",
        "examples": ["2026-01-02T03:04:05.678Z"],
    }


def _operation(operation: Operation) -> dict[str, Any]:
    described: dict[str, Any] = {
        "operationId": operation.id,
        "summary": operation.summary,
        "parameters": list(_parameters(operation)),
        "responses": {
            **{str(int(status)): _response(text, model) for status, (text, model) in operation.responses.items()},
            **_problems([*operation.errors, *ALWAYS]),
        },
    }
    if operation.body is not None:
        content = {_JSON: {"schema": _reference(operation.body.__name__)}}
        described["requestBody"] = {"required": not operation.has_optional_body, "content": content}
    return described


def _parameters(operation: Operation) -> list[dict[str, Any]]:
    described: list[dict[str, Any]] = []
    if operation.parameter is not None:
        name, kind = operation.parameter
        schema = msgspec.json.schema(kind, ref_template=_REFERENCE)
        described.append({"name": name, "in": "path", "required": True, "schema": schema})
    if operation.query is not None:
        _, components = msgspec.json.schema_components([operation.query], ref_template=_REFERENCE)
        for name, schema in components[operation.query.__name__]["properties"].items():
            described.append({"name": name, "in": "query", "required": False, "schema": _without_null(schema)})
    return [*described, *(_HEADERS[name] for name in operation.headers)]


def _response(text: str, model: Any) -> dict[str, Any]:
    if model is None:
        return {"description": text}
    name = model.__name__
    schema = _reference(_NAMES.get(name, name)) if _is_struct(model) else {"type": "object"}
    return {"description": text, "content": {_JSON: {"schema": schema}}}


def _problems(errors: Sequence[type[HalfwayError]]) -> dict[str, Any]:
    by_status: dict[int, list[type[HalfwayError]]] = {}
    for error in dict.fromkeys(errors):
        by_status.setdefault(status_of(error)[0], []).append(error)
    return {str(status): _problem(status, kinds) for status, kinds in sorted(by_status.items())}


def _problem(status: int, kinds: Sequence[type[HalfwayError]]) -> dict[str, Any]:
    lines = [f"- `{kind.code}`: {' '.join((kind.__doc__ or '').split())}" for kind in kinds]
    codes = {"properties": {"error_code": {"enum": [kind.code for kind in kinds]}}}
    described: dict[str, Any] = {
        "description": f"{HTTPStatus(status).phrase}\n\n" + "\n".join(lines),
        "content": {CONTENT_TYPE: {"schema": {"allOf": [_reference("Problem"), codes]}}},
    }
    if any(retry_after(kind.__new__(kind)) for kind in kinds):
        described["headers"] = {
            "Retry-After": {"description": "Seconds to wait", "schema": {"type": "integer", "minimum": 1}}
        }
    return described


def _without_null(schema: dict[str, Any]) -> dict[str, Any]:
    """Return a parameter's schema without the null that means "left out"."""
    choices = [choice for choice in schema.get("anyOf", ()) if choice != {"type": "null"}]
    if len(choices) == 1:
        only: dict[str, Any] = choices[0]
        return only
    return schema


def _reference(name: str) -> dict[str, str]:
    return {"$ref": _REFERENCE.format(name=name)}


def _is_struct(model: Any) -> bool:
    return isinstance(model, type) and issubclass(model, msgspec.Struct)
