"""What several workers answer as one: health and metrics."""

import json
import os
import pickle
import socket
from pathlib import Path
from unittest.mock import AsyncMock

import pytest
from aiohttp.test_utils import make_mocked_request

from halfway.app.serve.supervisor import cpus, workers_of
from halfway.app.serve.worker import (
    TOKEN_HEADER,
    Assignment,
    Connections,
    Worker,
    encoded,
    merged_health,
    merged_metrics,
)
from halfway.app.settings import load
from halfway.embedded.broker import HOST
from halfway.http.server.acceptor import open_listeners
from halfway.http.server.server import HttpServer
from halfway.protocol.errors import ConfigurationError, ForbiddenError
from tests.support.waiting import until_true

WELL = json.dumps({"status": "ok", "reasons": [], "warnings": [], "not_acquired": []}).encode()
STARTING = json.dumps({"status": "not_ready", "reasons": [{"check": "shards", "detail": "recovering"}]}).encode()
WARNING = json.dumps({"status": "ok", "reasons": [], "warnings": [{"check": "log", "detail": "lost"}]}).encode()


def test_the_service_is_ready_if_a_worker_is_and_warns_of_the_others() -> None:
    status, document = merged_health({0: STARTING, 1: WARNING, 2: None})
    assert (status, document["status"], document["reasons"]) == (200, "ok", [])
    assert document["warnings"] == [
        {"worker": 1, "check": "log", "detail": "lost"},
        {"worker": 0, "check": "shards", "detail": "recovering"},
        {"worker": 2, "check": "worker", "detail": "this worker does not answer"},
    ]


def test_the_service_is_not_ready_if_no_worker_is() -> None:
    status, document = merged_health({0: STARTING, 1: None})
    assert (status, document["status"], document["warnings"]) == (503, "not_ready", [])
    assert [reason["worker"] for reason in document["reasons"]] == [0, 1]
    assert merged_health({0: STARTING, 1: None}, is_ok=True)[0] == 200, "it was started before"
    assert merged_health({0: WELL, 1: WELL})[1]["warnings"] == []


def page(total: int) -> bytes:
    return (
        "# HELP a_total A } brace\n# TYPE a_total counter\n"
        f'a_total{{text="}} b# HELP \\n"}} {total}.0\n'
        f"# HELP b B\n# TYPE b gauge\nb {total}e+09\n# HELP c C\n# TYPE c gauge\n"
    ).encode()


def test_each_family_is_once_on_the_page_and_each_series_names_its_worker() -> None:
    lines = merged_metrics({1: page(2), 0: page(1), 2: None}, {0: 3}).decode().splitlines()
    assert lines == [
        *("# HELP a_total A } brace", "# TYPE a_total counter"),
        *('a_total{worker="0",text="} b# HELP \\n"} 1.0', 'a_total{worker="1",text="} b# HELP \\n"} 2.0'),
        *("# HELP b B", "# TYPE b gauge", 'b{worker="0"} 1e+09', 'b{worker="1"} 2e+09'),
        *("# HELP c C", "# TYPE c gauge"),
        *("# HELP halfway_worker_up 1 if a worker has answered this scrape, else 0", "# TYPE halfway_worker_up gauge"),
        *(
            'halfway_worker_up{worker="0"} 1.0',
            'halfway_worker_up{worker="1"} 1.0',
            'halfway_worker_up{worker="2"} 0.0',
        ),
        "# HELP halfway_worker_replaced_total Workers that have died and were replaced",
        *("# TYPE halfway_worker_replaced_total counter", 'halfway_worker_replaced_total{worker="0"} 3.0'),
    ]


def test_auto_is_a_worker_for_each_cpu_that_the_container_has_and_no_more_than_shards(tmp_path: Path) -> None:
    quota = tmp_path / "cpu.max"
    all_of_them = cpus(quota)
    quota.write_text("max 100000\n")
    assert cpus(quota) == all_of_them
    quota.write_text("50000 100000\n")
    assert cpus(quota) == 1
    assert workers_of(load({"HALFWAY_WORKERS": "auto", "HALFWAY_SHARDS": "1"})) == 1
    assert workers_of(load({"HALFWAY_WORKERS": "3", "HALFWAY_SHARDS": "1"})) == 3


@pytest.mark.parametrize("text", ["0", "-1", "65", "two", "1.5", ""])
def test_a_wrong_number_of_workers_is_named_with_the_remedy(text: str) -> None:
    with pytest.raises(
        ConfigurationError, match=rf"HALFWAY_WORKERS is '{text}': it must be auto or a number from 1 to 64"
    ):
        load({"HALFWAY_WORKERS": text})


def test_a_worker_leaves_connections_to_those_that_accept_and_have_fewer() -> None:
    shared = os.memfd_create("test")
    one, two = Connections(shared, 0), Connections(shared, 1)
    assert one.is_least(7), "the other one accepts none yet"
    two.publish(0)
    assert one.is_least(0)
    assert not one.is_least(1)
    two.publish(3)
    assert (one.is_least(3), one.is_least(4)) == (True, False)
    two.publish(None)
    assert one.is_least(4)
    os.close(shared)


async def test_processes_that_share_a_port_have_equally_many_connections() -> None:
    """One that does not accept gets none meanwhile."""
    shared = os.memfd_create("test")
    listeners = await open_listeners(HOST, 0)
    servers = [HttpServer(AsyncMock()) for _ in range(2)]
    counts = [Connections(shared, number) for number in range(2)]
    for server, own in zip(servers, counts, strict=True):
        server.serve([one.dup() for one in listeners], balance=own)
    clients: list[socket.socket] = []

    def held() -> list[int]:
        return [len(server._server.connections) for server in servers if server._server is not None]

    async def connected(number: int) -> list[int]:
        """Open so many connections, and return how many each server has once all are accepted."""
        for _ in range(number):
            clients.append(socket.create_connection((HOST, servers[0].port)))
            await until_true(lambda: sum(held()) == len(clients), what="it is accepted")
        return held()

    try:
        assert await connected(10) == [5, 5]
        servers[0].accept(False)
        assert await connected(4) == [5, 9]
        servers[0].accept(True)
        assert await connected(6) == [10, 10]
    finally:
        for one in (*clients, *listeners):
            one.close()
        for server in servers:
            await server.stop()
        os.close(shared)


def test_pages_are_for_the_other_workers_only() -> None:
    """Everybody on this machine can reach their port, and metrics may need a key."""
    ours, theirs = socket.socketpair()
    shared = os.memfd_create("test")
    assigned = Assignment(
        number=1,
        settings=pickle.dumps(load({})),
        api=[],
        health=[],
        port=0,
        token="t0ken",
        credential="c" * 32,
        shared=shared,
    )
    with ours:
        ours.sendall(encoded(assigned))
        worker = Worker(theirs.detach())
        worker.demand_colleague(make_mocked_request("GET", "/metrics", {TOKEN_HEADER: "t0ken"}))
        for headers in ({}, {TOKEN_HEADER: "another"}):
            with pytest.raises(ForbiddenError):
                worker.demand_colleague(make_mocked_request("GET", "/metrics", headers))
        assert worker.url(None, 8181) is None
        assert worker.url("https://[::1]:8080", 8181) == "https://[::1]:8181"
        assert worker.url("http://host-a", 8181) == "http://host-a:8181"
        given = load({"HALFWAY_PEER_CREDENTIAL": "the same on all hosts"})
        assert worker.settings.peer_credentials == ("c" * 32,)
        assert given.of_worker("c" * 32).peer_credentials == ("the same on all hosts", "c" * 32)
        worker._lines.close()
        worker._socket.close()
    os.close(shared)
