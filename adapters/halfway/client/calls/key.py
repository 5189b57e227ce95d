"""The key that identifies the caller to halfway."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Final

from halfway.client.errors import HalfwayError

KEY_VARIABLE: Final = "HALFWAY_CLIENT_KEY"
"""The environment variable with the default key."""
FILE_VARIABLE: Final = "HALFWAY_CLIENT_KEY_FILE"
"""The environment variable with the path of a file that contains the default key."""


class InvalidKeyError(HalfwayError, ValueError):
    """The key is not valid, or its file cannot be read: give it as it was shown, printable ASCII without spaces.

    The error does not show it.
    """


class Key:
    """A key. Its text does not appear in `repr`, logs or errors."""

    __slots__ = ("_text",)

    def __init__(self, text: str, source: str = "the key") -> None:
        """Take the text of a key; raises InvalidKeyError, which names where it came from."""
        text = text.strip()
        if not text or not all("!" <= character <= "~" for character in text):
            raise InvalidKeyError(f"{source} is not a key of halfway: give it as it was shown, without spaces in it")
        self._text = text

    @classmethod
    def resolve(cls, key: str | Key | None) -> Key | None:
        """Return the given key, or else the key of the environment, or None if there is none."""
        if isinstance(key, Key):
            return key
        if key is not None:
            return cls(key, "the key that key= gives")
        text, path = os.environ.get(KEY_VARIABLE), os.environ.get(FILE_VARIABLE)
        if path is None:
            return None if text is None else cls(text, KEY_VARIABLE)
        if text is not None:
            raise InvalidKeyError(f"{KEY_VARIABLE} and {FILE_VARIABLE} are both set: set one of them")
        try:
            content = Path(path).read_bytes()
        except OSError as error:
            raise InvalidKeyError(f"cannot read {FILE_VARIABLE} {path!r}: {error.strerror}") from None
        return cls(content.decode("utf-8", "replace"), f"what {FILE_VARIABLE} {path!r} contains")

    def __repr__(self) -> str:
        return "Key(**********)"

    def headers(self) -> dict[str, str]:
        """Return the header that carries the key."""
        return {"Authorization": f"Bearer {self._text}"}
