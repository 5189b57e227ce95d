"""DNS look-ups on their own threads, so that a name server that hangs delays only the checks of one group."""

from __future__ import annotations

import asyncio
import socket
from collections import Counter
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from contextlib import suppress
from typing import Final, TypeAlias

from aiohttp.abc import AbstractResolver, ResolveResult

from halfway.checkback.connections import EXCHANGE

LOOKUP_THREADS: Final = 256
"""A look-up that hangs occupies its thread for seconds. The event loop's own pool has as few as 5 threads."""
LOOKUPS_PER_GROUP: Final = 16
"""The most look-ups of one group at a time, abandoned ones included; more than a group may have endpoints."""
CACHE_S: Final = 10.0
"""How long an answer is cached."""

_Query: TypeAlias = tuple[str, str, int, int]
"""A group, and the host, port and address family that it looks up."""


class LookUp:
    """One look-up on a thread, shared by all checks of its group that need the name in the meantime."""

    def __init__(self) -> None:
        """Create a look-up that waits for a thread."""
        self.has_begun = False
        """Whether it runs on a thread."""
        self.waiting = 0
        """How many checks wait for it."""
        self.done = asyncio.get_running_loop().create_future()
        self.job: Future[list[ResolveResult]] = Future()

    def run(self, host: str, port: int, family: int) -> list[ResolveResult]:
        """Look the name up; called on a thread."""
        self.has_begun = True
        return _look_up(host, port, family)


class DnsResolver(AbstractResolver):
    """Runs `getaddrinfo` on a bounded pool of its own; each group may use only a part of the pool.

    Groups share no look-ups and no answers, so a group that has used up its part fails only its own checks.
    """

    def __init__(self, threads: int = LOOKUP_THREADS) -> None:
        """Create the pool; threads start on demand."""
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="halfway-dns")
        self._under_way: dict[_Query, LookUp] = {}
        self._count_by_group: Counter[str] = Counter()
        self._cache: dict[_Query, tuple[float, list[ResolveResult]]] = {}
        """Cached answers and when they expire, the oldest first."""

    async def resolve(
        self, host: str, port: int = 0, family: socket.AddressFamily = socket.AF_UNSPEC
    ) -> list[ResolveResult]:
        """Return the addresses of a host for the exchange under way; OSError if there are none."""
        exchange = EXCHANGE.get()
        name = (exchange.group, host, port, int(family))
        cached = self._cache.get(name)
        if cached is not None and asyncio.get_running_loop().time() < cached[0]:
            cached[1].append(cached[1].pop(0))  # round robin over the addresses
            return list(cached[1])
        if name not in self._under_way and self._count_by_group[exchange.group] >= LOOKUPS_PER_GROUP:
            exchange.refusal = (
                f"{LOOKUPS_PER_GROUP} look-ups of this group are under way already: the name servers of its endpoints "
                "do not answer"
            )
            raise OSError(exchange.refusal)
        exchange.look_up = look_up = self._under_way.get(name) or self._begin(name)
        look_up.waiting += 1
        try:
            await asyncio.shield(look_up.done)
        finally:
            look_up.waiting -= 1
            if not look_up.waiting:
                look_up.job.cancel()  # if it has no thread yet
        exchange.look_up = None
        try:
            return list(look_up.job.result())
        except UnicodeError:
            raise OSError("this cannot be a host name") from None
        except CancelledError:
            raise OSError("halfway is stopped") from None

    def _begin(self, name: _Query) -> LookUp:
        group, host, port, family = name
        loop = asyncio.get_running_loop()
        look_up = LookUp()

        def on_done(_: object) -> None:
            with suppress(RuntimeError):  # the loop is closed
                loop.call_soon_threadsafe(self._end, name, look_up)

        look_up.job = self._pool.submit(look_up.run, host, port, family)
        self._under_way[name] = look_up
        self._count_by_group[group] += 1
        look_up.job.add_done_callback(on_done)
        return look_up

    def _end(self, name: _Query, look_up: LookUp) -> None:
        """Free the group's place, cache the answer, and wake the waiting checks."""
        if self._under_way.get(name) is look_up:
            del self._under_way[name]
        self._count_by_group[name[0]] -= 1
        if not self._count_by_group[name[0]]:
            del self._count_by_group[name[0]]
        if not look_up.job.cancelled() and look_up.job.exception() is None:
            self._store(name, look_up.job.result())
        look_up.done.set_result(None)

    def _store(self, name: _Query, addresses: list[ResolveResult]) -> None:
        now = asyncio.get_running_loop().time()
        while self._cache and (oldest := next(iter(self._cache.items())))[1][0] <= now:
            del self._cache[oldest[0]]
        self._cache.pop(name, None)
        if addresses:
            self._cache[name] = now + CACHE_S, list(addresses)

    async def close(self) -> None:
        """Cancel waiting look-ups; those under way end by themselves."""
        self._pool.shutdown(wait=False, cancel_futures=True)


def _look_up(host: str, port: int, family: int) -> list[ResolveResult]:
    numeric = socket.NI_NUMERICHOST | socket.NI_NUMERICSERV
    return [
        ResolveResult(
            hostname=host,
            # The scope of a link-local IPv6 address must be cached, and only getnameinfo writes it.
            host=socket.getnameinfo(address, numeric)[0],
            port=port,
            family=family_found,
            proto=protocol,
            flags=socket.AI_NUMERICHOST | socket.AI_NUMERICSERV,
        )
        for family_found, _, protocol, _, address in socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, family=family
        )
    ]
