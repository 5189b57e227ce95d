"""The Kafka that the tests run against can be chosen."""

import gc

import pytest

from tests.support.brokers.container import container_properties
from tests.support.brokers.fixtures import run_kafka


def test_a_broker_that_runs_already_is_taken_as_it_is() -> None:
    with run_kafka("kafka-1:9092,kafka-2:9092") as kafka:
        assert kafka.bootstrap_servers == "kafka-1:9092,kafka-2:9092"


@pytest.mark.filterwarnings("ignore:unclosed:ResourceWarning")  # of the Docker client that finds no engine
def test_without_a_docker_engine_the_remedy_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DOCKER_HOST", "unix:///nowhere/docker.sock")
    with pytest.raises(RuntimeError, match="needs a running Docker engine"), run_kafka("testcontainers"):
        pass
    gc.collect()


def test_in_a_container_the_broker_listens_outside_and_advertises_where_it_is_reached() -> None:
    lines = container_properties("docker:32768").splitlines()
    assert "listeners=PLAINTEXT://0.0.0.0:9092,CONTROLLER://127.0.0.1:9093" in lines
    assert "advertised.listeners=PLAINTEXT://docker:32768" in lines
    assert "log.dirs=/tmp/halfway-data" in lines
