"""`halfway keys`, `halfway topics` and `halfway audit-log`.

Keys are created, listed, rotated and revoked over REST; the internal topics are listed, verified, created and read in
Kafka.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Awaitable, Callable, Mapping
from datetime import UTC, datetime
from http import HTTPStatus
from typing import TYPE_CHECKING, Any, Final

import click
import msgspec

from halfway.app.cli.remote import HEALTH_DOUBT, Remote, objects_of, path_of
from halfway.app.cli.transactions import json_option, show_answer, show_rows, token_option, url_option
from halfway.app.terminal import FiniteRange, complain, json_line, printable, say, say_rows
from halfway.kafka.log.registries import read_events
from halfway.kafka.topics.provisioning import InternalTopics
from halfway.kafka.topics.required_config import plans
from halfway.protocol.errors import HalfwayError
from halfway.protocol.keys import RANDOM_BYTES, key_text
from halfway.protocol.principal import PrincipalKind

if TYPE_CHECKING:
    from halfway.app.settings import Settings
    from halfway.protocol.records import AuditEvent


_DAY_S: Final = 86_400.0
_COLUMNS: Final = ("id", "kind", "name", "created_at", "expires_at", "valid", "certificate")

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


_BROKERS: Final = 3
"""The assumed size of a cluster that does not answer."""
ANSWER_S: Final = 5.0


def show_topics(settings: Settings) -> int:
    """Print each internal topic with its required partitions, replication and settings.

    Without HALFWAY_REPLICATION_FACTOR the replication depends on the number of brokers, so Kafka is asked.
    """

    async def print_plans(topics: InternalTopics) -> int:
        config = settings.kafka_config("")
        try:
            planned = await topics.plans(timeout_s=ANSWER_S) if config.replication_factor is None else None
        except HalfwayError as error:
            complain(f"{error.detail}: this shows what a cluster of {_BROKERS} brokers needs")
            planned = None
        rows = [
            (plan.name, str(plan.partitions), str(plan.replication), _settings(plan.settings))
            for plan in planned or plans(config, _BROKERS)
        ]
        say_rows(("topic", "partitions", "replication", "settings"), rows)
        return 0

    return with_topics(settings, print_plans)


def compare(settings: Settings) -> int:
    """Print unsafe and missing topics; return exit status 1 if there are any."""

    async def print_problems(topics: InternalTopics) -> int:
        problems = await topics.watch()
        for problem in problems:
            say(printable(str(problem)))
        if not problems:
            say("every internal topic has the required settings")
        return 1 if problems else 0

    return with_topics(settings, print_problems)


def prepare(settings: Settings) -> int:
    """Create missing topics, and verify the others."""

    async def ensure(topics: InternalTopics) -> int:
        await topics.ensure()
        say("every internal topic exists and has the required settings")
        return 0

    return with_topics(settings, ensure)


def not_acquired(health_url: str) -> int:
    """Print the shards that an instance cannot acquire; return exit status 1 if there are any."""
    remote = Remote(health_url, None, HEALTH_DOUBT)
    answer = remote.ask("GET", "/health/ready", expected=HTTPStatus.SERVICE_UNAVAILABLE)
    shards = objects_of(answer, "not_acquired", HEALTH_DOUBT)
    columns = ("shard", "since", "tries", "error", "remedy")
    if shards:
        say_rows(columns, [[shard.get(column) for column in columns] for shard in shards])
    else:
        say(f"the instance at {remote.shown} can acquire all its shards")
    return 1 if shards else 0


def _settings(needed: Mapping[str, str]) -> str:
    return " ".join(f"{name}={value}" for name, value in sorted(needed.items()))


def with_topics(settings: Settings, work: Callable[[InternalTopics], Awaitable[int]]) -> int:
    async def run() -> int:
        topics = InternalTopics(settings.kafka_config(""))
        try:
            return await work(topics)
        finally:
            topics.close()

    try:
        return asyncio.run(run())
    except HalfwayError as error:
        complain(error.detail)
        return 1


COLUMNS: Final = ("at", "actor", "key", "action", "subject", "group", "result", "detail", "remark")


def show_audit_log(settings: Settings, *, since_s: float, group: str | None, actor: str | None, as_json: bool) -> int:
    """Print the events of the last `since_s` seconds, of one group or actor if given; return the exit status."""
    since_ms = max(0, round((time.time() - since_s) * 1000))
    rows: list[tuple[object, ...]] = []
    try:
        for event in read_events(settings.kafka_config(""), since_ms=since_ms):
            if (group is not None and event.group != group) or (actor is not None and event.actor != actor):
                continue
            if as_json:
                say(json_line(msgspec.structs.asdict(event)))
            else:
                rows.append(_row(event))
    except HalfwayError as error:
        complain(error.detail)
        return 1
    if not as_json:
        say_rows(COLUMNS, rows)
    return 0


def _row(event: AuditEvent) -> tuple[object, ...]:
    at = datetime.fromtimestamp(event.at / 1000, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
    actor = f"{event.actor_kind} {event.actor}".strip()
    return (at, actor, event.key_id, event.action, event.subject, event.group, event.result, event.detail, event.remark)
