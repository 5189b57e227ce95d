"""Closes what asyncio's server accepts in the turn of the loop in which it is closed itself.

asyncio (3.11 to 3.13) leaves such a connection open: its client waits for ever, and whichever test runs when it is
collected fails for a `ResourceWarning`. Servers of tests close while clients still come.
"""

from asyncio import Server
from asyncio.selector_events import BaseSelectorEventLoop
from socket import socket
from typing import Any

_accept = BaseSelectorEventLoop._accept_connection2  # type: ignore[attr-defined]


async def _accept_or_close(
    loop: BaseSelectorEventLoop, make: Any, accepted: socket, extra: Any, tls: Any, server: Server, *bounds: float
) -> None:
    if server.is_serving():
        await _accept(loop, make, accepted, extra, tls, server, *bounds)
    else:
        accepted.close()


def close_late_connections() -> None:
    BaseSelectorEventLoop._accept_connection2 = _accept_or_close  # type: ignore[attr-defined]
