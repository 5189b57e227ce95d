"""JSON schemas of the models: OpenAPI serves them, and they explain refused bodies."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any, Final

import msgspec

from halfway.domain.records import MAX_REMARK_BYTES
from halfway.domain.urls import url_refusal
from halfway.rest.requests.data import from_base64

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


def components(types: Sequence[Any]) -> dict[str, Any]:
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
