"""The options of the commands, by the parameter that takes them, and their types: times, objectives, seconds, sizes."""

from __future__ import annotations

import inspect
import math
import re
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

import click
from click import Option

from halfway.pipeline import access
from halfway.pipeline.commands import alerts

_SIZE: Final = re.compile(r"[1-9][0-9]*[kmgt](i?b)?", re.IGNORECASE)


def moment(text: str) -> int:
    """Return a date or a time in ISO 8601, in UTC if it has no other zone, as ms since the epoch."""
    try:
        found = datetime.fromisoformat(text)
    except ValueError:
        raise click.BadParameter(f"{text!r} is no time: give 2026-01-31 or 2026-01-31T12:00:00Z") from None
    return round((found if found.tzinfo else found.replace(tzinfo=UTC)).timestamp() * 1000)


def objective(text: str) -> tuple[str | None, int]:
    """Return group and ms of `GROUP=SECONDS`, or of `SECONDS` for all groups without one of their own."""
    group, _, seconds = text.rpartition("=")
    try:
        within_ms = round(float(seconds) * 1000)
    except (ValueError, OverflowError):
        within_ms = 0
    if within_ms <= 0:
        raise click.BadParameter(f"{text!r}: give SECONDS, or GROUP=SECONDS, above 0")
    return group or None, within_ms


def size(text: str) -> str:
    """Return a size in the form of Spark: 512m or 2g."""
    if not _SIZE.fullmatch(text):
        raise click.BadParameter(f"{text!r} is no size: give 512m or 2g")
    return text


def setting(text: str) -> tuple[str, str]:
    """Return name and value of `KEY=VALUE`."""
    name, sign, value = text.partition("=")
    if not sign:
        raise click.BadParameter(f"{name}: give it as KEY=VALUE")
    return name, value


class Seconds(click.FloatRange):
    """A number of seconds in a range. click accepts `nan` in every range."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        """Return the value; a usage error if it is outside the range or no number."""
        seconds = float(super().convert(value, param, ctx))
        if math.isnan(seconds):
            self.fail(f"{value!r} is no number of seconds", param, ctx)
        return seconds


def require_order(since: int | None, until: int | None) -> None:
    """Raise a usage error if there is no time between two others: an audit of nothing finds nothing wrong."""
    if since is not None and until is not None and since >= until:
        raise click.UsageError("--until is not later than --since: give a later one")


def require_fitting(*, archive: bool, again: bool, on: bool = False, between: bool = False) -> None:
    if archive and again:
        raise click.UsageError("--offsets is about Kafka's topics, and --snapshot about an archive: give one of them")
    if on and (archive or again):
        raise click.UsageError("--continue reads what is new in Kafka: give it without --snapshot and --offsets")
    if on and between:
        raise click.UsageError("--continue judges what is new: give it without --since and --until")


_SECONDS: Final = Seconds(min=0, max=access.LONGEST_S)
_COUNT: Final = click.IntRange(min=1)


def _folder(name: str, parameter: str, text: str, *, required: bool = False) -> Option:
    return Option([name, parameter], metavar="FOLDER", required=required, help=text)


def _seconds(name: str, default: float, text: str) -> Option:
    return Option([name], type=_SECONDS, default=default, show_default=True, help=text)


def _flag(text: str, *names: str) -> Option:
    return Option(names, is_flag=True, help=text)


_OF_ALL: Final = (
    Option(
        ["--config"],
        type=click.Path(path_type=Path, dir_okay=False),
        help="A TOML file of settings, the coordinator's; the environment (HALFWAY_…) overrides it.",
    ),
    Option(["--master"], envvar="HALFWAY_PIPELINE_MASTER", help="Spark master; local[*] if not submitted."),
    Option(
        ["--memory"],
        type=size,
        envvar="HALFWAY_PIPELINE_MEMORY",
        help="Memory of a local Spark (2g); the limit for DuckDB.",
    ),
    Option(["--conf"], type=setting, multiple=True, metavar="KEY=VALUE", help="Any Spark setting; can be repeated."),
    Option(
        ["--jars"],
        envvar="HALFWAY_PIPELINE_JARS",
        default="",
        help="The jars of Spark's packages for Kafka, Avro and Delta, separated by commas.",
    ),
)
_OTHERS: Final = (
    _folder("--output", "output", "Where the tables go: a path or a URI.", required=True),
    _folder("--snapshot", "snapshot", "Read an archive instead of Kafka."),
    Option(["--offsets"], metavar="FILE", help="Read exactly what an earlier run read: its offsets.json."),
    Option(["--since"], type=moment, metavar="TIME", help="From this time on: 2026-01-31, or 2026-01-31T12:00Z; UTC."),
    Option(["--until"], type=moment, metavar="TIME", help="Before this time."),
    Option(
        ["--topic", "topics"], multiple=True, help="Read this real topic too, beside those that ops and groups name."
    ),
    Option(
        ["--engine"],
        type=click.Choice(["auto", "duckdb", "spark"]),
        default="auto",
        show_default=True,
        envvar="HALFWAY_PIPELINE_ENGINE",
        help="auto: DuckDB if the folders are on this machine, what is read fits its memory, and no options for Spark "
        "are given.",
    ),
    Option(["--metrics"], metavar="FILE", help="Write metrics for Prometheus' textfile collector."),
    _flag("Print one line: the counts as JSON.", "--json", "as_json"),
    _seconds("--grace-s", 5, "Judge no younger transactions."),
    _seconds("--clock-skew-s", 5, "The largest difference between clocks."),
    _flag("Judge what is new since the last audit with --continue into the same folder.", "--continue", "on"),
    _folder(
        "--cross-check",
        "against",
        "Audit what the runs of --continue into this folder have read, and compare the verdicts.",
    ),
    Option(
        ["--fail-on"],
        type=alerts.rule,
        multiple=True,
        metavar="VERDICT[@GROUP][=COUNT]",
        help="Exit with 1 only if a verdict has this count; can be repeated.",
    ),
    Option(
        ["--webhook"],
        type=alerts.webhook,
        metavar="URL",
        envvar="HALFWAY_PIPELINE_WEBHOOK",
        help="Post anomalies to this address as JSON.",
    ),
    _flag("Exit with 1 if a transaction is pending long after its group's max_age_s.", "--fail-on-overdue"),
    _flag("Read the present records, then end.", "--once"),
    _seconds("--every-s", 10, "Time between batches."),
    Option(["--max-records"], type=_COUNT, default=1_000_000, show_default=True, help="Most records of a batch."),
    _folder("--ledger", "exported", "What halfway-pipeline ledger wrote.", required=True),
    _folder("--ledger", "ledger_folder", "What halfway-pipeline ledger has written."),
    _folder("--audit", "audit_folder", "What halfway-pipeline audit has written."),
    _flag("Show manual changes and who made them: from Kafka, or from the archive of --snapshot.", "--trail"),
    Option(
        ["--objective", "objectives"],
        type=objective,
        multiple=True,
        metavar="[GROUP=]SECONDS",
        help="Within what 99 of 100 of a group's transactions must end, or of all other groups'; can be repeated.",
    ),
)
_OPTIONS: Final = {**{str(option.name): [option] for option in _OTHERS}, "options": _OF_ALL}


def command(function: Callable[..., None]) -> click.Command:
    """Return a command with the option of each parameter of a function, and its docstring as help.

    `**options` takes those that every command has.
    """
    options = [option for name in inspect.signature(function).parameters for option in _OPTIONS[name]]
    return click.command(params=list[click.Parameter](options))(function)
