"""The queries of alerts and dashboard in deploy/, and what they name: metrics, their labels, and values of these."""

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import promql_parser
from ruamel.yaml import YAML

DEPLOY = Path(__file__).parents[2] / "deploy"
Named = dict[str, dict[str, set[str]]]
"""By metric: its labels, each with the values that it is compared with."""
_GRAFANA = re.compile(r"\[\$__(rate_interval|range)\]")
_VARIABLE = re.compile(r"\$(job|instance|group)")


def alerts() -> list[dict[str, Any]]:
    [group] = YAML(typ="safe").load(DEPLOY / "prometheus" / "halfway.rules.yml")["groups"]
    return list(group["rules"])


def shown() -> list[tuple[str, str]]:
    """Return the expressions of the dashboard, each with the title of its panel."""
    panels = json.loads((DEPLOY / "grafana" / "halfway.json").read_text(encoding="utf-8"))["panels"]
    return [(panel["title"], target["expr"]) for panel in panels for target in panel.get("targets", ())]


def queries() -> list[str]:
    """Return the expressions of the alerts, and of the panels of the dashboard."""
    return [*(alert["expr"] for alert in alerts()), *(expression for _, expression in shown())]


def filled_in(expression: str) -> str:
    """Return an expression of the dashboard as Grafana sends it, if all is chosen and five minutes are shown."""
    return _VARIABLE.sub(lambda found: "halfway" if found[1] == "job" else ".*", _GRAFANA.sub("[5m]", expression))


def named(expression: str) -> Named:
    """Return what an expression names; a variable of Grafana is no value."""
    found: Named = {}
    _read(promql_parser.parse(_GRAFANA.sub("[5m]", expression)), (), found)
    return found


def _read(node: Any, grouped: Sequence[str], found: Named) -> None:
    modifier = getattr(node, "modifier", None)
    if isinstance(node, promql_parser.VectorSelector):
        labels = found.setdefault(str(node.name), {})
        for matcher in node.matchers.matchers:
            values = set() if matcher.value.startswith("$") else set(matcher.value.split("|"))
            labels.setdefault(matcher.name, set()).update(values)
        for label in grouped:
            labels.setdefault(label, set())
        return
    if isinstance(node, promql_parser.MatrixSelector):
        _read(node.vector_selector, grouped, found)
        return
    if isinstance(node, promql_parser.AggregateExpr):
        grouped = [*grouped, *(modifier.labels if modifier is not None else ())]
    elif isinstance(node, promql_parser.BinaryExpr) and modifier is not None and modifier.matching is not None:
        grouped = [*grouped, *modifier.matching.labels]
    for part in ("expr", "lhs", "rhs"):
        if (inner := getattr(node, part, None)) is not None:
            _read(inner, grouped, found)
    for argument in getattr(node, "args", ()):
        _read(argument, grouped, found)
