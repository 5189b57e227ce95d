"""Who is told how an audit went: a file for Prometheus' textfile collector, a webhook, and the exit status."""

from __future__ import annotations

import json
import re
import urllib.error
import urllib.request
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import urlsplit

from halfway.pipeline.errors import TellingError
from halfway.pipeline.transforms.verdict import ANOMALIES, NOT_JUDGED, VERDICTS

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from halfway.pipeline.jobs.audit import Summary

FOUND_ANOMALIES: Final = 1
UNJUDGED: Final = 3
_RULE: Final = re.compile(r"(?P<verdict>[a-z_]+)(?:@(?P<group>[^=]+))?(?:=(?P<count>[1-9][0-9]*))?")
_TIMEOUT_S: Final = 10
SHOWN: Final = 100
"""How many anomalies a webhook is told of."""


class FailOn:
    """What an exit status of 1 is for: verdicts, of all groups or of one, from a count on."""

    def __init__(self, rules: Sequence[str]) -> None:
        """Take rules as `verdict[@group][=count]`; none: every anomaly.

        Raises:
            TellingError: naming the rule that is none.

        """
        self.rules: list[tuple[str, str | None, int]] = []
        for rule in rules:
            found = _RULE.fullmatch(rule)
            if found is None or found["verdict"] not in VERDICTS:
                raise TellingError(
                    f"--fail-on {rule!r}: give verdict, verdict@group, verdict=count or verdict@group=count; "
                    f"verdicts are {', '.join(VERDICTS)}"
                )
            self.rules.append((found["verdict"], found["group"], int(found["count"] or 1)))

    def status(self, summary: Summary) -> int:
        """Return the exit status; a difference from another audit is as bad as an anomaly, whatever the rules."""
        if summary.differences:
            return FOUND_ANOMALIES
        if self.rules:
            counts = {(verdict, group): count for verdict, group, count in summary.by_group}
            for verdict, group, least in self.rules:
                of_group = summary.verdicts.get(verdict, 0) if group is None else counts.get((verdict, group), 0)
                if of_group >= least:
                    return FOUND_ANOMALIES
        elif summary.anomalies:
            return FOUND_ANOMALIES
        asked = any(verdict == NOT_JUDGED for verdict, *_ in self.rules)
        return UNJUDGED if summary.not_judged and not asked else 0


def write_metrics(summary: Summary, path: str, *, at_ms: int, seconds: float) -> None:
    """Write what a Prometheus textfile collector reads, whole or not at all."""
    lines = ["# TYPE halfway_audit_transactions gauge"]
    lines += [
        f'halfway_audit_transactions{{verdict="{verdict}",group="{_label(group)}"}} {count}'
        for verdict, group, count in summary.by_group
    ]
    figures = {
        "quarantined_records": summary.quarantined, "timestamp_seconds": at_ms / 1000, "seconds": round(seconds, 3),
    }  # fmt: skip
    if summary.differences is not None:
        figures["differences"] = summary.differences
    for name, value in figures.items():
        lines += [f"# TYPE halfway_audit_{name} gauge", f"halfway_audit_{name} {value}"]
    there = Path(path)
    unfinished = there.with_name(f".{there.name}.unfinished")
    try:
        unfinished.write_text("\n".join(lines) + "\n", encoding="utf-8")
        unfinished.replace(there)
    except OSError as error:
        raise TellingError(f"--metrics {path!r} cannot be written: {error.strerror}") from None


def _label(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")


def demand_webhook(url: str) -> None:
    """Raise TellingError where a webhook's address is none."""
    try:
        parts = urlsplit(url)
        right, named = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0, "@" in parts.netloc
    except ValueError:
        right, named = False, False
    if not right:
        raise TellingError("--webhook: give an address that begins with http:// or https://")
    if named:
        raise TellingError("--webhook: no user name and password are sent: give an address with a token in its path")


def call_webhook(url: str, summary: Summary, anomalies: Sequence[Mapping[str, Any]]) -> None:
    """Post counts and the first anomalies, as JSON, to the address that the operator gave and to no other."""
    body: dict[str, Any] = {
        "verdicts": {name: summary.verdicts[name] for name in (*ANOMALIES, NOT_JUDGED)},
        "anomalies": list(anomalies),
    }
    if summary.differences is not None:
        body["differences"] = summary.differences
    request = urllib.request.Request(  # noqa: S310 - http or https: demand_webhook
        url, json.dumps(body).encode(), {"Content-Type": "application/json"}, method="POST"
    )
    opener = urllib.request.build_opener(_NoRedirects)
    try:
        with opener.open(request, timeout=_TIMEOUT_S):
            pass
    except OSError as error:
        cause = error.reason if isinstance(error, urllib.error.URLError) else error
        told = getattr(cause, "strerror", None) or type(error).__name__
        if isinstance(error, urllib.error.HTTPError):
            error.close()
            told = str(error.code)
        # The address may hold a secret: it is not told.
        raise TellingError(f"the webhook did not take what was found: {told}") from None


class _NoRedirects(urllib.request.HTTPRedirectHandler):
    def redirect_request(self, *_: Any) -> None:
        """Go nowhere else."""
