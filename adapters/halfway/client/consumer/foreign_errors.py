"""Exceptions of handlers, drivers and libraries, made safe for log lines and headers."""

from __future__ import annotations

import traceback


class _StandInError(Exception):
    """Takes the place of an exception whose text cannot be encoded, with its traceback."""


def described(error: BaseException | None) -> str:
    """Return the type and the text of an exception, whatever its class does, as text that can be encoded."""
    kind = type(error).__name__
    try:
        text = f"{kind}: {error}"
    except Exception:  # noqa: BLE001 - its class is not ours
        text = f"{kind}: its text cannot be read"
    return text.encode("utf-8", "backslashreplace").decode()


def loggable(error: BaseException | None) -> BaseException | None:
    """Return an exception for `exc_info`: with a text that cannot be encoded, a log would lose the line."""
    try:
        "".join(traceback.format_exception(error)).encode()
    except Exception:  # noqa: BLE001 - the same
        return _StandInError(described(error)).with_traceback(None if error is None else error.__traceback__)
    return error
