"""A cluster of an earlier release, under load, takes this one and turns access control on."""

from __future__ import annotations

import asyncio
import random
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import AsyncExitStack
from dataclasses import dataclass
from http import HTTPStatus
from pathlib import Path
from typing import Final

import aiohttp

from checker.dump import Topics
from checker.history import HistoryWriter, Rest, Run, read_history
from checker.judge import Verdict, judge
from checker.records import read_records
from halfway.embedded import EmbeddedKafka
from halfway.embedded.process import SupervisedProcess
from tests.chaos.answering import CheckEndpoints, Fetcher
from tests.chaos.caller import Caller
from tests.chaos.coordinators import Instance
from tests.chaos.decisions import Decisions
from tests.chaos.follower import Follower
from tests.chaos.groups import register, use_keys
from tests.chaos.operator import Operator
from tests.chaos.producers import DROPPING, LEAVING, PULLED, TOPICS, Producers, born_now
from tests.chaos.run import OPERATOR_KEY, PREFIX
from tests.chaos.stage import SHARDS
from tests.support.coordinator.process import halfway_command
from tests.support.coordinator.topics import Cluster
from tests.support.waiting import eventually, until_true

INSTANCES: Final = 2
A_SECOND: Final = 60.0
SIDE_BY_SIDE: Final = 400
BETWEEN_STEPS: Final = 200
"""So many transactions are stored before the next instance is replaced."""
REST_WITHIN_S: Final = 300.0
_LOOK_AGAIN_S: Final = 1.0
_OPERATOR_LOOKS_S: Final = 3.0

OF_ALL_RELEASES: Final[Mapping[str, str]] = {
    "HALFWAY_SHARDS": str(SHARDS),
    "HALFWAY_SESSION_TIMEOUT_S": "10",
    "HALFWAY_CHECK_TIMEOUT_S": "2",
    "HALFWAY_LEASE_S": "3",
    "HALFWAY_PEER_CREDENTIAL": "what the instances of both releases share",
}
OF_THIS_RELEASE: Final[Mapping[str, str]] = {
    "HALFWAY_CHECK_ALSO_NETWORKS": "127.0.0.0/8",
    "HALFWAY_OPEN_ACCESS": "true",
    "HALFWAY_DRAIN_S": "0",
}
WITH_KEYS: Final[Mapping[str, str]] = {
    "HALFWAY_MASTER_SECRET": "upgrade-upgrade-upgrade-upgrade-upgrade",
    "HALFWAY_OPERATOR_KEY": OPERATOR_KEY,
}


class Member(Instance):
    """One coordinator, of the earlier release until it is replaced."""

    def __init__(self, number: int, bootstrap_port: int, directory: Path, earlier: Path) -> None:
        super().__init__(number, [bootstrap_port], directory, PREFIX, OF_ALL_RELEASES)
        for name in OF_THIS_RELEASE:
            self.settings.pop(name, None)
        self._earlier: Path | None = earlier

    def replace(self) -> None:
        """Be of this release from the next start on."""
        self._earlier = None

    def launch(self, **settings: str) -> None:
        if self._earlier is None:
            super().launch(**settings)
            return
        self.settings |= settings
        command = halfway_command(self.settings, "serve")
        command[command.index(sys.executable) :] = [str(self._earlier), "serve"]
        self._process = SupervisedProcess(command, cwd=self.directory, log_path=self.log_path)


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What came of it; `seconds` from the first load to rest, without the installation."""

    verdict: Verdict
    forged: list[str]
    held: Mapping[str, int]
    """How many transactions were pending and parked when the first instance was replaced."""
    pushed: int
    """Checks that were answered over HTTP."""
    answers: Mapping[str, int]
    seconds: float

    @property
    def sound(self) -> bool:
        return self.verdict.sound and not self.forged

    def summary(self) -> dict[str, object]:
        return {
            **self.verdict.summary(),
            "forged": len(self.forged),
            "held": self.held,
            "checks_answered": self.pushed,
            "answers": dict(sorted(self.answers.items())),
            "seconds": round(self.seconds),
        }


async def play(earlier: Path, directory: Path, say: Callable[[str], None]) -> Outcome:
    """Play it and judge; `earlier` is the command of the earlier release."""
    async with AsyncExitStack() as stack:
        story = _Story(earlier, directory, say, stack)
        await story.start()
        return await story.play()


class _Story:
    def __init__(self, earlier: Path, directory: Path, say: Callable[[str], None], stack: AsyncExitStack) -> None:
        self._earlier = earlier
        self._directory = directory
        self._say = say
        self._stack = stack
        self._seed = random.SystemRandom().randrange(10**6)
        self._over = False

    async def start(self) -> None:
        """Start the broker and the earlier release on it, without keys, and register the groups."""
        kafka = self._stack.enter_context(EmbeddedKafka())
        await Cluster(kafka.bootstrap_servers).make_exactly(*TOPICS)
        port = int(kafka.bootstrap_servers.rpartition(":")[2])
        self._members = [Member(n, port, self._directory, self._earlier) for n in range(1, INSTANCES + 1)]
        for member in self._members:
            self._stack.callback(member.close)
            member.launch()
        for member in self._members:
            await asyncio.to_thread(member.wait_until_ready)
        connector = aiohttp.TCPConnector(limit=0)
        session = await self._stack.enter_async_context(aiohttp.ClientSession(connector=connector))
        self._history = self._stack.enter_context(HistoryWriter(self._directory / "history.jsonl"))
        decisions = Decisions(self._directory / "decisions.db")
        self._stack.callback(decisions.close)
        self._caller = Caller(session, self._members, self._history, random.Random(self._seed))
        self._caller.streams_served = False
        self._stack.push_async_callback(self._caller.streams.close)
        self._producers = Producers(self._caller, decisions, self._seed, None)
        self._producers.id_of = lambda name: name  # the earlier release takes any text
        self._endpoints = CheckEndpoints(decisions, self._producers, self._history, self._seed)
        await self._endpoints.start()
        self._stack.push_async_callback(self._endpoints.stop)
        self._operator = Operator(self._caller, decisions, random.Random(self._seed))
        topics = Topics(kafka.bootstrap_servers, prefix=PREFIX, topics=tuple(TOPICS))
        self._follower = Follower.of(topics, self._directory / "topics.jsonl")
        self._history.write(
            Run(
                seed=self._seed,
                topics=tuple(TOPICS),
                policy_rolls_back=(DROPPING, LEAVING),
                fetching=(PULLED, LEAVING),
                wall=int(time.time() * 1000),
            )
        )
        await register(self._caller, self._endpoints.url)

    async def play(self) -> Outcome:
        began = time.monotonic()
        fetcher = Fetcher(self._caller, self._endpoints, INSTANCES)
        self._stack.callback(asyncio.create_task(fetcher.run()).cancel)
        load = asyncio.create_task(
            self._producers.run(
                0, lambda: self._over, side_by_side=SIDE_BY_SIDE, a_second=A_SECOND, lull_until=lambda: 0.0
            )
        )
        self._stack.callback(load.cancel)
        await self._more("two instances of the earlier release serve, without keys")
        held = await eventually(self._held, lambda found: all(found.values()), within_s=REST_WITHIN_S)
        self._stack.callback(asyncio.create_task(self._operator.run(_OPERATOR_LOOKS_S)).cancel)

        self._producers.id_of = born_now
        for member in self._members:
            await asyncio.to_thread(member.stop)
            member.replace()
            await asyncio.to_thread(member.start, **OF_THIS_RELEASE)
            await self._more(f"{member.name} is of this release")
        self._caller.streams_served = True
        await self._restart_each("has keys, and is open", WITH_KEYS)
        self._caller.keys[None] = OPERATOR_KEY
        await use_keys(self._caller, self._endpoints, self._members)
        await self._more("every group shows its key, and endpoints verify signatures")
        await self._restart_each("is open no more", {"HALFWAY_OPEN_ACCESS": "false"})
        for member in self._members:
            answer = await self._caller.ask(member, "/transactions", shown={})
            assert answer.status == HTTPStatus.UNAUTHORIZED, answer

        self._over = True
        await load
        await self._come_to_rest()
        verdict = judge(read_history(self._directory / "history.jsonl"), read_records(self._directory / "topics.jsonl"))
        return Outcome(
            verdict=verdict,
            forged=self._endpoints.forged,
            held=held,
            pushed=self._endpoints.manners.total(),
            answers=self._caller.by_status,
            seconds=time.monotonic() - began,
        )

    async def _held(self) -> dict[str, int]:
        await asyncio.to_thread(self._follower.look)
        return {"pending": len(self._follower.prepared), "parked": len(self._follower.parked)}

    async def _restart_each(self, what: str, settings: Mapping[str, str]) -> None:
        for member in self._members:
            await asyncio.to_thread(member.stop)
            await asyncio.to_thread(member.start, **settings)
            await self._more(f"{member.name} {what}")

    async def _more(self, what: str) -> None:
        """Say what has come about, and wait until the load has gone on for a while."""
        goal = self._producers.stored + BETWEEN_STEPS
        await until_true(lambda: self._producers.stored >= goal, what=f"callers go on: {what}", within_s=REST_WITHIN_S)
        self._say(f"{what}; {self._producers.stored} transactions so far")

    async def _come_to_rest(self) -> None:
        """Wait until nothing is pending; the operator ends what is parked, by the producers' own database."""
        deadline = time.monotonic() + REST_WITHIN_S
        while True:
            await asyncio.to_thread(self._follower.look)
            left = len(self._follower.prepared) + len(self._follower.parked)
            if not left or time.monotonic() > deadline:
                break
            await self._operator.end(self._follower.parked)
            await asyncio.sleep(_LOOK_AGAIN_S)
        self._say(f"{left} are left without an outcome" if left else "all have an outcome")
        self._history.write(Rest())
