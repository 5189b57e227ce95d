"""docker-compose.yml and the Dockerfile, checked without an engine: none is needed to run these tests."""

import json
import re
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
from aiohttp import web
from aiohttp.test_utils import make_mocked_request
from ruamel.yaml import YAML

from halfway.app.serve.addresses import demand_host
from halfway.app.settings import load
from halfway.embedded.broker import pick_port
from halfway.protocol.errors import ForbiddenError
from tests.support.waiting import GENEROUS_S

ROOT = Path(__file__).parents[2]
COMPOSE = ROOT / "docker-compose.yml"


@pytest.fixture
def services() -> dict[str, Any]:
    found: dict[str, Any] = YAML(typ="safe").load(COMPOSE)["services"]
    return found


@pytest.fixture
def dockerfile() -> str:
    return (ROOT / "Dockerfile").read_text(encoding="utf-8")


def test_the_compose_file_follows_the_specification() -> None:
    """The schema of the compose specification that check-jsonschema brings."""
    command = [sys.executable, "-m", "check_jsonschema", "--builtin-schema", "vendor.compose-spec", str(COMPOSE)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=GENEROUS_S)
    assert done.returncode == 0, done.stdout + done.stderr


def test_its_settings_are_known(services: dict[str, Any]) -> None:
    """No variable that the settings do not know, and none with a value that they refuse."""
    environment = services["coordinator"]["environment"]
    settings = load({name: str(value) for name, value in environment.items()})
    assert settings.kafka_config("").properties["bootstrap.servers"] == "kafka:19092"


def test_a_web_page_does_not_reach_the_coordinator_under_a_name_of_its_own(services: dict[str, Any]) -> None:
    """Access is open, so the name is the only protection; the order service and this machine have theirs."""
    settings = load({name: str(value) for name, value in services["coordinator"]["environment"].items()})
    demand = demand_host(settings)

    def called_by(host: str) -> web.BaseRequest:
        return make_mocked_request("GET", "/v1/groups", headers={"Host": host})

    used_by_services = urlsplit(
        next(word for word in services["orders"]["command"] if word.startswith("--halfway=")).partition("=")[2]
    ).netloc
    for host in (used_by_services, "localhost:8080", "127.0.0.1:8080"):
        demand(called_by(host))
    with pytest.raises(ForbiddenError):
        demand(called_by("evil.example:8080"))


def test_images_are_pinned_and_nothing_of_ours_runs_as_root(services: dict[str, Any], dockerfile: str) -> None:
    """Every image has a version, and each stage that is run ends as a user without rights."""
    bases = [image for image in re.findall(r"(?m)^FROM (\S+)", dockerfile) if image != "base"]
    images = [service["image"] for service in services.values()] + bases
    assert all(re.search(r":(?!latest)\w[\w.-]*(@sha256:\w{64})?$", image) for image in images), images
    for stage in re.split(r"(?m)^FROM ", dockerfile)[2:]:
        users = re.findall(r"(?m)^USER (\S+)$", stage)
        assert not users or users[-1] == "10001:10001", stage
    assert re.search(r"(?m)^FROM \S+:\S+ AS base\n(?:(?!FROM).*\n)*USER 10001:10001$", dockerfile)


def test_what_is_built_is_a_stage_and_the_coordinator_is_what_a_plain_build_gives(
    services: dict[str, Any], dockerfile: str
) -> None:
    stages = re.findall(r"(?m)^FROM \S+ AS (\S+)$", dockerfile)
    targets = {name: service["build"]["target"] for name, service in services.items() if "build" in service}
    assert targets == {"coordinator": "coordinator", "orders": "orders"}
    assert set(targets.values()) <= set(stages)
    assert stages[-1] == "coordinator"


def test_whatever_runs_on_says_whether_it_is_healthy_and_is_waited_for(services: dict[str, Any]) -> None:
    """Each service that stays has a health check, and who needs another waits for it."""
    for name, service in services.items():
        needed = service.get("depends_on", {})
        stays = service.get("restart") == "unless-stopped"
        assert stays == ("healthcheck" in service), name
        for other, how in needed.items():
            expected = "service_healthy" if "healthcheck" in services[other] else "service_completed_successfully"
            assert how["condition"] == expected, (name, other)


def test_the_dockerfile_copies_what_is_there_and_what_the_context_holds(dockerfile: str) -> None:
    """Every path that it copies exists, and .dockerignore lets it through."""
    ignore = (ROOT / ".dockerignore").read_text(encoding="utf-8").splitlines()
    let_through = [line.removeprefix("!").rstrip("/") for line in ignore if line.startswith("!")]
    copied = " ".join(re.findall(r"(?m)^COPY (?!--from)(.+) \S+$", dockerfile)).split()
    assert copied
    for path in copied:
        assert (ROOT / path).exists(), path
        assert any(path == one or path.startswith(f"{one}/") for one in let_through), path


@contextmanager
def answering(answer: bytes | None) -> Iterator[tuple[int, list[bytes]]]:
    """Listen, give one connection this answer, None for silence; give the port and what was asked."""
    asked: list[bytes] = []
    done = threading.Event()
    with socket.create_server(("127.0.0.1", pick_port())) as server:

        def serve() -> None:
            with suppress(OSError):  # whoever was to ask has ended, or never came
                connection, _ = server.accept()
                with connection:
                    question = b""
                    while not question.endswith((b"\xff\xff", b"\r\n\r\n")) and (more := connection.recv(1024)):
                        question += more
                    asked.append(question)
                    if answer is not None:
                        connection.sendall(answer)
                    else:
                        done.wait()

        thread = threading.Thread(target=serve)
        thread.start()
        try:
            yield server.getsockname()[1], asked
        finally:
            done.set()
            with suppress(OSError):
                server.shutdown(socket.SHUT_RDWR)
            thread.join()


def healthy(test: list[str], port: int, *, within_s: float = GENEROUS_S) -> bool:
    """Run a health check against another port of this machine; False if it does not end in time."""
    assert test[0] == "CMD"
    command = [re.sub(r"127\.0\.0\.1/\d+", f"127.0.0.1/{port}", part.replace("$$", "$")) for part in test[1:]]
    try:
        return subprocess.run(command, check=False, capture_output=True, timeout=within_s).returncode == 0
    except subprocess.TimeoutExpired:
        return False


KAFKA_ANSWERS = bytes.fromhex("00000010 00000001 0000 00000001 0012 0000 0004")


def test_kafkas_health_check_asks_kafka_and_starts_no_jvm(services: dict[str, Any]) -> None:
    """An ApiVersions request: a broker that listens and does not answer is not healthy."""
    test = services["kafka"]["healthcheck"]["test"]
    assert ".sh" not in " ".join(test), "each of Kafka's tools starts a JVM"
    with answering(KAFKA_ANSWERS) as (port, asked):
        assert healthy(test, port)
        assert asked == [bytes.fromhex("0000000a 0012 0000 00000001 ffff")]
    assert not healthy(test, port), "nothing listens"
    with answering(b"") as (port, _):
        assert not healthy(test, port), "it closes the connection"
    with answering(None) as (port, _):
        assert not healthy(test, port, within_s=1), "it says nothing"


def test_the_coordinators_health_checks_take_nothing_but_200(services: dict[str, Any], dockerfile: str) -> None:
    """Those of the compose file and of the image, by their own paths."""
    found = re.search(r"HEALTHCHECK .*\\\n    CMD (\[.*\])", dockerfile)
    assert found is not None
    for test, path in (
        (services["coordinator"]["healthcheck"]["test"], "ready"),
        (["CMD", *json.loads(found[1])], "live"),
    ):
        with answering(b"HTTP/1.1 200 OK\r\n\r\n") as (port, asked):
            assert healthy(test, port)
            assert asked[0].startswith(f"GET /health/{path} HTTP/1.0\r\n".encode())
        with answering(b"HTTP/1.1 503 Service Unavailable\r\n\r\n") as (port, _):
            assert not healthy(test, port)
        assert not healthy(test, port), "nothing listens"
    with answering(b"") as (port, _):
        assert healthy(services["orders"]["healthcheck"]["test"], port)
    assert not healthy(services["orders"]["healthcheck"]["test"], port)
