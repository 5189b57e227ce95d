"""The Kafka that the tests run against can be chosen."""

import gc
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, urlsplit

import pytest
from testcontainers.core.config import testcontainers_config

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


@pytest.fixture
def engine_without_registry(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Run a Docker engine that has no image and can pull none; give the names of the images it was asked to pull."""
    pulled: list[str] = []

    class Engine(BaseHTTPRequestHandler):
        def answer(self) -> None:
            self.rfile.read(int(self.headers["Content-Length"] or 0))
            url = urlsplit(self.path)
            status, body = 404, {"message": "No such image"}
            if url.path.endswith("/version"):
                status, body = 200, {"ApiVersion": "1.44"}
            elif url.path.endswith("/images/create"):
                pulled.append(parse_qs(url.query)["fromImage"][0])
                status, body = 500, {"message": "no registry answers"}
            content = json.dumps(body).encode()
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        do_GET = do_POST = do_HEAD = answer  # noqa: N815 - the names are http.server's

        def log_message(self, *_: Any) -> None:
            """Say nothing."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Engine) as server:
        monkeypatch.setenv("DOCKER_HOST", f"tcp://127.0.0.1:{server.server_port}")
        monkeypatch.setattr(testcontainers_config, "_ryuk_disabled", False)
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        yield pulled
        server.shutdown()
        thread.join()
    gc.collect()


@pytest.mark.filterwarnings("ignore:unclosed:ResourceWarning")  # of the Docker client
def test_without_the_reapers_image_it_goes_on_and_without_kafkas_the_remedy_is_said(
    engine_without_registry: list[str],
) -> None:
    """An image that cannot be pulled is found out only when a container is to be started."""
    with (
        pytest.raises(RuntimeError, match=r"has apache/kafka:\S+ or can pull it: .*no registry answers"),
        run_kafka("testcontainers"),
    ):
        pass
    assert engine_without_registry == ["testcontainers/ryuk", "apache/kafka"]


def test_in_a_container_the_broker_listens_outside_and_advertises_where_it_is_reached() -> None:
    lines = container_properties("docker:32768").splitlines()
    assert "listeners=PLAINTEXT://0.0.0.0:9092,CONTROLLER://127.0.0.1:9093" in lines
    assert "advertised.listeners=PLAINTEXT://docker:32768" in lines
    assert "log.dirs=/tmp/halfway-data" in lines
