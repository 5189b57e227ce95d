"""What the ports answer in addition to the calls of the API, and to whom. The table of calls does not contain it.

Metrics are on a port that often has no TLS, instances show a credential instead of a key, and the files of
the console are the same for everybody. `WHO` lists what each caller gets, and is written manually.
"""

from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any, cast

import pytest

from halfway.app.metrics import LoopPauses, Metrics
from halfway.app.serve.app import Stage
from halfway.coordinator.records import PATH
from halfway.http.console import Console
from halfway.http.handlers.routes import OPERATIONS
from halfway.http.server.health_port import HealthPort
from halfway.http.server.peer_port import PeerPort
from halfway.http.server.server import HttpServer
from tests.support.rest.client import HOST
from tests.support.rest.guarded import Guarded

CREDENTIAL = "what instances show one another"
CALLERS = ("operator", "shop", "board", "nobody", "never made")
WHO: dict[tuple[str, str, str], tuple[int, int, int, int, int]] = {
    ("health", "GET", "/metrics"): (200, 403, 200, 401, 401),
    ("health", "GET", "/health/live"): (200, 200, 200, 200, 200),
    ("health", "GET", "/health/ready"): (200, 200, 200, 200, 200),
    ("api", "POST", PATH): (401, 401, 401, 401, 401),
    ("api", "GET", "/console/"): (200, 200, 200, 200, 200),
    ("api", "GET", "/metrics"): (404, 404, 404, 404, 404),
    ("health", "POST", PATH): (404, 404, 404, 404, 404),
    ("health", "GET", "/v1/groups"): (404, 404, 404, 404, 404),
}


@pytest.fixture
async def ports(both: Guarded) -> AsyncIterator[dict[str, str]]:
    """Provide the URLs of both ports of an instance, built as `halfway serve` builds them."""
    stage = Stage(LoopPauses(), metrics_need_key=True)
    stage.backend = cast(Any, SimpleNamespace(coordinator=both.here.coordinator, not_ready=list))
    stage.api = both.here.api
    stage.peers = PeerPort(
        both.here.coordinator.peer_handler,
        credentials=[CREDENTIAL],
        incarnation=lambda: "one",
        max_body_bytes=10_000,
        longest_s=15,
    )
    health = HealthPort(reasons=list, not_acquired=list, metrics=Metrics().render, demand_reader=stage.demand_reader)
    servers = {"api": HttpServer(stage, console=Console()), "health": HttpServer(health)}
    try:
        yield {name: f"http://{HOST}:{await server.start(HOST, 0)}" for name, server in servers.items()}
    finally:
        for server in servers.values():
            await server.stop()


async def test_each_caller_gets_what_is_for_it(both: Guarded, ports: dict[str, str]) -> None:
    """No key gives access to the instances' path, and public files need no key."""
    both.tokens["never made"] = "hw_o_AAAAAAAAAAAA_" + "B" * 43 + "_000000"
    for (port, method, path), statuses in WHO.items():
        bodies = set()
        for caller, status in zip(CALLERS, statuses, strict=True):
            token = both.tokens[caller]
            headers = {} if token is None else {"Authorization": f"Bearer {token}", "Halfway-Peer-Credential": token}
            async with both.here.session.request(method, ports[port] + path, headers=headers) as answer:
                assert answer.status == status, (port, path, caller)
                text = await answer.text()
                bodies.add(text)
                assert token is None or token not in text
        if path == "/console/":
            assert len(bodies) == 1


def test_none_of_it_is_a_call_of_the_api() -> None:
    paths = {operation.path for operation in OPERATIONS}
    assert all(path.startswith("/v1/") or path == "/openapi.json" for path in paths)
    assert paths.isdisjoint({PATH, "/metrics", "/console/"})


async def test_the_credential_of_instances_is_no_key(both: Guarded, ports: dict[str, str]) -> None:
    both.tokens["peer"] = CREDENTIAL
    async with both.here.session.get(
        f"{ports['health']}/metrics", headers={"Authorization": f"Bearer {CREDENTIAL}"}
    ) as answer:
        assert answer.status == 401
    assert (await both.call("peer", "GET", "/v1/groups")).status == 401
