"""Decides which keys and values are shown as text."""

from __future__ import annotations

from typing import Final

_CONTROLS: Final = bytes(code for code in range(0x20) if code not in b"\t\n\r")


def is_plain(data: bytes) -> bool:
    """Return whether data has no control characters other than tabs and line breaks."""
    return len(data.translate(None, _CONTROLS)) == len(data)


def as_text(data: bytes) -> str | None:
    """Return data as text, None if it is not UTF-8 or has control characters other than tabs and line breaks.

    In JSON, a control character takes six times its size.
    """
    if not is_plain(data):
        return None
    try:
        return data.decode()
    except UnicodeDecodeError:
        return None
