"""What is answered: JSON or a problem document, and how it is written as one piece of bytes."""

from __future__ import annotations

import time
from email.utils import formatdate
from functools import lru_cache
from http import HTTPMethod, HTTPStatus
from typing import TYPE_CHECKING, Any, Final, cast

import msgspec
from aiohttp import HttpVersion10, web

from halfway.http.responses.problems import CONTENT_TYPE, MethodNotAllowedError, encoded, problem, retry_after
from halfway.protocol.errors import UnauthenticatedError
from halfway.protocol.records import rfc3339

if TYPE_CHECKING:
    from collections.abc import Sequence

    from aiohttp.abc import AbstractStreamWriter
    from aiohttp.http_writer import StreamWriter

    from halfway.protocol.errors import HalfwayError

JSON: Final = "application/json"
ENCODER: Final = msgspec.json.Encoder(enc_hook=rfc3339)
"""It writes each `Moment` as RFC 3339; no other type needs the hook."""
_NO_CONTENT: Final = HTTPStatus.NO_CONTENT.value
_HEAD: Final = HTTPMethod.HEAD.value
_STATUS_LINES: Final = {status.value: f"HTTP/1.1 {status.value} {status.phrase}\r\n" for status in HTTPStatus}


class Answer(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """An answer: a body of JSON, or none."""

    status: int
    body: bytes | None
    rest: Sequence[bytes] = ()
    """What follows `body`, in pieces: to join a large body would stop the event loop."""
    headers: tuple[tuple[str, str], ...] = ()
    error_code: str | None = None


def answer(status: int, body: Any = None, *headers: tuple[str, str]) -> Answer:
    return Answer(status=status, body=None if body is None else ENCODER.encode(body), headers=headers)


def answer_in_pieces(status: int, pieces: Sequence[bytes]) -> Answer:
    """Answer with JSON that is made already."""
    return Answer(status=status, body=pieces[0], rest=pieces[1:])


def refusal(error: HalfwayError, *, instance: str | None = None) -> Answer:
    document = problem(error)
    if instance is not None:
        document["instance"] = instance
    wait = retry_after(error)
    headers = () if wait is None else (("Retry-After", wait),)
    if isinstance(error, UnauthenticatedError):
        headers = (("WWW-Authenticate", 'Bearer realm="halfway"'),)
    elif isinstance(error, MethodNotAllowedError):
        headers = (("Allow", error.allowed),)
    return Answer(status=document["status"], body=encoded(document), headers=headers, error_code=error.code)


class WholeResponse(web.StreamResponse):
    """Writes head and body at once; `web.Response` takes several times as long to build the same head.

    Names and values of `headers` hold no line breaks: none of them is what a client sent.
    """

    def __init__(self, given: Answer, *headers: tuple[str, str]) -> None:
        super().__init__(status=given.status)
        self._whole = given.body
        self._rest = given.rest
        self._fields = [*given.headers, *headers]
        if given.body is not None:
            self._fields.append(("Content-Type", JSON if given.error_code is None else CONTENT_TYPE))

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
        if self.status != _NO_CONTENT:
            parts.append(f"Content-Length: {len(body or b'') + sum(map(len, self._rest))}\r\n")
        if not self._keep_alive:
            parts.append("Connection: close\r\n")
        elif request.version == HttpVersion10:
            parts.append("Connection: keep-alive\r\n")
        parts.append("\r\n")
        head = "".join(parts).encode()
        self._whole = head if body is None or request.method == _HEAD else head + body
        if request.method == _HEAD:
            self._rest = ()
        return self._payload_writer

    async def write_eof(self, data: bytes = b"") -> None:
        """Send it, once."""
        writer, whole = self._payload_writer, self._whole
        if self._eof_sent or writer is None or whole is None:
            return
        self._eof_sent = True
        rest, self._rest = self._rest, ()
        for piece in (whole, *rest[:-1]) if rest else ():
            # The connection gets all of it at once: it counts and bounds what the client does not read (`Unsent`).
            await cast("StreamWriter", writer).write(piece, drain=False)
        await writer.write((rest[-1] if rest else whole) + data)
        await writer.write_eof()


@lru_cache(maxsize=4)
def _date(second: int) -> str:
    return formatdate(second, usegmt=True)
