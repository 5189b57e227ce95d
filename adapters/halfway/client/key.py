"""The key that identifies the caller to halfway."""

from __future__ import annotations

import os
from typing import Final

from halfway.client.errors import HalfwayError

KEY_VARIABLE: Final = "HALFWAY_CLIENT_KEY"
"""The environment variable that is read if no key is given."""


class InvalidKeyError(HalfwayError, ValueError):
    """The key cannot be sent: give it as it was shown, printable ASCII without spaces. It is not told."""


class Key:
    """A key, whose text is in no `repr`, log or message of an error."""

    __slots__ = ("_text",)

    def __init__(self, text: str) -> None:
        """Take a key as it was shown; raises InvalidKeyError."""
        text = text.strip()
        if not text or not all("!" <= character <= "~" for character in text):
            raise InvalidKeyError("the key is no key of halfway's: give it as it was shown, without spaces in it")
        self._text = text

    @classmethod
    def chosen(cls, given: str | Key | None) -> Key | None:
        """Return the key that is given, else that of the environment, None if there is none."""
        if isinstance(given, Key):
            return given
        text = os.environ.get(KEY_VARIABLE) if given is None else given
        return None if text is None else cls(text)

    def __repr__(self) -> str:
        return "Key(**********)"

    def headers(self) -> dict[str, str]:
        """Return the header that carries the key."""
        return {"Authorization": f"Bearer {self._text}"}
