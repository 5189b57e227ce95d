"""`halfway dev`: an embedded Kafka broker and the coordinator in one command, on 127.0.0.1."""

from __future__ import annotations

import os
import signal
import socket
import sys
import threading
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import click
from confluent_kafka import KafkaException
from confluent_kafka.admin import AdminClient, NewTopic  # type: ignore[attr-defined] # public, but not for mypy

from halfway.checkback import LOOPBACK_NETWORKS
from halfway.domain.errors import ConfigurationError
from halfway.kafka.topics.admin_requests import admin_client
from halfway.runtime.app import Ready, not_listening, run
from halfway.runtime.check_caller import check_authorities
from halfway.runtime.check_echo import HOST, CheckEcho
from halfway.runtime.terminal import complain, json_line, say

if TYPE_CHECKING:
    from halfway.runtime.settings import Settings

_ASK_S = 30.0
_NOT_YET = "127.0.0.1:1"
"""Stands for the broker's address while the settings are checked; nothing connects to it."""


@dataclass(frozen=True, kw_only=True)
class Dev:
    """What `halfway dev` was asked for; `topics` are names and their partitions."""

    kafka_port: int
    data_dir: Path | None
    keep: bool
    topics: Mapping[str, int]
    check_echo: str | None
    """The outcome that every check is answered with on `check_port`; None: nothing answers there."""
    check_port: int
    as_json: bool
    with_parent: bool


def run_dev(wanted: Dev, settings_for: Callable[[str], Settings]) -> int:
    """Start the broker, then the coordinator; return the exit status once both have stopped."""
    from halfway.embedded import EmbeddedConfig, EmbeddedKafka, EmbeddedKafkaError

    config = EmbeddedConfig(
        data_dir=wanted.data_dir,
        keep_data=wanted.keep,
        port=wanted.kafka_port,
        progress=lambda line: click.echo(line, err=True),
    )
    try:
        with ExitStack() as stack:
            _demand_usable(settings_for(_NOT_YET), wanted)
            echo = (
                None if wanted.check_echo is None else stack.enter_context(_echo(wanted.check_echo, wanted.check_port))
            )
            if wanted.with_parent:
                threading.Thread(target=_end_with_stdin, name="halfway-parent", daemon=True).start()
            bootstrap = stack.enter_context(EmbeddedKafka(config)).bootstrap_servers
            _create(bootstrap, wanted.topics)
            settings = reaching_this_machine(logging_for(settings_for(bootstrap), terminal=sys.stderr.isatty()))
            return run(settings, on_ready=lambda ready: _announce(wanted, settings, ready, bootstrap, echo))
    except ConfigurationError as error:
        complain(error.detail)
    except EmbeddedKafkaError as error:
        complain(str(error))
    return 1


def _demand_usable(settings: Settings, wanted: Dev) -> None:
    """Raise ConfigurationError for all that the coordinator would refuse, before Kafka starts."""
    admin_client(settings.kafka_config(""))
    check_authorities(settings)
    ports = {"--port": settings.port, "--health-port": settings.health_port, "--kafka-port": wanted.kafka_port}
    if wanted.check_echo is not None:
        ports["--check-port"] = wanted.check_port
    asked = {option: port for option, port in ports.items() if port}
    if len(set(asked.values())) < len(asked):
        given = ", ".join(f"{option} {port}" for option, port in asked.items())
        raise ConfigurationError(f"each port is taken by one server only: give other ports than {given}")
    for option, host in (("--port", settings.host), ("--health-port", settings.health_host)):
        try:
            socket.create_server((host, ports[option])).close()
        except OSError as error:
            raise not_listening(host, ports[option], option, error) from error


def _echo(outcome: str, port: int) -> CheckEcho:
    try:
        return CheckEcho(outcome, port)
    except OSError as error:
        raise not_listening(HOST, port, "--check-port", error) from error


def reaching_this_machine(settings: Settings) -> Settings:
    """Return settings with which services on this machine are checked."""
    return settings.model_copy(update={"check_also_networks": (*settings.check_also_networks, *LOOPBACK_NETWORKS)})


def logging_for(settings: Settings, *, terminal: bool) -> Settings:
    """Return settings that log for people if logs go to a terminal and no format was chosen."""
    if "log_format" in settings.model_fields_set or not terminal:
        return settings
    return settings.model_copy(update={"log_format": "console"})


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
                complain(f"topic {name!r} was not created: {error.args[0].str()}")


def _announce(wanted: Dev, settings: Settings, ready: Ready, bootstrap: str, echo: CheckEcho | None) -> None:
    console = _console_url(settings, ready)
    if wanted.as_json:
        line = {"url": ready.url, "health_url": ready.health_url, "bootstrap_servers": bootstrap}
        line |= {} if console is None else {"console_url": console}
        say(json_line(line if echo is None else line | {"check_url": echo.url}))
        return
    say(f"halfway  {ready.url}    (OpenAPI: {ready.url}/openapi.json)")
    if console is not None:
        say(f"console  {console}    (in a browser)")
    say(f"health   {ready.health_url}/health/ready    metrics: {ready.health_url}/metrics")
    say(f"kafka    {bootstrap}")
    if echo is not None:
        say(f"checks   {echo.url}    (each is answered {wanted.check_echo})")
    if not settings.access_control:
        say("access   open: everybody on this machine may do everything    (HALFWAY_MASTER_SECRET asks for keys)")
    say("Stop with Ctrl-C.")


def _console_url(settings: Settings, ready: Ready) -> str | None:
    """Return where the console is; None if it is off."""
    host = {"api": ready.url, "health": ready.health_url, "off": None}[settings.console]
    return None if host is None else f"{host}/console/"
