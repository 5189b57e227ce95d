"""Several coordinators on one broker, for the benchmarks of several instances."""

from __future__ import annotations

import time
import urllib.error
import urllib.request
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Final, TypeVar

import msgspec
from confluent_kafka import KafkaException

from bench.audit.copies import Auditor
from bench.plan import GROUP
from bench.system.rig import Rig, RigError
from tests.support.coordinator.fleet import SHARDS, Fleet
from tests.support.coordinator.process import CoordinatorProcess

DEFAULTS: Final[Mapping[str, str]] = {
    "HALFWAY_SESSION_TIMEOUT_S": "10",
    "HALFWAY_REQUEST_TIMEOUT_S": "15",
    "HALFWAY_TRANSACTION_TIMEOUT_S": "45",
    "HALFWAY_SCAN_INTERVAL_S": "1",
    "HALFWAY_LEASE_S": "30",
    "HALFWAY_CHECK_TIMEOUT_S": "10",
}
"""The product's defaults, which the tests' coordinators override otherwise."""
EVEN_S: Final = 180.0
_POLL_S: Final = 0.05
_REQUEST_S: Final = 10.0

T = TypeVar("T")


class FleetRig(Rig):
    """A broker with the topic; coordinators are started on demand."""

    def _create_topic(self) -> None:
        super()._create_topic()
        until(self._has_leaders, bool, "the topic has no leaders")

    def _has_leaders(self) -> bool:
        try:
            Auditor(self.bootstrap_servers, self.topic).ends()
        except (KafkaException, KeyError):
            return False
        return True

    def _coordinator(self, stack: ExitStack) -> None:
        pass

    def _register(self) -> None:
        pass

    @contextmanager
    def fleet(self, count: int, settings: Mapping[str, str] | None = None) -> Iterator[Fleet]:
        """Run coordinators as a separate cluster, with the group of the load; they end with the block."""
        directory = self.directory / f"fleet-{next(self._jobs)}"
        fleet = Fleet(self.bootstrap_servers, directory, {**DEFAULTS, **(settings or {})})
        try:
            fleet.start(count)
            if count:
                until_even(fleet.members)
                register(fleet.members[0], self.topic)
            yield fleet
        finally:
            fleet.close()

    def pids_of(self, members: Sequence[CoordinatorProcess]) -> dict[str, int]:
        """Return the processes whose CPU time is measured."""
        broker = {} if self.broker_pid is None else {"broker": self.broker_pid}
        return {**{str(number): member.pid for number, member in enumerate(members)}, **broker}


def register(member: CoordinatorProcess, topic: str) -> None:
    """Register the group of the load."""
    body = msgspec.json.encode({"check": {"mode": "pull"}, "topics": [topic]})
    request = urllib.request.Request(  # noqa: S310 - our own process
        f"{member.url}/v1/groups/{GROUP}", data=body, method="PUT", headers={"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=_REQUEST_S) as answer:  # noqa: S310 - the same
        answer.read()


def metrics(member: CoordinatorProcess) -> dict[str, float]:
    """Return all samples of an instance by name and labels; empty if it does not answer."""
    try:
        with urllib.request.urlopen(f"{member.health_url}/metrics", timeout=_REQUEST_S) as answer:  # noqa: S310 - our own
            lines = answer.read().decode().splitlines()
    except (urllib.error.URLError, OSError):
        return {}
    samples = (line.rpartition(" ") for line in lines if not line.startswith("#"))
    return {name: float(value) for name, _, value in samples}


def summed(members: Sequence[CoordinatorProcess]) -> Counter[str]:
    """Return the samples of all instances, summed."""
    total: Counter[str] = Counter()
    for member in members:
        total.update(metrics(member))
    return total


def served(member: CoordinatorProcess) -> set[int]:
    """Return the shards that an instance serves."""
    return {int(name.split('"')[1]) for name in metrics(member) if name.startswith("halfway_pending{")}


def until_even(members: Sequence[CoordinatorProcess]) -> list[set[int]]:
    """Wait until every instance serves its share, and return the shards of each."""
    return until(
        lambda: [served(member) for member in members],
        lambda found: _is_complete(found) and max(map(len, found)) - min(map(len, found)) <= 1,
        "the shards are not distributed evenly",
    )


def owners(members: Sequence[CoordinatorProcess]) -> list[CoordinatorProcess]:
    """Return the owner of each shard."""
    by_shard = {shard: member for member, shards in zip(members, until_even(members), strict=True) for shard in shards}
    return [by_shard[shard] for shard in range(SHARDS)]


def until(probe: Callable[[], T], good: Callable[[T], object], otherwise: str, within_s: float = EVEN_S) -> T:
    """Return the result of `probe` as soon as it is `good`; RigError with the last result after `within_s`."""
    deadline = time.monotonic() + within_s
    while not good(last := probe()):
        if time.monotonic() > deadline:
            raise RigError(f"{otherwise}: {last}")
        time.sleep(_POLL_S)
    return last


def _is_complete(found: Collection[set[int]]) -> bool:
    return sum(map(len, found)) == SHARDS and set().union(*found) == set(range(SHARDS))
