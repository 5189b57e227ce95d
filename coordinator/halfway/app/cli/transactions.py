"""`halfway transactions` and `halfway groups`: commands for operators, over REST."""

from __future__ import annotations

import json
import os
import shlex
from collections.abc import Callable
from typing import Any, Final, TypeVar

import click
from click.core import ParameterSource

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


def show_answer(answer: dict[str, Any], *, as_json: bool) -> None:
    """Print an answer, field by field."""
    if as_json:
        say(json_line(answer))
    else:
        say_fields(answer)


def show_rows(answer: dict[str, Any], name: str, columns: tuple[str, ...], *, as_json: bool) -> None:
    """Print one page of a list, one line per row."""
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
    """Give a command the filters of transactions."""
    for option in reversed(_FILTERS):
        command = option(command)
    return command


def _given(filters: dict[str, Any]) -> dict[str, str]:
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
@url_option
@token_option
@json_option
def list_transactions(url: str, token: str | None, *, as_json: bool, **filters: Any) -> None:
    """List pending, parked and recently ended transactions, oldest first.

    The last column is the reason for parking, if a row has one.
    """
    answer = Remote(url, token).ask("GET", path_of("transactions"), query=_given(filters))
    columns: tuple[str, ...] = ("id", "state", "group", "prepared_at", "checks", "next_check_at", "cause", "topics")
    if any(row.get("reason") for row in objects_of(answer, "transactions")):
        columns += ("reason",)
    show_rows(answer, "transactions", columns, as_json=as_json)


@transactions.command()
@click.argument("transaction_id")
@url_option
@token_option
@json_option
def show(transaction_id: str, url: str, token: str | None, *, as_json: bool) -> None:
    """Show one transaction, with its messages while it is prepared or parked."""
    show_answer(Remote(url, token).ask("GET", path_of("transactions", transaction_id)), as_json=as_json)


@transactions.command()
@click.argument("transaction_id")
@click.argument("outcome", type=click.Choice(["commit", "rollback"]))
@click.option("--remark", help="The reason; stored in the op marker.")
@url_option
@token_option
@json_option
def end(transaction_id: str, outcome: str, remark: str | None, url: str, token: str | None, *, as_json: bool) -> None:
    """Commit a transaction or roll it back, as an operator."""
    body = {"outcome": outcome} | ({"remark": remark} if remark else {})
    path = path_of("transactions", transaction_id, "end")
    show_answer(Remote(url, token).ask("POST", path, body=body, headers={"Halfway-Cause": "operator"}), as_json=as_json)


@transactions.command()
@click.argument("transaction_id")
@click.option("--remark", help="The reason; for the audit trail.")
@url_option
@token_option
@json_option
def check(transaction_id: str, remark: str | None, url: str, token: str | None, *, as_json: bool) -> None:
    """Ask the producer group about a prepared transaction now."""
    path = path_of("transactions", transaction_id, "check")
    answer = Remote(url, token).ask("POST", path, body={"remark": remark} if remark else None)
    show_answer(answer, as_json=as_json)


@transactions.command()
@click.argument("transaction_id")
@click.option("--remark", help="The reason; for the audit trail, and stored in the op marker.")
@url_option
@token_option
@json_option
def resume(transaction_id: str, remark: str | None, url: str, token: str | None, *, as_json: bool) -> None:
    """Return a parked transaction to prepared."""
    path = path_of("transactions", transaction_id, "resume")
    answer = Remote(url, token).ask("POST", path, body={"remark": remark} if remark else None)
    show_answer(answer, as_json=as_json)


@transactions.command()
@click.argument("action", type=click.Choice(list(STATES)))
@filter_options
@click.option(
    "--rate", type=FiniteRange(MIN_RATE, MAX_RATE), default=RATE, show_default=True, help="At most so many per second."
)
@click.option("--reason", help="Stored as the remark of each transaction; needed except with --dry-run.")
@click.option("--dry-run", is_flag=True, help="Only print how many match, and the oldest.")
@url_option
@token_option
def bulk(
    action: str, url: str, token: str | None, *, rate: float, reason: str | None, dry_run: bool, **filters: Any
) -> None:
    """Check, resume, commit or roll back every transaction that matches, at a rate.

    Check is for prepared transactions, resume for parked ones, commit and rollback for both. Ctrl-C stops after the
    batch in flight. If it is run again, it acts on the rest.
    """
    if not reason and not dry_run:
        raise click.UsageError("--reason is missing: say why, for the record of each transaction")
    work = BulkAction(Remote(url, token), action, _given(filters), reason or "", rate)
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
@url_option
@token_option
@json_option
def list_groups(url: str, token: str | None, *, limit: int, cursor: str | None, as_json: bool) -> None:
    """List groups by name."""
    query = {"limit": str(limit)} | ({} if cursor is None else {"cursor": cursor})
    answer = Remote(url, token).ask("GET", path_of("groups"), query=query)
    show_rows(answer, "groups", ("group", "check", "topics", "policy"), as_json=as_json)


@groups.command("show")
@click.argument("group")
@url_option
@token_option
@json_option
def show_group(group: str, url: str, token: str | None, *, as_json: bool) -> None:
    """Show one group with its policy in force."""
    show_answer(Remote(url, token).ask("GET", path_of("groups", group)), as_json=as_json)


@groups.command()
@click.argument("group")
@click.option("--check-url", "urls", multiple=True, help="The URL for checks; can be repeated.")
@click.option("--pull", is_flag=True, help="The group fetches its checks.")
@click.option("--topic", "topics", multiple=True, help="A topic that it may write to; can be repeated.")
@click.option("--add", is_flag=True, help="What is not named stays as it is.")
@click.option("--policy", help="The policy as JSON, such as '{\"max_checks\": 5}'.")
@click.option("--limits", help="All its own limits as JSON: pending, prepares_per_s, bytes_in_flight.")
@url_option
@token_option
@json_option
def put(  # noqa: PLR0913 - one option each
    group: str,
    urls: tuple[str, ...],
    topics: tuple[str, ...],
    policy: str | None,
    limits: str | None,
    url: str,
    token: str | None,
    *,
    pull: bool,
    add: bool,
    as_json: bool,
) -> None:
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
    show_answer(Remote(url, token).ask("PATCH" if add else "PUT", path_of("groups", group), body=body), as_json=as_json)


def _groups_options(command: F) -> F:
    for option in reversed(
        (
            click.argument("names", nargs=-1, metavar="[GROUP]..."),
            click.option("--all", "every", is_flag=True, help="All groups that are registered now."),
            url_option,
            token_option,
        )
    ):
        command = option(command)
    return command


@groups.command()
@_groups_options
def refuse(names: tuple[str, ...], url: str, token: str | None, *, every: bool) -> None:
    """Refuse new transactions of groups, until `accept`, on every instance. Ends and checks go on."""
    _switch(Remote(url, token), names, every=every, rejects=True)


@groups.command()
@_groups_options
def accept(names: tuple[str, ...], url: str, token: str | None, *, every: bool) -> None:
    """Accept new transactions of groups again."""
    _switch(Remote(url, token), names, every=every, rejects=False)


def _switch(remote: Remote, names: tuple[str, ...], *, every: bool, rejects: bool) -> None:
    if every == bool(names):
        raise click.UsageError("name groups, or give --all")
    if every:
        names = tuple(str(row["group"]) for row in remote.every(path_of("groups"), "groups"))
    for name in names:
        remote.ask("PATCH", path_of("groups", name), body={"reject_prepares": rejects})
        say(f"group {printable(name)}: new transactions are {'refused' if rejects else 'accepted'}")


@groups.command()
@click.argument("group")
@url_option
@token_option
def delete(group: str, url: str, token: str | None) -> None:
    """Remove a group that has no pending and no parked transaction."""
    Remote(url, token).ask("DELETE", path_of("groups", group))
    say(f"group {printable(group)} is removed")
