"""One run: a cluster, coordinators, producers, faults; at the end the verdict."""

from __future__ import annotations

import asyncio
import random
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import aiohttp
import msgspec

from checker.cases import gather
from checker.dump import Topics
from checker.history import Held, HistoryWriter, Rest, Run, read_history
from checker.judge import Verdict, judge
from checker.records import read_records
from halfway.embedded.broker import Listener, pick_port
from halfway.protocol.keys import RANDOM_BYTES, key_text
from halfway.protocol.principal import PrincipalKind
from tests.chaos.answering import CheckEndpoints, Fetcher
from tests.chaos.audits import Agreement, agreement, audited
from tests.chaos.brokers import LOGIN, NODES, BrokerCluster
from tests.chaos.caller import Caller
from tests.chaos.coordinators import Instance
from tests.chaos.decisions import Decisions
from tests.chaos.effects import Effects
from tests.chaos.faults import Faults, Pace, Paces
from tests.chaos.follower import Follower
from tests.chaos.groups import register, use_keys
from tests.chaos.network_process import NetworkProcess
from tests.chaos.operator import Operator
from tests.chaos.probes import Probes
from tests.chaos.producers import DROPPING, FLEETING, LEAVING, PULLED, STRICT, TOPICS, Producers
from tests.chaos.stage import SESSION_S, SHARDS, Stage
from tests.chaos.topic_faults import TopicFaults

PREFIX: Final = "_halfway."
REST_WITHIN_S: Final = 400.0
"""When everything runs again, fewer must be pending after each period: denied ends are retried after 300 s."""
LATE_AFTER_S: Final = 30.0
"""How long after the horizon an ended id is prepared again."""
CLOCK_STEPS_S: Final = (-4 * 3600, -3600, -60, -5, 5, 60, 600, 2 * 3600, 3 * 3600)
_LOOK_AGAIN_S: Final = 1.0
_OPERATOR_LOOKS_S: Final = 3.0
_SETTLE_S: Final = 3.0

OPERATOR_KEY: Final = key_text(PrincipalKind.OPERATOR, bytes(range(RANDOM_BYTES)))
SETTINGS: Final[Mapping[str, str]] = {
    "HALFWAY_SHARDS": str(SHARDS),
    "HALFWAY_SESSION_TIMEOUT_S": f"{SESSION_S:g}",
    "HALFWAY_MIN_CHECK_INTERVAL_S": "0.5",
    "HALFWAY_REQUEST_TIMEOUT_S": "15",
    "HALFWAY_CHECK_TIMEOUT_S": "2",
    "HALFWAY_LEASE_S": "3",
    "HALFWAY_MASTER_SECRET": "chaos-chaos-chaos-chaos-chaos-chaos",
    "HALFWAY_OPERATOR_KEY": OPERATOR_KEY,
    "HALFWAY_OPEN_ACCESS": "metrics",
    # Limits that are reached.
    "HALFWAY_TRANSACTION_TIMEOUT_S": "22.5",
    "HALFWAY_MAX_PENDING": "2500",
    "HALFWAY_CHECK_CONCURRENCY": "3",
    "HALFWAY_POLICY__MAX_AGE_S": "300",
    **{f"HALFWAY_KAFKA__{name.upper().replace('.', '_')}": value for name, value in LOGIN.items()},
}


@dataclass(frozen=True, kw_only=True)
class RunOptions:
    """The size of a run."""

    seed: int
    transactions: int
    """The number of prepares that must be acknowledged."""
    coordinator_faults: int = 0
    """The load continues until this many took effect; likewise for brokers and for full stops."""
    broker_faults: int = 0
    topic_faults: int = 0
    full_stops: int = 0
    instances: int = 3
    side_by_side: int = 8000
    a_second: float = 600.0
    """The most transactions that are begun."""
    coordinator_gap_s: float = 8.0
    broker_gap_s: float = 20.0
    topic_gap_s: float = 15.0
    horizon_s: float = 900.0
    """Of outcomes; if it is short, ended ids are prepared again past it, and clocks are not set far ahead."""
    long_faults: bool = False
    """Whether some last for minutes."""
    kinds: tuple[str, ...] = ()
    """The kinds of faults; all if it is empty."""


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """The result of a run; the directory contains the history, the dump and all logs."""

    verdict: Verdict
    directory: Path
    seconds: float
    deaths: list[str]
    answers: Mapping[str, int]
    """The callers' results: the number of tries by status, or none."""
    effects: Effects
    forged: list[str]
    """Checks without a signature of their group's secrets, or repeated ones."""
    admitted: list[str]
    """Revoked keys that an instance has accepted, and deletions that it has not noticed."""
    audit: Agreement
    """Differences between the pipeline's audit of the topics and the checker."""

    @property
    def sound(self) -> bool:
        """Whether nothing is wrong, every check was signed, no revoked key was accepted, and the audit agrees."""
        return self.verdict.sound and not self.forged and not self.admitted and not self.audit.differences

    def summary(self) -> dict[str, object]:
        return {
            **self.verdict.summary(),
            **self.effects.summary(),
            "forged": len(self.forged),
            "admitted": len(self.admitted),
            "audited": self.audit.judged,
            "audit_differs": len(self.audit.differences),
            "deaths": len(self.deaths),
            "answers": dict(sorted(self.answers.items())),
            "minutes": round(self.seconds / 60, 1),
        }


async def run(options: RunOptions, directory: Path, say: Callable[[str], None]) -> Outcome:
    """Run, wait for everything to come to rest, and judge."""
    started = time.monotonic()
    async with AsyncExitStack() as stack:
        chaos = _Chaos(options, directory, say, stack)
        await chaos.start()
        await chaos.load()
        await chaos.come_to_rest()
        effects = await chaos.effects()
        rows = await asyncio.to_thread(audited, chaos.cluster.bootstrap_servers, PREFIX, options.horizon_s, directory)
    verdict = judge(read_history(chaos.history_path), read_records(chaos.dump_path))
    (directory / "findings.json").write_bytes(msgspec.json.format(msgspec.json.encode(verdict.findings)))
    evidence = gather(read_history(chaos.history_path), read_records(chaos.dump_path))
    return Outcome(
        verdict=verdict,
        directory=directory,
        seconds=time.monotonic() - started,
        deaths=chaos.faults.deaths,
        answers=chaos.caller.by_status,
        effects=effects,
        forged=chaos.endpoints.forged,
        admitted=chaos.stage.admitted,
        audit=agreement(rows, evidence.cases, verdict.findings, emptied=frozenset({FLEETING.name})),
    )


class _Chaos:
    def __init__(self, options: RunOptions, directory: Path, say: Callable[[str], None], stack: AsyncExitStack) -> None:
        self._options = options
        self._directory = directory
        self._say = say
        self._stack = stack
        self.history_path = directory / "history.jsonl"
        self.dump_path = directory / "topics.jsonl"

    def _chance(self, purpose: str) -> random.Random:
        return random.Random(f"{self._options.seed}/{purpose}")

    async def start(self) -> None:
        numbers = range(1, self._options.instances + 1)
        taken: set[int] = set()

        def free() -> int:
            taken.add(port := pick_port(taken))
            return port

        listeners = {
            f"C{number}": {node: Listener(port=free(), advertised_port=free()) for node in NODES} for number in numbers
        }
        self._say("three brokers start")
        self.cluster = BrokerCluster(self._directory, listeners)
        self._stack.callback(self.cluster.close)
        await asyncio.to_thread(self.cluster.__enter__)
        await asyncio.to_thread(self.cluster.make_topics, *TOPICS.values())
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
                PREFIX,
                {
                    **SETTINGS,
                    "HALFWAY_OUTCOME_HORIZON_S": f"{self._options.horizon_s:g}",
                    "HALFWAY_OP_RETENTION_MS": f"{self._options.horizon_s * 3000:.0f}",
                },
            )
            for number in numbers
        ]
        self._say(f"{len(self._instances)} coordinators start")
        for instance in self._instances:
            self._stack.callback(instance.close)
            instance.launch()
        for instance in self._instances:
            await asyncio.to_thread(instance.wait_until_ready)
        # Segments are rolled during the run.
        for kind in ("half", "op", "parked", "owners"):
            await asyncio.to_thread(self.cluster.configure, PREFIX + kind, {"segment.ms": "15000"})
        await self._start_producers(networks)

    async def _start_producers(self, networks: Mapping[int, NetworkProcess]) -> None:
        connector = aiohttp.TCPConnector(limit=0)
        session = await self._stack.enter_async_context(aiohttp.ClientSession(connector=connector))
        history = self._stack.enter_context(HistoryWriter(self.history_path))
        decisions = Decisions(self._directory / "decisions.db")
        self._stack.callback(decisions.close)
        self._history, self._decisions = history, decisions
        self.caller = Caller(session, self._instances, history, self._chance("caller"))
        self._stack.push_async_callback(self.caller.streams.close)
        late_after_s = self._options.horizon_s + LATE_AFTER_S if self._forgets_soon else None
        self.producers = Producers(self.caller, decisions, self._options.seed, late_after_s)
        self.endpoints = CheckEndpoints(decisions, self.producers, history, self._options.seed)
        await self.endpoints.start()
        self._stack.push_async_callback(self.endpoints.stop)
        self.fetcher = Fetcher(self.caller, self.endpoints, len(self._instances))
        self.operator = Operator(self.caller, decisions, self._chance("operator"))
        self.probes = Probes(self.caller, self._instances, history, SHARDS)
        self._topics = Topics(self.cluster.bootstrap_servers, prefix=PREFIX, topics=tuple(TOPICS))
        self.follower = Follower.of(self._topics, self.dump_path)
        self.stage = Stage(
            self.cluster,
            self._instances,
            networks,
            self.caller,
            history,
            self._chance("faults"),
            follower=self.follower,
            away=lambda: self.probes.away,
            holding=self.producers.holding,
            clock_steps_s=[step for step in CLOCK_STEPS_S if step < self._options.horizon_s / 2],
            horizon_s=self._options.horizon_s,
            long=self._options.long_faults,
        )
        of_topics = TopicFaults(self.stage, history, FLEETING, STRICT, PREFIX)
        self.faults = Faults(self.stage, of_topics, self._options.kinds)
        wall = int(time.time() * 1000)
        history.write(
            Run(
                seed=self._options.seed,
                topics=tuple(TOPICS),
                policy_rolls_back=(DROPPING, LEAVING),
                fetching=(PULLED, LEAVING),
                horizon_s=self._options.horizon_s,
                wall=wall,
                shards=SHARDS,
            )
        )
        self.caller.keys[None] = OPERATOR_KEY
        await register(self.caller, self.endpoints.url)
        await use_keys(self.caller, self.endpoints, self._instances)

    @property
    def _forgets_soon(self) -> bool:
        return self._options.horizon_s < RunOptions.horizon_s

    async def load(self) -> None:
        """Send transactions during faults, until there were enough of both."""
        options = self._options
        self._fetching = asyncio.create_task(self.fetcher.run())
        helpers = [
            self._fetching,
            asyncio.create_task(self.operator.run(_OPERATOR_LOOKS_S)),
            asyncio.create_task(self.probes.run()),
            asyncio.create_task(self.follower.run()),
        ]
        for helper in helpers:
            self._stack.callback(helper.cancel)
        self._paces = Paces(
            coordinators=Pace(wanted=options.coordinator_faults, gap_s=options.coordinator_gap_s),
            brokers=Pace(wanted=options.broker_faults, gap_s=options.broker_gap_s),
            topics=Pace(wanted=options.topic_faults, gap_s=options.topic_gap_s),
            full_stops=options.full_stops,
        )
        watching = asyncio.create_task(self._report())
        ending = asyncio.create_task(self._end_of_faults())
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(
                    self.producers.run(
                        self._options.transactions,
                        self._broken_enough,
                        side_by_side=self._options.side_by_side,
                        a_second=self._options.a_second,
                        lull_until=lambda: self.stage.lull_until,
                    )
                )
                group.create_task(self.faults.run(self._paces, self._progress))
        finally:
            for task in (ending, watching):
                task.cancel()
            await asyncio.gather(ending, watching, return_exceptions=True)
        await self.faults.mend()

    async def _end_of_faults(self) -> None:
        """Inject no more faults once there were enough: the last calls must be answered."""
        while self._progress() < 1 or not self._broken_enough():  # noqa: ASYNC110  counters set no event
            await asyncio.sleep(0.2)
        self.faults.over()

    def _broken_enough(self) -> bool:
        return self.faults.reached(self._paces)

    def _progress(self) -> float:
        return min(1.0, self.producers.stored / self._options.transactions)

    async def _report(self) -> None:
        before, started = 0, time.monotonic()
        while True:
            await asyncio.sleep(10)
            stored = self.producers.stored
            self._say(
                f"{time.monotonic() - started:.0f} s: {stored} transactions, {(stored - before) / 10:.0f}/s, "
                f"{self.stage.happened.total()} faults, {self.caller.in_flight.total()} requests in flight"
                + (f", away: {sorted(self.probes.away)}" if self.probes.away else "")
            )
            before = stored

    async def come_to_rest(self) -> None:
        """Wait until nothing is pending; an operator ends parked transactions by the producers' own database."""
        self._say("everything runs again; what is pending is resolved")
        left = self.follower
        fewest, deadline = sys.maxsize, 0.0
        while True:
            await asyncio.to_thread(left.look)
            if (count := len(left.prepared) + len(left.parked)) < fewest:
                fewest, deadline = count, time.monotonic() + REST_WITHIN_S
            await self.operator.end(left.parked)
            if not (count or self.probes.away) or time.monotonic() > deadline:
                break
            await asyncio.sleep(_LOOK_AGAIN_S)
        self._say(f"{len(left.prepared)} are left without an outcome" if left.prepared else "all have an outcome")
        self._fetching.cancel()  # pushed checks wait to be answered, long after their outcome
        await asyncio.gather(self._fetching, return_exceptions=True)
        await asyncio.sleep(_SETTLE_S)
        self._say("the topics are read to their ends")
        await asyncio.to_thread(left.look)
        self._forgotten = await asyncio.to_thread(self.cluster.forgotten)
        for (topic, partition), end in self._topics.held.items():
            times = self._forgotten[f"{topic}-{partition}"]
            why = f"Kafka itself forgot {times} transactions there (docs/verification.md)" if times else ""
            self._history.write(Held(topic=topic, partition=partition, end=end, why=why))
        self._history.write(Rest())

    async def effects(self) -> Effects:
        """Return the result of the run besides the verdict, and print the figures."""
        remaining = Topics(self.cluster.bootstrap_servers, prefix=PREFIX, topics=())
        effects = await asyncio.to_thread(
            Effects.of,
            self.follower,
            remaining,
            self.stage,
            self.caller.answers,
            self.producers.refused_late,
            {place: times for place, times in self._forgotten.items() if not place.startswith(f"{FLEETING.name}-")},
        )
        for line in effects.lines(self.faults.without_effect()):
            self._say(line)
        answers = ", ".join(f"{times} x {what}" for what, times in self.caller.answers.most_common())
        self._say(f"answers: {answers}")
        behaviours = ", ".join(f"{times} x {what}" for what, times in self.producers.begun.most_common())
        self._say(
            f"producers: {behaviours}; {self.caller.batches} batches; "
            f"{self.caller.streams.opened} streams, {self.fetcher.pushed} checks pushed on them; "
            f"checks answered: {dict(self.endpoints.manners)}"
        )
        return effects
