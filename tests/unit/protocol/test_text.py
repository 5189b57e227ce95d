"""The data that is shown as text."""

import pytest

from halfway.protocol.records import as_text


@pytest.mark.parametrize("text", ["", "v", "ä€\u202e", "a\tb\r\nc", '{"a": "\\u0001"}', "\x7f\x9b"])
def test_utf_8_without_control_characters_is_text(text: str) -> None:
    assert as_text(text.encode()) == text


@pytest.mark.parametrize("data", [b"\xff", b"\xed\xa0\x80", b"a\x00", b"\x1b[31m", b"\x01" * 1000, b"a\x0bb"])
def test_anything_else_is_not(data: bytes) -> None:
    """For example escape sequences of a terminal: such data would be six times as large in JSON."""
    assert as_text(data) is None
