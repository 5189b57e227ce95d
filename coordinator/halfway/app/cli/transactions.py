"""`halfway transactions` and `halfway groups`: commands for operators, over REST.

A job shows its progress until it ends, and is stopped on Ctrl-C.
"""

from __future__ import annotations

import json
import os
import secrets
import shlex
import time
from typing import Any, Final

import click
from click.core import ParameterSource
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from halfway.app.cli.remote import Remote, objects_of, path_of
from halfway.app.settings_sources import content_of
from halfway.app.terminal import FiniteRange, complain, fail, json_line, printable, say, say_fields, say_rows
from halfway.coordinator.records import MAX_RATE, MIN_RATE, RATE

_POLL_S: Final = 0.5
_PRINT_EVERY_S: Final = 5.0
_MAX_SHOWN_ITEMS: Final = 20
_NOT_DONE: Final = ("failed", "replaced")
_NOT_FOUND: Final = 404
_FINAL_STATES: Final = frozenset({"done", "stopped", "failed"})


def preview(remote: Remote, job: dict[str, Any]) -> None:
    """Print how many transactions a job would act on, and the oldest of them."""
    answer = remote.ask("POST", path_of("jobs"), body={**job, "preview": True})
    say(f"{printable(str(answer.get('count')))} transactions match; nothing is done")
    for item in objects_of(answer, "sample"):
        say(f"  {printable(str(item.get('id')))}  {printable(str(item.get('reason') or item.get('last_error') or ''))}")


def run(remote: Remote, job: dict[str, Any]) -> None:
    """Start a job and show its progress until it ends. The exit status is 1 unless everything is done.

    If the instance of the job ends, the same request is sent again. Nothing is done twice.
    """
    job = {**job, "id": f"cli-{secrets.token_hex(6)}"}
    remote.ask("POST", path_of("jobs"), body=job)
    click.echo(f"job {job['id']} is accepted", err=True)
    try:
        status = _wait_for(remote, job)
    except KeyboardInterrupt:
        remote.ask("DELETE", path_of("jobs", job["id"]))
        complain(f"job {job['id']} is stopped; items under way are finished, and the rest is unchanged")
        raise SystemExit(1) from None
    _report(remote, status)


def _wait_for(remote: Remote, job: dict[str, Any]) -> dict[str, Any]:
    """Show the progress of a job until it ends; return its last status."""
    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    printed_at = time.monotonic()
    with Progress(*columns, console=console, disable=not console.is_terminal) as progress:
        bar = progress.add_task(job["action"], total=None)
        while True:
            query = {"limit": "1"}
            status = remote.ask_patiently("GET", path_of("jobs", job["id"]), query=query, expected=_NOT_FOUND)
            if status is not None and status.get("error_code") == "unknown_job":
                complain("the instance of the job has ended: the job is sent again, and continues with the rest")
                # This is refused, and sent again, until every instance can answer whether it has the job.
                remote.ask_patiently("POST", path_of("jobs"), body=job)
            elif status is not None:
                finished, found = status.get("finished") or 0, status.get("found")
                progress.update(bar, completed=finished, total=found)
                if status.get("state") in _FINAL_STATES:
                    return status
                if not console.is_terminal and time.monotonic() - printed_at > _PRINT_EVERY_S:
                    printed_at = time.monotonic()
                    click.echo(printable(f"{finished} of {'?' if found is None else found}"), err=True)
            time.sleep(_POLL_S)


def _report(remote: Remote, status: dict[str, Any]) -> None:
    results = status.get("results")
    counts = ", ".join(f"{count} {name}" for name, count in results.items()) if isinstance(results, dict) else ""
    say(f"{printable(str(status.get('state')))}: {printable(counts) or 'nothing matched'}")
    if status.get("detail"):
        complain(str(status["detail"]))
    if status.get("more"):
        complain(f"{status.get('found')} matched, but the job acts on {status.get('most')}: run it again for the rest")
    not_done = [name for name in _NOT_DONE if isinstance(results, dict) and results.get(name)]
    for name in not_done:
        query = {"result": name, "limit": str(_MAX_SHOWN_ITEMS)}
        for item in objects_of(remote.ask("GET", path_of("jobs", str(status.get("id"))), query=query), "items"):
            complain(f"{item.get('id')}: {item.get('error_code')}: {item.get('detail')}")
    if not_done or status.get("state") != "done":
        raise SystemExit(1)


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
    help="A key. Better set HALFWAY_TOKEN or HALFWAY_FILE_VARIABLE: other users can see arguments.",
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


@click.group()
def transactions() -> None:
    """List, show, end, check and resume transactions."""


@transactions.command("list")
@click.option("--state", type=click.Choice(["prepared", "parked", "committed", "rolled_back"]))
@click.option("--group")
@click.option("--topic")
@click.option("--key")
@click.option("--id", help="The beginning of the id.")
@click.option(
    "--older-than", "older_than_s", type=FiniteRange(0), metavar="SECONDS", help="Prepared at least this long ago."
)
@click.option(
    "--younger-than", "younger_than_s", type=FiniteRange(0), metavar="SECONDS", help="Prepared at most this long ago."
)
@click.option("--cause", type=click.Choice(["producer", "check", "operator", "policy"]), help="What ended it.")
@click.option("--error", help="A part of the last error, or of the reason for parking.")
@click.option("--limit", type=click.IntRange(1, 1000), default=100, show_default=True)
@click.option("--cursor")
@url_option
@token_option
@json_option
def list_transactions(url: str, token: str | None, *, as_json: bool, **filters: Any) -> None:
    """List pending, parked and recently ended transactions, oldest first.

    The last column is the reason for parking, if a row has one.
    """
    query = {name: str(value) for name, value in filters.items() if value is not None}
    answer = Remote(url, token).ask("GET", path_of("transactions"), query=query)
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
@url_option
@token_option
@json_option
def check(transaction_id: str, url: str, token: str | None, *, as_json: bool) -> None:
    """Ask the producer group about a prepared transaction now."""
    show_answer(Remote(url, token).ask("POST", path_of("transactions", transaction_id, "check")), as_json=as_json)


@transactions.command()
@click.argument("transaction_id", required=False)
@click.option("--parked", is_flag=True, help="Run a job on all parked transactions that match the other options.")
@click.option("--group", help="Only transactions of this group.")
@click.option("--error", help="Only transactions whose reason for parking contains this text.")
@click.option(
    "--older-than", "older_than_s", type=FiniteRange(0), metavar="SECONDS", help="Only if prepared this long ago."
)
@click.option(
    "--rate", type=FiniteRange(MIN_RATE, MAX_RATE), default=RATE, show_default=True, help="At most so many per second."
)
@click.option("--reason", default="resumed from the command line", show_default=True, help="Stored as the remark.")
@click.option("--dry-run", is_flag=True, help="Only print how many match.")
@url_option
@token_option
@json_option
def resume(
    transaction_id: str | None,
    url: str,
    token: str | None,
    *,
    parked: bool,
    rate: float,
    reason: str,
    dry_run: bool,
    as_json: bool,
    **filters: Any,
) -> None:
    """Return a parked transaction to prepared; with --parked, many."""
    filter_fields = {name: value for name, value in filters.items() if value is not None}
    if (transaction_id is None) != parked or (transaction_id is not None and (filter_fields or dry_run)):
        raise click.UsageError("give either the id of a transaction, or --parked with the options to match")
    remote = Remote(url, token)
    if transaction_id is not None:
        show_answer(remote.ask("POST", path_of("transactions", transaction_id, "resume")), as_json=as_json)
        return
    job = {"action": "resume", "filter": {"state": "parked", **filter_fields}, "reason": reason, "rate": rate}
    (preview if dry_run else run)(remote, job)


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
@click.option("--topic", "topics", multiple=True, required=True, help="A topic that it may write to; can be repeated.")
@click.option("--add", is_flag=True, help="What is not named stays as it is.")
@click.option("--policy", help="The policy as JSON, such as '{\"max_checks\": 5}'.")
@url_option
@token_option
@json_option
def put(  # noqa: PLR0913 - one option each
    group: str,
    urls: tuple[str, ...],
    topics: tuple[str, ...],
    policy: str | None,
    url: str,
    token: str | None,
    *,
    pull: bool,
    add: bool,
    as_json: bool,
) -> None:
    """Register a group, replace it, or add to it.

    Without --add, topics and parts of the policy that are not named are taken away.
    """
    if pull == bool(urls) and (pull or not add):
        raise click.UsageError("give either --check-url or --pull")
    try:
        policy_fields = json.loads(policy) if policy else None
    except ValueError as error:
        raise click.BadParameter(f"{policy!r} is not JSON: {error}", param_hint="--policy") from None
    body: dict[str, Any] = {"topics": list(topics)}
    if pull or urls:
        body["check"] = {"mode": "pull"} if pull else {"urls": list(urls)}
    if policy_fields is not None:
        body["policy"] = policy_fields
    show_answer(Remote(url, token).ask("PATCH" if add else "PUT", path_of("groups", group), body=body), as_json=as_json)


@groups.command()
@click.argument("group")
@url_option
@token_option
def delete(group: str, url: str, token: str | None) -> None:
    """Remove a group that has no pending and no parked transaction."""
    Remote(url, token).ask("DELETE", path_of("groups", group))
    say(f"group {printable(group)} is removed")
