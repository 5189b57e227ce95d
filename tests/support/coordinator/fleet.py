"""Several coordinators with the same topics, and a client that asks one after the other as a load balancer does."""

import time
from collections.abc import Mapping
from itertools import cycle
from pathlib import Path
from typing import TypeVar
from uuid import uuid4

import aiohttp

from halfway.protocol.ids import IdMaker
from tests.support.coordinator.faulty import FaultyCoordinator
from tests.support.coordinator.process import CoordinatorProcess
from tests.support.coordinator.rest_client import Rest
from tests.support.waiting import eventually

SHARDS = 6
CREDENTIAL = "a secret that all instances share"
MIB = 1024 * 1024
_IDS = IdMaker(SHARDS)

Member = TypeVar("Member", bound=CoordinatorProcess)


class Fleet:
    """Coordinators that are one cluster."""

    def __init__(self, bootstrap_servers: str, directory: Path, settings: Mapping[str, str] | None = None) -> None:
        self.bootstrap_servers = bootstrap_servers
        self.prefix = f"_fleet{uuid4().hex[:10]}."
        self.members: list[CoordinatorProcess] = []
        self._directory = directory
        self.settings = {
            "HALFWAY_KAFKA_PREFIX": self.prefix,
            "HALFWAY_SHARDS": str(SHARDS),
            "HALFWAY_PEER_CREDENTIAL": CREDENTIAL,
            # On a slow machine one that lives is silent for seconds, and would lose its shards in the middle of a test.
            "HALFWAY_SESSION_TIMEOUT_S": "10",
            "HALFWAY_LEASE_S": "60",  # nor may a check be handed out again while the test ends it
            **(settings or {}),
        }

    def add(self, settings: Mapping[str, str] | None = None) -> CoordinatorProcess:
        """Make one more, not yet started."""
        return self._added(CoordinatorProcess, settings)

    def add_faulty(self) -> FaultyCoordinator:
        """Make one more with fault points, not yet started."""
        return self._added(FaultyCoordinator)

    def _added(self, kind: type[Member], settings: Mapping[str, str] | None = None) -> Member:
        directory = self._directory / f"member-{len(self.members)}"
        member = kind(self.bootstrap_servers, directory, {**self.settings, **(settings or {})})
        member.prefix = self.prefix
        member.alone = False
        member.settings["HALFWAY_INSTANCE_URL"] = member.url
        self.members.append(member)
        return member

    def start(self, count: int) -> None:
        """Start so many more at once, and return when all are ready."""
        fresh = [self.add() for _ in range(count)]
        for member in fresh:
            member.launch()
        for member in fresh:
            member.wait_until_ready()

    def close(self) -> None:
        for member in self.members:
            member.close()


class RoundRobin(Rest):
    """A client whose every call goes to the next of several coordinators."""

    def __init__(self, session: aiohttp.ClientSession, members: list[CoordinatorProcess]) -> None:
        super().__init__(session, members[0].url, members[0].health_url)
        self._urls = cycle([member.url for member in members])

    @property
    def url(self) -> str:
        return next(self._urls)

    @url.setter
    def url(self, _: str) -> None:
        """Stay with all of them."""


def id_in(shard: int) -> str:
    """Make an id that belongs to a shard."""
    return _IDS.make(time.time_ns() // 1_000_000, shard)


async def served_by(rest: Rest) -> set[int]:
    """Give the shards that an instance serves, as its metrics say."""
    _, metrics = await rest.health("/metrics")
    lines = (line for line in metrics.splitlines() if line.startswith("halfway_pending{"))
    return {int(line.split('shard="')[1].split('"')[0]) for line in lines}


async def shares(rests: list[Rest]) -> list[set[int]]:
    """Give the shards of each instance; none for one that cannot be asked."""
    found = []
    for rest in rests:
        try:
            found.append(await served_by(rest))
        except aiohttp.ClientError:
            found.append(set())
    return found


async def settled(rests: list[Rest]) -> list[set[int]]:
    """Wait until each instance serves its fair share and reaches the owners of the others; give their shards.

    They are ready before their shards are shared out, and an instance learns of an owner a moment after that serves.
    """
    most = -(-SHARDS // len(rests))

    async def found() -> list[set[int]]:
        found = await shares(rests)
        fair = sum(map(len, found)) == SHARDS and all(SHARDS // len(rests) <= len(one) <= most for one in found)
        # A list asks the owner of each shard.
        reached = fair and all([(await rest.call("GET", "/transactions")).status == 200 for rest in rests])
        return found if reached else []

    return await eventually(found, len)
