"""`halfway dev`: an embedded Kafka broker and the coordinator in one command, on 127.0.0.1."""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import click
from confluent_kafka import KafkaException
from confluent_kafka.admin import AdminClient, NewTopic  # type: ignore[attr-defined] # public, but not for mypy

from halfway.runtime.app import Ready, run

if TYPE_CHECKING:
    from halfway.runtime.settings import Settings

_ASK_S = 30.0


@dataclass(frozen=True, kw_only=True)
class Dev:
    """What `halfway dev` was asked for; `topics` are names and their partitions."""

    kafka_port: int
    data_dir: Path | None
    keep: bool
    topics: Mapping[str, int]
    as_json: bool
    with_parent: bool


def run_dev(wanted: Dev, settings_for: Callable[[str], Settings]) -> int:
    """Start the broker, then the coordinator; return the exit status once both have stopped."""
    from halfway.embedded import EmbeddedConfig, EmbeddedKafka, EmbeddedKafkaError

    if wanted.with_parent:
        threading.Thread(target=_end_with_stdin, name="halfway-parent", daemon=True).start()
    config = EmbeddedConfig(
        data_dir=wanted.data_dir,
        keep_data=wanted.keep,
        port=wanted.kafka_port,
        progress=lambda line: click.echo(line, err=True),
    )
    try:
        with EmbeddedKafka(config) as kafka:
            bootstrap = kafka.bootstrap_servers
            _create(bootstrap, wanted.topics)
            return run(settings_for(bootstrap), on_ready=lambda ready: _announce(wanted, ready, bootstrap))
    except EmbeddedKafkaError as error:
        click.echo(f"halfway: {error}", err=True)
        return 1


def _end_with_stdin() -> None:
    """Stop this process when the one that holds the other end of its standard input is gone, however it ended."""
    # Not through `sys.stdin`: its lock, held here, would keep the interpreter from ending.
    while os.read(sys.stdin.fileno(), 1024):
        pass
    os.kill(os.getpid(), signal.SIGTERM)


def _create(bootstrap: str, topics: Mapping[str, int]) -> None:
    admin = AdminClient({"bootstrap.servers": bootstrap})
    wanted = [NewTopic(name, num_partitions=count, replication_factor=1) for name, count in topics.items()]
    if not wanted:
        return
    for name, made in admin.create_topics(wanted, operation_timeout=_ASK_S, request_timeout=_ASK_S).items():
        try:
            made.result(_ASK_S)
        except KafkaException as error:
            if error.args[0].name() != "TOPIC_ALREADY_EXISTS":
                click.echo(f"halfway: topic {name!r} was not created: {error.args[0].str()}", err=True)


def _announce(wanted: Dev, ready: Ready, bootstrap: str) -> None:
    if wanted.as_json:
        line = {"url": ready.url, "health_url": ready.health_url, "bootstrap_servers": bootstrap}
        sys.stdout.write(json.dumps(line) + "\n")
        sys.stdout.flush()
        return
    click.echo(f"halfway  {ready.url}    (OpenAPI: {ready.url}/openapi.json)")
    click.echo(f"health   {ready.health_url}/health/ready    metrics: {ready.health_url}/metrics")
    click.echo(f"kafka    {bootstrap}")
    click.echo("Stop with Ctrl-C.")
