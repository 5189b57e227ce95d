"""`halfway serve --workers 2`: two processes on one port that callers and operators see as one service."""

import asyncio
import json
import os
import signal
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from halfway.client import Halfway, Message
from halfway.embedded.broker import HOST, is_free, pick_port
from halfway.protocol.keys import RANDOM_BYTES, key_text
from halfway.protocol.principal import PrincipalKind
from tests.support.certificates import Authority
from tests.support.coordinator.callers import Callers
from tests.support.coordinator.metrics import parsed, samples, total
from tests.support.coordinator.process import CoordinatorProcess, NewCoordinator
from tests.support.coordinator.rest_client import QUIET, Connect, Rest, message
from tests.support.coordinator.topics import Cluster
from tests.support.ids import new_id
from tests.support.processes import alive, children
from tests.support.waiting import eventually, until_true

CALLERS = 12
SETTINGS = {"HALFWAY_WORKERS": "2", "HALFWAY_SHARDS": "4", "HALFWAY_SESSION_TIMEOUT_S": "10"}


@pytest.fixture(autouse=True)
def _as_users_do(monkeypatch: pytest.MonkeyPatch) -> None:
    """Start coordinators as the command: a supervisor runs its own command again."""
    monkeypatch.setattr(CoordinatorProcess, "warm", False)


@pytest.fixture
async def service(new_coordinator: NewCoordinator, connect: Connect) -> AsyncIterator[CoordinatorProcess]:
    """Return a service of two workers that serve two shards each, with an empty file of settings. They end with it."""
    service = new_coordinator({**SETTINGS, "HALFWAY_DRAIN_S": "1"})
    file = service.directory / "halfway.toml"
    file.write_text("")
    service.start(HALFWAY_CONFIG_FILE=str(file))
    workers = children(service.pid)
    await settled(connect(service))
    yield service
    workers += children(service.pid)
    service.close()
    await until_true(lambda: not any(map(alive, workers)), what="the workers have ended with their supervisor")


async def settled(rest: Rest, each: int = 2) -> dict[str, set[str]]:
    """Wait until two workers are ready and serve their share; return the shards by worker.

    A worker that has not yet read the keys of principals answers 503, though another worker takes them already.
    """

    async def shares() -> dict[str, set[str]]:
        found: dict[str, set[str]] = {}
        status, text = await rest.health("/metrics")
        assert status in (200, 503), text
        for (name, labels), value in (parsed(text) if status == 200 else {}).items():
            given = dict(labels)
            if name == "halfway_ready" and value == 1:
                found.setdefault(given["worker"], set())
            if name == "halfway_pending":
                found.setdefault(given["worker"], set()).add(given["shard"])
        return found

    return await eventually(shares, lambda found: [len(shards) for shards in found.values()] == [each, each])


def events(service: CoordinatorProcess, name: str) -> list[dict[str, Any]]:
    """Return the log entries of an event. Every line is one whole document, though several processes write them."""
    lines = [json.loads(line) for line in service.log.splitlines()]
    return [line for line in lines if line["event"] == name]


def refused_connections(callers: Callers) -> list[BaseException]:
    return [error for error in callers.history.cut if isinstance(error, aiohttp.ClientConnectorError)]


async def test_a_killed_worker_costs_nothing_and_is_replaced(
    service: CoordinatorProcess, connect: Connect, cluster: Cluster, group: str, topic: str
) -> None:
    """Under load: no connection is refused, health stays 200, the other one serves on, nothing is lost or doubled.

    If their supervisor is killed, workers stop in order: a successor finds the ports free and every shard given back.
    """
    rest = connect(service)
    (await rest.put_group(group, topics=[topic], policy=QUIET)).expect(201)
    async with Callers(rest, group, [topic], callers=CALLERS) as callers:
        await callers.committed(100)
        # Under load a worker may not give its page in time: then the service's has only that of the other.
        await eventually(
            lambda: samples(rest),
            lambda found: (
                {dict(labels)["worker"] for name, labels in found if name == "halfway_prepares_total"} == {"0", "1"}
            ),
        )
        victim, survivor = events(service, "worker_started")
        os.kill(victim["pid"], signal.SIGKILL)
        await callers.committed(50)
        statuses = [(await rest.health(path))[0] for path in ("/health/live", "/health/started", "/health/ready")]
        assert statuses == [200, 200, 200]
        await settled(rest)
        await callers.committed(50)
        await callers.finish()
    assert refused_connections(callers) == []
    await callers.history.audit(cluster, [topic])
    [died] = events(service, "worker_died")
    assert (died["worker"], died["pid"], died["status"]) == (victim["worker"], victim["pid"], -signal.SIGKILL)
    assert alive(survivor["pid"])
    found = await eventually(lambda: samples(rest), lambda found: total(found, "halfway_worker_up") == 2)
    assert total(found, "halfway_worker_replaced_total", worker=str(victim["worker"])) == 1
    assert total(found, "halfway_worker_replaced_total") == 1

    workers = children(service.pid)
    assert len(workers) == 2
    service.kill()
    await until_true(lambda: not any(map(alive, workers)), what="the workers have ended")
    await assert_gone(service, cluster)


async def test_a_reload_replaces_each_worker_and_refuses_no_connection(
    service: CoordinatorProcess, connect: Connect, cluster: Cluster, group: str, topic: str
) -> None:
    """The new workers read the settings again; a reload to wrong settings changes nothing; SIGTERM leaves nothing."""
    file = service.directory / "halfway.toml"
    rest = connect(service)
    before = children(service.pid)
    (await rest.put_group(group, topics=[topic], policy=QUIET)).expect(201)

    file.write_text("max_requests = 0")
    os.kill(service.pid, signal.SIGHUP)
    await until_true(lambda: events(service, "reload_failed"), what="the reload has failed")
    assert "HALFWAY_MAX_REQUESTS" in events(service, "reload_failed")[0]["error"]
    assert children(service.pid) == before

    file.write_text("reject_prepares = false\nmax_pending = 4321")
    async with Callers(rest, group, [topic], callers=CALLERS) as callers:
        await callers.committed(50)
        os.kill(service.pid, signal.SIGHUP)
        await until_true(lambda: events(service, "reloaded"), what="the reload is done")
        await callers.committed(50)
        await callers.finish()
    assert refused_connections(callers) == []
    await callers.history.audit(cluster, [topic])
    assert not set(before) & set(children(service.pid))
    assert [line["status"] for line in events(service, "worker_died")] == []
    await settled(rest)
    found = await samples(rest)
    assert {
        value for (name, labels), value in found.items() if name == "halfway_limit" and "pending" in str(labels)
    } == {4321}

    left = children(service.pid)
    assert service.stop() == 0
    assert not any(map(alive, left))
    await assert_gone(service, cluster)


async def assert_gone(service: CoordinatorProcess, cluster: Cluster) -> None:
    assert is_free(service.port)
    assert is_free(service.health_port)
    assert await cluster.members(service.topic("members")) == 0


async def test_hosts_with_workers_are_one_cluster(
    new_coordinator: NewCoordinator, connect: Connect, group: str, topic: str
) -> None:
    """Three services of two workers each: every worker owns a shard, and a call through any finds its owner."""
    shared = {**SETTINGS, "HALFWAY_SHARDS": "6", "HALFWAY_PEER_CREDENTIAL": "the same on all hosts"}
    services = [new_coordinator(shared)]
    services += [new_coordinator({**shared, "HALFWAY_KAFKA_PREFIX": services[0].prefix}) for _ in range(2)]
    for service in services:
        service.launch()
    for service in services:
        service.wait_until_ready()
    rests = [connect(service) for service in services]
    for rest in rests * 2:  # the first may have served its share before the last has joined
        await settled(rest, each=1)
    (await rests[0].put_group(group, topics=[topic], policy=QUIET)).expect(201)
    made = await asyncio.gather(*(rests[0].prepared(group, [message(topic)]) for _ in range(30)))
    ended = await asyncio.gather(*(rests[1].end(name, "commit", retry=True) for name in made))
    assert [answer.status for answer in ended] == [200] * len(made)

    async def instances() -> set[str]:
        """Return those whose statistics have come in time."""
        state = (await rests[2].call("GET", "/statistics")).expect(200)
        return {instance["url"] for instance in state["instances"]}

    await eventually(instances, lambda found: len(found) == 6)
    for service in services:
        service.terminate()
    assert [await service.exited() for service in services] == [0, 0, 0]


async def test_a_client_on_a_stream_makes_ids_that_are_not_forwarded(
    service: CoordinatorProcess, connect: Connect, group: str, topic: str
) -> None:
    """The worker says which shards it serves. Only ids that were made before the stream was open may be of others."""
    rest = connect(service)
    (await rest.put_group(group, topics=[topic], policy=QUIET)).expect(201)

    async def forwarded() -> float:
        found = await eventually(
            lambda: samples(rest), lambda found: sum(name == "halfway_ready" for name, _ in found) == 2
        )
        return sum(total(found, "halfway_forwarded_total", call=call) for call in ("prepare", "end"))

    async with Halfway(service.url, group, stream=True) as client:

        async def place() -> None:
            async with client.transaction([Message(topic=topic, value="paid")]):
                pass

        await place()
        before = await forwarded()
        await asyncio.gather(*(place() for _ in range(40)))
        assert await forwarded() == before


async def test_keys_and_certificates_hold_at_every_worker(
    new_coordinator: NewCoordinator, tmp_path: Path, group: str, topic: str
) -> None:
    """Both shared ports speak https, workers call each other by it, and the page of all metrics takes a key."""
    authority = Authority(tmp_path, "own")
    certificate, key = authority.sign("port", "CN=halfway", f"IP:{HOST}")
    operator = key_text(PrincipalKind.OPERATOR, bytes(range(RANDOM_BYTES)))
    port = pick_port()
    service = new_coordinator(
        {
            **SETTINGS,
            "HALFWAY_PORT": str(port),
            "HALFWAY_INSTANCE_URL": f"https://{HOST}:{port}",
            "HALFWAY_TLS_CERTIFICATE_FILE": str(certificate),
            "HALFWAY_TLS_KEY_FILE": str(key),
            "HALFWAY_HEALTH_TLS": "true",
            "HALFWAY_PEER_CA_FILE": str(authority.file),
            "HALFWAY_CONSOLE": "health",
            "HALFWAY_MASTER_SECRET": "m" * 32,
            "HALFWAY_OPERATOR_KEY": operator,
        }
    )
    service.port = port
    service.start()
    connector = aiohttp.TCPConnector(limit=0, force_close=True, ssl=authority.trusted())
    async with aiohttp.ClientSession(connector=connector) as session:
        rest = Rest(session, service.url, service.health_url)
        # 503 until the worker that got the connection has read the keys of principals.
        await eventually(lambda: rest.health("/metrics"), lambda answer: answer[0] == 401)
        session.headers["Authorization"] = f"Bearer {operator}"
        await settled(rest)
        (await rest.put_group(group, topics=[topic], policy=QUIET)).expect(201)
        names = [new_id() for _ in range(30)]
        for name in names:
            await rest.prepared(group, [message(topic)], as_id=name, retry=True)
        for name in names:
            await rest.commit(name, retry=True)
        found = await samples(rest)
        assert total(found, "halfway_forwarded_total", call="end", result="done") > 0
        async with session.get(f"{service.health_url}/v1/transactions/{names[0]}") as answer:
            assert answer.status == 200, "the API is on the port of the console"
    assert service.stop() == 0
