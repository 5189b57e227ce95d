"""The answer to a call."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final


@dataclass(frozen=True, kw_only=True)
class Answer:
    """The answer to a call; status 0 if there was none."""

    status: int
    body: Mapping[str, Any]
    tries: int = 1
    """How often the call was sent until this answer."""

    def text(self, name: str) -> str | None:
        value = self.body.get(name)
        return value if isinstance(value, str) else None

    @property
    def state(self) -> str | None:
        return self.text("state")


NOTHING: Final = Answer(status=0, body={})
