"""What deploy/ has for operators fits the code: the reference of metrics, the alerts, the dashboard and the runbook."""

import re
from typing import Any

import pytest

from deploy.dashboard import dashboard
from deploy.metrics import reference, rows
from halfway.pipeline.transforms.verdict import VERDICTS
from tests.support.queries import DEPLOY, Named, alerts, named, queries

_OF_AUDITS = {"halfway_audit_transactions": {"verdict": [*VERDICTS], "group": "any"}}


@pytest.mark.parametrize("file, generate", [("metrics.md", reference), ("grafana/halfway.json", dashboard)])
def test_what_is_generated_is_as_the_code_generates_it(file: str, generate: Any) -> None:
    """`python -m deploy.metrics` and `python -m deploy.dashboard` write them again."""
    assert (DEPLOY / file).read_text(encoding="utf-8") == generate()


def test_each_alert_has_a_place_in_the_runbook_and_a_fault_in_which_it_fires() -> None:
    names = [alert["alert"] for alert in alerts()]
    headings = re.findall(r"^### (\w+)$", (DEPLOY / "runbook.md").read_text(encoding="utf-8"), re.MULTILINE)
    assert sorted(names) == sorted(headings)
    for alert in alerts():
        assert alert["annotations"]["runbook_url"] == f"deploy/runbook.md#{alert['alert'].lower()}"
        assert alert["labels"]["severity"] in ("critical", "warning")
    injected = re.findall(r"^@fires\((.*?)\)$", (DEPLOY / "test_alerts.py").read_text(encoding="utf-8"), re.MULTILINE)
    assert {*names} == {name for one in injected for name in re.findall(r'"(\w+)"', one.partition("besides")[0])}


def test_each_query_names_metrics_labels_and_values_that_there_are() -> None:
    """A misspelt label would match nothing, and the alert would never fire."""
    documented = {row.name: row.labels for row in rows()} | _OF_AUDITS | {"up": {}}
    for query in queries():
        for metric, labels in named(query).items():
            name = metric if metric in documented else re.sub(r"_(bucket|sum|count)$", "", metric)
            assert labels.keys() <= documented[name].keys() | {"job", "instance", "le"}, query
            for label, values in labels.items():
                known = documented[name].get(label)
                assert not isinstance(known, list) or values <= set(known), query


def test_a_query_is_read_to_its_labels() -> None:
    """Those of matchers, and of the aggregations and comparisons that it is in."""
    query = 'max by (job) (a{x=~"b|c", y!="d"}) / on (job, z) rate(e{instance=~"$instance"}[5m])'
    expected: Named = {"a": {"x": {"b", "c"}, "y": {"d"}, "job": set(), "z": set()}, "e": {"instance": set()}}
    expected["e"] |= {"job": set(), "z": set()}
    assert named(query) == expected
