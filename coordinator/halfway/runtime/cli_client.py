"""`halfway transactions` and `halfway groups`: an operator's commands, over REST."""

from __future__ import annotations

import asyncio
import json
import sys
from typing import Any, NoReturn
from urllib.parse import quote

import aiohttp
import click
from rich.console import Console
from rich.table import Table

_TIMEOUT_S = 30

url_option = click.option(
    "--url", envvar="HALFWAY_URL", default="http://127.0.0.1:8080", show_default=True, help="Where the coordinator is."
)
token_option = click.option("--token", envvar="HALFWAY_TOKEN", help="Sent as Authorization: Bearer.")
json_option = click.option("--json", "as_json", is_flag=True, help="Print the answer as JSON.")
console = Console(width=None if sys.stdout.isatty() else 200)


class Remote:
    """One coordinator, asked over REST."""

    def __init__(self, url: str, token: str | None) -> None:
        """Keep where it is."""
        self._url = url.rstrip("/")
        self._headers = {"Authorization": f"Bearer {token}"} if token else {}

    def ask(
        self,
        method: str,
        path: str,
        *,
        body: object = None,
        query: dict[str, str] | None = None,
        headers: dict[str, str] | None = None,
    ) -> Any:
        """Return the answer as JSON; an error answer or none ends the command with status 1 and its message."""
        try:
            status, answer = asyncio.run(self._ask(method, path, body, query or {}, headers or {}))
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            _fail(
                f"{self._url} did not answer ({str(error) or type(error).__name__}): is `halfway serve` running there?"
            )
        if status >= 400:  # noqa: PLR2004 - the first error status
            detail = answer.get("detail", "") if isinstance(answer, dict) else ""
            _fail(f"{status}: {detail or 'no detail'}")
        return answer

    async def _ask(
        self, method: str, path: str, body: object, query: dict[str, str], headers: dict[str, str]
    ) -> tuple[int, Any]:
        timeout = aiohttp.ClientTimeout(total=_TIMEOUT_S)
        async with (
            aiohttp.ClientSession(timeout=timeout, headers=self._headers) as session,
            session.request(method, self._url + path, json=body, params=query, headers=headers) as response,
        ):
            text = await response.text()
            try:
                return response.status, json.loads(text) if text else {}
            except ValueError:
                return response.status, {"detail": f"not JSON: {text[:200]!r}"}


def _fail(message: str) -> NoReturn:
    click.echo(f"halfway: {message}", err=True)
    sys.exit(1)


def _path(*parts: str) -> str:
    return "/v1/" + "/".join(quote(part, safe="") for part in parts)


def _show(answer: Any, *, as_json: bool) -> None:
    if as_json:
        click.echo(json.dumps(answer))
        return
    table = Table(show_header=False, box=None)
    for name, value in answer.items():
        table.add_row(name, value if isinstance(value, str) else json.dumps(value))
    console.print(table)


def _rows(rows: list[dict[str, Any]], columns: tuple[str, ...]) -> None:
    table = Table(box=None)
    for column in columns:
        # An id is there to be copied: it is never cut.
        table.add_column(column, no_wrap=column in ("id", "group", "state"), overflow="fold")
    for row in rows:
        cells = (row.get(column) for column in columns)
        table.add_row(*("" if cell is None else cell if isinstance(cell, str) else json.dumps(cell) for cell in cells))
    console.print(table)


@click.group()
def transactions() -> None:
    """List, show, end, check and resume transactions."""


@transactions.command("list")
@click.option("--state", type=click.Choice(["prepared", "parked", "committed", "rolled_back"]))
@click.option("--group")
@click.option("--topic")
@click.option("--key")
@click.option("--limit", type=click.IntRange(1, 1000), default=100, show_default=True)
@click.option("--cursor")
@url_option
@token_option
@json_option
def list_transactions(url: str, token: str | None, *, as_json: bool, **filters: Any) -> None:
    """List what is pending, parked and lately ended, oldest first."""
    query = {name: str(value) for name, value in filters.items() if value is not None}
    answer = Remote(url, token).ask("GET", _path("transactions"), query=query)
    if as_json:
        click.echo(json.dumps(answer))
        return
    _rows(answer["transactions"], ("id", "state", "group", "prepared_at", "checks", "next_check_at", "cause", "topics"))
    if answer.get("next"):
        click.echo(f"more: --cursor {answer['next']}")


@transactions.command()
@click.argument("transaction_id")
@url_option
@token_option
@json_option
def show(transaction_id: str, url: str, token: str | None, *, as_json: bool) -> None:
    """Show one transaction, with its messages while it is prepared or parked."""
    _show(Remote(url, token).ask("GET", _path("transactions", transaction_id)), as_json=as_json)


@transactions.command()
@click.argument("transaction_id")
@click.argument("outcome", type=click.Choice(["commit", "rollback"]))
@click.option("--remark", help="Why; kept in the op marker.")
@url_option
@token_option
@json_option
def end(transaction_id: str, outcome: str, remark: str | None, url: str, token: str | None, *, as_json: bool) -> None:
    """Commit a transaction or roll it back, as its operator."""
    body = {"outcome": outcome} | ({"remark": remark} if remark else {})
    path = _path("transactions", transaction_id, "end")
    _show(Remote(url, token).ask("POST", path, body=body, headers={"Halfway-Cause": "operator"}), as_json=as_json)


@transactions.command()
@click.argument("transaction_id")
@url_option
@token_option
@json_option
def check(transaction_id: str, url: str, token: str | None, *, as_json: bool) -> None:
    """Ask the producer group about a prepared transaction now."""
    _show(Remote(url, token).ask("POST", _path("transactions", transaction_id, "check")), as_json=as_json)


@transactions.command()
@click.argument("transaction_id")
@url_option
@token_option
@json_option
def resume(transaction_id: str, url: str, token: str | None, *, as_json: bool) -> None:
    """Take a parked transaction back among the prepared."""
    _show(Remote(url, token).ask("POST", _path("transactions", transaction_id, "resume")), as_json=as_json)


@click.group()
def groups() -> None:
    """List, show, put and delete producer groups."""


@groups.command("list")
@url_option
@token_option
@json_option
def list_groups(url: str, token: str | None, *, as_json: bool) -> None:
    """List every group."""
    answer = Remote(url, token).ask("GET", _path("groups"))
    if as_json:
        click.echo(json.dumps(answer))
        return
    _rows(answer["groups"], ("group", "check", "topics", "policy"))


@groups.command("show")
@click.argument("group")
@url_option
@token_option
@json_option
def show_group(group: str, url: str, token: str | None, *, as_json: bool) -> None:
    """Show one group with its policy in force."""
    _show(Remote(url, token).ask("GET", _path("groups", group)), as_json=as_json)


@groups.command()
@click.argument("group")
@click.option("--check-url", "urls", multiple=True, help="Where halfway asks; can be repeated.")
@click.option("--pull", is_flag=True, help="The group fetches its checks.")
@click.option("--topic", "topics", multiple=True, required=True, help="A topic it may write to; can be repeated.")
@click.option("--policy", help="As JSON, such as '{\"max_checks\": 5}'.")
@url_option
@token_option
@json_option
def put(
    group: str,
    urls: tuple[str, ...],
    topics: tuple[str, ...],
    policy: str | None,
    url: str,
    token: str | None,
    *,
    pull: bool,
    as_json: bool,
) -> None:
    """Register a group or change it."""
    if pull == bool(urls):
        raise click.UsageError("give either --check-url or --pull")
    try:
        chosen = json.loads(policy) if policy else None
    except ValueError as error:
        raise click.BadParameter(f"{policy!r} is not JSON: {error}", param_hint="--policy") from None
    body: dict[str, Any] = {"check": {"mode": "pull"} if pull else {"urls": list(urls)}, "topics": list(topics)}
    if chosen is not None:
        body["policy"] = chosen
    _show(Remote(url, token).ask("PUT", _path("groups", group), body=body), as_json=as_json)


@groups.command()
@click.argument("group")
@url_option
@token_option
def delete(group: str, url: str, token: str | None) -> None:
    """Remove a group that has no pending and no parked transaction."""
    Remote(url, token).ask("DELETE", _path("groups", group))
    click.echo(f"group {group} is removed")
