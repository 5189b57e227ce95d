"""A coordinator on a simulated broker with real HTTP, time and checks, for the console to look at."""

import asyncio
import time
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Self

import aiohttp

from halfway.client import transaction_id
from halfway.testing import MemoryServer
from tests.support.coordinator.rest_client import QUIET, Json, Rest, message

IMPATIENT: Mapping[str, object] = {
    "first_check_after_s": 0.1,
    "check_interval_s": 0.1,
    "max_interval_s": 0.1,
    "max_checks": 2,
}
"""A policy that parks what two checks do not decide, at once."""


class Shop:
    """One coordinator, its REST, and a topic."""

    def __init__(self, session: aiohttp.ClientSession) -> None:
        self._server = MemoryServer()
        self._session = session
        self.topic = ""
        self._ids: dict[str, str] = {}

    async def __aenter__(self) -> Self:
        await asyncio.to_thread(self._server.__enter__)
        self.topic = self._server.new_topic("orders")
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await asyncio.to_thread(self._server.__exit__, kind, error, trace)

    @property
    def url(self) -> str:
        return self._server.url

    @property
    def rest(self) -> Rest:
        return Rest(self._session, self.url, "")

    def at(self, address: str = "overview") -> str:
        """Return the address of a view of the console."""
        return f"{self.url}/console/#/{address}"

    async def group(
        self, name: str = "shop", *, url: str | None = None, policy: Mapping[str, object] | None = None
    ) -> None:
        """Register a group; without `url` it fetches its checks, so that nothing is asked by itself."""
        urls = None if url is None else [url]
        wanted = QUIET if policy is None else policy
        (await self.rest.put_group(name, topics=[self.topic], urls=urls, policy=wanted)).expect(200, 201)

    def id(self, name: str) -> str:
        """Return the id for a name; ids are in the order in which they were asked for first."""
        at = round(time.time() * 1000) - 10_000 + len(self._ids)
        return self._ids.setdefault(name, transaction_id(name, at))

    async def prepared(self, names: Sequence[str], *, group: str = "shop", **fields: object) -> None:
        """Prepare one message for each name, in batches; `fields` are those of the message."""
        for begin in range(0, len(names), 500):
            items = [
                {
                    "group": group,
                    "id": self.id(name),
                    "messages": [message(self.topic, **{"key": name, "value": "v", **fields})],
                }
                for name in names[begin : begin + 500]
            ]
            answers: list[Json] = (await self.rest.batch(prepare=items)).expect(200)["prepare"]
            assert {answer["status"] for answer in answers} == {201}, answers
