"""Name servers that do not answer affect only the group whose names they serve."""

import asyncio
import socket
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import msgspec
import pytest

from halfway.checks.connections import LOOKUPS_PER_GROUP, MAX_ADDRESSES, DnsResolver
from halfway.coordinator.ports import CheckReply
from halfway.protocol.transactions import Outcome
from tests.support.checkback.servers import Endpoint, endpoint, sends
from tests.support.loop_time import LoopTime
from tests.support.waiting import GENEROUS_S, until_true
from tests.unit.checks.conftest import COMMIT, GROUP, QUESTION, local_caller

OLD_THREADS = 64


class NameServers:
    """Look-ups of names below `.slow` hang until `release`; all others return this machine's address at once."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.release = threading.Event()
        self.hung: list[str] = []
        self.asked: list[str] = []
        monkeypatch.setattr("socket.getaddrinfo", self._look_up)

    def _look_up(self, host: str, port: int, **_: Any) -> list[Any]:
        self.asked.append(host)
        if host.endswith(".slow"):
            self.hung.append(host)
            self.release.wait()
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", ("127.0.0.1", port))]


@pytest.fixture
def names(monkeypatch: pytest.MonkeyPatch) -> NameServers:
    return NameServers(monkeypatch)


class Checks:
    """One caller for several groups."""

    def __init__(self, service: Endpoint, timeout_s: float) -> None:
        self.service = service
        self.caller = local_caller(timeout_s=timeout_s)
        self.tasks: list[asyncio.Task[CheckReply]] = []

    async def of(self, group: str, host: str) -> CheckReply:
        question = msgspec.structs.replace(QUESTION, group=group)
        return await self.caller.call(GROUP, [f"http://{host}:{self.service.port}/check"], question)

    def begin(self, group: str, hosts: list[str]) -> None:
        self.tasks += [asyncio.create_task(self.of(group, host)) for host in hosts]


@asynccontextmanager
async def checking(names: NameServers, *, timeout_s: float = GENEROUS_S) -> AsyncIterator[Checks]:
    async with endpoint(sends(COMMIT)) as service:
        checks = Checks(service, timeout_s)
        try:
            yield checks
        finally:
            names.release.set()
            await asyncio.gather(*checks.tasks, return_exceptions=True)
            await checks.caller.close()


async def test_a_group_whose_names_are_slow_delays_no_other_groups_checks(names: NameServers) -> None:
    """With any number of names it fails only its own checks, with the reason, and keeps its places until they end."""
    async with checking(names) as checks:
        checks.begin("evil", [f"{number}.slow" for number in range(2 * OLD_THREADS)])
        await until_true(lambda: len(names.hung) == LOOKUPS_PER_GROUP, what="its look-ups hang")
        assert (await checks.of("shop", "shop.example")).outcome is Outcome.COMMIT

        for task in checks.tasks:
            task.cancel()
        await asyncio.gather(*checks.tasks, return_exceptions=True)
        refused = await checks.of("evil", "another.slow")
        assert (refused.sent, refused.reachable) == (False, False)
        assert f"{LOOKUPS_PER_GROUP} look-ups of this group are under way already" in refused.detail
        assert len(names.hung) == LOOKUPS_PER_GROUP
        assert (await checks.of("shop", "shop.other.example")).outcome is Outcome.COMMIT


async def test_a_group_that_is_out_of_look_ups_takes_no_others_with_it_by_asking_for_their_names(
    names: NameServers,
) -> None:
    async with checking(names) as checks:
        checks.begin("evil", [f"{number}.slow" for number in range(LOOKUPS_PER_GROUP)])
        await until_true(lambda: len(names.hung) == LOOKUPS_PER_GROUP, what="its look-ups hang")
        checks.begin("evil", ["shop.example"] * 5)
        assert (await checks.of("shop", "shop.example")).outcome is Outcome.COMMIT
        names.release.set()
        await until_true(lambda: not checks.caller._resolver._count_by_group, what="its places are free")
        assert (await checks.of("evil", "shop.example")).outcome is Outcome.COMMIT


async def test_a_check_that_found_no_free_thread_says_nothing_about_its_endpoint(
    names: NameServers, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its circuit breaker does not count the effects of other groups' names."""
    monkeypatch.setattr("halfway.checks.caller.DnsResolver", lambda: DnsResolver(threads=2))
    async with checking(names, timeout_s=100) as checks:
        checks.begin("evil", ["1.slow", "2.slow"])
        await until_true(lambda: len(names.hung) == 2, what="its look-ups have all threads")
        waits = lambda: checks.caller._resolver._count_by_group["shop"]  # noqa: E731
        asking = checks.of("shop", "shop.example")
        reply = await LoopTime().out(asking, 102, once=waits, what="it waits for a thread")
        assert (reply.sent, reply.answered, reply.reachable) == (False, False, True)
        assert "no look-up of the host name was free in time" in reply.detail
        names.release.set()
        assert all(
            (one.reachable, "the host name was not found in time" in one.detail) == (False, True)
            for one in await asyncio.gather(*checks.tasks)
        )
        assert names.asked == ["1.slow", "2.slow"], "what nobody waits for any more takes no thread"


async def test_a_name_with_thousands_of_addresses_is_asked_at_few(monkeypatch: pytest.MonkeyPatch) -> None:
    """Aiohttp tries all addresses, and after each failure all that are left: thousands for one check otherwise."""
    found = [
        (family, socket.SOCK_STREAM, 6, "", (address, 1))
        for number in range(1000)
        for family, address in ((socket.AF_INET6, f"::{number + 1:x}"), (socket.AF_INET, f"127.0.{number // 250}.9"))
    ]
    monkeypatch.setattr("socket.getaddrinfo", lambda *_, **__: found)
    tried: list[str] = []

    def refuse(self: socket.socket, address: tuple[str, int]) -> None:
        tried.append(address[0])
        raise ConnectionRefusedError

    monkeypatch.setattr(socket.socket, "connect", refuse)
    async with local_caller() as caller:
        reply = await caller.call(GROUP, ["http://many.test/"], QUESTION)
    assert not reply.sent
    assert len(set(tried)) <= 2 * MAX_ADDRESSES
    assert 0 < len(tried) < 200


async def test_checks_of_one_group_share_a_look_up_and_use_its_answer_again(names: NameServers) -> None:
    async with checking(names) as checks:
        checks.begin("shop", ["shop.slow"] * (2 * LOOKUPS_PER_GROUP))
        await until_true(lambda: len(names.hung) == 1, what="the look-up hangs")
        names.release.set()
        assert {one.outcome for one in await asyncio.gather(*checks.tasks)} == {Outcome.COMMIT}
        assert (await checks.of("shop", "shop.slow")).outcome is Outcome.COMMIT
        assert names.hung == ["shop.slow"]
