"""The key that identifies the caller to halfway."""

from __future__ import annotations

import os
from typing import Final

from halfway.client.errors import HalfwayError

KEY_VARIABLE: Final = "HALFWAY_CLIENT_KEY"
"""The environment variable with the default key."""


class InvalidKeyError(HalfwayError, ValueError):
    """The key is not valid: give it as it was shown, printable ASCII without spaces. The error does not show it."""


class Key:
    """A key. Its text does not appear in `repr`, logs or errors."""

    __slots__ = ("_text",)

    def __init__(self, text: str) -> None:
        """Take the text of a key; raises InvalidKeyError."""
        text = text.strip()
        if not text or not all("!" <= character <= "~" for character in text):
            raise InvalidKeyError("the key is not a key of halfway: give it as it was shown, without spaces in it")
        self._text = text

    @classmethod
    def resolve(cls, key: str | Key | None) -> Key | None:
        """Return the given key, or else the key of the environment, or None if there is none."""
        if isinstance(key, Key):
            return key
        text = os.environ.get(KEY_VARIABLE) if key is None else key
        return None if text is None else cls(text)

    def __repr__(self) -> str:
        return "Key(**********)"

    def headers(self) -> dict[str, str]:
        """Return the header that carries the key."""
        return {"Authorization": f"Bearer {self._text}"}
