"""One run: a cluster, coordinators, producers, faults; at the end the verdict."""

from __future__ import annotations

import asyncio
import random
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import aiohttp
import msgspec

from checker.dump import Topics, read_topics
from checker.history import HistoryWriter, Rest, Run, read_history
from checker.judge import Verdict, judge
from checker.records import Half, Parked, read_records, write_records
from halfway.embedded.ports import pick_port
from halfway.embedded.properties import Listener
from tests.chaos.answering import CheckEndpoints, Fetcher
from tests.chaos.brokers import NODES, BrokerCluster
from tests.chaos.caller import Caller
from tests.chaos.coordinators import Instance
from tests.chaos.decisions import Decisions
from tests.chaos.faults import SESSION_S, Faults, Pace
from tests.chaos.network_process import NetworkProcess
from tests.chaos.operator import Operator
from tests.chaos.producers import DROPPING, PARKING, PULLED, PUSHED, TOPICS, Producers

SHARDS: Final = 6
PARTITIONS: Final = 2
REST_WITHIN_S: Final = 180.0
"""When all runs again, less must be pending after so long each time: checks are seconds apart here."""
_LOOK_AGAIN_S: Final = 1.0
_OPERATOR_LOOKS_S: Final = 3.0
_SETTLE_S: Final = 3.0

SETTINGS: Final[Mapping[str, str]] = {
    "HALFWAY_SHARDS": str(SHARDS),
    "HALFWAY_SESSION_TIMEOUT_S": f"{SESSION_S:g}",
    "HALFWAY_SCAN_INTERVAL_S": "0.5",
    "HALFWAY_CHECK_TIMEOUT_S": "2",
    "HALFWAY_LEASE_S": "3",
    "HALFWAY_PEER_CREDENTIAL": "chaos-chaos-chaos-chaos",
}
_POLICY: Final = {"first_check_after_s": 2, "check_interval_s": 1, "max_interval_s": 4, "max_checks": 40}
_SHORT: Final = {"first_check_after_s": 1.5, "check_interval_s": 1, "max_interval_s": 1, "max_checks": 2}


@dataclass(frozen=True, kw_only=True)
class Wanted:
    """How large a run is to be."""

    seed: int
    transactions: int
    """So many prepares are to be acknowledged."""
    coordinator_faults: int = 0
    """The load goes on until so many took effect; the same of brokers, and of everything at one instant."""
    broker_faults: int = 0
    full_stops: int = 0
    instances: int = 3
    side_by_side: int = 8000
    a_second: float = 600.0
    """Transactions begun, at most."""
    coordinator_gap_s: float = 8.0
    broker_gap_s: float = 20.0
    kinds: tuple[str, ...] = ()
    """Of faults; all of them where there are none."""


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What came of a run; the directory holds the history, the dump and all logs."""

    verdict: Verdict
    directory: Path
    seconds: float
    deaths: list[str]
    answers: Mapping[str, int]
    """What callers saw: how many tries got each status, or none."""

    def summary(self) -> dict[str, object]:
        return {
            **self.verdict.summary(),
            "deaths": len(self.deaths),
            "answers": dict(sorted(self.answers.items())),
            "minutes": round(self.seconds / 60, 1),
        }


async def run(wanted: Wanted, directory: Path, say: Callable[[str], None]) -> Outcome:
    """Run, wait for everything to come to rest, and judge."""
    began = time.monotonic()
    async with AsyncExitStack() as stack:
        chaos = _Chaos(wanted, directory, say, stack)
        await chaos.start()
        await chaos.load()
        await chaos.come_to_rest()
        await chaos.dump()
    verdict = judge(read_history(chaos.history_path), read_records(chaos.dump_path))
    (directory / "findings.json").write_bytes(msgspec.json.format(msgspec.json.encode(verdict.findings)))
    return Outcome(
        verdict=verdict,
        directory=directory,
        seconds=time.monotonic() - began,
        deaths=chaos.faults.deaths,
        answers=chaos.caller.by_status,
    )


class _Chaos:
    def __init__(self, wanted: Wanted, directory: Path, say: Callable[[str], None], stack: AsyncExitStack) -> None:
        self._wanted = wanted
        self._directory = directory
        self._say = say
        self._stack = stack
        self.history_path = directory / "history.jsonl"
        self.dump_path = directory / "topics.jsonl"
        self._prefix = "_halfway."

    def _chance(self, purpose: str) -> random.Random:
        return random.Random(f"{self._wanted.seed}/{purpose}")

    async def start(self) -> None:
        numbers = range(1, self._wanted.instances + 1)
        taken: set[int] = set()

        def free() -> int:
            taken.add(port := pick_port(taken))
            return port

        listeners = {
            f"C{number}": {node: Listener(port=free(), advertised_port=free()) for node in NODES} for number in numbers
        }
        self._say("three brokers start")
        self._cluster = BrokerCluster(self._directory, listeners)
        self._stack.callback(self._cluster.close)
        await asyncio.to_thread(self._cluster.__enter__)
        await asyncio.to_thread(self._cluster.make_topics, *TOPICS, partitions=PARTITIONS)
        networks = {}
        for number in numbers:
            ports = listeners[f"C{number}"].values()
            networks[number] = NetworkProcess({one.advertised_port or 0: one.port for one in ports})
            await networks[number].start()
            self._stack.push_async_callback(networks[number].stop)
        self._instances = [
            Instance(
                number,
                [one.advertised_port or 0 for one in listeners[f"C{number}"].values()],
                self._directory,
                self._prefix,
                SETTINGS,
            )
            for number in numbers
        ]
        self._say(f"{len(self._instances)} coordinators start")
        for instance in self._instances:
            self._stack.callback(instance.close)
            instance.launch()
        for instance in self._instances:
            await asyncio.to_thread(instance.wait_until_ready, 120)
        await self._start_producers(networks)

    async def _start_producers(self, networks: Mapping[int, NetworkProcess]) -> None:
        connector = aiohttp.TCPConnector(limit=0)
        session = await self._stack.enter_async_context(aiohttp.ClientSession(connector=connector))
        history = self._stack.enter_context(HistoryWriter(self.history_path))
        decisions = Decisions(self._directory / "decisions.db")
        self._stack.callback(decisions.close)
        self._history, self._decisions = history, decisions
        self.caller = Caller(session, self._instances, history, self._chance("caller"))
        self.producers = Producers(self.caller, decisions, self._wanted.seed)
        self.endpoints = CheckEndpoints(decisions, self.producers, history, self._wanted.seed)
        await self.endpoints.start()
        self._stack.push_async_callback(self.endpoints.stop)
        self.fetcher = Fetcher(self.caller, self.endpoints, len(self._instances))
        self.operator = Operator(self.caller, decisions, self._chance("operator"))
        self.faults = Faults(
            self._cluster, self._instances, networks, self.caller, history, self._chance("faults"), self._wanted.kinds
        )
        history.write(Run(seed=self._wanted.seed, topics=TOPICS, policy_rolls_back=(DROPPING,)))
        await self._register()

    async def _register(self) -> None:
        pushed = {"urls": [self.endpoints.url]}
        for group, check, policy in (
            (PUSHED, pushed, _POLICY),
            (PULLED, {"mode": "pull"}, _POLICY),
            (PARKING, pushed, _SHORT | {"on_exhausted": "park"}),
            (DROPPING, pushed, _SHORT | {"on_exhausted": "rollback"}),
        ):
            body = {"check": check, "topics": list(TOPICS), "policy": policy}
            answer = await self.caller.persist("PUT", f"/groups/{group}", body)
            assert answer.status in (200, 201), answer

    async def load(self) -> None:
        """Send transactions while faults happen, until there were enough of both."""
        for helping in (self.fetcher.run(), self.operator.run(_OPERATOR_LOOKS_S)):
            self._stack.callback(asyncio.create_task(helping).cancel)
        self._paces = (
            Pace(wanted=self._wanted.coordinator_faults, gap_s=self._wanted.coordinator_gap_s),
            Pace(wanted=self._wanted.broker_faults, gap_s=self._wanted.broker_gap_s),
        )
        watching = asyncio.create_task(self._report())
        ending = asyncio.create_task(self._end_of_faults())
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(
                    self.producers.run(
                        self._wanted.transactions,
                        self._broken_enough,
                        side_by_side=self._wanted.side_by_side,
                        a_second=self._wanted.a_second,
                    )
                )
                group.create_task(self.faults.run(*self._paces, self._progress))
        finally:
            for task in (ending, watching):
                task.cancel()
            await asyncio.gather(ending, watching, return_exceptions=True)
        await self.faults.mend()

    async def _end_of_faults(self) -> None:
        """Break nothing more once there is enough of everything: the last calls are to be answered."""
        while self._progress() < 1 or not self._broken_enough():  # noqa: ASYNC110  counters set no event
            await asyncio.sleep(0.2)
        self.faults.over()

    def _broken_enough(self) -> bool:
        return self.faults.reached(*self._paces, self._wanted.full_stops)

    def _progress(self) -> float:
        return min(1.0, self.producers.stored / self._wanted.transactions)

    async def _report(self) -> None:
        before, began = 0, time.monotonic()
        while True:
            await asyncio.sleep(10)
            stored = self.producers.stored
            self._say(
                f"{time.monotonic() - began:.0f} s: {stored} transactions, {(stored - before) / 10:.0f}/s, "
                f"{self.faults.happened.total()} faults, {self.caller.in_flight.total()} requests in flight"
            )
            before = stored

    async def come_to_rest(self) -> None:
        """Wait until nothing is pending; an operator ends what is parked, by the producers' own database."""
        self._say("everything runs again; what is pending is resolved")
        left = Left(Topics(self._cluster.bootstrap_servers, prefix=self._prefix, topics=()))
        fewest, deadline = sys.maxsize, 0.0
        while True:
            await asyncio.to_thread(left.look)
            if (count := len(left.prepared) + len(left.parked)) < fewest:
                fewest, deadline = count, time.monotonic() + REST_WITHIN_S
            await self.operator.end(left.parked)
            if not count or time.monotonic() > deadline:
                break
            await asyncio.sleep(_LOOK_AGAIN_S)
        self._say(f"{len(left.prepared)} are left without an outcome" if left.prepared else "all have an outcome")
        await asyncio.sleep(_SETTLE_S)
        self._history.write(Rest())

    async def dump(self) -> None:
        """Keep what the topics hold."""
        self._say("the topics are read")
        records = read_topics(self._cluster.bootstrap_servers, prefix=self._prefix, topics=TOPICS)
        await asyncio.to_thread(write_records, self.dump_path, records)
        answers = ", ".join(f"{times} x {what}" for what, times in self.caller.answers.most_common())
        self._say(f"answers: {answers}")
        behaviours = ", ".join(f"{times} x {what}" for what, times in self.producers.begun.most_common())
        self._say(
            f"producers: {behaviours}; {self.caller.batches} batches; checks answered: {dict(self.endpoints.manners)}"
        )


class Left:
    """What the log has as prepared and as parked, read on each time."""

    def __init__(self, topics: Topics) -> None:
        self._topics = topics
        self.prepared: set[str] = set()
        self.parked: set[str] = set()

    def look(self) -> None:
        """Take what has been written since the last time."""
        for record in self._topics.read():
            match record:
                case Half(contents=None):
                    self.prepared.discard(record.id)
                case Half():
                    self.prepared.add(record.id)
                case Parked(tombstone=True):
                    self.parked.discard(record.id)
                case Parked():
                    self.parked.add(record.id)


def new_directory() -> Path:
    """Make a directory for one run."""
    return Path(tempfile.mkdtemp(prefix="halfway-chaos-"))
