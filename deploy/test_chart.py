"""What the chart renders fits halfway. `make deploy-test` runs this: it needs helm."""

import re
import subprocess
from collections import defaultdict
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


def rendered(example: str, *versions: str, **over: str) -> Objects:
    """Return the objects of an example, by kind, in a cluster that has more API versions."""
    sets = [word for name, value in over.items() for word in ("--set", f"{name.replace('__', '.')}={value}")]
    values = str(CHART / "ci" / f"{example}-values.yaml")
    command = ["helm", "template", "halfway", str(CHART), "--kube-version", "1.30.0", "--namespace", "shop"]
    command += [word for version in versions for word in ("--api-versions", version)]
    done = subprocess.run(
        [*command, "--values", values, *sets], capture_output=True, text=True, check=False, timeout=60
    )
    if done.returncode:
        raise ValueError(done.stderr)
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
    objects = rendered(example, drainSeconds="7")
    [drain] = [one["value"] for one in container(objects)["env"] if one["name"] == "HALFWAY_DRAIN_S"]
    assert pod(objects)["terminationGracePeriodSeconds"] >= int(drain) + STOP_S + 5
    probe = container(objects)["readinessProbe"]
    assert probe["periodSeconds"] * probe["failureThreshold"] < int(drain)


@pytest.mark.parametrize("example", EXAMPLES)
def test_probes_ask_what_they_mean_on_the_port_of_health(example: str) -> None:
    found, served = container(rendered(example)), Path(health_port.__file__).read_text(encoding="utf-8")
    ports = {port["name"]: port["containerPort"] for port in found["ports"]}
    assert ports == {"api": 8080, "health": 8081}
    for probe, path in (("startupProbe", "started"), ("readinessProbe", "ready"), ("livenessProbe", "live")):
        asked = found[probe]["httpGet"]
        assert (asked["path"], asked["port"]) == (f"/health/{path}", "health")
        assert f"/health/{path}" in served
        assert asked["scheme"] == ("HTTPS" if example == "three" else "HTTP")


@pytest.mark.parametrize("example", EXAMPLES)
def test_a_pod_has_no_rights_and_no_variables_of_services(example: str) -> None:
    """Services whose names begin with halfway would set HALFWAY_PORT."""
    objects = rendered(example)
    spec, one = pod(objects), container(objects)
    assert spec["enableServiceLinks"] is False
    assert spec["automountServiceAccountToken"] is False
    assert spec["securityContext"]["runAsNonRoot"] is True
    assert one["securityContext"] == {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }
    assert not [variable for variable in one["env"] if "secretKeyRef" in variable.get("valueFrom", {})]
    assert "cpu" not in one["resources"]["limits"]


def test_a_number_keeps_its_digits() -> None:
    environment = {one["name"]: one["value"] for one in container(rendered("one"))["env"]}
    assert environment["HALFWAY_MAX_PENDING"] == "1000000"


def test_without_keys_or_a_credential_nothing_is_rendered() -> None:
    with pytest.raises(ValueError, match=r"masterSecret\.name, or openAccess"):
        rendered("one", openAccess="false")
    with pytest.raises(ValueError, match=r"several instances need"):
        rendered("one", replicas="3")
    with pytest.raises(ValueError, match=r"set kafka\.bootstrapServers"):
        rendered("one", kafka__bootstrapServers="")


@pytest.mark.parametrize("setting", ["port", "health_port", "drain_s"])
def test_what_the_chart_fixes_is_no_setting(setting: str) -> None:
    """Otherwise no call would arrive, or the pod would be killed before its drain ends."""
    with pytest.raises(ValueError, match=f"settings.{setting} cannot be changed"):
        rendered("one", **{f"settings__{setting}": "30"})


def test_a_closed_api_is_not_open_at_the_health_port() -> None:
    closed = {"networkPolicy__enabled": "true", "networkPolicy__clients[0]__podSelector__matchLabels__app": "shop"}
    with pytest.raises(ValueError, match=r"set networkPolicy\.monitoring"):
        rendered("one", settings__console="health", **closed)
    opened = {"networkPolicy__monitoring[0]__podSelector__matchLabels__app": "prometheus"}
    assert rendered("one", settings__console="health", **closed, **opened)["NetworkPolicy"]


@pytest.mark.parametrize("example", EXAMPLES)
def test_the_limit_of_memory_holds_the_bounds_of_each_worker(example: str) -> None:
    objects = rendered(example)
    workers = [int(one["value"]) for one in container(objects)["env"] if one["name"] == "HALFWAY_WORKERS"]
    assert container(objects)["resources"]["limits"]["memory"] == f"{4 * sum(workers or [1])}Gi"


def test_instances_reach_each_other_by_names_that_a_certificate_can_have(tmp_path: Path) -> None:
    """Ready or not, because a shard may be served before everything is; and each pod has its own."""
    objects = rendered("three")
    [environment] = [one["value"] for one in container(objects)["env"] if one["name"] == "HALFWAY_INSTANCE_URL"]
    assert environment == "https://$(POD_NAME).halfway-instances.shop.svc:8080"
    [headless] = [one for one in objects["Service"] if one["spec"].get("clusterIP") == "None"]
    [stateful] = objects["StatefulSet"]
    assert stateful["spec"]["serviceName"] == headless["metadata"]["name"] == "halfway-instances"
    assert headless["spec"]["publishNotReadyAddresses"] is True
    assert settings_of(objects, tmp_path).tls_certificate_file is not None
    [policy] = objects["NetworkPolicy"]
    own = {"podSelector": {"matchLabels": stateful["spec"]["selector"]["matchLabels"]}}
    assert own in policy["spec"]["ingress"][0]["from"]
    assert own in policy["spec"]["egress"][1]["to"]
    assert {port["port"] for port in policy["spec"]["egress"][0]["ports"]} == {53}


def test_prometheus_finds_each_instance_and_the_alerts_with_their_runbook() -> None:
    objects = rendered("three")
    [monitor], [rule] = objects["ServiceMonitor"], objects["PrometheusRule"]
    [headless] = [one for one in objects["Service"] if one["spec"].get("clusterIP") == "None"]
    wanted = monitor["spec"]["selector"]["matchLabels"].items()
    assert [one["metadata"]["name"] for one in objects["Service"] if wanted <= one["metadata"]["labels"].items()] == [
        headless["metadata"]["name"]
    ]
    assert headless["metadata"]["labels"][monitor["spec"]["jobLabel"]] == "halfway"
    text = (ROOT / "deploy" / "prometheus" / "halfway.rules.yml").read_text(encoding="utf-8")
    text = text.replace("runbook_url: ", "runbook_url: https://git.example/halfway/")
    assert rule["spec"] == YAML(typ="safe").load(text)
    dashboard = (ROOT / "deploy" / "grafana" / "halfway.json").read_text(encoding="utf-8")
    assert objects["ConfigMap"][0]["data"]["halfway.json"] == dashboard


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
    assert user["apiVersion"] == "kafka.strimzi.io/v1beta2"
    assert rendered("strimzi", "kafka.strimzi.io/v1")["KafkaUser"][0]["apiVersion"] == "kafka.strimzi.io/v1"
    assert {resource: granted[resource] for resource in documented} == documented
    assert {kind for kind, _ in granted.keys() - documented.keys()} <= {"topic"}  # further topics of messages
