"""A fast check endpoint: `python -m bench.load.check_endpoint PORT OUTCOME` answers every check with the same verdict.

It is a bare asyncio protocol, because its own cost must not be measured.
"""

from __future__ import annotations

import asyncio
import sys
from typing import Final, cast

import uvloop

from halfway.embedded.broker import HOST

_END_OF_HEAD: Final = b"\r\n\r\n"
_LENGTH: Final = b"content-length:"
_NONCE: Final = b'"nonce":"'


class Endpoint(asyncio.Protocol):
    """One connection; checks arrive one after the other."""

    def __init__(self, outcome: str) -> None:
        """Keep the verdict."""
        self._before = b'{"outcome":"%b","nonce":"' % outcome.encode()
        self._received = b""
        self._transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Keep the connection."""
        self._transport = cast("asyncio.Transport", transport)

    def data_received(self, data: bytes) -> None:
        """Answer as soon as a check has arrived in full; its nonce binds the answer to it."""
        received = self._received + data
        end = received.find(_END_OF_HEAD)
        if end >= 0 and self._transport is not None:
            head = received[:end].lower()
            at = head.index(_LENGTH) + len(_LENGTH)
            until = end + len(_END_OF_HEAD) + int(head[at:].partition(b"\r\n")[0])
            if len(received) >= until:
                start = received.index(_NONCE, end) + len(_NONCE)
                body = b'%b%b"}' % (self._before, received[start : received.index(b'"', start)])
                self._transport.write(
                    b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n%b"
                    % (len(body), body)
                )
                received = received[until:]
        self._received = received


async def _serve(port: int, outcome: str) -> None:
    server = await asyncio.get_running_loop().create_server(lambda: Endpoint(outcome), HOST, port)
    await server.serve_forever()


if __name__ == "__main__":
    uvloop.run(_serve(int(sys.argv[1]), sys.argv[2]))
