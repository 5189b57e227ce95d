"""`halfway dev`: runs an embedded Kafka broker and the coordinator together on 127.0.0.1.

Its check endpoint gives every check the same answer, for trying halfway without a service.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
import threading
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, Final, Self

import click
import structlog
from confluent_kafka import KafkaException
from confluent_kafka.admin import AdminClient, NewTopic  # type: ignore[attr-defined] # public, but not for mypy

from halfway.app.serve.addresses import cannot_listen
from halfway.app.serve.app import Ready, run
from halfway.app.serve.backend import check_authorities
from halfway.app.settings import Settings
from halfway.app.terminal import complain, json_line, say
from halfway.checks import LOOPBACK_NETWORKS
from halfway.kafka.clients.librdkafka_events import LibrdkafkaLog
from halfway.kafka.topics.admin_requests import admin_client
from halfway.protocol.errors import ConfigurationError

log = structlog.get_logger(__name__)

HOST: Final = "127.0.0.1"
_MAX_CHECK_BYTES: Final = 64 * 1024 * 1024
_IDLE_S: Final = 60.0


class CheckEcho:
    """A context manager that answers checks on a local port. Raises OSError if it cannot listen on the port."""

    def __init__(self, outcome: str, port: int) -> None:
        """Listen at once. Checks wait until the context is entered."""

        class Handler(_Handler):
            answered_outcome = outcome

        self._server = ThreadingHTTPServer((HOST, port), Handler)
        self._thread = threading.Thread(target=self._server.serve_forever, name="halfway-check-echo", daemon=True)
        self.url = f"http://{HOST}:{self._server.server_port}/check"

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    timeout = _IDLE_S
    answered_outcome: str

    def do_POST(self) -> None:
        """Answer one check. Any other request gets 400."""
        length = self.headers.get("Content-Length", "")
        if not (length.isascii() and length.isdecimal() and int(length) <= _MAX_CHECK_BYTES):
            self.send_error(HTTPStatus.BAD_REQUEST)
            return
        try:
            check = json.loads(self.rfile.read(int(length)))
        except (ValueError, RecursionError):
            check = None
        if not isinstance(check, dict):
            self.send_error(HTTPStatus.BAD_REQUEST)
            return
        # The nonce, if the check has one, binds the answer to the check.
        answer = {"outcome": self.answered_outcome} | {name: check[name] for name in ("nonce",) if name in check}
        body = json.dumps(answer).encode()
        self.send_response(HTTPStatus.OK)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)
        log.info("check_answered", id=check.get("id"), group=check.get("group"), outcome=self.answered_outcome)

    def log_message(self, *_: Any) -> None:
        """Log nothing: `check_answered` is logged instead."""


_ADMIN_TIMEOUT_S = 30.0
_PLACEHOLDER = "127.0.0.1:1"
"""The broker's address while the settings are validated. Nothing connects to it."""


@dataclass(frozen=True, kw_only=True)
class DevOptions:
    """The options of `halfway dev`. `topics` maps names to numbers of partitions."""

    kafka_port: int
    data_dir: Path | None
    keep: bool
    topics: Mapping[str, int]
    check_echo: str | None
    """The outcome for every check on `check_port`; None: nothing listens there."""
    check_port: int
    as_json: bool
    with_parent: bool


def run_dev(options: DevOptions, settings_for: Callable[[str], Settings]) -> int:
    """Start the broker, then the coordinator; return the exit status once both have stopped."""
    from halfway.embedded import EmbeddedConfig, EmbeddedKafka, EmbeddedKafkaError

    config = EmbeddedConfig(
        data_dir=options.data_dir,
        keep_data=options.keep,
        port=options.kafka_port,
        progress=lambda line: click.echo(line, err=True),
    )
    try:
        with ExitStack() as stack:
            _demand_usable(settings_for(_PLACEHOLDER), options)
            echo = None
            if options.check_echo is not None:
                echo = stack.enter_context(_echo(options.check_echo, options.check_port))
            if options.with_parent:
                threading.Thread(target=_stop_when_stdin_closes, name="halfway-parent", daemon=True).start()
            bootstrap = stack.enter_context(EmbeddedKafka(config)).bootstrap_servers
            _create(bootstrap, options.topics)
            settings = _local(settings_for(bootstrap))
            return run(settings, on_ready=lambda ready: _announce(options, settings, ready, bootstrap, echo))
    except ConfigurationError as error:
        complain(error.detail)
    except EmbeddedKafkaError as error:
        complain(str(error))
    return 1


def _demand_usable(settings: Settings, options: DevOptions) -> None:
    """Raise ConfigurationError for everything that the coordinator would refuse, before Kafka starts."""
    admin_client(settings.kafka_config(""))
    check_authorities(settings)
    ports = {"--port": settings.port, "--health-port": settings.health_port, "--kafka-port": options.kafka_port}
    if options.check_echo is not None:
        ports["--check-port"] = options.check_port
    fixed = {option: port for option, port in ports.items() if port}
    if len(set(fixed.values())) < len(fixed):
        listed = ", ".join(f"{option} {port}" for option, port in fixed.items())
        raise ConfigurationError(f"two servers cannot share a port: choose different ports in {listed}")
    for option, host in (("--port", settings.host), ("--health-port", settings.health_host)):
        try:
            socket.create_server((host, ports[option])).close()
        except OSError as error:
            raise cannot_listen(host, ports[option], option, error) from error


def _echo(outcome: str, port: int) -> CheckEcho:
    try:
        return CheckEcho(outcome, port)
    except OSError as error:
        raise cannot_listen(HOST, port, "--check-port", error) from error


def _local(settings: Settings) -> Settings:
    """Also allow check endpoints on this machine, and do not drain unless asked to: no load balancer is waited for."""
    drain = {} if "drain_s" in settings.model_fields_set else {"drain_s": 0.0}
    networks = (*settings.check_also_networks, *LOOPBACK_NETWORKS)
    return settings.model_copy(update={"check_also_networks": networks, **drain})


def _stop_when_stdin_closes() -> None:
    """Stop this process when the process at the other end of its standard input has ended, in any way."""
    # This does not use `sys.stdin`: its lock, held here, would keep the interpreter from ending.
    while os.read(sys.stdin.fileno(), 1024):
        pass
    os.kill(os.getpid(), signal.SIGTERM)


def _create(bootstrap: str, topics: Mapping[str, int]) -> None:
    properties: dict[str, Any] = {"bootstrap.servers": bootstrap, "logger": LibrdkafkaLog()}
    admin = AdminClient(properties)
    new_topics = [NewTopic(name, num_partitions=count, replication_factor=1) for name, count in topics.items()]
    if not new_topics:
        return
    timeout_s = _ADMIN_TIMEOUT_S
    for name, created in admin.create_topics(
        new_topics, operation_timeout=timeout_s, request_timeout=timeout_s
    ).items():
        try:
            created.result(timeout_s)
        except KafkaException as error:
            if error.args[0].name() != "TOPIC_ALREADY_EXISTS":
                complain(f"topic {name!r} was not created: {error.args[0].str()}")


def _announce(options: DevOptions, settings: Settings, ready: Ready, bootstrap: str, echo: CheckEcho | None) -> None:
    console = _console_url(settings, ready)
    if options.as_json:
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
        say(f"checks   {echo.url}    (answers {options.check_echo})")
    if not settings.access_control:
        say("access   open: everybody on this machine may do everything    (set HALFWAY_MASTER_SECRET to require keys)")
    say("Stop with Ctrl-C.")


def _console_url(settings: Settings, ready: Ready) -> str | None:
    host = {"api": ready.url, "health": ready.health_url, "off": None}[settings.console]
    return None if host is None else f"{host}/console/"
