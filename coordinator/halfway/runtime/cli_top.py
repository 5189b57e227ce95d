"""`halfway top`: what all instances know, again and again, in the terminal."""

from __future__ import annotations

import os
import time
from typing import TYPE_CHECKING, Any, Final

import click
from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from halfway.runtime.cli_client import token_option, url_option
from halfway.runtime.cli_remote import Remote, path_of
from halfway.runtime.terminal import FiniteRange, json_line, printable, say

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from rich.console import RenderableType

_DETAIL: Final = 100
_ROWS: Final = 20
_PIPE_COLUMNS: Final = 400


@click.command()
@click.option("--interval", type=FiniteRange(0.5, 3600), default=1.0, show_default=True, metavar="SECONDS")
@click.option("--once", is_flag=True, help="Print it once; so does an output that is no terminal.")
@click.option("--json", "as_json", is_flag=True, help="Print the answer once, as JSON.")
@url_option
@token_option
def top(url: str, token: str | None, *, interval: float, once: bool, as_json: bool) -> None:
    """Show pending and parked transactions, rates, groups, shards and failures, live."""
    remote, path = Remote(url, token), path_of("statistics")
    console = Console()
    if not console.is_terminal and "COLUMNS" not in os.environ:
        console.width = _PIPE_COLUMNS  # the reader of a pipe cuts the lines
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
                told = remote.ask_patiently("GET", path)
                live.update(_silent(remote.shown) if told is None else screen(told), refresh=True)
    except KeyboardInterrupt:
        return


def screen(told: dict[str, Any]) -> RenderableType:
    """Return statistics as they are shown; all text is printed as it is, and obeyed by nothing."""
    parts: list[RenderableType] = [_totals(told)]
    away = told.get("away") or []
    if away:
        lines = [
            f"shard {one.get('shard')} is away ({one.get('instance') or 'nobody'}): {one.get('detail')}" for one in away
        ]
        lines.append("the figures are without what is away")
        parts.append(Text("\n".join(map(_short, lines)), style="bold red"))
    parts.append(_groups(told))
    parts += _endpoints(told)
    parts.append(_instances(told))
    parts.append(_shards(told))
    parts += _failures(told.get("failures") or {})
    return Group(*parts)


def _totals(told: dict[str, Any]) -> Text:
    totals = told.get("totals") or {}
    names = (
        ("pending", "pending"),
        ("parked", "parked"),
        ("oldest_pending_s", "oldest (s)"),
        ("prepares_per_s", "prepares/s"),
        ("ends_per_s", "ends/s"),
        ("resolving", "resolving"),
    )
    text = Text(f"halfway  {_short(told.get('at'))}\n")
    for name, label in names:
        alarming = name == "parked" and bool(totals.get(name))
        text.append(f"{label} {_short(totals.get(name))}   ", style="bold yellow" if alarming else "bold")
    ends = " ".join(f"{one['outcome']}/{one['cause']} {one['per_s']}" for one in told.get("ends") or [])
    checks = " ".join(f"{one['verdict']} {one['per_s']}" for one in told.get("checks") or [])
    text.append(f"\nends/s  {_short(ends) or '-'}\nchecks/s  {_short(checks) or '-'}")
    return text


def _groups(told: dict[str, Any]) -> Table:
    fields = ("group", "pending", "parked", "prepares_per_s", "ends_per_s", "checks_in_flight", "checks_due", "breaker")
    columns = ("group", "pending", "parked", "prepares/s", "ends/s", "checks", "due", "breaker")
    return _table(columns, [[one.get(name) for name in fields] for one in told.get("groups") or []])


def _endpoints(told: dict[str, Any]) -> Iterable[RenderableType]:
    """Show each endpoint that gave no verdict, with what came of the last check."""
    ill = [
        (one.get("group"), end.get("host"), _answer_of(end))
        for one in told.get("groups") or []
        for end in one.get("endpoints") or []
        if not end.get("well")
    ]
    if ill:
        yield _table(("group", "endpoint that is not well", "answer"), ill)


def _answer_of(endpoint: dict[str, Any]) -> str:
    """Return what an endpoint answered, without its host, which stands beside it."""
    host = str(endpoint.get("host")).rpartition("://")[2]
    return str(endpoint.get("detail")).removeprefix(f"{host}: ")


def _instances(told: dict[str, Any]) -> Table:
    """Show each instance with its lane: a failure of the lane concerns all of its shards, and is counted once."""
    rows = []
    for one in told.get("instances") or []:
        lane = one.get("lane") or {}
        last = lane.get("last_failure") or {}
        shards = len(one.get("shards") or [])
        rows.append(
            (one.get("url") or "this one", shards, lane.get("commits_per_s"), lane.get("failures"), last.get("reason"))
        )
    return _table(("instance", "shards", "lane commits/s", "lane failures", "last failure"), rows)


def _shards(told: dict[str, Any]) -> Table:
    rows = [
        (
            one.get("shard"),
            one.get("instance") or "away",
            one.get("pending"),
            one.get("parked"),
            one.get("oldest_pending_s"),
            one.get("due"),
        )
        for one in told.get("shards") or []
    ]
    return _table(("shard", "instance", "pending", "parked", "oldest (s)", "due"), rows)


def _failures(failures: dict[str, Any]) -> Iterable[RenderableType]:
    topics = [
        (one.get("topic"), one.get("error_code"), one.get("refused"), one.get("detail"))
        for one in failures.get("topics") or []
    ]
    if topics:
        yield _table(("topic that cannot be written", "error", "refused", "detail"), topics)
    quarantined = [
        (one.get("id") or f"topic {one.get('topic')}", one.get("state"), one.get("detail"))
        for one in failures.get("quarantined") or []
    ]
    if quarantined:
        yield _table(("in quarantine", "state", "detail"), quarantined)
    skipped = [(one.get("topic"), one.get("reason"), one.get("count")) for one in failures.get("skipped") or []]
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


def _silent(url: str) -> Text:
    return Text(f"{printable(url)} gives no answer; asking again", style="bold red")
