"""`halfway keys`: creates, lists, rotates and revokes keys over REST."""

from __future__ import annotations

import os
from typing import Any, Final

import click

from halfway.domain.keys import RANDOM_BYTES, key_text
from halfway.domain.principal import PrincipalKind
from halfway.runtime.cli.remote import Remote, path_of
from halfway.runtime.cli.transactions import json_option, show_answer, show_rows, token_option, url_option
from halfway.runtime.terminal import FiniteRange, printable, say

_DAY_S: Final = 86_400.0
_COLUMNS: Final = ("id", "kind", "name", "created_at", "expires_at", "certificate")

expires_option = click.option("--expires-in", type=FiniteRange(0), metavar="SECONDS", help="Default: it never expires.")


@click.group()
def keys() -> None:
    """Create, list, rotate and revoke keys; generate the first operator's key."""


@keys.command()
@click.argument("kind", type=click.Choice(["group", "operator", "reader"]))
@click.argument("name")
@click.option("--certificate", help="Bind a client certificate instead: subject:…, DNS:…, URI:… or email:…")
@expires_option
@url_option
@token_option
@json_option
def create(
    kind: str,
    name: str,
    certificate: str | None,
    expires_in: float | None,
    url: str,
    token: str | None,
    *,
    as_json: bool,
) -> None:
    """Create a key for a group, operator or reader of that name. The key is shown only once."""
    body: dict[str, Any] = {"kind": kind, "name": name}
    if expires_in is not None:
        body["expires_in_s"] = expires_in
    if certificate is not None:
        body["certificate"] = certificate
    show_answer(Remote(url, token).ask("POST", path_of("keys"), body=body), as_json=as_json)


@keys.command("list")
@click.option("--name", help="Only keys of this group, operator or reader.")
@click.option("--limit", type=click.IntRange(1, 1000), default=1000, show_default=True)
@click.option("--cursor")
@url_option
@token_option
@json_option
def list_keys(url: str, token: str | None, *, as_json: bool, **filters: Any) -> None:
    """List keys by their public ids, without their secrets."""
    query = {name: str(value) for name, value in filters.items() if value is not None}
    show_rows(Remote(url, token).ask("GET", path_of("keys"), query=query), "keys", _COLUMNS, as_json=as_json)


@keys.command()
@click.argument("key_id")
@click.option(
    "--keep",
    type=FiniteRange(0),
    default=_DAY_S,
    show_default=True,
    metavar="SECONDS",
    help="How long the old key stays valid.",
)
@expires_option
@url_option
@token_option
@json_option
def rotate(key_id: str, keep: float, expires_in: float | None, url: str, token: str | None, *, as_json: bool) -> None:
    """Create another key for the principal of a key, which then expires. The new key is shown only once."""
    body = {"keep_s": keep} | ({} if expires_in is None else {"expires_in_s": expires_in})
    show_answer(Remote(url, token).ask("POST", path_of("keys", key_id, "rotate"), body=body), as_json=as_json)


@keys.command()
@click.argument("key_id")
@url_option
@token_option
def revoke(key_id: str, url: str, token: str | None) -> None:
    """Revoke a key: within a second, no instance accepts it any more."""
    Remote(url, token).ask("DELETE", path_of("keys", key_id))
    say(f"key {printable(key_id)} is revoked")


@keys.command()
def generate() -> None:
    """Print a new operator's key for HALFWAY_OPERATOR_KEY. This needs no coordinator."""
    say(key_text(PrincipalKind.OPERATOR, os.urandom(RANDOM_BYTES)))
