"""Three instances behind Envoy, which looks at their health, with callers that never try anything again.

`pytest -n 0 -rP` prints what the callers saw: docs/benchmarks.md#behind-a-load-balancer has the figures.
"""

import asyncio
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Self

import aiohttp
import pytest

from tests.support.brokers.fixtures import Kafka
from tests.support.coordinator.balancer import Balancer
from tests.support.coordinator.fleet import SHARDS, Fleet, settled, shares
from tests.support.coordinator.process import CoordinatorProcess, NewCoordinator
from tests.support.coordinator.rest_client import QUIET, Connect, Json, Rest, message
from tests.support.coordinator.topics import Cluster
from tests.support.ids import new_id
from tests.support.waiting import eventually

CALLERS = 8
LEAST_CALLS = 50
SETTINGS = {"HALFWAY_DRAIN_S": "3", "HALFWAY_REQUEST_TIMEOUT_S": "15"}
MOVED = "503 shard_unavailable with Retry-After"
OF_A_SHARD = {
    "with ids of halfway, end: " + MOVED,
    "with ids of their own, prepare: " + MOVED,
    "with ids of their own, end: " + MOVED,
    "with ids of their own, prepare: 503 outcome_unknown with Retry-After",
}
"""What callers may see while a shard moves. A prepare without an id needs no particular shard. One with an id is
unknown if Kafka has stored its half only after the shard was gone."""


@dataclass
class Seen:
    """What callers saw while something happened: the failures by call and answer, and how long each success took."""

    failures: Counter[str] = field(default_factory=Counter)
    began: float = field(default_factory=time.monotonic)
    took_s: list[float] = field(default_factory=list)

    def __str__(self) -> str:
        took = sorted(self.took_s)
        failed = ", ".join(f"{count} {what}" for what, count in self.failures.most_common()) or "none"
        calls, seconds = len(took) + self.failures.total(), time.monotonic() - self.began
        p50, p99 = (round(took[len(took) * share // 100] * 1000) for share in (50, 99))
        return f"{calls} calls in {seconds:.0f} s, failed: {failed}; p50 {p50} ms, p99 {p99} ms, max {took[-1]:.1f} s"


class Callers:
    """Prepare and commit, one call after the other. What failed is left to check-back, as a service does."""

    def __init__(self, rest: Rest, group: str, topic: str, *, own_ids: bool) -> None:
        self._rest = rest
        self._group = group
        self._topic = topic
        self._own_ids = own_ids
        self._done = False
        self.seen = Seen()
        self.committed: set[str] = set()

    def now_seen(self) -> Seen:
        """Begin to count anew, and return what was seen until now."""
        seen, self.seen = self.seen, Seen()
        return seen

    async def until_served(self) -> None:
        """Wait until more calls have succeeded."""
        begun = len(self.seen.took_s)

        async def ok() -> int:
            return len(self.seen.took_s)

        await eventually(ok, lambda count: count >= begun + LEAST_CALLS)

    async def run(self) -> None:
        while not self._done:
            prepare: Json = {"group": self._group, "messages": [message(self._topic, "v")]}
            if self._own_ids:
                prepare["id"] = new_id()
            prepared = await self._call("prepare", "/transactions", prepare)
            if prepared is not None:
                name = str(prepared["id"])
                if await self._call("end", f"/transactions/{name}/end", {"outcome": "commit"}) is not None:
                    self.committed.add(name)
            await asyncio.sleep(0.01)

    async def _call(self, what: str, path: str, body: Json) -> Json | None:
        seen, sent_at = self.seen, time.monotonic()
        try:
            answer = await self._rest.call("POST", path, body)
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            seen.failures[f"{what}: {type(error).__name__}"] += 1
            return None
        if answer.status in (200, 201):
            seen.took_s.append(time.monotonic() - sent_at)
            found: Json = answer.body
            return found
        asked_to_wait = " with Retry-After" if "Retry-After" in answer.headers else ""
        seen.failures[f"{what}: {answer.status} {answer.error_code}{asked_to_wait}"] += 1
        return None

    def stop(self) -> None:
        self._done = True


class Services:
    """Two services with half of the callers each: one takes halfway's ids, the other brings its own."""

    def __init__(self, rest: Rest, group: str, topic: str) -> None:
        self.callers = {
            "with ids of halfway": Callers(rest, group, topic, own_ids=False),
            "with ids of their own": Callers(rest, group, topic, own_ids=True),
        }

    @property
    def committed(self) -> set[str]:
        return set().union(*(callers.committed for callers in self.callers.values()))

    async def until_served(self) -> None:
        for callers in self.callers.values():
            await callers.until_served()

    def now_seen(self, when: str) -> Counter[str]:
        """Print what was seen until now, and return the failures."""
        failures: Counter[str] = Counter()
        for ids, callers in self.callers.items():
            print(f"{when}, {ids}: {(seen := callers.now_seen())}")  # noqa: T201
            failures.update({f"{ids}, {failure}": count for failure, count in seen.failures.items()})
        return failures

    async def __aenter__(self) -> Self:
        self._tasks = asyncio.TaskGroup()
        await self._tasks.__aenter__()
        for callers in self.callers.values():
            for _ in range(CALLERS // 2):
                self._tasks.create_task(callers.run())
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for callers in self.callers.values():
            callers.stop()
        await self._tasks.__aexit__(kind, error, trace)


async def served_by_all(rests: list[Rest]) -> None:
    """Wait until these instances serve every shard together."""
    await eventually(lambda: shares(rests), lambda found: sum(map(len, found)) == SHARDS)


@pytest.mark.timeout(900)
async def test_while_instances_are_restarted_and_killed_a_load_balancer_always_has_a_ready_server(
    kafka: Kafka, tmp_path: Path, connect: Connect, cluster: Cluster, topic: str, group: str
) -> None:
    """A shard that moves is 503 with Retry-After, and nothing else fails but what a killed instance was answering.

    Each acknowledged commit is there, once.
    """
    fleet = Fleet(kafka.bootstrap_servers, tmp_path, SETTINGS)
    balancer = None
    try:
        fleet.start(3)
        rests = [connect(member) for member in fleet.members]
        await settled(rests)
        balancer = Balancer(fleet.members, tmp_path / "balancer")
        await balancer.until_all_are_ready()
        async with aiohttp.ClientSession() as session:
            rest = Rest(session, balancer.url, "")
            (await rest.put_group(group, topics=[topic], policy=QUIET)).expect(201)
            async with Services(rest, group, topic) as services:
                await services.until_served()
                assert services.now_seen("before") == {}
                for member in fleet.members:
                    await asyncio.to_thread(_restart, member)
                    await balancer.until_all_are_ready()
                    await services.until_served()
                assert services.now_seen("rolling restart").keys() <= OF_A_SHARD
                await settled(rests)
                fleet.members[0].kill()
                killed_at = time.monotonic()
                await served_by_all(rests[1:])
                print(f"its shards were served again after {time.monotonic() - killed_at:.1f} s")  # noqa: T201
                await services.until_served()
                killed = services.now_seen("kill -9 of one of three")
        in_flight = sum(count for failure, count in killed.items() if failure not in OF_A_SHARD)
        assert in_flight <= 2 * CALLERS  # its connections are closed one after the other, so a caller may find two
        assert balancer.refused() == 0
        ready = balancer.stop()
        print(ready)  # noqa: T201
        assert ready.changes >= 2 * len(fleet.members)  # Envoy has noticed each restart
        assert ready.fewest >= 1
        assert ready.without_any_s == 0
        found = Counter(record.transaction_id for record in await cluster.read(topic))
        assert [name for name in services.committed if found[name] != 1] == []
        assert max(found.values()) == 1
    finally:
        if balancer is not None:
            balancer.close()
        fleet.close()


async def test_a_connection_without_requests_is_closed_when_the_setting_says(new_coordinator: NewCoordinator) -> None:
    """A load balancer that keeps its connections for longer needs a longer time here."""
    short, long = new_coordinator({"HALFWAY_KEEPALIVE_S": "0.5"}), new_coordinator({"HALFWAY_KEEPALIVE_S": "3600"})
    for coordinator in (short, long):
        coordinator.launch()
    for coordinator in (short, long):
        await asyncio.to_thread(coordinator.wait_until_ready)
    kept, closed = [await asyncio.open_connection("127.0.0.1", one.port) for one in (long, short)]
    await _call_on(*kept)
    await _call_on(*closed)
    assert await closed[0].read() == b""
    await _call_on(*kept)
    for _, writer in (kept, closed):
        writer.close()


async def _call_on(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Make a call on a connection, and read its answer."""
    writer.write(b"GET /v1/groups HTTP/1.1\r\nHost: localhost\r\n\r\n")
    head = await reader.readuntil(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 200 ")
    await reader.readexactly(int(head.lower().split(b"content-length: ")[1].split(b"\r\n")[0]))


def _restart(member: CoordinatorProcess) -> None:
    assert member.stop() == 0
    member.start()
