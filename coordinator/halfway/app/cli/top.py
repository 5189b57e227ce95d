"""`halfway top`: the statistics of all instances in the terminal."""

from __future__ import annotations

import os
import time
from typing import Any

import click
from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from halfway.app.cli.remote import Remote, objects_of, path_of
from halfway.app.cli.transactions import token_option, url_option
from halfway.app.terminal import FiniteRange, json_line, printable, say

_ROWS, _WIDTH, _PIPE_COLUMNS = 20, 100, 400
_TABLES = {
    "groups": ("group", "pending", "parked", "checks_in_flight", "checks_due", "breaker"),
    "instances": ("url", "resolving", "last_failure", "warnings"),
    "shards": ("shard", "instance", "pending", "parked", "oldest_pending_s"),
    "topics": ("topic", "error_code", "refused", "detail"),
    "quarantined": ("topic", "id", "state", "detail"),
    "skipped": ("topic", "reason", "count"),
    "away": ("shard", "instance", "detail"),
}


@click.command()
@click.option("--interval", type=FiniteRange(0.5, 3600), default=2.0, show_default=True, metavar="SECONDS")
@click.option("--once", is_flag=True, help="Print once. This is the default if the output is not a terminal.")
@click.option("--json", "as_json", is_flag=True, help="Print the answer once, as JSON.")
@url_option
@token_option
def top(url: str, token: str | None, *, interval: float, once: bool, as_json: bool) -> None:
    """Show counts, totals since the start, groups, shards and failures, again and again."""
    remote, console = Remote(url, token), Console()
    if not console.is_terminal and "COLUMNS" not in os.environ:
        console.width = _PIPE_COLUMNS  # do not cut lines that go to a pipe
    statistics = remote.ask("GET", path_of("statistics"))
    if as_json:
        say(json_line(statistics))
    elif once or not console.is_terminal:
        console.print(screen(statistics))
    else:
        with Live(screen(statistics), console=console, screen=True, auto_refresh=False) as live:
            while True:  # until Ctrl-C
                time.sleep(interval)
                live.update(screen(remote.ask_patiently("GET", path_of("statistics"))), refresh=True)


def screen(statistics: dict[str, Any] | None) -> Group:
    """Return the statistics for the terminal. Their text is escaped, so that the terminal does not interpret it."""
    if statistics is None:
        return Group(Text("no answer; trying again", style="bold red"))
    figures = {**(statistics.get("totals") or {}), **(statistics.get("counted") or {})}
    shown: list[Text | Table] = [Text("  ".join(f"{name} {_short(value)}" for name, value in figures.items()))]
    parts = {**statistics, **(statistics.get("failures") or {})}
    for name, columns in _TABLES.items():
        if rows := objects_of(parts, name) if parts.get(name) else []:
            table = Table(*columns, title=name, title_justify="left", box=None, pad_edge=False)
            for row in rows[:_ROWS]:
                table.add_row(*(Text(_short(row.get(column)), overflow="ellipsis", no_wrap=True) for column in columns))
            shown.append(table)
    return Group(*shown)


def _short(value: object) -> str:
    return "-" if value is None else printable(str(value)[:_WIDTH])
