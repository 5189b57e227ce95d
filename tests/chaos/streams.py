"""A stream of each group to each coordinator, opened again after a loss; each operation gets its own answer."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Mapping
from contextlib import suppress
from http import HTTPStatus
from typing import Any, Final

import aiohttp

from tests.chaos.answer import NOTHING, Answer
from tests.chaos.coordinators import Instance
from tests.support.coordinator.stream_client import StreamClient, StreamLostError

BROKEN_OFF: Final = 0.001
"""How many operations break their connection in flight, with everything else on it."""
CHECKS_AT_ONCE: Final = 50
_CONNECT_S: Final = 8.0


class Streams:
    """The streams that all producers share."""

    def __init__(self, session: aiohttp.ClientSession, chance: random.Random) -> None:
        self._session = session
        self._chance = chance
        self._open: dict[tuple[int, str], StreamClient] = {}
        self._opening: dict[tuple[int, str], asyncio.Lock] = {}
        self._subscribed_groups: tuple[str, ...] = ()
        self._tasks: set[asyncio.Task[None]] = set()
        self.checks: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
        """The checks that the coordinators pushed."""
        self.opened = 0

    def want(self, *groups: str) -> None:
        """Let the checks of these groups be pushed to each of their streams that is opened from now on."""
        self._subscribed_groups = groups

    async def send(
        self,
        instance: Instance,
        group: str,
        shown: Mapping[str, str],
        kind: str,
        fields: Mapping[str, Any],
        *,
        within_s: float,
    ) -> Answer:
        """Send one operation to a coordinator on a stream with the group's key, and return its answer.

        None if the connection is lost before it.
        """
        client: StreamClient | None = None
        try:
            async with asyncio.timeout(within_s):
                client = await self._client(instance, group, shown)
                call = asyncio.ensure_future(client.call(kind, fields))
                if self._chance.random() < BROKEN_OFF:
                    self._spawn(_break_off(client, self._chance.uniform(0, 0.1)))
                answer = await call
                return Answer(status=answer.status, body=answer.document or {})
        except TimeoutError:
            if client is not None:  # no caller waits for it any more
                self._spawn(client.abort())
            return NOTHING
        except (aiohttp.ClientError, ConnectionError, StreamLostError):
            return NOTHING

    async def close(self) -> None:
        """Close every stream."""
        for task in list(self._tasks):
            task.cancel()
        for client in self._open.values():
            await client.close()

    async def _client(self, instance: Instance, group: str, shown: Mapping[str, str]) -> StreamClient:
        place = instance.number, group
        async with self._opening.setdefault(place, asyncio.Lock()):
            client = self._open.get(place)
            if client is not None and not client.closed.is_set() and not client.closing.is_set():
                return client
            async with asyncio.timeout(_CONNECT_S):
                client = self._open[place] = await StreamClient.connect(self._session, instance.url, shown)
            client.checks = self.checks
            self.opened += 1
            if group in self._subscribed_groups:
                self._spawn(self._subscribe(client, group))
            return client

    async def _subscribe(self, client: StreamClient, group: str) -> None:
        with suppress(StreamLostError):
            while True:
                answer = await client.subscribe(group, CHECKS_AT_ONCE)
                if answer.status == HTTPStatus.OK:
                    break
                await asyncio.sleep(1)

    def _spawn(self, work: Any) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


async def _break_off(client: StreamClient, after_s: float) -> None:
    await asyncio.sleep(after_s)
    await client.abort()
