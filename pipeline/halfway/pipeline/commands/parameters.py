"""Options that several commands share, and their types: times, objectives of groups, seconds, sizes."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final, TypeVar

import click

from halfway.pipeline import access

_SIZE: Final = re.compile(r"[1-9][0-9]*[kmgt](i?b)?", re.IGNORECASE)
_COMMAND = TypeVar("_COMMAND", bound=Callable[..., Any])


class Moment(click.ParamType[int]):
    """A date or a time in ISO 8601, in UTC if it has no other zone, as ms since the epoch."""

    name = "time"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        """Return the value; a usage error if the text is wrong."""
        if isinstance(value, int):
            return value
        try:
            moment = datetime.fromisoformat(value)
        except ValueError:
            self.fail(f"{value!r} is no time: give 2026-01-31 or 2026-01-31T12:00:00Z", param, ctx)
        return round((moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp() * 1000)


class Objective(click.ParamType[tuple[str | None, int]]):
    """`GROUP=SECONDS`, or `SECONDS` for all groups without one of their own, as group and ms."""

    name = "objective"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[str | None, int]:
        """Return the value; a usage error if the text is wrong."""
        if isinstance(value, tuple):
            return value
        group, _, seconds = value.rpartition("=")
        try:
            within_ms = round(float(seconds) * 1000)
        except (ValueError, OverflowError):
            within_ms = 0
        if within_ms <= 0:
            self.fail(f"{value!r}: give SECONDS, or GROUP=SECONDS, above 0", param, ctx)
        return group or None, within_ms


class Seconds(click.FloatRange):
    """A number of seconds in a range. click accepts `nan` in every range."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        """Return the value; a usage error if it is outside the range or no number."""
        seconds = float(super().convert(value, param, ctx))
        if math.isnan(seconds):
            self.fail(f"{value!r} is no number of seconds", param, ctx)
        return seconds


class Memory(click.ParamType[str]):
    """A size in the form of Spark: 512m or 2g."""

    name = "size"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        """Return the value; a usage error if the text is wrong."""
        if not _SIZE.fullmatch(value):
            self.fail(f"{value!r} is no size: give 512m or 2g", param, ctx)
        return str(value)


MOMENT: Final = Moment()
OBJECTIVE: Final = Objective()


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


def several(*options: Callable[[_COMMAND], _COMMAND]) -> Callable[[_COMMAND], _COMMAND]:
    def add(command: _COMMAND) -> _COMMAND:
        for option in reversed(options):
            command = option(command)
        return command

    return add


SECONDS: Final = Seconds(min=0, min_open=True, max=access.LONGEST_S)
SECONDS_OR_NONE: Final = Seconds(min=0, max=access.LONGEST_S)
SPARK: Final = several(
    click.option("--master", envvar="HALFWAY_PIPELINE_MASTER", help="Spark master; local[*] if not submitted."),
    click.option(
        "--memory",
        type=Memory(),
        envvar="HALFWAY_PIPELINE_MEMORY",
        help="Memory of a local Spark (2g); the limit for DuckDB.",
    ),
    click.option("--conf", multiple=True, metavar="KEY=VALUE", help="Any Spark setting; can be repeated."),
    click.option(
        "--connector-version",
        envvar="HALFWAY_PIPELINE_CONNECTOR_VERSION",
        help="Version of Spark's packages for Kafka and Avro; the one for the PySpark that is installed.",
    ),
    click.option(
        "--jars", envvar="HALFWAY_PIPELINE_JARS", default="", help="The jars of these packages, separated by commas."
    ),
)
KAFKA: Final = several(
    SPARK,
    click.option(
        "--min-partitions", type=click.IntRange(min=1), help="Spark: the least number of parts in which Kafka is read."
    ),
    click.option("--max-records-per-partition", type=click.IntRange(min=1), help="Spark: the most records in a part."),
)
CONFIG: Final = click.option(
    "--config",
    type=click.Path(path_type=Path, dir_okay=False),
    help="A TOML file of settings, the coordinator's; the environment (HALFWAY_…) overrides it.",
)
OUTPUT: Final = click.option("--output", required=True, metavar="FOLDER", help="Where the tables go: a path or a URI.")
SNAPSHOT: Final = click.option("--snapshot", metavar="FOLDER", help="Read an archive instead of Kafka.")
OFFSETS: Final = click.option(
    "--offsets", metavar="FILE", help="Read exactly what an earlier run read: its offsets.json."
)
HORIZON: Final = click.option(
    "--horizon-s",
    type=SECONDS,
    help="The coordinator's outcome horizon; HALFWAY_OUTCOME_HORIZON_S, then that of --config, then 900.",
)
AS_JSON: Final = click.option("--json", "as_json", is_flag=True, help="Print one line: the counts as JSON.")
METRICS: Final = click.option("--metrics", metavar="FILE", help="Write metrics for Prometheus' textfile collector.")
TOPICS: Final = click.option(
    "--topic", "topics", multiple=True, help="Read this real topic too, beside those that ops and groups name."
)
ENGINE: Final = click.option(
    "--engine",
    type=click.Choice(["auto", "duckdb", "spark"]),
    default="auto",
    show_default=True,
    envvar="HALFWAY_PIPELINE_ENGINE",
    help="auto: DuckDB if the folders are on this machine, what is read fits its memory, and no options for Spark are "
    "given.",
)
BETWEEN: Final = several(
    click.option("--since", type=MOMENT, help="From this time on: 2026-01-31, or 2026-01-31T12:00Z; UTC."),
    click.option("--until", type=MOMENT, help="Before this time."),
)
