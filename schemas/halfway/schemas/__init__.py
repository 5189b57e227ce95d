"""The Avro schemas of the records in halfway's topics, and their loader.

`<name>.avsc` is the schema that is written now. `history/<name>.v<n>.avsc` are older schemas, which must stay readable.
`upcoming/<name>.v<n>.avsc` is the schema that the next release will write and this one can already read. Each file is
self-contained: no type is defined in another file.
"""

from __future__ import annotations

import json
from functools import cache
from importlib.resources import files
from typing import Any, Final

NAMES: Final = ("half", "op", "parked", "group", "key", "audit", "owner", "barrier", "layout")
"""The kinds of records."""
LAYOUT_KEY: Final = "!layout"
"""The key of the record with the number of shards."""


@cache
def text(name: str) -> str:
    """Return the current schema of a kind of record as JSON; ValueError for an unknown kind."""
    if name not in NAMES:
        raise ValueError(f"there is no schema {name!r}; there are {', '.join(NAMES)}")
    return (files(__name__) / f"{name}.avsc").read_text(encoding="utf-8")


def current(name: str) -> dict[str, Any]:
    """Return the current schema of a kind of record, parsed from JSON."""
    schema: dict[str, Any] = json.loads(text(name))
    return schema


def versions(name: str) -> tuple[dict[str, Any], ...]:
    """Return every readable version: first the one that is written now, then the others from new to old."""
    numbered = [*_numbered(name, "history"), *_numbered(name, "upcoming")]
    numbered.sort(key=lambda version: version[0], reverse=True)
    return (current(name), *(schema for _, schema in numbered))


def newest(name: str) -> dict[str, Any]:
    """Return the newest readable version, which has every field of the others."""
    _, schema = max(_numbered(name, "upcoming"), key=lambda version: version[0], default=(0, current(name)))
    return schema


def _numbered(name: str, folder: str) -> list[tuple[int, dict[str, Any]]]:
    directory = files(__name__) / folder
    return [
        (int(entry.name.removeprefix(f"{name}.v").removesuffix(".avsc")), json.loads(entry.read_text(encoding="utf-8")))
        for entry in (directory.iterdir() if directory.is_dir() else ())
        if entry.name.startswith(f"{name}.v") and entry.name.endswith(".avsc")
    ]
