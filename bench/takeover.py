"""`python -m bench takeover`: an instance is killed, stopped, or joins under load; what callers see meanwhile.

Transactions begin by the clock, whatever became of earlier ones, and each asks as behind a load balancer: every request
goes to the next instance. Where it is refused (503) it asks the next one after the seconds of Retry-After, where its
connection fails after a moment; with the same id and the same end again, as a client should.
"""

from __future__ import annotations

import asyncio
import time
import uuid
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import Final

import aiohttp
import msgspec

from bench.copies import Auditor, Sent, judge
from bench.figures import percentile
from bench.fleet import FleetRig, served
from bench.plan import GROUP, VALUE_BYTES
from halfway.domain.ids import shard_of
from tests.support.coordinator.fleet import SHARDS, Fleet
from tests.support.coordinator.process import CoordinatorProcess

RATE_PER_S: Final = 60.0
PAUSE_S: Final = 0.1
"""How long a caller whose connection failed waits before it asks the next instance."""
REQUEST_S: Final = 20.0
SETTLED_S: Final = 120.0
_LOOK_S: Final = 0.05


class Taking(msgspec.Struct, frozen=True, kw_only=True):
    """The sessions to try, transactions begun in a second, and seconds of load before and after each event."""

    sessions_s: tuple[float, ...] = (10.0, 6.0)
    rate_per_s: float = RATE_PER_S
    lead_s: float = 5.0
    after_s: float = 3.0


class TakeoverLine(msgspec.Struct, frozen=True, kw_only=True):
    """One event: of the shards that moved, and of the requests from it until all shards were served again.

    The seconds of a shard are the longest time in which no prepare and no end of it was done, counted from the event
    on: the least and the most of those that moved. `others_s` is the most of those that stayed where they were.
    """

    event: str
    session_s: float
    shards: int
    least_s: float
    most_s: float
    others_s: float
    requests: int
    refused: dict[str, int]
    """503 by their code."""
    without_retry_after: int
    lost: dict[str, int]
    """Requests without an answer, by what aiohttp says."""
    other: dict[str, int]
    """What else but 200 and 201 came."""
    p50_ms: float
    longest_s: float
    """Of a prepare or an end, from first asking to its being done, repetitions included; so is the p50."""


class Takeover(msgspec.Struct, frozen=True, kw_only=True):
    """What the run showed, and what the audit of all of it found."""

    rate_per_s: float
    lines: list[TakeoverLine]
    transactions: int
    missing: int
    doubled: int
    extra: int

    @property
    def clean(self) -> bool:
        """Whether everything stands exactly as it was answered, and nothing came but what may come."""
        told = not any(line.other or line.without_retry_after for line in self.lines)
        return told and not (self.missing or self.doubled or self.extra)


@dataclass
class _Seen:
    """What callers saw since an event."""

    since: float
    last: dict[int, float] = field(default_factory=dict)
    away: dict[int, float] = field(default_factory=dict)
    latencies: list[float] = field(default_factory=list)
    requests: int = 0
    refused: Counter[str] = field(default_factory=Counter)
    lost: Counter[str] = field(default_factory=Counter)
    other: Counter[str] = field(default_factory=Counter)
    without_retry_after: int = 0

    def done(self, shard: int, began: float, now: float) -> None:
        """Note a prepare or an end that is done; `began` is when it was asked first."""
        self.latencies.append(now - began)
        self.away[shard] = max(self.away.get(shard, 0.0), now - self.last.get(shard, self.since))
        self.last[shard] = now


class Callers:
    """Prepare and commit, each in a task of its own."""

    def __init__(self, session: aiohttp.ClientSession, topic: str, urls: Sequence[str]) -> None:
        self.urls = list(urls)
        self.seen = _Seen(time.monotonic())
        self.committed: set[bytes] = set()
        self.begun: set[bytes] = set()
        self.running = True
        self._session = session
        self._topic = topic
        self._turn = 0

    def event(self) -> None:
        """Count anew from now on."""
        self.seen = _Seen(time.monotonic())

    async def by_the_clock(self, rate: float) -> None:
        """Begin transactions until `running` is over, and return when all are committed."""
        loop = asyncio.get_running_loop()
        due = loop.time()
        async with asyncio.TaskGroup() as group:
            while self.running:
                group.create_task(self._transaction())
                due += 1 / rate
                await asyncio.sleep(max(0.0, due - loop.time()))

    async def _transaction(self) -> None:
        made = uuid.uuid4().hex
        shard = shard_of(made, SHARDS) or 0
        self.begun.add(made.encode())
        message = {"topic": self._topic, "key": made[:2], "value": "v" * VALUE_BYTES}
        await self._done("/transactions", {"group": GROUP, "id": made, "messages": [message]}, shard)
        await self._done(f"/transactions/{made}/end", {"outcome": "commit"}, shard)
        self.committed.add(made.encode())

    async def _done(self, path: str, body: object, shard: int) -> None:
        """Ask until it is done."""
        began = time.monotonic()
        while True:
            self._turn += 1
            pause_s = await self._asked(self.urls[self._turn % len(self.urls)] + "/v1" + path, body)
            if pause_s is None:
                self.seen.done(shard, began, time.monotonic())
                return
            await asyncio.sleep(pause_s)

    async def _asked(self, url: str, body: object) -> float | None:
        """Ask once; None where it is done, else after how many seconds to ask again."""
        seen = self.seen
        seen.requests += 1
        try:
            async with self._session.post(url, json=body) as response:
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


def measure_takeovers(rig: FleetRig, taking: Taking, *, say: Callable[[str], None]) -> Takeover:
    """Have a fourth instance join three, be stopped again, and one of the three be killed; with each session."""
    auditor = Auditor(rig.bootstrap_servers, rig.topic)
    began = auditor.ends()
    lines: list[TakeoverLine] = []
    committed: set[bytes] = set()
    begun: set[bytes] = set()
    for session_s in taking.sessions_s:
        say(f"three instances with a session of {session_s:g} s")
        with rig.fleet(3, {"HALFWAY_SESSION_TIMEOUT_S": f"{session_s:g}"}) as fleet:
            found, callers = asyncio.run(_events(fleet, rig.topic, taking, session_s, say))
        lines += found
        committed |= callers.committed
        begun |= callers.begun
    verdict = judge(
        Sent(committed=frozenset(committed), unconfirmed=frozenset(begun - committed)), auditor.copies(began)
    )
    return Takeover(
        rate_per_s=taking.rate_per_s,
        lines=lines,
        transactions=len(committed),
        missing=verdict.missing,
        doubled=verdict.doubled,
        extra=verdict.extra,
    )


async def _events(
    fleet: Fleet, topic: str, taking: Taking, session_s: float, say: Callable[[str], None]
) -> tuple[list[TakeoverLine], Callers]:
    lines: list[TakeoverLine] = []
    timeout = aiohttp.ClientTimeout(total=REQUEST_S)
    async with aiohttp.ClientSession(timeout=timeout, connector=aiohttp.TCPConnector(limit=0)) as session:
        callers = Callers(session, topic, [member.url for member in fleet.members])

        async def observed(event: str, act: Callable[[], None], before: set[int], then: Sequence[int]) -> None:
            """Act, and note what callers see until every shard has been served, and the shares are even."""
            say(f"  {event}")
            callers.event()
            seen = callers.seen
            await asyncio.to_thread(act)
            members = [fleet.members[number] for number in then]
            after = await _settled(members, lambda: len(seen.last) == SHARDS)
            moved = before or after[-1]
            await asyncio.sleep(taking.after_s)
            callers.event()
            lines.append(_line(event, session_s, seen, moved))

        async with asyncio.TaskGroup() as group:
            group.create_task(callers.by_the_clock(taking.rate_per_s))
            await asyncio.sleep(taking.lead_s)

            fresh = fleet.add()

            def join() -> None:
                fresh.start()
                callers.urls.append(fresh.url)

            await observed("a fourth joins", join, set(), (0, 1, 2, 3))
            own = await asyncio.to_thread(served, fresh)

            def stop() -> None:
                fresh.terminate()

            await observed("one of four is stopped (SIGTERM)", stop, own, (0, 1, 2))
            callers.urls.remove(fresh.url)
            own = await asyncio.to_thread(served, fleet.members[2])
            await observed("one of three is killed (kill -9)", fleet.members[2].kill, own, (0, 1))
            callers.running = False
    return lines, callers


async def _settled(members: Sequence[CoordinatorProcess], served_again: Callable[[], bool]) -> list[set[int]]:
    """Wait until callers have been served in every shard, and these instances have all the shards between them."""
    async with asyncio.timeout(SETTLED_S):
        while True:
            found = [await asyncio.to_thread(served, member) for member in members]
            whole = sum(map(len, found)) == SHARDS and set().union(*found) == set(range(SHARDS)) and all(found)
            if whole and served_again():
                return found
            await asyncio.sleep(_LOOK_S)


def _line(event: str, session_s: float, seen: _Seen, moved: set[int]) -> TakeoverLine:
    ordered = sorted(seen.latencies)
    away = [seconds for shard, seconds in seen.away.items() if shard in moved]
    stayed = [seconds for shard, seconds in seen.away.items() if shard not in moved]
    return TakeoverLine(
        event=event,
        session_s=session_s,
        shards=len(moved),
        least_s=round(min(away), 2),
        most_s=round(max(away), 2),
        others_s=round(max(stayed), 2),
        requests=seen.requests,
        refused=dict(seen.refused),
        without_retry_after=seen.without_retry_after,
        lost=dict(seen.lost),
        other=dict(seen.other),
        p50_ms=round(percentile(ordered, 0.5) * 1000, 1),
        longest_s=round(max(ordered), 2),
    )
