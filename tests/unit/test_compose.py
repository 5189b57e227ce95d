"""docker-compose.yml and the Dockerfile, checked without an engine: no Docker runs where these tests do."""

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from ruamel.yaml import YAML

from examples.orders import service as order_service
from halfway.runtime.settings import load

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
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr


def test_its_settings_are_known(services: dict[str, Any]) -> None:
    """No variable that the settings do not know, and none with a value that they refuse."""
    environment = services["coordinator"]["environment"]
    settings = load({name: str(value) for name, value in environment.items()})
    assert settings.kafka_config("").properties["bootstrap.servers"] == "kafka:19092"


def test_images_are_pinned_and_nothing_of_ours_runs_as_root(services: dict[str, Any], dockerfile: str) -> None:
    """Every image has a version, and each stage that is run ends as a user without rights."""
    bases = [image for image in re.findall(r"(?m)^FROM (\S+)", dockerfile) if image != "base"]
    images = [service["image"] for service in services.values()] + bases
    assert all(re.search(r":\w[\w.-]*$", image) and not image.endswith(":latest") for image in images), images
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


def test_the_order_service_is_optional_and_its_command_line_is_its_own(services: dict[str, Any]) -> None:
    assert {name for name, service in services.items() if "profiles" in service} == {"orders", "orders-topics"}
    given = order_service.command_line().parse_args(services["orders"]["command"])
    assert (given.host, given.port) == ("0.0.0.0", 9000)  # noqa: S104 - in a container
    assert given.halfway == f"http://coordinator:{load({}).port}"
    assert given.check_url == "http://orders:9000/check"
    script = " ".join(services["orders-topics"]["command"])
    assert re.search(r"for topic in ([a-z ]+);", script) is not None
    assert tuple(re.findall(r"for topic in ([a-z ]+);", script)[0].split()) == order_service.TOPICS


def test_volumes_and_ports(services: dict[str, Any]) -> None:
    """What must outlive a container lies in a named volume, and no port is open to other machines."""
    declared = set(YAML(typ="safe").load(COMPOSE)["volumes"])
    used = {volume.split(":")[0] for service in services.values() for volume in service.get("volumes", [])}
    assert used == declared == {"kafka-data", "orders-data"}
    ports = [port for service in services.values() for port in service.get("ports", [])]
    assert ports
    assert all(port.startswith("127.0.0.1:") for port in ports), ports


def test_the_dockerfile_copies_what_is_there_and_what_the_context_holds(dockerfile: str) -> None:
    """Every path that it copies exists, and .dockerignore lets it through."""
    ignore = (ROOT / ".dockerignore").read_text(encoding="utf-8").splitlines()
    let_through = [line.removeprefix("!").rstrip("/") for line in ignore if line.startswith("!")]
    copied = " ".join(re.findall(r"(?m)^COPY (?!--from)(.+) \S+$", dockerfile)).split()
    assert copied
    for path in copied:
        assert (ROOT / path).exists(), path
        assert any(path == one or path.startswith(f"{one}/") for one in let_through), path
