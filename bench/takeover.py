"""`python -m bench takeover`: an instance joins, is stopped, or is killed under load; what callers see meanwhile.

Transactions begin by the clock, regardless of earlier ones, as behind a load balancer: every request goes to the next
instance. A refused request (503) is sent to the next one after the seconds of Retry-After, a request with a failed
connection after a moment, each with the same id and the same end, as a client should.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from http import HTTPStatus
from itertools import count, cycle
from typing import IO, Annotated, Final

import aiohttp
import msgspec
from msgspec import Meta

from bench.audit import Audit, Journal
from bench.figures import Record, Row, Say, percentile
from bench.load.wire import payloads
from bench.plan import GROUP
from bench.scenarios import FLEET_SHARDS
from bench.system import SPARE_S, Broker, Instance, Rig
from halfway.client.ids import NewIds
from halfway.protocol.ids import shard_of

PAUSE_S: Final = 0.1
"""How long a caller waits after a failed connection before it calls the next instance."""
REQUEST_S: Final = 20.0
_POLL_S: Final = 0.05


class Options(msgspec.Struct, frozen=True, kw_only=True):
    """The size of the run."""

    session: Annotated[tuple[float, ...], Meta(description="session time-outs in seconds")] = (10.0, 6.0)
    rate: Annotated[float, Meta(description="transactions a second")] = 60.0
    lead: Annotated[float, Meta(description="seconds of load before the first event")] = 5.0
    after: Annotated[float, Meta(description="seconds of load after each event")] = 3.0


@dataclass
class _Seen:
    """The results of callers since an event."""

    since: float
    last: dict[int, float] = field(default_factory=dict)
    away: dict[int, float] = field(default_factory=dict)
    latencies: list[float] = field(default_factory=list)
    requests: int = 0
    refused: Counter[str] = field(default_factory=Counter)
    lost: Counter[str] = field(default_factory=Counter)
    other: Counter[str] = field(default_factory=Counter)
    without_retry_after: int = 0

    def done(self, shard: int, started: float, now: float) -> None:
        """Record a successful prepare or end; `started` is the time of its first request."""
        self.latencies.append(now - started)
        self.away[shard] = max(self.away.get(shard, 0.0), now - self.last.get(shard, self.since))
        self.last[shard] = now

    def row(self, event: str, session: float, moved: set[int]) -> Row:
        """Return the figures. `away`: the longest time without a success of a shard that moved, from the event on."""
        ordered = sorted(self.latencies)
        away = [seconds for shard, seconds in self.away.items() if shard in moved]
        return {
            "event": event,
            "session s": session,
            "shards moved": len(moved),
            "away s": min(away),
            "to": max(away),
            "others s": max(seconds for shard, seconds in self.away.items() if shard not in moved),
            "requests": self.requests,
            "503": dict(self.refused),
            "without Retry-After": self.without_retry_after,
            "no answer": dict(self.lost),
            "other answers": dict(self.other),
            "p50 ms": percentile(ordered, 0.5) * 1000,
            "longest s": max(ordered),
        }


class _Callers:
    """The callers: each transaction runs in its own task."""

    def __init__(self, session: aiohttp.ClientSession, rig: Rig, journal: Journal) -> None:
        self.called = [instance.url for instance in rig.instances]
        self.seen = _Seen(time.monotonic())
        self.running = True
        self._session = session
        self._topic = rig.topic
        self._journal = journal
        self._contents = cycle(enumerate(payloads()))
        self._turn = count()

    async def by_the_clock(self, rate: float) -> None:
        """Begin transactions while `running`, and return when all are committed."""
        loop = asyncio.get_running_loop()
        due = loop.time()
        async with asyncio.TaskGroup() as group:
            while self.running:
                group.create_task(self._transaction())
                due += 1 / rate
                await asyncio.sleep(max(0.0, due - loop.time()))

    async def _transaction(self) -> None:
        name = NewIds().new_id()
        shard = shard_of(name, FLEET_SHARDS) or 0
        number, (key, value) = next(self._contents)
        message = {"topic": self._topic, "key": key, "value": value}
        await self._repeat("/transactions", {"group": GROUP, "id": name, "messages": [message]}, shard)
        await self._repeat(f"/transactions/{name}/end", {"outcome": "commit"}, shard)
        self._journal.committed([(number, name.encode())])

    async def _repeat(self, path: str, body: object, shard: int) -> None:
        """Send a request until it succeeds."""
        started = time.monotonic()
        while (pause_s := await self._send(path, body)) is not None:  # noqa: ASYNC110 - each try decides how long
            await asyncio.sleep(pause_s)
        self.seen.done(shard, started, time.monotonic())

    async def _send(self, path: str, body: object) -> float | None:
        """Send a request once; return None on success, else the seconds to wait before the next try."""
        seen = self.seen
        seen.requests += 1
        url = self.called[next(self._turn) % len(self.called)]
        try:
            async with self._session.post(f"{url}/v1{path}", json=body) as response:
                answer = await response.read()
        except (aiohttp.ClientError, TimeoutError) as error:
            seen.lost[type(error).__name__] += 1
            return PAUSE_S
        if response.ok:
            return None
        code = str(msgspec.json.decode(answer, type=dict[str, object]).get("error_code"))
        if response.status == HTTPStatus.SERVICE_UNAVAILABLE:
            seen.refused[code] += 1
        else:
            seen.other[f"{response.status} {code}"] += 1
        wait = response.headers.get("Retry-After")
        seen.without_retry_after += wait is None
        return PAUSE_S if wait is None else float(wait)


def run(kafka: Broker, options: Options, say: Say) -> Record:
    """With each session: a fourth instance joins three, it is stopped, then one of the three is killed."""
    rows: list[Row] = []
    audits = []
    for session in options.session:
        say(f"three instances with a session of {session:g} s")
        settings = {"HALFWAY_SESSION_TIMEOUT_S": f"{session:g}"}
        name = f"takeover-{NewIds().new_id()[-6:]}"
        with Rig(kafka, name, settings=settings, instances=3, shards=FLEET_SHARDS) as rig:
            auditor, journal = rig.auditor(), rig.directory / "takeover.journal"
            with journal.open("wb") as file:
                rows += asyncio.run(_events(rig, options, session, file, say))
            audits.append(auditor.audit([journal], payloads()))
    audit = Audit.sum(audits)
    expected = not any(row["other answers"] or row["without Retry-After"] for row in rows)
    found = ", ".join(f"{number} {kind}" for kind, number in audit.found.items())
    return Record(
        title=f"{options.rate:g} tx/s begun, {audit.transactions:,} in all: {found}",
        rows=rows,
        notes=list(audit.first),
        clean=audit.clean and expected,
    )


async def _events(rig: Rig, options: Options, session: float, journal: IO[bytes], say: Say) -> list[Row]:
    rows: list[Row] = []
    timeout = aiohttp.ClientTimeout(total=REQUEST_S)
    async with aiohttp.ClientSession(timeout=timeout, connector=aiohttp.TCPConnector(limit=0)) as client:
        callers = _Callers(client, rig, Journal(journal))

        async def observed(event: str, act: Callable[[], None], moved: set[int] | None = None) -> None:
            """Carry out an event, and record the results until all shards are served and evenly shared."""
            say(f"  {event}")
            seen = callers.seen = _Seen(time.monotonic())
            await asyncio.to_thread(act)
            served = await _settled(rig.instances, lambda: len(seen.last) == FLEET_SHARDS)
            await asyncio.sleep(options.after)
            callers.seen = _Seen(time.monotonic())
            rows.append(seen.row(event, session, served[-1] if moved is None else moved))

        def join() -> None:
            fresh = rig.launch()
            fresh.ready()
            callers.called.append(fresh.url)

        async with asyncio.TaskGroup() as group:
            group.create_task(callers.by_the_clock(options.rate))
            await asyncio.sleep(options.lead)
            await observed("a fourth joins", join)
            stopped = rig.instances.pop()
            own = await asyncio.to_thread(stopped.served)
            await observed("one of four is stopped (SIGTERM)", stopped.process.terminate, own)
            callers.called.remove(stopped.url)
            killed = rig.instances.pop()
            own = await asyncio.to_thread(killed.served)
            await observed("one of three is killed (kill -9)", killed.process.kill, own)
            callers.running = False
    return rows


async def _settled(members: list[Instance], served_again: Callable[[], bool]) -> list[set[int]]:
    """Wait until callers were served in every shard, and these instances together serve all shards."""
    async with asyncio.timeout(SPARE_S):
        while True:
            results = [await asyncio.to_thread(member.served) for member in members]
            whole = sum(map(len, results)) == FLEET_SHARDS == len(set().union(*results)) and all(results)
            if whole and served_again():
                return results
            await asyncio.sleep(_POLL_S)
