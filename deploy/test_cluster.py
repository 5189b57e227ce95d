"""The chart runs: pods start, are replaced one by one, deleted, killed and drained under callers that repeat nothing.

`make cluster-test` runs this in a cluster of its own (deploy/cluster.sh). `-rP` prints what the callers saw.
"""

import asyncio
import json
import secrets
import subprocess
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

import aiohttp
import psutil
import pytest

from halfway.embedded import EmbeddedConfig, EmbeddedKafka
from halfway.protocol.keys import RANDOM_BYTES, key_text
from halfway.protocol.principal import PrincipalKind
from tests.acceptance.instances.test_behind_a_balancer import Services
from tests.support.brokers.jvm import STEADY
from tests.support.coordinator.rest_client import QUIET, Rest
from tests.support.coordinator.topics import Cluster
from tests.support.waiting import eventually

CHART: Final = Path(__file__).parent / "chart" / "halfway"
NODE: Final = "10.77.0.11"
"""The address of the first node, where this runs: pods reach Kafka there."""
REPLICAS: Final = 3
NAMESPACE: Final = "shop"
KILLED: Final = "kill -9 of a pod's process"
OPERATOR: Final = key_text(PrincipalKind.OPERATOR, bytes(range(RANDOM_BYTES)))


def kubectl(*arguments: str) -> str:
    return run("kubectl", "--namespace", NAMESPACE, *arguments)


def run(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{command}: {done.stdout}{done.stderr}"
    return done.stdout


def helm(what: str, kafka: EmbeddedKafka, *options: str) -> None:
    values = ["image.repository=halfway", "image.tag=dev", "masterSecret.name=halfway", "operatorKey.name=halfway"]
    values += ["settings.replication_factor=1"]
    values += [f"kafka.bootstrapServers={kafka.bootstrap_servers}", f"replicas={REPLICAS}", *options]
    settings = [word for value in values for word in ("--set", value)]
    run("helm", what, "halfway", str(CHART), "--namespace", NAMESPACE, *settings)
    rolled_out()


def rolled_out() -> None:
    kubectl("rollout", "status", "statefulset/halfway", "--timeout=600s")


def restart() -> None:
    kubectl("rollout", "restart", "statefulset/halfway")
    rolled_out()


class ReadyPods:
    """How many pods the Service's endpoints said are ready, and since when."""

    def __init__(self) -> None:
        selected = ["endpointslices", "--selector", "kubernetes.io/service-name=halfway", "--watch"]
        shown = "jsonpath={.endpoints[*].conditions.ready}{'\\n'}"
        command = ["kubectl", "--namespace", NAMESPACE, "get", *selected, "--output", shown]
        self._process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        self.counts: list[tuple[float, int]] = []
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self.counts.append((time.monotonic(), line.split().count("true")))

    async def until_all(self) -> None:
        async def last() -> int:
            return self.counts[-1][1] if self.counts else 0

        await eventually(last, lambda count: count == REPLICAS, within_s=600)

    def since(self, begun: float) -> tuple[int, float]:
        """Return the fewest ready pods, and the longest time without any."""
        before = [count for at, count in self.counts if at < begun]
        seen = [(begun, before[-1]), *((at, count) for at, count in self.counts if at >= begun)]
        ends = [*(at for at, _ in seen[1:]), time.monotonic()]
        without = [end - at for (at, count), end in zip(seen, ends, strict=True) if count == 0]
        return min(count for _, count in seen), max(without, default=0.0)

    def close(self) -> None:
        with self._process:
            self._process.kill()
            self._thread.join()


@pytest.fixture
def kafka(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[EmbeddedKafka]:
    """Run a broker that pods reach."""
    monkeypatch.setattr("halfway.embedded.broker.HOST", NODE)
    with EmbeddedKafka(EmbeddedConfig(data_dir=tmp_path / "kafka", properties=STEADY)) as broker:
        yield broker


@pytest.fixture
def service(kafka: EmbeddedKafka, tmp_path: Path) -> str:
    """Install the chart as its page says, and return the address of the Service."""
    run("kubectl", "create", "namespace", NAMESPACE)
    (tmp_path / "master-secret").write_text(secrets.token_hex(32))
    (tmp_path / "operator-key").write_text(OPERATOR)
    files = [f"--from-file={tmp_path / name}" for name in ("master-secret", "operator-key")]
    kubectl("create", "secret", "generic", "halfway", *files)
    helm("install", kafka)
    return f"http://{kubectl('get', 'service', 'halfway', '--output=jsonpath={.spec.clusterIP}')}:8080"


def pods() -> dict[str, Any]:
    """Return the pods by name."""
    found = json.loads(kubectl("get", "pods", "--output=json", "--selector=app.kubernetes.io/name=halfway"))
    return {one["metadata"]["name"]: one for one in found["items"]}


def inside(script: str) -> str:
    return kubectl("exec", "halfway-0", "--", "sh", "-c", script)


def kill_process_of(pod: str) -> None:
    """Send SIGKILL to a pod's process from outside, and wait until it is started again."""
    [process] = [
        process
        for process in psutil.process_iter(["cmdline", "environ"])
        if "serve" in (process.info["cmdline"] or ()) and (process.info["environ"] or {}).get("HOSTNAME") == pod
    ]
    process.kill()
    shown = "jsonpath={.status.containerStatuses[0].restartCount}"
    kubectl("wait", f"pod/{pod}", f"--for={shown}=1", "--timeout=600s")


def drain(*nodes: str) -> None:
    """Drain nodes at once, then let pods return to them."""
    commands = [["kubectl", "drain", node, "--ignore-daemonsets", "--timeout=600s"] for node in nodes]
    processes = [subprocess.Popen(command) for command in commands]
    assert [process.wait() for process in processes] == [0] * len(nodes)
    kubectl("uncordon", *nodes)


async def test_what_is_replaced_killed_or_drained_is_noticed_only_where_a_shard_moves(
    kafka: EmbeddedKafka, service: str
) -> None:
    """Two pods are ready at every moment, and each acknowledged commit is there, once."""
    assert len({pod["spec"]["nodeName"] for pod in pods().values()}) == REPLICAS
    assert inside("id -u").strip() == "10001"
    assert "Read-only file system" in inside("touch /opt/halfway/file 2>&1 || true")
    assert "HALFWAY_PORT" not in inside("env")
    cluster = Cluster(kafka.bootstrap_servers)
    topic, group = await cluster.make_topic(), "shop"
    events: dict[str, Callable[[], object]] = {
        "helm upgrade": lambda: helm("upgrade", kafka, "podAnnotations.changed=yes"),
        "rollout restart": restart,
        "a pod is deleted": lambda: kubectl("delete", "pod", "halfway-1"),
        "two of three nodes are drained at once": lambda: drain("node2", "node3"),
        KILLED: lambda: kill_process_of("halfway-1"),
    }
    ready = ReadyPods()
    await ready.until_all()
    async with aiohttp.ClientSession(headers={"Authorization": f"Bearer {OPERATOR}"}) as session:
        rest = Rest(session, service, "")
        (await rest.put_group(group, topics=[topic], policy=QUIET)).expect(201)
        key = (await rest.call("POST", "/keys", {"kind": "group", "name": group})).expect(201)["key"]
        session.headers["Authorization"] = f"Bearer {key}"
        async with Services(rest, group, topic) as services:
            await services.until_served()
            assert services.now_seen("nothing") == {}
            for event, make in events.items():
                begun = time.monotonic()
                await asyncio.to_thread(make)
                await asyncio.to_thread(kubectl, "wait", "pod", "--all", "--for=condition=Ready", "--timeout=600s")
                await ready.until_all()
                await services.until_served()
                failures = services.now_seen(event)
                fewest, without_any_s = ready.since(begun)
                print(f"{event}: {fewest} or more pods were ready")
                assert without_any_s == 0
                assert fewest >= REPLICAS - 1
                lost = sum(count for failure, count in failures.items() if not failure.endswith(" with Retry-After"))
                assert lost == 0 or event == KILLED
    ready.close()
    found = Counter(record.transaction_id for record in await cluster.read(topic))
    assert [name for name in services.committed if found[name] != 1] == []
    assert max(found.values()) == 1
