"""DNS look-ups on threads of their own, so that a name server that hangs delays no other group's checks."""

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
"""A look-up that hangs keeps its thread for seconds; the event loop's own pool has as few as 5, which others need."""
LOOKUPS_PER_GROUP: Final = 16
"""Of one group at a time, more than it may have endpoints: those that nobody waits for any more count too."""
KEPT_S: Final = 10.0
"""How long an answer is used again."""

_Name: TypeAlias = tuple[str, str, int, int]
"""A group, and the host, port and address family that it asks for."""


class LookUp:
    """One look-up on a thread, for all checks of its group that need that name meanwhile."""

    def __init__(self) -> None:
        """Wait for a thread."""
        self.begun = False
        """Whether it has a thread."""
        self.waiting = 0
        """How many checks wait for it."""
        self.over = asyncio.get_running_loop().create_future()
        self.job: Future[list[ResolveResult]] = Future()

    def run(self, host: str, port: int, family: int) -> list[ResolveResult]:
        """Look up, on a thread."""
        self.begun = True
        return _look_up(host, port, family)


class DnsResolver(AbstractResolver):
    """`getaddrinfo` on a bounded pool of its own, of which each group has a part at most.

    Groups share no look-up and no answer: one that has used up its part fails only its own checks, whatever names it
    asks for.
    """

    def __init__(self, threads: int = LOOKUP_THREADS) -> None:
        """Start no thread yet."""
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="halfway-dns")
        self._under_way: dict[_Name, LookUp] = {}
        self._of_groups: Counter[str] = Counter()
        self._found: dict[_Name, tuple[float, list[ResolveResult]]] = {}
        """Answers, and until when they are used again: the oldest first."""

    async def resolve(
        self, host: str, port: int = 0, family: socket.AddressFamily = socket.AF_UNSPEC
    ) -> list[ResolveResult]:
        """Return the addresses of a host for the exchange under way; OSError if there are none to be had."""
        exchange = EXCHANGE.get()
        name = (exchange.group, host, port, int(family))
        kept = self._found.get(name)
        if kept is not None and asyncio.get_running_loop().time() < kept[0]:
            kept[1].append(kept[1].pop(0))  # each address in turn
            return list(kept[1])
        if name not in self._under_way and self._of_groups[exchange.group] >= LOOKUPS_PER_GROUP:
            exchange.refusal = (
                f"{LOOKUPS_PER_GROUP} look-ups of this group are under way already: the name servers of its endpoints "
                "do not answer"
            )
            raise OSError(exchange.refusal)
        exchange.look_up = look_up = self._under_way.get(name) or self._begin(name)
        look_up.waiting += 1
        try:
            await asyncio.shield(look_up.over)
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

    def _begin(self, name: _Name) -> LookUp:
        group, host, port, family = name
        loop = asyncio.get_running_loop()
        look_up = LookUp()

        def over(_: object) -> None:
            with suppress(RuntimeError):  # the loop is closed
                loop.call_soon_threadsafe(self._end, name, look_up)

        look_up.job = self._pool.submit(look_up.run, host, port, family)
        self._under_way[name] = look_up
        self._of_groups[group] += 1
        look_up.job.add_done_callback(over)
        return look_up

    def _end(self, name: _Name, look_up: LookUp) -> None:
        """Give the place back, keep the answer, and wake those who wait."""
        if self._under_way.get(name) is look_up:
            del self._under_way[name]
        self._of_groups[name[0]] -= 1
        if not self._of_groups[name[0]]:
            del self._of_groups[name[0]]
        if not look_up.job.cancelled() and look_up.job.exception() is None:
            self._keep(name, look_up.job.result())
        look_up.over.set_result(None)

    def _keep(self, name: _Name, addresses: list[ResolveResult]) -> None:
        now = asyncio.get_running_loop().time()
        while self._found and (oldest := next(iter(self._found.items())))[1][0] <= now:
            del self._found[oldest[0]]
        self._found.pop(name, None)
        if addresses:
            self._found[name] = now + KEPT_S, list(addresses)

    async def close(self) -> None:
        """Cancel waiting look-ups; one that is under way ends by itself."""
        self._pool.shutdown(wait=False, cancel_futures=True)


def _look_up(host: str, port: int, family: int) -> list[ResolveResult]:
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
        for found_family, _, protocol, _, address in socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, family=family
        )
    ]
