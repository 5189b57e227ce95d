"""An answer that is there as a whole, as one piece of bytes."""

from __future__ import annotations

import time
from email.utils import formatdate
from functools import lru_cache
from http import HTTPMethod, HTTPStatus
from typing import TYPE_CHECKING, Final

from aiohttp import HttpVersion10, web

if TYPE_CHECKING:
    from collections.abc import Iterable

    from aiohttp.abc import AbstractStreamWriter

_STATUS_LINES: Final = {status.value: f"HTTP/1.1 {status.value} {status.phrase}\r\n" for status in HTTPStatus}


class WholeResponse(web.StreamResponse):
    """Writes head and body at once; `web.Response` takes several times as long to build the same head.

    Names and values of `headers` hold no line breaks: none of them is what a client sent.
    """

    def __init__(self, status: int, body: bytes | None, headers: Iterable[tuple[str, str]]) -> None:
        """Keep the answer; a body of None is no body."""
        super().__init__(status=status)
        self._whole = body
        self._fields = headers

    async def prepare(self, request: web.BaseRequest) -> AbstractStreamWriter | None:
        """Build the bytes; `write_eof` sends them."""
        if self._payload_writer is not None:
            return self._payload_writer
        self._payload_writer = request.writer
        if self._keep_alive is None:
            self._keep_alive = request.keep_alive
        parts = [_STATUS_LINES[self.status], *[f"{name}: {value}\r\n" for name, value in self._fields]]
        parts.append(f"Date: {_date(int(time.time()))}\r\n")
        body = self._whole
        if self.status != HTTPStatus.NO_CONTENT:
            parts.append(f"Content-Length: {len(body or b'')}\r\n")
        if not self._keep_alive:
            parts.append("Connection: close\r\n")
        elif request.version == HttpVersion10:
            parts.append("Connection: keep-alive\r\n")
        parts.append("\r\n")
        head = "".join(parts).encode()
        self._whole = head if body is None or request.method == HTTPMethod.HEAD else head + body
        return self._payload_writer

    async def write_eof(self, data: bytes = b"") -> None:
        """Send it, once."""
        writer, whole = self._payload_writer, self._whole
        if self._eof_sent or writer is None or whole is None:
            return
        self._eof_sent = True
        await writer.write(whole + data)
        await writer.write_eof()


@lru_cache(maxsize=4)
def _date(second: int) -> str:
    return formatdate(second, usegmt=True)
