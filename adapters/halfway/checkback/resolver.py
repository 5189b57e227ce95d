"""Name look-ups on threads of their own, so that names whose servers hang hold up nobody else's."""

from __future__ import annotations

import asyncio
import socket
from concurrent.futures import ThreadPoolExecutor
from functools import partial

from aiohttp.abc import AbstractResolver, ResolveResult

LOOKUP_THREADS = 64
"""A look-up that hangs keeps its thread for some seconds; the loop's own pool has as few as 5 and others need it."""


class PoolResolver(AbstractResolver):
    """`getaddrinfo` on a bounded pool of its own."""

    def __init__(self, threads: int = LOOKUP_THREADS) -> None:
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="halfway-dns")

    async def resolve(
        self, host: str, port: int = 0, family: socket.AddressFamily = socket.AF_UNSPEC
    ) -> list[ResolveResult]:
        look_up = partial(socket.getaddrinfo, host, port, type=socket.SOCK_STREAM, family=family)
        try:
            found = await asyncio.get_running_loop().run_in_executor(self._pool, look_up)
        except UnicodeError:
            raise OSError("this cannot be a host name") from None
        numeric = socket.NI_NUMERICHOST | socket.NI_NUMERICSERV
        return [
            ResolveResult(
                hostname=host,
                # The scope of a link-local IPv6 address must be kept, and only getnameinfo writes it.
                host=socket.getnameinfo(address, numeric)[0],
                port=port,
                family=found_family,
                proto=protocol,
                flags=socket.AI_NUMERICHOST | socket.AI_NUMERICSERV,
            )
            for found_family, _, protocol, _, address in found
        ]

    async def close(self) -> None:
        """Drop what waits; a look-up under way ends by itself."""
        self._pool.shutdown(wait=False, cancel_futures=True)
