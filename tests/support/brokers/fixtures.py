"""The Kafka that the tests run against, chosen by HALFWAY_TEST_KAFKA.

`embedded` (default): a broker of our own.
`testcontainers`: the image `apache/kafka` in the Docker engine.
Anything else: the bootstrap servers of a running broker.

All workers of pytest-xdist share it.
If something is missing (Java, the network, a Docker engine), the tests fail with the remedy; nothing is skipped.
"""

import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Protocol

import pytest

from halfway.embedded import EmbeddedConfig, EmbeddedKafka
from tests.support.brokers.guarded import GuardedKafka
from tests.support.brokers.jvm import STARTED_WITHIN_S, STEADY, short_lived
from tests.support.brokers.keeper import kept_kafka

VARIABLE = "HALFWAY_TEST_KAFKA"
# How to end shared resources, by the fixture that provides and starts them.
_ENDS = pytest.StashKey[dict[str, Callable[[], object]]]()


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    """End shared resources that the next test does not use: an idle coordinator takes 5% of a core, its broker 2%."""
    for name, end in item.config.stash.get(_ENDS, {}).items():
        if name not in getattr(nextitem, "fixturenames", ()):
            end()


def end_when_idle(config: pytest.Config, name: str, end: Callable[[], object]) -> None:
    """Let the resource of a fixture end when the next test does not use it; the fixture starts it again."""
    config.stash.setdefault(_ENDS, {})[name] = end


class Kafka(Protocol):
    """A running broker."""

    @property
    def bootstrap_servers(self) -> str: ...


class GivenKafka:
    """A broker that runs outside the tests."""

    def __init__(self, bootstrap_servers: str) -> None:
        self._bootstrap_servers = bootstrap_servers

    @property
    def bootstrap_servers(self) -> str:
        return self._bootstrap_servers


@contextmanager
def run_kafka(choice: str) -> Iterator[Kafka]:
    """Run or connect to the Kafka that `choice` names, as in HALFWAY_TEST_KAFKA."""
    match choice:
        case "embedded":
            with EmbeddedKafka(
                EmbeddedConfig(jvm_options=short_lived(), properties=STEADY, startup_timeout_s=STARTED_WITHIN_S)
            ) as embedded:
                yield embedded
        case "testcontainers":
            from docker.errors import DockerException  # type: ignore[import-untyped]  # it has no types

            from tests.support.brokers.container import IMAGE, KafkaContainer, reap_if_possible

            with ExitStack() as stack:
                try:
                    reap_if_possible()
                    container = stack.enter_context(KafkaContainer())
                except DockerException as error:
                    raise RuntimeError(
                        f"{VARIABLE}=testcontainers needs a running Docker engine that has {IMAGE} or can pull it: "
                        f"{error}"
                    ) from None
                yield container
        case bootstrap_servers:
            yield GivenKafka(bootstrap_servers)


@pytest.fixture(scope="session")
def kafka(testrun_uid: str) -> Iterator[Kafka]:
    """Return the broker of the whole run; tests use different names of topics and groups."""
    choice = os.environ.get(VARIABLE) or "embedded"
    if choice in {"embedded", "testcontainers"}:
        with kept_kafka(choice, testrun_uid) as bootstrap_servers:
            yield GivenKafka(bootstrap_servers)
    else:
        yield GivenKafka(choice)


@pytest.fixture(scope="session")
def _guarded(tmp_path_factory: pytest.TempPathFactory, pytestconfig: pytest.Config) -> Iterator[GuardedKafka]:
    with GuardedKafka(tmp_path_factory.mktemp("guarded-kafka")) as kafka:
        end_when_idle(pytestconfig, "guarded_kafka", kafka.stop)
        yield kafka


@pytest.fixture
def guarded_kafka(_guarded: GuardedKafka) -> Iterator[GuardedKafka]:
    """Return a running broker with passwords and ACLs, which tests may stop and freeze.

    Tests that use it have the mark `xdist_group("guarded_kafka")`, so that there is only one.
    """
    _guarded.start()
    yield _guarded
    if _guarded.running:
        _guarded.resume()
