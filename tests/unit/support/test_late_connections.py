import asyncio
import socket

import pytest

from tests.support.waiting import GENEROUS_S


@pytest.mark.parametrize("turns", range(4))
async def test_a_connection_that_comes_while_a_server_is_closed_is_closed_too(turns: int) -> None:
    """However far the loop has come with it."""
    server = await asyncio.start_server(lambda _, writer: writer.close(), "127.0.0.1", 0)
    with socket.create_connection(server.sockets[0].getsockname()) as client:
        client.setblocking(False)
        for _ in range(turns):
            await asyncio.sleep(0)
        server.close()
        try:
            async with asyncio.timeout(GENEROUS_S):
                assert await asyncio.get_running_loop().sock_recv(client, 1) == b""
        except ConnectionResetError:
            pass
