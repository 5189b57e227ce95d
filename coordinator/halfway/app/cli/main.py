"""The command line `halfway`."""

from __future__ import annotations

import io
import logging
import os
import re
import sys
from functools import partial
from pathlib import Path
from typing import Any, Final

import click

from halfway.app import settings as configuration
from halfway.app.cli.administration import audit_log, config_option, keys, load_settings, topics
from halfway.app.cli.remote import Remote
from halfway.app.cli.transactions import groups, token_option, top, transactions, url_option, with_remote
from halfway.app.terminal import say
from halfway.protocol.errors import ConfigurationError

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
halfway.add_command(topics)
halfway.add_command(audit_log)


@halfway.command()
@config_option
@click.option("--workers", metavar="N", help="Processes on the API's port, or auto; over HALFWAY_WORKERS.")
@click.option("--worker", type=int, hidden=True, help="The descriptor of the supervisor's socket.")
def serve(config: Path | None, workers: str | None, worker: int | None) -> None:
    """Run the coordinator with the Kafka at HALFWAY_KAFKA__BOOTSTRAP_SERVERS."""
    from halfway.app.serve.app import run
    from halfway.app.serve.process import configure, log_start_failure
    from halfway.app.serve.supervisor import supervise
    from halfway.app.serve.worker import Worker

    if worker is not None:
        link = Worker(worker)
        sys.exit(run(link.settings, worker=link))
    load = partial(configuration.load, file=config, over={} if workers is None else {"workers": workers})
    try:
        settings = load()
    except ConfigurationError as error:
        configure(level="info")
        log_start_failure(error.detail)
        sys.exit(1)
    sys.exit(run(settings) if settings.workers == 1 else supervise(settings, load))


@halfway.command()
@config_option
@click.option("--port", type=click.IntRange(0, 65_535), help="REST port, over HALFWAY_PORT (8080); 0: a free one.")
@click.option(
    "--health-port", type=click.IntRange(0, 65_535), help="Health port, over HALFWAY_HEALTH_PORT (8081); 0: a free one."
)
@click.option(
    "--kafka-port", type=click.IntRange(0, 65_535), default=0, help="Kafka's port; 0, the default: a free one."
)
@click.option("--data-dir", type=click.Path(path_type=Path, file_okay=False), help="The directory of Kafka's data.")
@click.option("--keep", is_flag=True, help="Do not delete Kafka's data in its temporary directory.")
@click.option("--topic", "topics", multiple=True, metavar="NAME[:PARTITIONS]", help="Create a topic; can be repeated.")
@click.option(
    "--check-echo",
    type=click.Choice(["commit", "rollback", "unknown"]),
    help="Answer every check with this outcome, in place of a service.",
)
@click.option(
    "--check-port",
    type=click.IntRange(0, 65_535),
    default=9000,
    show_default=True,
    help="Port of --check-echo; 0: a free one.",
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON line when ready.")
@click.option("--with-parent", is_flag=True, help="Stop when standard input is closed.")
def dev(
    config: Path | None, port: int | None, health_port: int | None, topics: tuple[str, ...], **options: Any
) -> None:
    """Run a Kafka broker and the coordinator together on 127.0.0.1 until stopped."""
    from halfway.app.dev import DevOptions, run_dev

    ports = {name: one for name, one in (("port", port), ("health_port", health_port)) if one is not None}
    over = {"host": "127.0.0.1", "health_host": "127.0.0.1"} | ports
    dev_options = DevOptions(topics=_topics(topics), **options)
    sys.exit(
        run_dev(
            dev_options, lambda bootstrap: load_settings(config, over | {"kafka": {"bootstrap.servers": bootstrap}})
        )
    )


@halfway.command()
@click.argument("file", type=click.Path(allow_dash=True, dir_okay=False))
@click.option(
    "--dry-run", is_flag=True, help="Only show what would be done; the exit status is 3 if that is something."
)
@click.option("--prune", is_flag=True, help="Remove what the file does not name; keys only if it has a list of keys.")
@click.option(
    "--keys-dir",
    type=click.Path(path_type=Path, file_okay=False),
    help="Write each new key to a file KIND-NAME.key there, with mode 0600.",
)
@click.option("--show-keys", is_flag=True, help="Print each new key, once.")
@url_option
@token_option
def apply(
    file: str, url: str, token: str | None, *, dry_run: bool, prune: bool, keys_dir: Path | None, show_keys: bool
) -> None:
    """Make the groups and keys of a deployment what a TOML file declares, after showing what differs.

    `halfway export` prints such a file. Topics, limits and parts of a policy that the file does not name stay, as do
    groups and keys, unless --prune is given.
    """
    from halfway.app.cli import apply as declarations

    if keys_dir is not None and show_keys:
        raise click.UsageError("give either --keys-dir or --show-keys")
    remote = Remote(url, token)
    options = {"dry_run": dry_run, "prune": prune, "show_keys": show_keys}
    sys.exit(declarations.apply(file, remote, token=token, keys_dir=keys_dir, **options))


@halfway.command()
@with_remote
def export(remote: Remote) -> None:
    """Print the groups and keys of a deployment as a file for `halfway apply`. It holds no key."""
    from halfway.app.cli.apply import read_deployment, to_toml

    say(to_toml(read_deployment(remote)))


@halfway.command()
@config_option
@click.option("--topic", "topics", multiple=True, help="A topic that messages go to; can be repeated.")
@click.option("--json", "as_json", is_flag=True, help="Print the findings as JSON.")
def doctor(config: Path | None, topics: tuple[str, ...], as_json: bool) -> None:  # noqa: FBT001 - click's
    """Look at Kafka and the settings as a start does, show all that is wrong with its remedy, and change nothing."""
    from halfway.app.cli.doctor import examine

    sys.exit(examine(partial(configuration.load, file=config), topics, as_json=as_json))


def _topics(texts: tuple[str, ...]) -> dict[str, int]:
    topics = {}
    for text in texts:
        name, _, count = text.partition(":")
        partitions = int(count or 1) if _COUNT.fullmatch(count) else 0
        if not _TOPIC.fullmatch(name) or name in (".", "..") or not 0 < partitions <= _MAX_PARTITIONS:
            raise click.BadParameter(
                f"{text!r} is not NAME or NAME:PARTITIONS: a name has 1 to 249 letters, digits and . _ -, and there "
                f"are 1 to {_MAX_PARTITIONS} partitions",
                param_hint="--topic",
            )
        topics[name] = partitions
    return topics


def main() -> None:
    """Run the command line, and exit without finalizing the interpreter.

    Finalization would destroy Kafka clients that are not collected yet, which hangs if their broker is gone.
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
            status = status or 1  # the reader is gone or the disk is full, so nothing more can be printed
    os._exit(status if isinstance(status, int) else int(status is not None))


def _open_streams() -> None:
    """Make the standard streams writable: a closed stream discards its output, and every character can be encoded."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is None:
            setattr(sys, name, Path(os.devnull).open("w", encoding="utf-8"))  # noqa: SIM115 - open until the process ends
        elif isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
