"""Generates deploy/grafana/halfway.json, a dashboard for Grafana 10 and later on a Prometheus that scrapes halfway.

`python -m deploy.dashboard > deploy/grafana/halfway.json`
"""

from itertools import count
from typing import Any, Final

from grafana_foundation_sdk.builders import common, heatmap, stat, table, timeseries
from grafana_foundation_sdk.builders.dashboard import (
    Dashboard,
    DatasourceVariable,
    QueryVariable,
    Row,
    ThresholdsConfig,
)
from grafana_foundation_sdk.builders.prometheus import Dataquery
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.models.common import SortOrder, TooltipDisplayMode
from grafana_foundation_sdk.models.dashboard import (
    DashboardCursorSync,
    DataSourceRef,
    DataTransformerConfig,
    DynamicConfigValue,
    Threshold,
    ThresholdsMode,
    VariableRefresh,
)
from grafana_foundation_sdk.models.heatmap import HeatmapColorMode
from grafana_foundation_sdk.models.prometheus import PromQueryFormat

SOURCE: Final = DataSourceRef(type_val="prometheus", uid="${datasource}")
OF: Final = 'job="$job"'
HERE: Final = 'job="$job", instance=~"$instance"'
GROUP: Final = 'job="$job", group=~"$group"'
INSTANCE: Final = "{{instance}} {{worker}}"
"""The legend of series that are not added up: with several workers an instance has one of each."""
COLOURS: Final = {"commit": "green", "rollback": "orange", "unknown": "yellow", "none": "red", "leased": "blue"}
"""Those of outcomes and verdicts, in shades for several series."""
_HEIGHT: Final = 7
_STAT_HEIGHT: Final = 4


def _query(expression: str, legend: str = "__auto", *, form: str = "time_series", instant: bool = False) -> Dataquery:
    query = Dataquery().expr(expression).legend_format(legend).format(PromQueryFormat(form))
    if "_seconds_bucket" in expression:
        query = query.exemplar(True)
    return (query.instant() if instant else query).ref_id("A")


def lines(title: str, unit: str, *queries: tuple[str, str], width: int = 8, text: str = "") -> timeseries.Panel:
    """Return a chart of queries, each with the legend of its lines."""
    panel = timeseries.Panel().title(title).unit(unit).span(width).height(_HEIGHT).datasource(SOURCE).description(text)
    tooltip = common.VizTooltipOptions().mode(TooltipDisplayMode.MULTI).sort(SortOrder.DESCENDING)
    panel = panel.min(0).tooltip(tooltip).fill_opacity(8)
    if any("outcome" in legend or "verdict" in legend for _, legend in queries):
        for word, colour in COLOURS.items():
            shades = DynamicConfigValue(id_val="color", value={"mode": "shades", "fixedColor": colour})
            panel = panel.override_by_regexp(rf"/\b{word}\b/", [shades])
    for letter, (expression, legend) in zip("ABC", queries, strict=False):
        panel = panel.with_target(_query(expression, legend).ref_id(letter))
    return panel


def figure(title: str, expression: str, *, unit: str = "short", red: float) -> stat.Panel:
    """Return one number that is green, and red from a value on."""
    steps = [Threshold(value=None, color="green"), Threshold(value=red, color="red")]
    limits = ThresholdsConfig().mode(ThresholdsMode.ABSOLUTE).steps(steps)
    panel = stat.Panel().title(title).unit(unit).span(4).height(_STAT_HEIGHT).datasource(SOURCE).thresholds(limits)
    return panel.with_target(_query(expression))


def quantiles(title: str, histogram: str, of: str = HERE, by: str = "", width: int = 8) -> timeseries.Panel:
    """Return the quantiles of a histogram of seconds."""
    labels, legend = (f"le, {by}", f" {{{{{by}}}}}") if by else ("le", "")
    rate = f"sum by ({labels}) (rate({histogram}_bucket{{{of}}}[5m]))"
    wanted = ((0.5, "p50"), (0.99, "p99"))
    return lines(
        title, "s", *((f"histogram_quantile({part}, {rate})", f"{name}{legend}") for part, name in wanted), width=width
    )


def per_s(metric: str, by: str, of: str) -> str:
    """Return the rate of a counter, by labels."""
    return f"sum by ({by}) (rate({metric}{{{of}}}[$__rate_interval]))"


def per_s_if_any(metric: str, by: str, of: str) -> str:
    """Return the rate of a counter, without what is 0 for as long as the dashboard shows."""
    return f"{per_s(metric, by, of)} and sum by ({by}) (increase({metric}{{{of}}}[$__range])) > 0"


def _shards() -> table.Panel:
    panel = table.Panel().title("Who serves which shard").span(8).height(_HEIGHT).datasource(SOURCE)
    columns = {
        "excludeByName": {"Time": True},
        "indexByName": {"shard": 0, "instance": 1},
        "renameByName": {"Value": "pending"},
    }
    panel = panel.with_transformation(DataTransformerConfig(id_val="organize", options=columns))
    order = {"sort": [{"field": "shard"}]}
    panel = panel.with_transformation(DataTransformerConfig(id_val="sortBy", options=order))
    owners = f"sum by (shard, instance) (halfway_pending{{{OF}}})"
    return panel.with_target(_query(owners, form="table", instant=True))


def _time_to_outcome() -> heatmap.Panel:
    panel = heatmap.Panel().title("Time from prepare to outcome").span(8).height(_HEIGHT).datasource(SOURCE)
    rate = f"sum by (le) (rate(halfway_time_to_outcome_seconds_bucket{{{GROUP}}}[$__rate_interval]))"
    query = _query(rate, "{{le}}", form="heatmap")
    panel = panel.y_axis(heatmap.YAxisConfig().unit("s"))
    return panel.with_target(query).color(heatmap.HeatmapColorOptions().mode(HeatmapColorMode.SCHEME).scheme("Blues"))


def _well() -> list[Any]:
    served = f"count(count by (shard) (halfway_pending{{{OF}}})) or vector(0)"
    requests = f"sum(rate(halfway_requests_total{{{OF}}}[5m]))"
    failed = f'sum(rate(halfway_requests_total{{{OF}, status=~"5.."}}[5m]))'
    errors = f"{failed} / {requests} or vector(0)"
    overdue = f"max(halfway_group_overdue_seconds{{{OF}}}) or vector(0)"
    return [
        figure("Instances that are not ready", f"count(up{{{OF}}}) - (sum(halfway_ready{{{OF}}}) or vector(0))", red=1),
        figure("Shards without an owner", f"max(halfway_shards{{{OF}}}) - ({served})", red=1),
        figure("Parked", f"sum(halfway_parked{{{OF}}})", red=1),
        figure("Longest without a verdict", overdue, unit="s", red=900),
        figure("Calls that fail", errors, unit="percentunit", red=0.02),
        figure("Warnings", f"sum(halfway_warnings{{{OF}}})", red=1),
    ]


def _traffic() -> list[Any]:
    prepared, changed = f'{GROUP}, result="prepared"', f'{GROUP}, result="changed"'
    refused = f'{HERE}, status=~"4..|5.."'
    return [
        lines("Prepares", "ops", (per_s("halfway_prepares_total", "group", prepared), "{{group}}")),
        lines("Ends", "ops", (per_s("halfway_ends_total", "outcome, cause", changed), "{{outcome}} by {{cause}}")),
        lines("Requests", "reqps", (per_s("halfway_requests_total", "operation", HERE), "{{operation}}")),
        lines(
            "Requests that are refused or fail",
            "reqps",
            (per_s("halfway_requests_total", "operation, status", refused), "{{operation}} {{status}}"),
        ),
        lines(
            "Prepares that are refused",
            "ops",
            (
                per_s("halfway_prepares_total", "group, result", f'{GROUP}, result!~"prepared|repeated"'),
                "{{group}}: {{result}}",
            ),
        ),
        lines(
            "Ends that are refused",
            "ops",
            (
                per_s("halfway_ends_total", "group, result", f'{GROUP}, result!~"changed|unchanged"'),
                "{{group}}: {{result}}",
            ),
        ),
        lines(
            "Streams",
            "short",
            (f"sum by (instance) (halfway_streams{{{HERE}}})", "open at {{instance}}"),
            (per_s("halfway_stream_operations_total", "operation, status", HERE), "{{operation}} {{status}} /s"),
        ),
        lines(
            "Callers without permission",
            "reqps",
            (per_s_if_any("halfway_refused_callers_total", "reason", HERE), "{{reason}}"),
            text="Empty if there are none.",
        ),
        lines("Prepares that wait for a place", "short", (f"halfway_prepares_waiting{{{HERE}}}", INSTANCE)),
    ]


def _latency() -> list[Any]:
    return [
        quantiles("Prepare", "halfway_prepare_seconds", f'{HERE}, result="prepared"'),
        quantiles("End", "halfway_end_seconds", f'{HERE}, result="changed"', "outcome"),
        quantiles("Kafka transaction of the lane", "halfway_lane_commit_seconds"),
        quantiles("Check", "halfway_check_seconds", HERE, "verdict"),
        quantiles("Call to another instance", "halfway_forwarded_seconds", f'{HERE}, call!="due"', "call"),
        _time_to_outcome(),
    ]


def _check_back() -> list[Any]:
    return [
        lines("Pending", "short", (f"sum by (group) (halfway_group_pending{{{GROUP}}})", "{{group}}")),
        lines("Parked", "short", (f"sum by (group) (halfway_group_parked{{{GROUP}}})", "{{group}}")),
        lines(
            "Longest without a verdict",
            "s",
            (f"max by (group) (halfway_group_overdue_seconds{{{GROUP}}})", "{{group}}"),
            text="Since the first check was due: a group with a long first check is not overdue.",
        ),
        lines(
            "Checks",
            "ops",
            (per_s_if_any("halfway_checks_total", "group, verdict", GROUP), "{{group}}: {{verdict}}"),
        ),
        lines(
            "Checks that wait to be sent",
            "short",
            (f"sum by (group) (halfway_group_checks_due{{{GROUP}}})", "{{group}}"),
        ),
        lines(
            "Endpoints that cannot be reached",
            "short",
            (f"max by (group) (halfway_group_breaker_open{{{GROUP}}})", "{{group}}"),
        ),
    ]


def _lane() -> list[Any]:
    ends = per_s("halfway_lane_batch_ends_sum", "instance", HERE)
    transactions = per_s("halfway_lane_batch_ends_count", "instance", HERE)
    size = per_s("halfway_lane_batch_bytes_sum", "instance", HERE)
    failures = f"sum by (instance, reason) (increase(halfway_lane_failures_total{{{HERE}}}[$__rate_interval])) > 0"
    return [
        lines("Ends in one Kafka transaction", "short", (f"{ends} / {transactions}", "{{instance}}")),
        lines("Kafka transactions", "ops", (transactions, "{{instance}}")),
        lines("Bytes in one Kafka transaction", "bytes", (f"{size} / {transactions}", "{{instance}}")),
        lines("Incarnations that ended", "short", (failures, "{{instance}}: {{reason}}"), text="Empty if none has."),
        lines("Changes that wait", "short", (f"sum by (on) (halfway_changes_waiting{{{HERE}}})", "for {{on}}")),
        lines("Held back", "short", (f"sum by (kind) (halfway_held_back{{{HERE}}})", "{{kind}}")),
        lines(
            "Round trip to a broker",
            "s",
            (f"max by (broker) (halfway_kafka_round_trip_seconds{{{HERE}}})", "{{broker}}: average"),
            (f"max by (broker) (halfway_kafka_round_trip_p99_seconds{{{HERE}}})", "{{broker}}: p99"),
            text="Of the producer of half records, in the last 15 s; the slowest instance.",
        ),
        lines(
            "Kafka's quotas",
            "s",
            (per_s("halfway_kafka_throttled_seconds_total", "instance", HERE), "{{instance}}"),
            text="Seconds of delay in each second.",
        ),
    ]


def _of_shards() -> list[Any]:
    away = f"sum by (le) (rate(halfway_shard_away_seconds_bucket{{{OF}}}[$__range]))"
    return [
        _shards(),
        lines("Unserved before it was acquired", "s", (f"histogram_quantile(0.99, {away})", "p99 of the time shown")),
        lines(
            "Cannot be acquired",
            "s",
            (f"max by (shard) (halfway_shard_not_acquired_seconds{{{OF}}})", "shard {{shard}}"),
        ),
        lines(
            "Records that the next owner reads",
            "short",
            (f"max by (shard) (halfway_half_cursor_lag{{{OF}}})", "half {{shard}}"),
            (f"max by (shard) (halfway_op_cursor_lag{{{OF}}})", "op {{shard}}"),
        ),
        lines("Outcomes in memory", "short", (f"max by (shard) (halfway_outcomes{{{OF}}})", "shard {{shard}}")),
        lines(
            "What the log has lost, or others wrote",
            "short",
            (f"sum by (result) (halfway_missing_transactions_total{{{OF}}}) > 0", "{{result}}"),
            (f"sum by (topic, reason) (halfway_skipped_records_total{{{OF}}}) > 0", "{{topic}}: {{reason}}"),
            text="Since the instances started. Empty if there is nothing.",
        ),
    ]


def _process() -> list[Any]:
    hits, misses = (per_s(f"halfway_payload_cache_{what}_total", "instance", HERE) for what in ("hits", "misses"))
    held = f"sum without (shard) (halfway_pending{{{HERE}}} + halfway_parked{{{HERE}}})"
    most = f'max without (limit) (halfway_limit{{{HERE}, limit="pending"}})'
    return [
        lines("CPU", "percentunit", (per_s("process_cpu_seconds_total", "instance", HERE), "{{instance}}")),
        lines("Resident memory", "bytes", (f"process_resident_memory_bytes{{{HERE}}}", INSTANCE)),
        lines("Pause of the event loop", "s", (f"halfway_loop_pause_seconds{{{HERE}}}", INSTANCE)),
        lines(
            "Pending and parked, of the most",
            "percentunit",
            (f"{held} / {most}", INSTANCE),
        ),
        lines("Open files", "short", (f"process_open_fds{{{HERE}}}", INSTANCE)),
        lines("Requests in flight", "short", (f"halfway_requests_in_flight{{{HERE}}}", INSTANCE)),
        lines(
            "Bytes of bodies, answers and payloads",
            "bytes",
            (f"halfway_body_bytes_in_flight{{{HERE}}}", f"bodies, {INSTANCE}"),
            (f"halfway_unsent_answer_bytes{{{HERE}}}", f"unread answers, {INSTANCE}"),
            (f"halfway_payload_cache_bytes{{{HERE}}}", f"payloads, {INSTANCE}"),
        ),
        lines("Payloads found in memory", "percentunit", (f"{hits} / ({hits} + {misses})", "{{instance}}")),
        lines(
            "Age of what is known",
            "s",
            (f"halfway_keys_age_seconds{{{HERE}}}", f"keys, {INSTANCE}"),
            (f"halfway_tail_age_seconds{{{HERE}}}", f"half, {INSTANCE}"),
        ),
        lines("Events of the action log", "ops", (per_s("halfway_audit_events_total", "result", HERE), "{{result}}")),
        lines(
            "Releases",
            "short",
            (f"count by (version) (halfway_build_info{{{OF}}})", "{{version}}"),
            text="Instances, or workers, of each.",
        ),
    ]


ROWS: Final = {
    "Is it well?": _well,
    "Traffic": _traffic,
    "Latency": _latency,
    "Check-back": _check_back,
    "Lane and Kafka": _lane,
    "Shards": _of_shards,
    "Process": _process,
}


def _choice(name: str, label: str, metric: str, query: str) -> QueryVariable:
    variable = QueryVariable(name).label(label).datasource(SOURCE).query(f"label_values({metric}, {query})")
    return variable.refresh(VariableRefresh.ON_TIME_RANGE_CHANGED)


def dashboard() -> str:
    """Return the dashboard as JSON."""
    board = (
        Dashboard("halfway")
        .uid("halfway")
        .tags(["halfway", "kafka"])
        .editable()
        .tooltip(DashboardCursorSync.CROSSHAIR)
        .refresh("30s")
        .time("now-1h", "now")
        .with_variable(DatasourceVariable("datasource").label("Prometheus").type("prometheus"))
        .with_variable(_choice("job", "job", "halfway_build_info", "job"))
        .with_variable(_all(_choice("instance", "instance", f"halfway_build_info{{{OF}}}", "instance")))
        .with_variable(_all(_choice("group", "group", f"halfway_checks_total{{{OF}}}", "group")))
    )
    ids = count(1)
    for title, panels in ROWS.items():
        board = board.with_row(Row(title).id(next(ids)))
        for panel in panels():
            board = board.with_panel(panel.id(next(ids)))
    return JSONEncoder(sort_keys=True, indent=2).encode(board.build()) + "\n"


def _all(variable: QueryVariable) -> QueryVariable:
    return variable.include_all(include_all=True).multi(multi=True).all_value(".*")


if __name__ == "__main__":
    print(dashboard(), end="")
