"""The coordinator as a process of its own with a real broker, and producer services and consumers."""

from collections.abc import AsyncIterator, Callable, Generator, Iterator, Mapping
from contextlib import AsyncExitStack
from functools import partial
from pathlib import Path
from typing import Any
from uuid import uuid4

import aiohttp
import pytest

from tests.support.brokers.fixtures import Kafka, end_when_idle
from tests.support.brokers.proxied import ProxiedKafka
from tests.support.canary import leaks_in, refuse_leaks
from tests.support.coordinator.endpoints import CheckEndpoint, Endpoints
from tests.support.coordinator.faulty import FaultyCoordinator, NewFaultyCoordinator
from tests.support.coordinator.process import CoordinatorProcess, NewCoordinator
from tests.support.coordinator.rest_client import QUIET, Connect, Rest
from tests.support.coordinator.topics import Cluster, InternalTopics

# The position in the log of each coordinator at which the test started to use it.
_LOGS = pytest.StashKey[list[tuple[CoordinatorProcess, int]]]()
_SHOWN_CHARACTERS = 20_000


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Show the coordinators' logs with a test that failed."""
    report = yield
    if report.failed:
        for coordinator, position in item.stash.get(_LOGS, []):
            log = coordinator.log[position:]
            report.sections.append((f"log of {coordinator.prefix}", log[-_SHOWN_CHARACTERS:]))
    return report


def _surprises(node: pytest.Item) -> list[str]:
    """Return the lines of the coordinators' logs with unexpected exceptions."""
    return [
        line
        for coordinator, position in node.stash.get(_LOGS, [])
        for line in coordinator.log[position:].splitlines()
        if '"exception"' in line or line.startswith("Traceback")
    ]


def _note_log(node: pytest.Item, coordinator: CoordinatorProcess) -> None:
    node.stash.setdefault(_LOGS, []).append((coordinator, len(coordinator.log)))


@pytest.fixture(autouse=True)
def _no_canary(tmp_path: Path) -> Iterator[None]:
    """Search the logs of every coordinator of a test for secrets and payloads.

    It ends after the fixtures that make coordinators, and before their folder is removed.
    """
    del tmp_path
    yield
    launched = [
        process for process in CoordinatorProcess.launched if process.log_path.exists()
    ]  # a benchmark removes its own
    CoordinatorProcess.launched[:] = [coordinator for coordinator in launched if coordinator.running]
    found = {str(coordinator.log_path): leaks_in(coordinator.fresh_words()) for coordinator in launched}
    assert {path: names for path, names in found.items() if names} == {}


@pytest.fixture
def note_log(request: pytest.FixtureRequest) -> Iterator[Callable[[CoordinatorProcess], None]]:
    """Return a function that adds a coordinator's log, from now on, to the checks and the report of this test."""
    yield lambda coordinator: _note_log(request.node, coordinator)
    assert _surprises(request.node) == []


@pytest.fixture(scope="session")
def cluster(kafka: Kafka) -> Cluster:
    return Cluster(kafka.bootstrap_servers)


@pytest.fixture(scope="session")
def _shared(
    kafka: Kafka, tmp_path_factory: pytest.TempPathFactory, pytestconfig: pytest.Config
) -> Iterator[CoordinatorProcess]:
    coordinator = CoordinatorProcess(kafka.bootstrap_servers, tmp_path_factory.mktemp("shared"))
    end_when_idle(pytestconfig, "coordinator", coordinator.close)
    yield coordinator
    coordinator.close()
    refuse_leaks(coordinator.fresh_words())


@pytest.fixture
def coordinator(_shared: CoordinatorProcess, request: pytest.FixtureRequest) -> Iterator[CoordinatorProcess]:
    """Return the coordinator for tests that neither stop it nor need settings of their own."""
    if not _shared.running:
        _shared.start()
    _note_log(request.node, _shared)
    pid = _shared.pid
    yield _shared
    assert _shared.running, "the coordinator ended during this test"
    assert _shared.pid == pid
    assert _surprises(request.node) == []


@pytest.fixture
def _factory(
    kafka: Kafka, tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest
) -> Iterator[Callable[..., Any]]:
    """Return a function that makes coordinators of any kind, not yet started, which end with the test."""
    made: list[CoordinatorProcess] = []

    def make(
        kind: type[CoordinatorProcess],
        settings: Mapping[str, str] | None = None,
        *,
        bootstrap_servers: str | None = None,
    ) -> CoordinatorProcess:
        directory = tmp_path_factory.mktemp("coordinator")
        coordinator = kind(bootstrap_servers or kafka.bootstrap_servers, directory, settings)
        made.append(coordinator)
        _note_log(request.node, coordinator)
        return coordinator

    yield make
    for coordinator in made:
        coordinator.close()
    assert _surprises(request.node) == []


@pytest.fixture
def new_coordinator(_factory: Callable[..., Any]) -> NewCoordinator:
    """Return a factory of coordinators."""
    return partial(_factory, CoordinatorProcess)


@pytest.fixture
def faulty_coordinator(_factory: Callable[..., Any]) -> NewFaultyCoordinator:
    """Return a factory of coordinators with fault points."""
    return partial(_factory, FaultyCoordinator)


@pytest.fixture
async def connect() -> AsyncIterator[Connect]:
    """Return a factory of REST clients."""
    timeout = aiohttp.ClientTimeout(total=240)
    # A pooled connection is dead after a restart, and a POST over it is not repeated automatically.
    connector = aiohttp.TCPConnector(limit=0, force_close=True)
    async with aiohttp.ClientSession(timeout=timeout, connector=connector) as session:
        yield lambda coordinator: Rest(session, coordinator.url, coordinator.health_url)


@pytest.fixture
def rest(coordinator: CoordinatorProcess, connect: Connect) -> Rest:
    return connect(coordinator)


@pytest.fixture
def internal(coordinator: CoordinatorProcess, cluster: Cluster) -> InternalTopics:
    return InternalTopics(cluster, coordinator.prefix)


@pytest.fixture
async def topic(cluster: Cluster) -> str:
    """Create an empty real topic with three partitions."""
    return await cluster.make_topic()


@pytest.fixture
def group() -> str:
    """Return a unique name for a group."""
    return f"group-{uuid4().hex[:10]}"


@pytest.fixture
async def quiet(rest: Rest, group: str, topic: str) -> str:
    """Register a group that gets no checks."""
    (await rest.put_group(group, topics=[topic], policy=QUIET)).expect(201)
    return group


@pytest.fixture
async def _stack() -> AsyncIterator[AsyncExitStack]:
    async with AsyncExitStack() as stack:
        yield stack


@pytest.fixture
def endpoints(_stack: AsyncExitStack) -> Endpoints:
    return Endpoints(_stack)


@pytest.fixture
async def endpoint(endpoints: Endpoints) -> CheckEndpoint:
    """Start a check endpoint that answers `unknown` until a test sets another answer."""
    return await endpoints.check()


@pytest.fixture(scope="session")
def _proxied(tmp_path_factory: pytest.TempPathFactory, pytestconfig: pytest.Config) -> Iterator[ProxiedKafka]:
    with ProxiedKafka(data_dir=tmp_path_factory.mktemp("proxied-kafka")) as kafka:
        end_when_idle(pytestconfig, "proxied_kafka", kafka.stop)
        yield kafka


@pytest.fixture
def proxied_kafka(_proxied: ProxiedKafka) -> Iterator[ProxiedKafka]:
    """Return a running broker behind a proxy; tests may disturb both.

    Tests that use it have the mark `xdist_group("proxied_kafka")`, so that there is only one.
    """
    _proxied.start()
    yield _proxied
    _proxied.proxy.clear()
    if _proxied.running:
        _proxied.resume()
