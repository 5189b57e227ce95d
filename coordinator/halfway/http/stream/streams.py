"""All open streams: the bounds that they share, and how they begin and end."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Final

import structlog
from aiohttp import web

from halfway.http.handlers.handlers import SUBPROTOCOL
from halfway.http.requests.admission import SMALL_BYTES
from halfway.http.responses.problems import RareLog
from halfway.http.stream.frames import FrameReader
from halfway.http.stream.stream import Stream
from halfway.protocol.errors import OverloadedError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from halfway.http.handlers.handlers import Call
    from halfway.http.requests.admission import ApiLimits, InFlight
    from halfway.http.stream.operations import StreamOperations
    from halfway.protocol.principal import Principal

log = structlog.get_logger(__name__)

_CLOSE_S: Final = 2.0
"""How long a client may take to answer a close frame."""


class Streams:
    """Every open stream of this instance."""

    def __init__(self, operations: StreamOperations, in_flight: InFlight, limits: ApiLimits) -> None:
        """Take what does the operations of all streams, and what counts their bytes; nothing is open."""
        self._operations = operations
        self._in_flight = in_flight
        self._limits = limits
        self._open: dict[Stream, web.BaseRequest] = {}
        self._cut_off = RareLog(__name__, "stream_cut_off")

    def __len__(self) -> int:
        """Return how many are open."""
        return len(self._open)

    def __iter__(self) -> Iterator[Stream]:
        return iter(self._open)

    def demand_room(self, principal: Principal) -> None:
        """Raise OverloadedError if no more may be opened, or no more by a group that has half of all."""
        if len(self._open) >= self._limits.max_streams:
            raise OverloadedError(f"{len(self._open)} streams are open here already: try again later")
        if (group := principal.group) is None:
            return
        of_group = sum(stream.principal.group == group for stream in self._open)
        if of_group >= max(1, self._limits.max_streams // 2):
            raise OverloadedError(f"{of_group} streams of group {group!r} are open here already: others need the rest")

    def make(self, call: Call) -> Stream:
        """Make the stream of a handshake that was accepted; `serve` opens it."""
        limits = self._limits
        socket = web.WebSocketResponse(
            timeout=_CLOSE_S,
            protocols=(SUBPROTOCOL,),
            compress=False,
            max_msg_size=limits.max_body_bytes + 1,  # aiohttp refuses a message of this size
            heartbeat=limits.heartbeat_s,
            decode_text=False,
        )
        return Stream(
            socket,
            call=call,
            reader=FrameReader(call.site.validation, max_operations=limits.max_batch_items),
            operations=self._operations,
            limits=limits,
            on_frame=self.read,
        )

    async def serve(self, stream: Stream, request: web.BaseRequest) -> web.StreamResponse:
        self._open[stream] = request
        log.debug("stream_opened", principal=str(stream.principal), remote=request.remote)
        try:
            await stream.socket.prepare(request)
            await stream.run()
        finally:
            del self._open[stream]
            self.read(stream, stream.unread_bytes)
            log.debug("stream_closed", principal=str(stream.principal), code=stream.socket.close_code)
            if not stream.socket.closed and request.transport is not None:
                request.transport.abort()
        return stream.socket

    def received(self, stream: Stream, data: bytes) -> bool:
        """Count what has arrived for a stream, and return whether it may go on.

        If the unread frames of all streams are too large, the largest one of the caller that has most of them is cut
        off: the streams of others go on.
        """
        size = stream.arriving.size_in(data)
        stream.unread_bytes += size
        self._in_flight.arrive(size)
        while self._in_flight.arriving_too_much and (largest := self._largest()) is not None:
            self._cut_off.note(
                "frames_too_large",
                principal=str(largest.principal),
                unread_bytes=largest.unread_bytes,
                of_all=self._in_flight.arriving,
            )
            self.read(largest, largest.unread_bytes)
            if largest is stream:
                return False
            if (transport := self._open[largest].transport) is not None:
                transport.abort()
        return True

    def _largest(self) -> Stream | None:
        """Return the stream to cut off, None if no stream has more than a small frame."""
        of_groups: Counter[str | None] = Counter()
        for stream in self._open:
            of_groups[stream.principal.group] += stream.unread_bytes
        large = [stream for stream in self._open if stream.unread_bytes > SMALL_BYTES]
        return max(large, key=lambda one: (of_groups[one.principal.group], one.unread_bytes), default=None)

    def read(self, stream: Stream, size: int) -> None:
        self._in_flight.arrived(size)
        stream.unread_bytes -= size

    def stop(self) -> None:
        """Let every stream answer what is in flight, and close."""
        for stream in self._open:
            stream.stop()
