"""The examples for Kubernetes and Airflow fit the command line."""

import runpy
import shlex
import sys
from contextlib import nullcontext
from pathlib import Path
from types import ModuleType

import pytest
from ruamel.yaml import YAML

from halfway.pipeline import cli

EXAMPLES = Path(__file__).parents[3] / "examples" / "audit"


def test_the_example_for_kubernetes_names_what_the_command_line_has() -> None:
    """An audit with --continue, and a cross-check with its folder."""
    folders = []
    for job in YAML(typ="safe").load_all((EXAMPLES / "cronjob.yaml").read_text()):
        [container] = job["spec"]["jobTemplate"]["spec"]["template"]["spec"]["containers"]
        _, name, *rest = container["args"]
        with cli.pipeline.commands[name].make_context(name, rest) as context:
            folders.append((context.params["on"], context.params["output"], context.params["against"]))
    assert folders == [(True, "/audit/continued", None), (False, "/audit/whole", "/audit/continued")]


def test_the_example_for_cron_names_what_the_command_line_has() -> None:
    """Each line has the five fields of a time, and a command that parses."""
    lines = [line for line in (EXAMPLES / "crontab").read_text().splitlines() if line[0] in "*0123456789"]
    folders = []
    for line in lines:
        fields = shlex.split(line)
        _, name, *rest = fields[fields.index("halfway-pipeline") : fields.index(">")]
        assert fields[5] in {"flock", "halfway-pipeline"}
        with cli.pipeline.commands[name].make_context(name, rest) as context:
            folders.append((context.params["on"], context.params["output"], context.params["against"]))
    assert folders == [(True, "/audit/continued", None), (False, "/audit/whole", "/audit/continued")]


def test_the_example_for_airflow_names_what_the_command_line_has(monkeypatch: pytest.MonkeyPatch) -> None:
    """It can be imported, and its commands parse."""
    commands: list[str] = []

    def operator(*, bash_command: str, **_: object) -> None:
        commands.append(bash_command)

    operators = "airflow.providers.standard.operators"
    for name in ("airflow", "airflow.providers", "airflow.providers.standard", operators):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    bash, sdk = ModuleType(f"{operators}.bash"), ModuleType("airflow.sdk")
    vars(bash)["BashOperator"] = operator
    vars(sdk)["DAG"] = lambda *_, **__: nullcontext()
    monkeypatch.setitem(sys.modules, bash.__name__, bash)
    monkeypatch.setitem(sys.modules, sdk.__name__, sdk)
    runpy.run_path(str(EXAMPLES / "airflow_dag.py"))
    assert len(commands) == 2
    for command in commands:
        _, job, *rest = shlex.split(command.replace("{{ ds }}", "day"))
        with cli.pipeline.commands[job].make_context(job, rest) as context:
            assert context.params["output"]
