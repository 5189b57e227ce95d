"""Counts what arrives on a WebSocket and is held until its message is read."""

from __future__ import annotations

from typing import Final

_MASKED: Final = 0x80
_LENGTH: Final = 0x7F
_TWO_BYTES: Final = 126
_EIGHT_BYTES: Final = 127
_CONTROL: Final = 0x08


class ArrivingPayload:
    """Follows the headers of frames, and counts the payload of messages.

    Headers and control frames (pings, pongs, closes) do not count. They are not held, and a client may send any number
    of them without ever completing a message.
    """

    def __init__(self) -> None:
        """Start at the header of a frame."""
        self._header = bytearray()
        """What has arrived of the header."""
        self._left = 0
        """Bytes of the payload of this frame that have yet to arrive."""
        self._counts = False

    def size_in(self, data: bytes) -> int:
        """Return how many bytes of `data`, which follows what came before, are payload of messages."""
        found = at = 0
        while at < len(data):
            if not self._left:
                at += self._read_header(data, at)
            taken = min(self._left, len(data) - at)
            self._left -= taken
            at += taken
            if self._counts:
                found += taken
        return found

    def _read_header(self, data: bytes, at: int) -> int:
        """Read more of a header, and return how many bytes of it are in `data`."""
        header, start = self._header, at
        while at < len(data) and (missing := _header_size(header) - len(header)):
            header += data[at : at + missing]
            at = min(at + missing, len(data))
        if len(header) == _header_size(header):
            length = header[1] & _LENGTH
            extended = {_TWO_BYTES: header[2:4], _EIGHT_BYTES: header[2:10]}.get(length)
            self._left = length if extended is None else int.from_bytes(extended)
            self._counts = not header[0] & _CONTROL
            header.clear()
        return at - start


def _header_size(header: bytes | bytearray) -> int:
    """Return the size of a header as far as it is known: its second byte says how long it is."""
    if len(header) < 2:  # noqa: PLR2004 - flags and length
        return 2
    extended = {_TWO_BYTES: 2, _EIGHT_BYTES: 8}.get(header[1] & _LENGTH, 0)
    return 2 + extended + (4 if header[1] & _MASKED else 0)
