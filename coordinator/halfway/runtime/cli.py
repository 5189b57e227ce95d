"""The command line `halfway`."""

from __future__ import annotations

import io
import logging
import os
import re
import sys
from pathlib import Path
from typing import Any, Final

import click

from halfway.domain.errors import ConfigurationError
from halfway.runtime import settings as configuration
from halfway.runtime.cli_client import groups, transactions
from halfway.runtime.cli_keys import keys
from halfway.runtime.cli_top import top
from halfway.runtime.terminal import FiniteRange, fail

_MAX_PARTITIONS: Final = 1000
_COUNT: Final = re.compile(r"[0-9]{0,4}")
_TOPIC: Final = re.compile(r"[A-Za-z0-9._-]{1,249}")


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="halfway")
def halfway() -> None:
    """Transactional (half) messages for the Kafka you already run."""


halfway.add_command(transactions)
halfway.add_command(groups)
halfway.add_command(keys)
halfway.add_command(top)

config_option = click.option(
    "--config",
    type=click.Path(path_type=Path, dir_okay=False),
    help="A TOML file of settings; the environment (HALFWAY_…) is above it.",
)


@halfway.command()
@config_option
def serve(config: Path | None) -> None:
    """Run the coordinator beside the Kafka of HALFWAY_KAFKA__BOOTSTRAP_SERVERS."""
    from halfway.runtime.app import run

    sys.exit(run(_load(config)))


@halfway.command()
@config_option
@click.option("--port", type=click.IntRange(0, 65_535), default=8080, show_default=True, help="REST; 0 for a free one.")
@click.option(
    "--health-port", type=click.IntRange(0, 65_535), default=8081, show_default=True, help="0 for a free one."
)
@click.option("--kafka-port", type=click.IntRange(0, 65_535), default=0, help="0, the default, for a free one.")
@click.option("--data-dir", type=click.Path(path_type=Path, file_okay=False), help="Keep Kafka's data here.")
@click.option("--keep", is_flag=True, help="Keep Kafka's data in its temporary directory.")
@click.option("--topic", "topics", multiple=True, metavar="NAME[:PARTITIONS]", help="Create a topic; can be repeated.")
@click.option(
    "--check-echo",
    type=click.Choice(["commit", "rollback", "unknown"]),
    help="Answer checks with this, as a service would.",
)
@click.option(
    "--check-port",
    type=click.IntRange(0, 65_535),
    default=9000,
    show_default=True,
    help="Of --check-echo; 0 for a free one.",
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON line when ready.")
@click.option("--with-parent", is_flag=True, help="Stop when standard input is closed.")
def dev(config: Path | None, port: int, health_port: int, topics: tuple[str, ...], **asked: Any) -> None:
    """Run a Kafka broker and the coordinator together on 127.0.0.1 until stopped."""
    from halfway.runtime.dev import Dev, run_dev

    over = {"host": "127.0.0.1", "health_host": "127.0.0.1", "port": port, "health_port": health_port}
    wanted = Dev(topics=_topics(topics), **asked)
    sys.exit(run_dev(wanted, lambda bootstrap: _load(config, over | {"kafka": {"bootstrap.servers": bootstrap}})))


@halfway.group()
def topics() -> None:
    """The internal topics: list, verify, create."""


@halfway.command("audit-log")
@config_option
@click.option("--since-s", type=FiniteRange(0), default=86_400.0, show_default=True, help="How far to look back.")
@click.option("--group", help="Only what concerns this group.")
@click.option("--actor", help="Only what the operator, reader or group of this name did.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object a line.")
def audit_log(config: Path | None, since_s: float, group: str | None, actor: str | None, as_json: bool) -> None:  # noqa: FBT001 - click's
    """Show who changed what, from the audit trail in Kafka, the oldest first."""
    from halfway.runtime.audit_log import show

    sys.exit(show(_load(config), since_s=since_s, group=group, actor=actor, as_json=as_json))


@topics.command("list")
@config_option
def list_topics(config: Path | None) -> None:
    """Show the internal topics and the settings that matter."""
    from halfway.runtime.topics import show

    sys.exit(show(_load(config)))


@topics.command()
@config_option
def verify(config: Path | None) -> None:
    """Compare the internal topics with what is needed; change nothing."""
    from halfway.runtime.topics import compare

    sys.exit(compare(_load(config)))


@topics.command()
@config_option
def create(config: Path | None) -> None:
    """Create what is missing and verify the rest."""
    from halfway.runtime.topics import prepare

    sys.exit(prepare(_load(config)))


@topics.command()
@click.option(
    "--health-url",
    envvar="HALFWAY_HEALTH_URL",
    default="http://127.0.0.1:8081",
    show_default=True,
    help="Where an instance shows its health.",
)
def shards(health_url: str) -> None:
    """Show the shards that an instance cannot acquire, since when, why, and the remedy."""
    from halfway.runtime.topics import not_acquired

    sys.exit(not_acquired(health_url))


def _load(config: Path | None, over: dict[str, Any] | None = None) -> configuration.Settings:
    try:
        return configuration.load(file=config, over=over)
    except ConfigurationError as error:
        fail(error.detail)


def _topics(given: tuple[str, ...]) -> dict[str, int]:
    wanted = {}
    for text in given:
        name, _, count = text.partition(":")
        partitions = int(count or 1) if _COUNT.fullmatch(count) else 0
        if not _TOPIC.fullmatch(name) or name in (".", "..") or not 0 < partitions <= _MAX_PARTITIONS:
            raise click.BadParameter(
                f"{text!r} is not NAME or NAME:PARTITIONS: a name is 1 to 249 of letters, digits and . _ -, and there "
                f"are 1 to {_MAX_PARTITIONS} partitions",
                param_hint="--topic",
            )
        wanted[name] = partitions
    return wanted


def main() -> None:
    """Run the command line, and end without taking the interpreter apart.

    A Kafka client that was not collected yet is destroyed there, which hangs if its broker is already gone.
    """
    _open_streams()
    status: object = 0
    try:
        halfway()
    except SystemExit as ended:
        status = ended.code
    logging.shutdown()
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except OSError:
            status = status or 1  # the reader is gone, or the disk is full: nothing more can be printed
    os._exit(status if isinstance(status, int) else int(status is not None))


def _open_streams() -> None:
    """Make the standard streams writable: closed ones lead nowhere, and no character ends a command."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is None:
            setattr(sys, name, Path(os.devnull).open("w", encoding="utf-8"))  # noqa: SIM115 - until the process ends
        elif isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


if __name__ == "__main__":
    main()
