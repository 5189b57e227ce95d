"""docker-compose.yml and the Dockerfile, checked without an engine: no Docker runs where these tests do."""

import re
import subprocess
import sys
from pathlib import Path

from ruamel.yaml import YAML

from halfway.runtime.settings import load

ROOT = Path(__file__).parents[2]
COMPOSE = ROOT / "docker-compose.yml"


def test_the_compose_file_follows_the_specification() -> None:
    """The schema of the compose specification that check-jsonschema brings."""
    command = [sys.executable, "-m", "check_jsonschema", "--builtin-schema", "vendor.compose-spec", str(COMPOSE)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr


def test_its_settings_are_known() -> None:
    """No variable that the settings do not know, and none with a value that they refuse."""
    environment = YAML(typ="safe").load(COMPOSE)["services"]["coordinator"]["environment"]
    settings = load({name: str(value) for name, value in environment.items()})
    assert settings.kafka_config("").properties["bootstrap.servers"] == "kafka:19092"


def test_images_are_pinned_and_the_coordinator_is_no_root() -> None:
    """Every image has a version, and the process an id of its own."""
    services = YAML(typ="safe").load(COMPOSE)["services"]
    dockerfile = (ROOT / "Dockerfile").read_text(encoding="utf-8")
    images = [service["image"] for service in services.values()] + re.findall(r"(?m)^FROM (\S+)", dockerfile)
    assert all(re.search(r":\w[\w.-]*$", image) and not image.endswith(":latest") for image in images), images
    assert re.search(r"(?m)^USER 10001:10001$", dockerfile)


def test_the_dockerfile_copies_what_is_there() -> None:
    """Every path that it copies exists."""
    copied = re.findall(r"(?m)^COPY (?!--from)(.+) \S+$", (ROOT / "Dockerfile").read_text(encoding="utf-8"))
    for path in " ".join(copied).split():
        assert (ROOT / path).exists(), path
