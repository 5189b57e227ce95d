"""What the chart renders fits the code and the pages; the suites in its folder tests/ say the rest.

`make deploy-test` runs this and them: they need helm and helm-unittest.
"""

import re
import subprocess
from collections import defaultdict
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from ruamel.yaml import YAML

from halfway.app.serve.backend import STOP_S
from halfway.app.settings import Settings, load
from halfway.http.server import health_port

ROOT = Path(__file__).parents[1]
CHART = ROOT / "deploy" / "chart" / "halfway"
EXAMPLES = sorted(path.stem.removesuffix("-values") for path in (CHART / "ci").glob("*-values.yaml"))
Objects = dict[str, list[dict[str, Any]]]
FOLDER = "/etc/halfway"


@cache
def rendered(example: str) -> Objects:
    """Return the objects of an example, by kind."""
    values = str(CHART / "ci" / f"{example}-values.yaml")
    command = ["helm", "template", "halfway", str(CHART), "--kube-version", "1.30.0", "--namespace", "shop"]
    done = subprocess.run([*command, "--values", values], stdout=subprocess.PIPE, text=True, check=True, timeout=60)
    objects: Objects = defaultdict(list)
    for one in YAML(typ="safe").load_all(done.stdout):
        if one is not None:
            objects[one["kind"]].append(one)
    return objects


def pod(objects: Objects) -> dict[str, Any]:
    [found] = objects["StatefulSet"]
    return dict(found["spec"]["template"]["spec"])


def container(objects: Objects) -> dict[str, Any]:
    [found] = pod(objects)["containers"]
    return dict(found)


def settings_of(objects: Objects, folder: Path) -> Settings:
    """Load the settings as a pod would, with the secrets that it mounts."""
    environment = {one["name"]: one.get("value", "") for one in container(objects)["env"]}
    environment = {name: value.replace("$(POD_NAME)", "halfway-0") for name, value in environment.items()}
    mounted = {
        f"{FOLDER}/{volume['name']}/{item['path']}"
        for volume in pod(objects)["volumes"]
        for item in volume["secret"]["items"]
    }
    for variable, value in environment.items():
        if value.startswith(FOLDER):
            assert value in mounted, value
            (folder / variable).write_text("a" * 64, encoding="utf-8")
            environment[variable] = str(folder / variable)
    environment.pop("HALFWAY_OPERATOR_KEY_FILE", None)  # a key has a form
    return load(environment)


@pytest.mark.parametrize("example", EXAMPLES)
def test_its_settings_are_known_and_right(example: str, tmp_path: Path) -> None:
    objects = rendered(example)
    if "volumes" in pod(objects):
        settings_of(objects, tmp_path)
    else:
        load({one["name"]: one["value"] for one in container(objects)["env"]})


@pytest.mark.parametrize("example", EXAMPLES)
def test_a_pod_has_time_to_stop_and_leaves_the_service_before_it_closes_its_port(example: str) -> None:
    objects = rendered(example)
    [drain] = [one["value"] for one in container(objects)["env"] if one["name"] == "HALFWAY_DRAIN_S"]
    assert pod(objects)["terminationGracePeriodSeconds"] >= int(drain) + STOP_S + 5
    probe = container(objects)["readinessProbe"]
    assert probe["periodSeconds"] * probe["failureThreshold"] < int(drain)


@pytest.mark.parametrize("probe", ["startupProbe", "readinessProbe", "livenessProbe"])
def test_what_a_probe_asks_is_served(probe: str) -> None:
    path = container(rendered("one"))[probe]["httpGet"]["path"]
    assert f'"{path}"' in Path(health_port.__file__).read_text(encoding="utf-8")


def test_the_alerts_and_the_dashboard_are_those_of_the_repository() -> None:
    objects = rendered("three")
    [rule], [board] = objects["PrometheusRule"], objects["ConfigMap"]
    text = (ROOT / "deploy" / "prometheus" / "halfway.rules.yml").read_text(encoding="utf-8")
    text = text.replace("runbook_url: ", "runbook_url: https://git.example/halfway/")
    assert rule["spec"] == YAML(typ="safe").load(text)
    dashboard = (ROOT / "deploy" / "grafana" / "halfway.json").read_text(encoding="utf-8")
    assert board["data"]["halfway.json"] == dashboard


def test_the_user_of_strimzi_has_the_documented_permissions() -> None:
    page = (ROOT / "docs" / "operating.md").read_text(encoding="utf-8")
    [user] = rendered("strimzi")["KafkaUser"]
    granted = {
        (one["resource"]["type"], one["resource"].get("name", "")): one["operations"]
        for one in user["spec"]["authorization"]["acls"]
    }
    documented = {
        (kind.replace("-i", "I"), name): re.findall(r"--operation (\w+)", operations)
        for kind, name, operations in re.findall(r"(?m)^\$ACLS User:halfway --([\w-]+) ?(\S*?) (--.+)$", page)
    }
    assert {resource: granted[resource] for resource in documented} == documented
    assert {kind for kind, _ in granted.keys() - documented.keys()} <= {"topic"}  # further topics of messages
