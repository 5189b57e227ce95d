"""Generates deploy/metrics.md, the reference of halfway's metrics, from the code that registers them.

`python -m deploy.metrics > deploy/metrics.md`
"""

from collections.abc import Iterable, Iterator
from inspect import signature
from types import SimpleNamespace
from typing import Any, Final, cast, get_args
from unittest.mock import MagicMock

from halfway.app.metrics import MAX_GROUPS, OTHER, LoopPauses, Metrics
from halfway.app.serve.app import Stage, show_backend, show_process
from halfway.app.serve.backend import WARNINGS
from halfway.app.serve.worker import WorkerFigures
from halfway.coordinator.access import Refusal
from halfway.coordinator.coordinator import Coordinator
from halfway.coordinator.operations import Waits
from halfway.coordinator.records import PeerCall
from halfway.coordinator.requests import ServiceLimits
from halfway.http.handlers.routes import OPERATIONS
from halfway.http.server.api import Api
from halfway.kafka.clients.config import KafkaConfig
from halfway.protocol.errors import HalfwayError
from halfway.protocol.transactions import Cause, Outcome

STATUS: Final = "the status of the answer"
PREFIX: Final = "_halfway."
_NUMBER: Final = "the number of a shard"


def _errors(kind: type[HalfwayError] = HalfwayError) -> set[str]:
    found = set[str]().union(*map(_errors, kind.__subclasses__()))
    return found | {kind.code} if kind.__module__.startswith("halfway.") else found


ERRORS: Final = sorted(_errors())
"""The value of `error_code` in a problem."""
_VERDICTS: Final = [*Outcome, "none", "leased"]
_CALLS: Final = sorted(str(call.__struct_config__.tag) for call in get_args(PeerCall))
VALUES: Final[dict[str, dict[str, Iterable[str] | str]]] = {
    "halfway_prepares_total": {"result": ["prepared", "repeated", *ERRORS]},
    "halfway_prepare_seconds": {"result": ["prepared", "repeated", *ERRORS]},
    "halfway_ends_total": {"outcome": Outcome, "cause": Cause, "result": ["changed", "unchanged", *ERRORS]},
    "halfway_end_seconds": {"outcome": Outcome, "result": ["changed", "unchanged", *ERRORS]},
    "halfway_time_to_outcome_seconds": {"outcome": [Outcome.COMMIT, Outcome.ROLLBACK]},
    "halfway_checks_total": {"verdict": _VERDICTS, "sent": ["true", "false"]},
    "halfway_check_seconds": {"verdict": _VERDICTS},
    "halfway_requests_total": {"operation": [*(one.id for one in OPERATIONS), "none"], "status": STATUS},
    "halfway_stream_operations_total": {"operation": ["prepare", "end", "checks"], "status": STATUS},
    "halfway_audit_events_total": {"result": ["written", "lost"]},
    "halfway_forwarded_total": {"call": _CALLS, "result": ["done", *ERRORS]},
    "halfway_forwarded_seconds": {"call": _CALLS},
    "halfway_refused_callers_total": {"reason": get_args(Refusal)},
    "halfway_skipped_records_total": {"topic": f"an internal topic, or the group `{PREFIX}cursors`"},
    "halfway_warnings": {"check": WARNINGS},
    "halfway_changes_waiting": {"on": Waits},
    "halfway_build_info": {"version": "the release", "python": "Python's version"},
    "python_gc_objects_collected_total": {"generation": ["0", "1", "2"]},
    "python_gc_objects_uncollectable_total": {"generation": ["0", "1", "2"]},
    "python_gc_collections_total": {"generation": ["0", "1", "2"]},
}
"""The values that labels can have; those that are exported from the start are found there."""
_ANYWHERE: Final = {
    "broker": "a broker's id",
    "group": f"a registered group; `{OTHER}` for the others, and from the {MAX_GROUPS + 1}st on",
    "shard": _NUMBER,
    "worker": "the number of a worker; with several workers every series has it",
}


def registered() -> Metrics:
    """Return the metrics as an instance registers them, with the samples that it exports from the start."""
    metrics, ports = Metrics(), signature(Coordinator).parameters.keys() - {"limits"}
    coordinator = Coordinator(limits=ServiceLimits(shards=1), **dict.fromkeys(ports, cast("Any", MagicMock())))
    metrics.show(coordinator, Api(coordinator, internal_prefix=PREFIX, observer=metrics))
    pauses, age = LoopPauses(), SimpleNamespace(age_s=0.0)
    show_process(metrics, pauses, Stage(pauses))
    backend = SimpleNamespace(keys=age, tail=age, not_acquired_s=dict)
    show_backend(metrics, cast("Any", backend), cast("Any", SimpleNamespace(bytes=0)))
    properties = {"bootstrap.servers": "unused:1"}
    metrics.export_zeros(KafkaConfig(properties=properties, max_prepare_bytes=1, prefix=PREFIX), has_peers=True)
    metrics.registry.register(WorkerFigures({}, {}))
    return metrics


class Row:
    """A metric: its name as it is exported, its type, its text, and the values of its labels, or a phrase for them."""

    def __init__(self, collector: Any, family: Any) -> None:
        """Take the family as a scrape returns it. Only its collector knows the labels of one without samples."""
        self.name = family.name + {"counter": "_total", "info": "_info"}.get(family.type, "")
        self.type = "gauge" if family.type == "info" else family.type
        self.text = family.documentation
        own = [name for sample in family.samples for name in sample.labels if name != "le"]
        names = getattr(family, "_labelnames", None) or getattr(collector, "_labelnames", None) or own
        self.labels = {name: self._values(name, family) for name in dict.fromkeys(names)}

    def _values(self, label: str, family: Any) -> list[str] | str:
        values = VALUES.get(self.name, {}).get(label) or _ANYWHERE.get(label)
        if isinstance(values, str):
            return values
        exported = [sample.labels[label] for sample in family.samples if label in sample.labels]
        return list(dict.fromkeys(map(str, [*(values or ()), *exported])))


def rows() -> Iterator[Row]:
    """Yield the metrics in the order of their names."""
    collectors = list(registered().registry._collector_to_names)  # noqa: SLF001 - nothing else has the collectors
    found = [Row(collector, family) for collector in collectors for family in collector.collect()]
    return iter(sorted(found, key=lambda row: row.name))


def _label(name: str, values: list[str] | str) -> str:
    if isinstance(values, str):
        return f"`{name}`: {values}"
    shown, rest = ([one for one in values if one not in ERRORS], "") if set(ERRORS) <= set(values) else (values, "")
    if len(shown) < len(values):
        rest = ", or the [error](#errors)"
    return f"`{name}`: {', '.join(f'`{value}`' for value in shown)}{rest}"


def reference() -> str:
    """Return the page."""
    lines = [
        "# Metrics",
        "",
        "Generated from the code by `python -m deploy.metrics`. Each instance exports them at `GET :8081/metrics`.",
        "",
        "A histogram `x` is exported as `x_bucket` (label `le`), `x_sum` and `x_count`. Counters are 0 from the",
        "start with each value of their labels that is known then: `increase(...) > 0` finds the first event. See the",
        "[alerts](runbook.md) and the [dashboard](README.md#dashboard) on them.",
        "",
        "| metric | type | meaning | labels |",
        "| --- | --- | --- | --- |",
    ]
    for row in rows():
        labels = "; ".join(_label(name, values) for name, values in row.labels.items())
        lines.append(f"| `{row.name}` | {row.type} | {row.text.rstrip('.')} | {labels} |")
    lines += ["", "## Errors", "", "The `error_code` of [a refusal](../docs/api.md#errors):"]
    lines += [", ".join(f"`{code}`" for code in ERRORS) + ".", ""]
    return "\n".join(lines)


if __name__ == "__main__":
    print(reference(), end="")
