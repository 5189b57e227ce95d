"""`python -m bench takeover`: an instance is killed, is stopped, or joins under load; what callers see meanwhile.

Transactions begin by the clock, regardless of earlier ones, as behind a load balancer: every request goes to the next
instance. A refused request (503) is sent to the next one after the seconds of Retry-After, a request with a failed
connection after a moment, each with the same id and the same end, as a client should.
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

from bench.audit.copies import Auditor, Sent, judge
from bench.figures import percentile
from bench.plan import GROUP, VALUE_BYTES
from bench.system.fleet import FleetRig, served
from halfway.domain.ids import shard_of
from tests.support.coordinator.fleet import SHARDS, Fleet
from tests.support.coordinator.process import CoordinatorProcess

RATE_PER_S: Final = 60.0
PAUSE_S: Final = 0.1
"""How long a caller waits after a failed connection before it calls the next instance."""
REQUEST_S: Final = 20.0
SETTLED_S: Final = 120.0
_POLL_S: Final = 0.05


class TakeoverOptions(msgspec.Struct, frozen=True, kw_only=True):
    """The session time-outs to try, transactions per second, and seconds of load before and after each event."""

    sessions_s: tuple[float, ...] = (10.0, 6.0)
    rate_per_s: float = RATE_PER_S
    lead_s: float = 5.0
    after_s: float = 3.0


class TakeoverLine(msgspec.Struct, frozen=True, kw_only=True):
    """One event: the shards that moved, and the requests until all shards were served again.

    The seconds of a shard are the longest time without a successful prepare or end, counted from the event on: the
    lowest and the highest of the moved shards. `others_s` is the highest of the shards that stayed.
    """

    event: str
    session_s: float
    shards: int
    least_s: float
    most_s: float
    others_s: float
    requests: int
    refused: dict[str, int]
    """Answers with 503 by error code."""
    without_retry_after: int
    lost: dict[str, int]
    """Requests without an answer, by aiohttp's error."""
    other: dict[str, int]
    """Answers other than 200, 201 and 503."""
    p50_ms: float
    longest_s: float
    """The longest prepare or end, from the first request to its success, with retries; as for the p50."""


class Takeover(msgspec.Struct, frozen=True, kw_only=True):
    """The result of the run, and of its audit."""

    rate_per_s: float
    lines: list[TakeoverLine]
    transactions: int
    missing: int
    doubled: int
    extra: int

    @property
    def clean(self) -> bool:
        """Whether the topic contains exactly what was acknowledged, and every answer was an expected one."""
        expected = not any(line.other or line.without_retry_after for line in self.lines)
        return expected and not (self.missing or self.doubled or self.extra)


@dataclass
class _Results:
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


class Callers:
    """The callers: each transaction runs in its own task."""

    def __init__(self, session: aiohttp.ClientSession, topic: str, urls: Sequence[str]) -> None:
        self.urls = list(urls)
        self.seen = _Results(time.monotonic())
        self.committed: set[bytes] = set()
        self.sent: set[bytes] = set()
        self.running = True
        self._session = session
        self._topic = topic
        self._turn = 0

    def event(self) -> None:
        """Reset the results at an event."""
        self.seen = _Results(time.monotonic())

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
        transaction_id = uuid.uuid4().hex
        shard = shard_of(transaction_id, SHARDS) or 0
        self.sent.add(transaction_id.encode())
        message = {"topic": self._topic, "key": transaction_id[:2], "value": "v" * VALUE_BYTES}
        await self._repeat("/transactions", {"group": GROUP, "id": transaction_id, "messages": [message]}, shard)
        await self._repeat(f"/transactions/{transaction_id}/end", {"outcome": "commit"}, shard)
        self.committed.add(transaction_id.encode())

    async def _repeat(self, path: str, body: object, shard: int) -> None:
        """Send a request until it succeeds."""
        started = time.monotonic()
        while True:
            self._turn += 1
            pause_s = await self._send(self.urls[self._turn % len(self.urls)] + "/v1" + path, body)
            if pause_s is None:
                self.seen.done(shard, started, time.monotonic())
                return
            await asyncio.sleep(pause_s)

    async def _send(self, url: str, body: object) -> float | None:
        """Send a request once; return None on success, else the seconds to wait before the next try."""
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


def measure_takeovers(rig: FleetRig, options: TakeoverOptions, *, say: Callable[[str], None]) -> Takeover:
    """With each session: a fourth instance joins three, it is stopped, then one of the three is killed."""
    auditor = Auditor(rig.bootstrap_servers, rig.topic)
    start_offsets = auditor.ends()
    lines: list[TakeoverLine] = []
    committed: set[bytes] = set()
    sent: set[bytes] = set()
    for session_s in options.sessions_s:
        say(f"three instances with a session of {session_s:g} s")
        with rig.fleet(3, {"HALFWAY_SESSION_TIMEOUT_S": f"{session_s:g}"}) as fleet:
            found_lines, callers = asyncio.run(_events(fleet, rig.topic, options, session_s, say))
        lines += found_lines
        committed |= callers.committed
        sent |= callers.sent
    verdict = judge(
        Sent(committed=frozenset(committed), unconfirmed=frozenset(sent - committed)), auditor.copies(start_offsets)
    )
    return Takeover(
        rate_per_s=options.rate_per_s,
        lines=lines,
        transactions=len(committed),
        missing=verdict.missing,
        doubled=verdict.doubled,
        extra=verdict.extra,
    )


async def _events(
    fleet: Fleet, topic: str, options: TakeoverOptions, session_s: float, say: Callable[[str], None]
) -> tuple[list[TakeoverLine], Callers]:
    lines: list[TakeoverLine] = []
    timeout = aiohttp.ClientTimeout(total=REQUEST_S)
    async with aiohttp.ClientSession(timeout=timeout, connector=aiohttp.TCPConnector(limit=0)) as session:
        callers = Callers(session, topic, [member.url for member in fleet.members])

        async def observed(event: str, act: Callable[[], None], moved_before: set[int], then: Sequence[int]) -> None:
            """Carry out an event, and record the callers' results until all shards are served and evenly shared."""
            say(f"  {event}")
            callers.event()
            seen = callers.seen
            await asyncio.to_thread(act)
            members = [fleet.members[number] for number in then]
            after = await _settled(members, lambda: len(seen.last) == SHARDS)
            moved = moved_before or after[-1]
            await asyncio.sleep(options.after_s)
            callers.event()
            lines.append(_line(event, session_s, seen, moved))

        async with asyncio.TaskGroup() as group:
            group.create_task(callers.by_the_clock(options.rate_per_s))
            await asyncio.sleep(options.lead_s)

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
    """Wait until callers were served in every shard, and these instances together serve all shards."""
    async with asyncio.timeout(SETTLED_S):
        while True:
            results = [await asyncio.to_thread(served, member) for member in members]
            whole = sum(map(len, results)) == SHARDS and set().union(*results) == set(range(SHARDS)) and all(results)
            if whole and served_again():
                return results
            await asyncio.sleep(_POLL_S)


def _line(event: str, session_s: float, seen: _Results, moved: set[int]) -> TakeoverLine:
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
