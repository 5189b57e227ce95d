"""What Prometheus makes of a fault: samples of real instances, stretched in time, given to the alerts by promtool."""

import asyncio
import json
import subprocess
import time
from collections.abc import Callable, Collection, Mapping
from functools import wraps
from pathlib import Path
from typing import Any

import aiohttp
from prometheus_client.parser import text_string_to_metric_families

from tests.support.coordinator.rest_client import Rest
from tests.support.queries import DEPLOY, alerts, filled_in, named, queries, shown

_ANSWERS_WITHIN_S = 5
_NAMES = {metric for query in queries() for metric in named(query)}
_OF_A_GROUP = {alert["alert"] for alert in alerts() if "$labels.group" in alert["annotations"]["summary"]}
_ABSENT = "_"


class Scrapes:
    """Samples of instances by their names. `step_s` is the time between two of them as the alerts see it.

    `age` is a metric of seconds that is stretched with the time, where a second lies between two scrapes.
    """

    def __init__(self, step_s: int = 60, *, age: str = "", **instances: Rest) -> None:
        self._step_s = step_s
        self._age = age
        self._instances = instances
        self._count = 0
        self._values: dict[str, list[str]] = {}
        self.workers: dict[str, Collection[str]] = {}
        """The numbers of an instance's workers. Its page is read for each, as a service with workers exports them."""

    async def take(self, times: int = 1) -> "Scrapes":
        """Scrape each instance; one that does not answer is down."""
        for _ in range(times):
            for name, rest in self._instances.items():
                try:
                    async with asyncio.timeout(_ANSWERS_WITHIN_S):
                        status, text = await rest.health("/metrics")
                    assert status == 200, text
                except (aiohttp.ClientError, TimeoutError):
                    text = ""
                self._add("up", {"instance": name}, float(bool(text)))
                for labels in [{"worker": worker} for worker in self.workers.get(name, ())] or [{}]:
                    self.read(text, instance=name, **labels)
            self._count += 1
        return self

    def read(self, text: str, **labels: str) -> None:
        """Take the samples of a page that the alerts name, for this moment."""
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                if sample.name in _NAMES:
                    value = sample.value
                    if sample.name == "halfway_clock_seconds":  # promtool's clock begins at 0
                        value += self._count * self._step_s - time.time()
                    elif sample.name == self._age:
                        value *= self._step_s
                    self._add(sample.name, {**labels, **sample.labels}, value)

    def _add(self, name: str, labels: Mapping[str, str], value: float) -> None:
        text = ", ".join(f"{label}={json.dumps(value)}" for label, value in {"job": "halfway", **labels}.items())
        values = self._values.setdefault(f"{name}{{{text}}}", [])
        values.extend(self._gap(values))
        values.append(repr(value))

    def _gap(self, values: list[str]) -> list[str]:
        """Return what a series lacks up to this moment. A series that ends is stale at once, as in Prometheus."""
        missing = self._count - len(values)
        return (["stale"] if values and missing else [_ABSENT] * bool(missing)) + [_ABSENT] * (missing - 1)

    def expect(self, firing: Collection[str], *, besides: Collection[str] = (), group: str = "") -> None:
        """Fail unless just these alerts fire at the end, those of a group with its name; `besides` may fire too.

        If none is to fire, none may at any time; else a loop may pause too, as a busy machine lets any.
        """
        excluded = "|".join({*besides, "HalfwayLoopPaused"} - {*firing} if firing else ())
        expression = f'group by (alertname, group) (ALERTS{{alertstate="firing", alertname!~"{excluded}"}})'
        labels = ({"alertname": one} | ({"group": group} if one in _OF_A_GROUP else {}) for one in firing)
        samples = [
            {"labels": f"{{{', '.join(f'{label}={json.dumps(value)}' for label, value in one.items())}}}", "value": 1}
            for one in labels
        ]
        last = (self._count - 1) * self._step_s
        times = [last] if firing else range(0, last + 1, self._step_s)
        self._judge([{"expr": expression, "eval_time": f"{at}s", "exp_samples": samples} for at in times])

    def expect_panels(self, *, empty: Collection[str]) -> None:
        """Fail unless each query of the dashboard finds something, except those of panels with these titles."""
        last = f"{(self._count - 1) * self._step_s}s"
        one = [{"labels": "{}", "value": 1}]
        tests: list[dict[str, Any]] = []
        for title, query in shown():
            found = f"count({filled_in(query)})"
            asked = f"({found} or vector(0)) >= bool 0" if title in empty else f"{found} > bool 0"
            tests.append({"expr": asked, "eval_time": last, "exp_samples": one})
        self._judge(tests)

    def _judge(self, tests: list[dict[str, Any]]) -> None:
        series = [
            {"series": name, "values": " ".join([*values, *self._gap(values)])} for name, values in self._values.items()
        ]
        test = {"interval": f"{self._step_s}s", "input_series": series, "promql_expr_test": tests}
        document = {"rule_files": [str(DEPLOY / "prometheus" / "halfway.rules.yml")], "tests": [test]}
        _run_promtool(json.dumps(document | {"evaluation_interval": "30s"}))


def _run_promtool(tests: str) -> None:
    path = Path("build") / "halfway.injected.test.yml"
    path.write_text(tests, encoding="utf-8")  # JSON is YAML
    done = subprocess.run(
        ["promtool", "test", "rules", str(path)], capture_output=True, text=True, check=False, timeout=60
    )
    assert done.returncode == 0, done.stdout + done.stderr


def fires(*names: str, besides: Collection[str] = ()) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Make a test of a function that injects a fault and returns what was scraped: these alerts fire, no others do.

    Those of a group have the name of its fixture `group`. `besides` may fire too, by how quick the machine is.
    """

    def made(inject: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(inject)
        async def test(**fixtures: Any) -> None:
            scrapes: Scrapes = await inject(**fixtures)
            scrapes.expect(names, besides=besides, group=fixtures.get("group", ""))

        return test

    return made
