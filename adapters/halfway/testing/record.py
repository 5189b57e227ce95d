"""A record as consumers see it."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, kw_only=True)
class Record:
    """One committed record of a real topic; `halfway.client.consumer.Record(**vars(record))` is for its handlers."""

    topic: str
    partition: int
    offset: int
    timestamp_ms: int
    key: bytes | None
    value: bytes | None
    headers: tuple[tuple[str, bytes | None], ...]

    def header(self, name: str) -> bytes | None:
        """Return the last value of a header, None if there is none."""
        return next((value for found, value in reversed(self.headers) if found == name), None)

    def json(self) -> Any:
        """Return the value read as JSON."""
        return json.loads(self.value or b"null")
