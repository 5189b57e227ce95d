"""Reads the bodies of requests: headers first, then the bytes, with bounds on size and on slowness."""

from __future__ import annotations

import asyncio
from typing import Final

from aiohttp import web

from halfway.domain.errors import OverloadedError
from halfway.rest.responses.errors import (
    BodyTimeoutError,
    BodyTooLargeError,
    MalformedJsonError,
    UnsupportedMediaTypeError,
)

JSON: Final = "application/json"
SMALL_BYTES: Final = 16 * 1024
"""A body of up to this size is never refused because of other bodies."""
MIN_BYTES: Final = 80 * 1024
MIN_BYTES_IN_S: Final = 5.0
"""At least this much of a body, or all of it, has to arrive in this time."""
_CONTINUE: Final = b"HTTP/1.1 100 Continue\r\n\r\n"


class Bodies:
    """The bodies that are being received or served. Only bytes that have arrived count, not announced ones."""

    def __init__(self, *, max_bytes: int, max_bytes_in_flight: int, timeout_s: float) -> None:
        """Take the bounds on one body, on all of them, and on the time of one."""
        self._max_bytes = max_bytes
        self._max_in_flight = max_bytes_in_flight
        self._timeout_s = timeout_s
        self.bytes = 0
        self.arriving = 0
        """Of frames that are not complete, or not read yet."""

    async def read(self, request: web.BaseRequest, deadline: float, *, expected: bool) -> bytes:
        """Return a body, which counts until `release`; a refused body does not count.

        If the call expects a body, it must have a Content-Type.
        """
        self._judge_head(request, expected=expected)
        if not request.body_exists:
            return b""
        content = request.content
        if content.is_eof() and content.exception() is None:
            whole = content.read_nowait()  # a small body arrives with its headers: no wait
            self._demand_fitting(len(whole), self.bytes + len(whole))
            self.bytes += len(whole)
            return whole
        body = bytearray()
        try:
            await self._receive(request, body, deadline)
        except BaseException as error:
            self.bytes -= len(body)
            if isinstance(error, TimeoutError):
                raise BodyTimeoutError(
                    f"the body did not arrive within {self._timeout_s:g} s, or less than {MIN_BYTES // 1024} KiB of it "
                    f"in {MIN_BYTES_IN_S:g} s: send it again"
                ) from None
            if isinstance(error, web.RequestPayloadError):
                raise MalformedJsonError("the body is not sent as its headers say") from None
            raise
        return bytes(body)

    def hold(self, size: int) -> None:
        """Count the bytes of a frame, until `free`; OverloadedError if all are too many."""
        self._demand_fitting(size, self.bytes + size)
        self.bytes += size

    def arrive(self, size: int, by: int) -> bool:
        """Count bytes of a frame that arrives, `size` of it by now, until `arrived`; False if all are too large."""
        self.arriving += by
        return size <= SMALL_BYTES or self.arriving <= self._max_in_flight

    def arrived(self, size: int) -> None:
        """Stop counting a frame that has arrived, or never will."""
        self.arriving -= size

    def free(self, size: int) -> None:
        """Stop counting a frame."""
        self.bytes -= size

    def release(self, body: bytes) -> None:
        """Stop counting a body."""
        self.bytes -= len(body)

    async def _receive(self, request: web.BaseRequest, body: bytearray, deadline: float) -> None:
        """Append the bytes that arrive to `body`, and count them."""
        loop = asyncio.get_running_loop()
        content = request.content
        wanted = MIN_BYTES
        async with asyncio.timeout_at(min(deadline, loop.time() + MIN_BYTES_IN_S)) as patience:
            if request.headers.get("Expect", "").lower() == "100-continue" and not content.total_bytes:
                await request.writer.write(_CONTINUE)
                request.writer.output_size = 0
            while chunk := await content.readany():
                body += chunk
                self.bytes += len(chunk)
                self._demand_fitting(len(body), self.bytes)
                if len(body) >= wanted:
                    wanted = len(body) + MIN_BYTES
                    patience.reschedule(min(deadline, loop.time() + MIN_BYTES_IN_S))

    def _demand_fitting(self, size: int, in_flight: int) -> None:
        """Refuse a body if its size, or what has arrived of it, is too large, or all bodies together are."""
        if size > self._max_bytes:
            raise BodyTooLargeError(self._max_bytes)
        if size > SMALL_BYTES and in_flight > self._max_in_flight:
            raise OverloadedError(f"{in_flight} bytes of bodies are in flight here already: try again later")

    def _judge_head(self, request: web.BaseRequest, *, expected: bool) -> None:
        """Refuse a body by its headers, before it is read."""
        headers = request.headers
        self._demand_fitting(request.content_length or 0, self.bytes)
        if not request.body_exists:
            return
        media_type = headers.get("Content-Type")
        if media_type is None:
            if expected:
                raise UnsupportedMediaTypeError(f"the body has no Content-Type: send it as {JSON}")
        elif media_type != JSON and media_type.partition(";")[0].strip().lower() != JSON:
            raise UnsupportedMediaTypeError(f"Content-Type {media_type[:100]!r} is not taken: send {JSON}")
        if headers.get("Content-Encoding", "identity").lower() != "identity":
            raise UnsupportedMediaTypeError("compressed bodies are not taken: send it as it is")
