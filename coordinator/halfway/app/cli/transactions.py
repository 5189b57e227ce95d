"""`halfway transactions`, `halfway groups` and `halfway top`: commands for operators, over REST."""

from __future__ import annotations

import functools
import json
import os
import shlex
import time
from collections.abc import Callable
from typing import Any, Final, TypeVar

import click
from click.core import ParameterSource
from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from halfway.app.cli.bulk import MAX_RATE, MIN_RATE, RATE, STATES, BulkAction
from halfway.app.cli.bulk import run as run_bulk
from halfway.app.cli.remote import Remote, objects_of, path_of
from halfway.app.settings_sources import content_of
from halfway.app.terminal import FiniteRange, fail, json_line, printable, say, say_fields, say_rows

F = TypeVar("F", bound=Callable[..., Any])
_FILE_VARIABLE: Final = "HALFWAY_TOKEN_FILE"

url_option = click.option(
    "--url", envvar="HALFWAY_URL", default="http://127.0.0.1:8080", show_default=True, help="The coordinator's URL."
)


def _token_in_file(context: click.Context, option: click.Parameter, token: str | None) -> str | None:
    """Return the token, or what the file in HALFWAY_TOKEN_FILE contains; the option overrides both variables."""
    path = os.environ.get(_FILE_VARIABLE)
    if not path or context.get_parameter_source(str(option.name)) is ParameterSource.COMMANDLINE:
        return token
    if token is not None:
        fail(f"HALFWAY_TOKEN and {_FILE_VARIABLE} are both set: set one of them")
    try:
        content = content_of(path)
    except ValueError as error:
        fail(f"cannot read {_FILE_VARIABLE} {path!r}: {error}")
    return content or fail(f"{_FILE_VARIABLE} {path!r} is empty")


token_option = click.option(
    "--token",
    envvar="HALFWAY_TOKEN",
    callback=_token_in_file,
    help=f"A key. Better set HALFWAY_TOKEN or {_FILE_VARIABLE}: other users can see arguments.",
)
json_option = click.option("--json", "as_json", is_flag=True, help="Print the answer as JSON.")


def with_remote(command: Callable[..., Any]) -> Callable[..., Any]:
    """Give a command the coordinator that its options name, as `remote`."""

    @url_option
    @token_option
    @functools.wraps(command)
    def call(*args: Any, url: str, token: str | None, **options: Any) -> Any:
        return command(*args, remote=Remote(url, token), **options)

    return call


def answering(command: Callable[..., dict[str, Any]]) -> Callable[..., None]:
    """Print the answer of `remote` that a command returns: field by field, or as JSON."""

    @with_remote
    @json_option
    @functools.wraps(command)
    def call(*args: Any, as_json: bool, **options: Any) -> None:
        answer = command(*args, **options)
        if as_json:
            say(json_line(answer))
        else:
            say_fields(answer)

    return call


def show_rows(answer: dict[str, Any], name: str, columns: tuple[str, ...], *, as_json: bool) -> None:
    if as_json:
        say(json_line(answer))
        return
    say_rows(columns, [[row.get(column) for column in columns] for row in objects_of(answer, name)])
    if cursor := answer.get("next"):
        # On standard error, because the rows may go to a pipe.
        click.echo(f"more: --cursor {shlex.quote(printable(str(cursor)))}", err=True)


_FILTERS: Final = (
    click.option("--group"),
    click.option("--topic"),
    click.option("--key"),
    click.option("--id", help="The beginning of the id."),
    click.option(
        "--older-than", "older_than_s", type=FiniteRange(0), metavar="SECONDS", help="Prepared at least this long ago."
    ),
    click.option(
        "--younger-than",
        "younger_than_s",
        type=FiniteRange(0),
        metavar="SECONDS",
        help="Prepared at most this long ago.",
    ),
    click.option("--error", help="A part of the last error, or of the reason for parking."),
)


def filter_options(command: F) -> F:
    for option in reversed(_FILTERS):
        command = option(command)
    return command


def given(filters: dict[str, Any]) -> dict[str, str]:
    return {name: str(value) for name, value in filters.items() if value is not None}


@click.group()
def transactions() -> None:
    """List, show, end, check and resume transactions, one or many."""


@transactions.command("list")
@click.option("--state", type=click.Choice(["prepared", "parked", "committed", "rolled_back"]))
@click.option("--cause", type=click.Choice(["producer", "check", "operator", "policy"]), help="What ended it.")
@filter_options
@click.option("--limit", type=click.IntRange(1, 1000), default=100, show_default=True)
@click.option("--cursor")
@with_remote
@json_option
def list_transactions(remote: Remote, *, as_json: bool, **filters: Any) -> None:
    """List pending, parked and recently ended transactions, oldest first.

    The last column is the reason for parking, if a row has one.
    """
    answer = remote.ask("GET", path_of("transactions"), query=given(filters))
    columns: tuple[str, ...] = ("id", "state", "group", "prepared_at", "checks", "next_check_at", "cause", "topics")
    if any(row.get("reason") for row in objects_of(answer, "transactions")):
        columns += ("reason",)
    show_rows(answer, "transactions", columns, as_json=as_json)


@transactions.command()
@click.argument("transaction_id")
@answering
def show(transaction_id: str, remote: Remote) -> dict[str, Any]:
    """Show one transaction, with its messages while it is prepared or parked."""
    return remote.ask("GET", path_of("transactions", transaction_id))


@transactions.command()
@click.argument("transaction_id")
@click.argument("outcome", type=click.Choice(["commit", "rollback"]))
@click.option("--remark", help="The reason; stored in the op marker.")
@answering
def end(transaction_id: str, outcome: str, remark: str | None, remote: Remote) -> dict[str, Any]:
    """Commit a transaction or roll it back, as an operator."""
    body = {"outcome": outcome} | ({"remark": remark} if remark else {})
    return remote.ask(
        "POST", path_of("transactions", transaction_id, "end"), body=body, headers={"Halfway-Cause": "operator"}
    )


@transactions.command()
@click.argument("transaction_id")
@click.option("--remark", help="The reason; for the audit trail.")
@answering
def check(transaction_id: str, remark: str | None, remote: Remote) -> dict[str, Any]:
    """Ask the producer group about a prepared transaction now."""
    return _act(remote, transaction_id, "check", remark)


@transactions.command()
@click.argument("transaction_id")
@click.option("--remark", help="The reason; for the audit trail, and stored in the op marker.")
@answering
def resume(transaction_id: str, remark: str | None, remote: Remote) -> dict[str, Any]:
    """Return a parked transaction to prepared."""
    return _act(remote, transaction_id, "resume", remark)


def _act(remote: Remote, transaction_id: str, action: str, remark: str | None) -> dict[str, Any]:
    path = path_of("transactions", transaction_id, action)
    return remote.ask("POST", path, body={"remark": remark} if remark else None)


@transactions.command()
@click.argument("action", type=click.Choice(list(STATES)))
@filter_options
@click.option(
    "--rate", type=FiniteRange(MIN_RATE, MAX_RATE), default=RATE, show_default=True, help="At most so many per second."
)
@click.option("--reason", help="Stored as the remark of each transaction; needed except with --dry-run.")
@click.option("--dry-run", is_flag=True, help="Only print how many match, and the oldest.")
@with_remote
def bulk(action: str, remote: Remote, *, rate: float, reason: str | None, dry_run: bool, **filters: Any) -> None:
    """Check, resume, commit or roll back every transaction that matches, at a rate.

    Check is for prepared transactions, resume for parked ones, commit and rollback for both. Ctrl-C stops after the
    batch in flight. If it is run again, it acts on the rest.
    """
    if not reason and not dry_run:
        raise click.UsageError("--reason is missing: say why, for the record of each transaction")
    work = BulkAction(remote, action, given(filters), reason or "", rate)
    if dry_run:
        work.preview()
    else:
        run_bulk(work, action)


@click.group()
def groups() -> None:
    """List, show, register and delete producer groups."""


@groups.command("list")
@click.option("--limit", type=click.IntRange(1, 1000), default=1000, show_default=True)
@click.option("--cursor")
@with_remote
@json_option
def list_groups(remote: Remote, *, as_json: bool, **filters: Any) -> None:
    """List groups by name."""
    answer = remote.ask("GET", path_of("groups"), query=given(filters))
    show_rows(answer, "groups", ("group", "check", "topics", "policy"), as_json=as_json)


@groups.command("show")
@click.argument("group")
@answering
def show_group(group: str, remote: Remote) -> dict[str, Any]:
    """Show one group with its policy in force."""
    return remote.ask("GET", path_of("groups", group))


@groups.command()
@click.argument("group")
@click.option("--check-url", "urls", multiple=True, help="The URL for checks; can be repeated.")
@click.option("--pull", is_flag=True, help="The group fetches its checks.")
@click.option("--topic", "topics", multiple=True, help="A topic that it may write to; can be repeated.")
@click.option("--add", is_flag=True, help="What is not named stays as it is.")
@click.option("--policy", help="The policy as JSON, such as '{\"max_checks\": 5}'.")
@click.option("--limits", help="All its own limits as JSON: pending, prepares_per_s, bytes_in_flight.")
@answering
def put(
    group: str,
    remote: Remote,
    *,
    urls: tuple[str, ...],
    topics: tuple[str, ...],
    policy: str | None,
    limits: str | None,
    pull: bool,
    add: bool,
) -> dict[str, Any]:
    """Register a group, replace it, or add to it.

    Without --add, topics and parts of the policy that are not named are taken away; its limits stay.
    """
    if pull == bool(urls) and (pull or not add):
        raise click.UsageError("give either --check-url or --pull")
    if not topics and not add:
        raise click.UsageError("give a --topic")
    body: dict[str, Any] = {"topics": list(topics)} if topics else {}
    if pull or urls:
        body["check"] = {"mode": "pull"} if pull else {"urls": list(urls)}
    for name, text in (("policy", policy), ("limits", limits)):
        try:
            body |= {name: json.loads(text)} if text else {}
        except ValueError as error:
            raise click.BadParameter(f"{text!r} is not JSON: {error}", param_hint=f"--{name}") from None
    return remote.ask("PATCH" if add else "PUT", path_of("groups", group), body=body)


def _groups_options(command: Callable[..., Any]) -> Callable[..., Any]:
    every = click.option("--all", "every", is_flag=True, help="All groups that are registered now.")
    return click.argument("names", nargs=-1, metavar="[GROUP]...")(every(with_remote(command)))


@groups.command()
@_groups_options
def refuse(names: tuple[str, ...], remote: Remote, *, every: bool) -> None:
    """Refuse new transactions of groups, until `accept`, on every instance. Ends and checks go on."""
    _switch(remote, names, every=every, rejects=True)


@groups.command()
@_groups_options
def accept(names: tuple[str, ...], remote: Remote, *, every: bool) -> None:
    """Accept new transactions of groups again."""
    _switch(remote, names, every=every, rejects=False)


def _switch(remote: Remote, names: tuple[str, ...], *, every: bool, rejects: bool) -> None:
    if every == bool(names):
        raise click.UsageError("name groups, or give --all")
    if every:
        names = tuple(str(row["group"]) for row in remote.every(path_of("groups"), "groups"))
    for name in () if every else names:  # a PATCH would begin to register one that is misspelt
        remote.ask("GET", path_of("groups", name))
    for name in names:
        remote.ask("PATCH", path_of("groups", name), body={"reject_prepares": rejects})
        say(f"group {printable(name)}: new transactions are {'refused' if rejects else 'accepted'}")


@groups.command()
@click.argument("group")
@with_remote
def delete(group: str, remote: Remote) -> None:
    """Remove a group that has no pending and no parked transaction."""
    remote.ask("DELETE", path_of("groups", group))
    say(f"group {printable(group)} is removed")


# --- the statistics of all instances in the terminal

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
@with_remote
def top(remote: Remote, *, interval: float, once: bool, as_json: bool) -> None:
    """Show counts, all ends, totals since the start, groups, shards and failures, again and again."""
    console = Console()
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
