"""`halfway keys`, `halfway topics` and `halfway audit-log`.

Keys are created, listed, rotated and revoked over REST; the internal topics are listed, verified, created and read in
Kafka, with the settings of `serve`.
"""

from __future__ import annotations

import asyncio
import os
import sys
import time
from collections.abc import Awaitable, Callable, Mapping
from datetime import UTC, datetime
from http import HTTPStatus
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import click
import msgspec

from halfway.app.cli.remote import HEALTH_DOUBT, Remote, objects_of, path_of
from halfway.app.cli.transactions import answering, given, json_option, show_rows, with_remote
from halfway.app.settings import Settings, load
from halfway.app.terminal import FiniteRange, complain, fail, json_line, printable, say, say_rows
from halfway.kafka.log.registries import read_events
from halfway.kafka.topics.provisioning import InternalTopics
from halfway.kafka.topics.required_config import plans
from halfway.protocol.errors import ConfigurationError, HalfwayError
from halfway.protocol.keys import RANDOM_BYTES, key_text
from halfway.protocol.principal import PrincipalKind

if TYPE_CHECKING:
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
@answering
def create(kind: str, name: str, certificate: str | None, expires_in: float | None, remote: Remote) -> dict[str, Any]:
    """Create a key for a group, operator or reader of that name. The key is shown only once."""
    body: dict[str, Any] = {"kind": kind, "name": name}
    if expires_in is not None:
        body["expires_in_s"] = expires_in
    if certificate is not None:
        body["certificate"] = certificate
    return remote.ask("POST", path_of("keys"), body=body)


@keys.command("list")
@click.option("--name", help="Only keys of this group, operator or reader.")
@click.option("--limit", type=click.IntRange(1, 1000), default=1000, show_default=True)
@click.option("--cursor")
@with_remote
@json_option
def list_keys(remote: Remote, *, as_json: bool, **filters: Any) -> None:
    """List keys by their public ids, without their secrets."""
    show_rows(remote.ask("GET", path_of("keys"), query=given(filters)), "keys", _COLUMNS, as_json=as_json)


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
@answering
def rotate(key_id: str, keep: float, expires_in: float | None, remote: Remote) -> dict[str, Any]:
    """Create another key for the principal of a key, which then expires. The new key is shown only once."""
    body = {"keep_s": keep} | ({} if expires_in is None else {"expires_in_s": expires_in})
    return remote.ask("POST", path_of("keys", key_id, "rotate"), body=body)


@keys.command()
@click.argument("key_id")
@with_remote
def revoke(key_id: str, remote: Remote) -> None:
    """Revoke a key: within a second, no instance accepts it any more."""
    remote.ask("DELETE", path_of("keys", key_id))
    say(f"key {printable(key_id)} is revoked")


@keys.command()
def generate() -> None:
    """Print a new operator's key for HALFWAY_OPERATOR_KEY. This needs no coordinator."""
    say(key_text(PrincipalKind.OPERATOR, os.urandom(RANDOM_BYTES)))


config_option = click.option(
    "--config",
    type=click.Path(path_type=Path, dir_okay=False),
    help="A TOML file of settings. Environment variables (HALFWAY_…) override it.",
)


def load_settings(config: Path | None, over: Mapping[str, Any] | None = None) -> Settings:
    """Return the settings; the command ends if one of them is wrong."""
    try:
        return load(file=config, over=over)
    except ConfigurationError as error:
        fail(error.detail)


_BROKERS: Final = 3
"""The assumed size of a cluster that does not answer."""
ANSWER_S: Final = 5.0


@click.group()
def topics() -> None:
    """List, verify and create the internal topics."""


@topics.command("list")
@config_option
def list_topics(config: Path | None) -> None:
    """Show the internal topics and their required settings."""
    settings = load_settings(config)

    async def show(topics: InternalTopics) -> int:
        wanted = settings.kafka_config("")
        planned = None
        try:
            if wanted.replication_factor is None:  # then it depends on the number of brokers
                planned = await topics.plans(timeout_s=ANSWER_S)
        except HalfwayError as error:
            complain(f"{error.detail}: this shows what a cluster of {_BROKERS} brokers needs")
        rows = [
            (plan.name, str(plan.partitions), str(plan.replication), _settings(plan.settings))
            for plan in planned or plans(wanted, _BROKERS)
        ]
        say_rows(("topic", "partitions", "replication", "settings"), rows)
        return 0

    sys.exit(with_topics(settings, show))


def _settings(needed: Mapping[str, str]) -> str:
    return " ".join(f"{name}={value}" for name, value in sorted(needed.items()))


@topics.command()
@config_option
def verify(config: Path | None) -> None:
    """Compare the internal topics with their required settings, and change nothing."""

    async def compare(topics: InternalTopics) -> int:
        problems = await topics.watch()
        for problem in problems:
            say(printable(str(problem)))
        if not problems:
            say("every internal topic has the required settings")
        return 1 if problems else 0

    sys.exit(with_topics(load_settings(config), compare))


@topics.command("create")
@config_option
def create_topics(config: Path | None) -> None:
    """Create missing internal topics, and verify the others."""

    async def ensure(topics: InternalTopics) -> int:
        await topics.ensure()
        say("every internal topic exists and has the required settings")
        return 0

    sys.exit(with_topics(load_settings(config), ensure))


@topics.command()
@click.option(
    "--health-url",
    envvar="HALFWAY_HEALTH_URL",
    default="http://127.0.0.1:8081",
    show_default=True,
    help="The URL of an instance's health port.",
)
def shards(health_url: str) -> None:
    """Show the shards that an instance cannot acquire, with the time, the error and the remedy."""
    remote = Remote(health_url, None, HEALTH_DOUBT)
    answer = remote.ask("GET", "/health/ready", expected=HTTPStatus.SERVICE_UNAVAILABLE)
    columns = ("shard", "since", "tries", "error", "remedy")
    if found := objects_of(answer, "not_acquired", HEALTH_DOUBT):
        say_rows(columns, [[shard.get(column) for column in columns] for shard in found])
        sys.exit(1)
    say(f"the instance at {remote.shown} can acquire all its shards")


def with_topics(settings: Settings, work: Callable[[InternalTopics], Awaitable[int]]) -> int:
    """Return the exit status of what is done with the internal topics."""

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


@click.command("audit-log")
@config_option
@click.option("--since-s", type=FiniteRange(0), default=_DAY_S, show_default=True, help="How far to look back.")
@click.option("--group", help="Only events of this group.")
@click.option("--actor", help="Only events of the operator, reader or group with this name.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object per line.")
def audit_log(config: Path | None, *, since_s: float, group: str | None, actor: str | None, as_json: bool) -> None:
    """Show who changed what, from the audit trail in Kafka, oldest first."""
    since_ms = max(0, round((time.time() - since_s) * 1000))
    rows: list[tuple[object, ...]] = []
    try:
        for event in read_events(load_settings(config).kafka_config(""), since_ms=since_ms):
            if (group is not None and event.group != group) or (actor is not None and event.actor != actor):
                continue
            if as_json:
                say(json_line(msgspec.structs.asdict(event)))
            else:
                rows.append(_row(event))
    except HalfwayError as error:
        fail(error.detail)
    if not as_json:
        say_rows(COLUMNS, rows)


def _row(event: AuditEvent) -> tuple[object, ...]:
    at = datetime.fromtimestamp(event.at / 1000, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
    actor = f"{event.actor_kind} {event.actor}".strip()
    return (at, actor, event.key_id, event.action, event.subject, event.group, event.result, event.detail, event.remark)
