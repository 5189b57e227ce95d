"""How the result of a job is reported: a table, metrics for Prometheus, a webhook, and the exit status."""

from __future__ import annotations

import json
import re
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from typing import Any, Final, NamedTuple
from urllib.parse import urlsplit

import click
from prometheus_client import CollectorRegistry, Gauge, write_to_textfile

from halfway.pipeline.errors import PipelineError
from halfway.pipeline.jobs.audit import Summary
from halfway.pipeline.transforms.verdict import ANOMALIES, NOT_JUDGED, VERDICTS

FOUND_ANOMALIES: Final = 1
UNJUDGED: Final = 3
_RULE: Final = re.compile(r"(?P<verdict>[a-z_]+)(?:@(?P<group>[^=]+))?(?:=(?P<count>[1-9][0-9]*))?")
_TIMEOUT_S: Final = 10
_Figure = tuple[tuple[str, ...], dict[tuple[str, ...], float]]
"""The names of labels, and the values by labels."""
SHOWN: Final = 100
"""The largest number of anomalies that a webhook gets."""


class Rule(NamedTuple):
    """From which count on a verdict, of one group or of all (None), fails an audit."""

    verdict: str
    group: str | None
    least: int


def rule(text: str) -> Rule:
    """Return the rule of the form `verdict[@group][=count]`."""
    found = _RULE.fullmatch(text)
    if found is None or found["verdict"] not in VERDICTS:
        raise click.BadParameter(
            f"{text!r}: give verdict, verdict@group, verdict=count or verdict@group=count; "
            f"verdicts are {', '.join(VERDICTS)}"
        )
    return Rule(found["verdict"], found["group"], int(found["count"] or 1))


def status(rules: Sequence[Rule], summary: Summary) -> int:
    """Return the exit status. Without rules every anomaly counts; a difference from another audit always does."""
    counts: dict[tuple[str, str | None], int] = {(verdict, None): n for verdict, n in summary.verdicts.items()}
    counts |= {(verdict, group): n for verdict, group, n in summary.by_group}
    rules = rules or [Rule(verdict, None, 1) for verdict in ANOMALIES]
    if summary.differences or any(counts.get((verdict, group), 0) >= least for verdict, group, least in rules):
        return FOUND_ANOMALIES
    named = any(each.verdict == NOT_JUDGED for each in rules)
    return UNJUDGED if summary.not_judged and not named else 0


def write_metrics(summary: Summary, path: str, *, at_ms: int, seconds: float) -> None:
    """Write metrics for Prometheus' textfile collector, in one step."""
    figures: dict[str, _Figure] = {
        "transactions": (("verdict", "group"), {each[:2]: each[2] for each in summary.by_group}),
        "provable_since_seconds": (("topic",), {(name,): at / 1000 for name, at in summary.provable_since.items()}),
        "quarantined_records": ((), {(): summary.quarantined}),
        "timestamp_seconds": ((), {(): at_ms / 1000}),
        "seconds": ((), {(): round(seconds, 3)}),
    }
    if summary.differences is not None:
        figures["differences"] = ((), {(): summary.differences})
    _write("halfway_audit", figures, path)


def write_sweep_metrics(rows: Sequence[Mapping[str, Any]], path: str, *, at_ms: int) -> None:
    """Write the counts of a sweep for Prometheus' textfile collector, in one step."""
    figures: dict[str, _Figure] = {
        name: (("group", "age"), {(row["group"], row["age"]): row[name] for row in rows})
        for name in ("pending", "due", "overdue")
    }
    _write("halfway_sweep", figures | {"timestamp_seconds": ((), {(): at_ms / 1000})}, path)


def _write(of: str, figures: Mapping[str, _Figure], path: str) -> None:
    registry = CollectorRegistry()
    for name, (labels, values) in figures.items():
        gauge = Gauge(name, "See docs/pipeline.md.", labels, namespace=of, registry=registry)
        for names, value in values.items():
            (gauge.labels(*names) if names else gauge).set(value)
    try:
        write_to_textfile(path, registry)
    except OSError as error:
        raise PipelineError(f"--metrics {path!r} cannot be written: {error.strerror}") from None


def webhook(url: str) -> str:
    """Return an address that can be posted to. An error does not have it: it can contain a secret."""
    try:
        parts = urlsplit(url)
        right, named = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0, "@" in parts.netloc
    except ValueError:
        right, named = False, False
    if not right:
        raise click.BadParameter("give an address that begins with http:// or https://")
    if named:
        raise click.BadParameter("no user name and password are sent: give an address with a token in its path")
    return url


def call_webhook(url: str, summary: Summary, anomalies: Sequence[Mapping[str, Any]]) -> None:
    """Post counts and the first anomalies as JSON to the address of the webhook. Redirects are not followed."""
    body: dict[str, Any] = {
        "verdicts": {name: summary.verdicts[name] for name in (*ANOMALIES, NOT_JUDGED)},
        "anomalies": list(anomalies),
    }
    if summary.differences is not None:
        body["differences"] = summary.differences
    request = urllib.request.Request(  # noqa: S310 - http or https: webhook
        url, json.dumps(body).encode(), {"Content-Type": "application/json"}, method="POST"
    )
    opener = urllib.request.build_opener(_NoRedirects)
    try:
        with opener.open(request, timeout=_TIMEOUT_S):
            pass
    except OSError as error:
        cause = error.reason if isinstance(error, urllib.error.URLError) else error
        reason = getattr(cause, "strerror", None) or type(error).__name__
        if isinstance(error, urllib.error.HTTPError):
            error.close()
            reason = str(error.code)
        # The address can contain a secret, so the message does not have it.
        raise PipelineError(f"the webhook did not accept the result: {reason}") from None


class _NoRedirects(urllib.request.HTTPRedirectHandler):
    def redirect_request(self, *_: Any) -> None:
        """Follow no redirect."""


def print_table(header: list[str], rows: list[list[str]]) -> None:
    """Print rows in columns, the first of text and the others of numbers."""
    # Names come from topics that others can write to: their control characters must not reach the terminal.
    lines = [[cell if cell.isprintable() else repr(cell)[1:-1] for cell in row] for row in [header, *rows]]
    widths = [max(len(line[column]) for line in lines) for column in range(len(header))]
    for row in lines:
        first, *others = row
        cells = [first.ljust(widths[0]), *(cell.rjust(width) for cell, width in zip(others, widths[1:], strict=True))]
        click.echo("  ".join(cells).rstrip())
