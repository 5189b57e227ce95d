"""`halfway top`: live statistics of all instances in the terminal."""

from __future__ import annotations

import os
import time
from typing import TYPE_CHECKING, Any, Final

import click
from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from halfway.app.cli.remote import Remote, path_of
from halfway.app.cli.transactions import token_option, url_option
from halfway.app.terminal import FiniteRange, json_line, printable, say

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from rich.console import RenderableType

_DETAIL: Final = 100
_ROWS: Final = 20
_PIPE_COLUMNS: Final = 400


@click.command()
@click.option("--interval", type=FiniteRange(0.5, 3600), default=1.0, show_default=True, metavar="SECONDS")
@click.option("--once", is_flag=True, help="Print once. This is the default if the output is not a terminal.")
@click.option("--json", "as_json", is_flag=True, help="Print the answer once, as JSON.")
@url_option
@token_option
def top(url: str, token: str | None, *, interval: float, once: bool, as_json: bool) -> None:
    """Show pending and parked transactions, rates, groups, shards and failures, live."""
    remote, path = Remote(url, token), path_of("statistics")
    console = Console()
    if not console.is_terminal and "COLUMNS" not in os.environ:
        console.width = _PIPE_COLUMNS  # do not cut lines that go to a pipe
    if as_json:
        say(json_line(remote.ask("GET", path)))
        return
    if once or not console.is_terminal:
        console.print(screen(remote.ask("GET", path)))
        return
    try:
        with Live(screen(remote.ask("GET", path)), console=console, screen=True, auto_refresh=False) as live:
            while True:
                time.sleep(interval)
                statistics = remote.ask_patiently("GET", path)
                live.update(_no_answer(remote.shown) if statistics is None else screen(statistics), refresh=True)
    except KeyboardInterrupt:
        return


def screen(statistics: dict[str, Any]) -> RenderableType:
    """Return the statistics as a rich renderable. Their text is escaped, so the terminal does not interpret it."""
    parts: list[RenderableType] = [*_warnings(statistics), _totals(statistics)]
    away = statistics.get("away") or []
    if away:
        lines = [
            f"shard {place.get('shard')} of {place.get('instance') or 'nobody'} is not available: {place.get('detail')}"
            for place in away
        ]
        lines.append("the figures do not include these shards")
        parts.append(Text("\n".join(map(_short, lines)), style="bold red"))
    parts.append(_groups(statistics))
    parts += _endpoints(statistics)
    parts.append(_instances(statistics))
    parts.append(_shards(statistics))
    parts += _failures(statistics.get("failures") or {})
    return Group(*parts)


def _totals(statistics: dict[str, Any]) -> Text:
    totals = statistics.get("totals") or {}
    names = (
        ("pending", "pending"),
        ("parked", "parked"),
        ("oldest_pending_s", "oldest (s)"),
        ("prepares_per_s", "prepares/s"),
        ("ends_per_s", "ends/s"),
        ("resolving", "resolving"),
    )
    text = Text(f"halfway  {_short(statistics.get('at'))}\n")
    for name, label in names:
        is_warning = name == "parked" and bool(totals.get(name))
        text.append(f"{label} {_short(totals.get(name))}   ", style="bold yellow" if is_warning else "bold")
    ends = " ".join(f"{end['outcome']}/{end['cause']} {end['per_s']}" for end in statistics.get("ends") or [])
    checks = " ".join(f"{check['verdict']} {check['per_s']}" for check in statistics.get("checks") or [])
    text.append(f"\nends/s  {_short(ends) or '-'}\nchecks/s  {_short(checks) or '-'}")
    return text


def _warnings(statistics: dict[str, Any]) -> Iterable[RenderableType]:
    """Show what is unsafe on each instance, in red and above everything else."""
    for instance in statistics.get("instances") or []:
        for warning in instance.get("warnings") or []:
            text = f"unsafe ({warning.get('check')}) on {instance.get('url') or 'this one'}: {warning.get('detail')}"
            yield Text(printable(text), style="bold red")


def _groups(statistics: dict[str, Any]) -> Table:
    fields = ("group", "pending", "parked", "prepares_per_s", "ends_per_s", "checks_in_flight", "checks_due", "breaker")
    columns = ("group", "pending", "parked", "prepares/s", "ends/s", "checks", "due", "breaker")
    return _table(columns, [[group.get(name) for name in fields] for group in statistics.get("groups") or []])


def _endpoints(statistics: dict[str, Any]) -> Iterable[RenderableType]:
    """Show each endpoint whose last answer was not a verdict, with that answer."""
    broken = [
        (group.get("group"), endpoint.get("host"), _answer_of(endpoint))
        for group in statistics.get("groups") or []
        for endpoint in group.get("endpoints") or []
        if not endpoint.get("well")
    ]
    if broken:
        yield _table(("group", "broken endpoint", "answer"), broken)


def _answer_of(endpoint: dict[str, Any]) -> str:
    """Return the answer of an endpoint, without its host, which is in the column before."""
    host = str(endpoint.get("host")).rpartition("://")[2]
    return str(endpoint.get("detail")).removeprefix(f"{host}: ")


def _instances(statistics: dict[str, Any]) -> Table:
    """Show each instance with its lane. A failure of the lane affects all its shards, but counts once."""
    rows = []
    for instance in statistics.get("instances") or []:
        lane = instance.get("lane") or {}
        failure = lane.get("last_failure") or {}
        url, shards = instance.get("url") or "this one", len(instance.get("shards") or [])
        rows.append((url, shards, lane.get("commits_per_s"), lane.get("failures"), failure.get("reason")))
    return _table(("instance", "shards", "lane commits/s", "lane failures", "last failure"), rows)


def _shards(statistics: dict[str, Any]) -> Table:
    rows = [
        (
            shard.get("shard"),
            shard.get("instance") or "not available",
            shard.get("pending"),
            shard.get("parked"),
            shard.get("oldest_pending_s"),
            shard.get("due"),
        )
        for shard in statistics.get("shards") or []
    ]
    return _table(("shard", "instance", "pending", "parked", "oldest (s)", "due"), rows)


def _failures(failures: dict[str, Any]) -> Iterable[RenderableType]:
    topics = [
        (topic.get("topic"), topic.get("error_code"), topic.get("refused"), topic.get("detail"))
        for topic in failures.get("topics") or []
    ]
    if topics:
        yield _table(("topic that cannot be written", "error", "refused", "detail"), topics)
    quarantined = [
        (entry.get("id") or f"topic {entry.get('topic')}", entry.get("state"), entry.get("detail"))
        for entry in failures.get("quarantined") or []
    ]
    if quarantined:
        yield _table(("in quarantine", "state", "detail"), quarantined)
    skipped = [
        (records.get("topic"), records.get("reason"), records.get("count")) for records in failures.get("skipped") or []
    ]
    if skipped:
        yield _table(("skipped records of", "reason", "count"), skipped)


def _table(columns: Sequence[str], rows: Sequence[Sequence[object]]) -> Table:
    table = Table(expand=False, box=None, pad_edge=False, header_style="bold underline")
    for column in columns:
        table.add_column(column, overflow="ellipsis", no_wrap=True)
    for row in rows[:_ROWS]:
        table.add_row(*(Text(_short(value)) for value in row))
    if len(rows) > _ROWS:
        table.add_row(Text(f"and {len(rows) - _ROWS} more"))
    return table


def _short(value: object) -> str:
    return "-" if value is None else printable(str(value)[:_DETAIL])


def _no_answer(url: str) -> Text:
    return Text(f"{printable(url)} does not answer; trying again", style="bold red")
