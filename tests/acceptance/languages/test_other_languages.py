"""The producers in other languages in examples/producers, with a real coordinator."""

import json
import os
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from halfway.client import transaction_id
from halfway.embedded import find_java
from tests.support.coordinator.process import CoordinatorProcess
from tests.support.coordinator.rest_client import Rest
from tests.support.coordinator.topics import Cluster

pytestmark = pytest.mark.timeout(1800)  # a new machine compiles Go's standard library first
GO = {"CGO_ENABLED": "0", "GOPROXY": "off", "GOTOOLCHAIN": "local"}
PRODUCERS = Path(__file__).parents[3] / "examples" / "producers"


class Service:
    """A producer of the examples: it reads orders by lines, and prints their results."""

    def __init__(self, process: "subprocess.Popen[str]") -> None:
        self._process = process
        self.at = time.time_ns() // 1_000_000
        ready, self.check_url = self._line().split()
        assert ready == "ready"

    def place(self, order: str) -> str:
        assert self._process.stdin is not None
        self._process.stdin.write(f"{order} {self.at}\n")
        self._process.stdin.flush()
        named, _, state = self._line().partition(" ")
        assert named == order
        return state

    def id_of(self, order: str) -> str:
        return transaction_id(f"shop/order/{order}", self.at)

    def ask(self, order: str) -> object:
        question = {"type": "transaction.check", "nonce": "n-1", "id": self.id_of(order), "group": "shop"}
        request = urllib.request.Request(self.check_url, json.dumps(question).encode())  # noqa: S310 - our own
        with urllib.request.urlopen(request, timeout=120) as answer:  # noqa: S310 - the same
            return json.load(answer)

    def _line(self) -> str:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        assert line, f"it ended with {self._process.wait(10)}"
        return line.rstrip("\n")


@pytest.fixture(params=["java", "go"])
def command(request: pytest.FixtureRequest) -> list[str]:
    if request.param == "java":
        return [str(find_java().path), str(PRODUCERS / "Producer.java")]
    # A new machine builds Go's standard library first, which is faster without the optimiser.
    build = ("-gcflags=all=-N -l", "-ldflags=-w -s")
    return [str(Path(sys.executable).with_name("go")), "run", *build, str(PRODUCERS / "producer.go")]


@pytest.fixture
async def topic(cluster: Cluster) -> str:
    return await cluster.make_topic()


@pytest.fixture
def service(command: list[str], coordinator: CoordinatorProcess, topic: str, tmp_path: Path) -> Iterator[Service]:
    with subprocess.Popen(
        [*command, coordinator.url, topic, str(tmp_path / "orders")],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, **GO, "GOTMPDIR": str(tmp_path)},
        start_new_session=True,
    ) as process:
        try:
            yield Service(process)
        finally:
            os.killpg(process.pid, signal.SIGKILL)  # `go run` has the program as its child


async def test_what_the_producer_commits_is_sent_and_nothing_else(
    service: Service, rest: Rest, cluster: Cluster, topic: str
) -> None:
    """Also if an end is lost, or the local transaction comes after a check. The ids are those of the Python client."""
    good, bad, lost, late = (f"{kind}-{topic}" for kind in ("good", "bad", "lost", "late"))
    assert service.place(good) == "committed"
    assert service.place(bad) == "rolled_back"
    assert service.place(lost) == "open"
    assert service.ask(late) == {"outcome": "rollback", "nonce": "n-1"}
    assert service.place(late) == "rolled_back"
    assert service.place(good) == "refused"
    assert (await rest.until(service.id_of(lost), "committed"))["cause"] == "check"
    sent = {record.key: json.loads(record.value or b"") for record in await cluster.read(topic)}
    assert sent == {order.encode(): {"order": order} for order in (good, lost)}
