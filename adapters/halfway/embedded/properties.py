"""The configuration files of a broker, `server.properties` and that of log4j, and its ports on loopback."""

import random
import re
import socket
import time
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from halfway.embedded.errors import PortTakenError, ReservedPropertyError

HOST = "127.0.0.1"
TRIES = 200
LOWEST = 15_000
_RETRY_S = 0.05
# If the system's range is unknown, use the lowest first port of the known systems (Linux: 32768, macOS: 49152).
_EPHEMERAL_DEFAULT = 32_768


def is_free(port: int, host: str = HOST) -> bool:
    """Return whether a server could listen on the port now."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        # As Java does: closing connections of an earlier server do not matter, a listening socket does.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
            probe.listen(1)
        except OSError:
            return False
    return True


def require_free(port: int, host: str = HOST, *, patience_s: float = 1) -> None:
    """Raise PortTakenError if the port is still taken after `patience_s`: a killed broker may still hold it."""
    deadline = time.monotonic() + patience_s
    while not is_free(port, host):
        if time.monotonic() > deadline:
            raise PortTakenError(port, host)
        time.sleep(_RETRY_S)


def pick_port(taken: Collection[int] = (), host: str = HOST) -> int:
    """Return a port that is free now and not in `taken`.

    It is below the ephemeral ports. While a broker is down, a client that keeps connecting to an ephemeral port
    eventually gets this port as its own source port, connects to itself, and so keeps the broker from starting again.
    """
    for port in candidates():
        if port not in taken and is_free(port, host):
            return port
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.bind((host, 0))
        return int(probe.getsockname()[1])


def candidates() -> Iterator[int]:
    """Yield ports in the order in which to try them."""
    end = _first_ephemeral_port()
    for _ in range(TRIES if end - LOWEST > TRIES else 0):
        yield random.randrange(LOWEST, end)  # noqa: S311  protects nothing


def bind_failure(log: str) -> int | None:
    """Return the port that the broker could not bind: 0 if its log does not name it, None if there was no failure."""
    match = re.search(r"failed to bind to \S*?:(\d+)", log, re.IGNORECASE)
    if match:
        return int(match[1])
    return 0 if "Address already in use" in log else None


def _first_ephemeral_port() -> int:
    try:
        return int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text(encoding="ascii").split()[0])
    except (OSError, ValueError, IndexError):
        return _EPHEMERAL_DEFAULT


CLIENT_LISTENER = "PLAINTEXT"
CONTROLLER_LISTENER = "CONTROLLER"
# Relative to the broker's working directory, because Kafka splits this list at commas.
DATA_FOLDER = "data"
RESERVED = (
    "advertised.listeners",
    "broker.id",
    "controller.listener.names",
    "controller.quorum.bootstrap.servers",
    "controller.quorum.voters",
    "inter.broker.listener.name",
    "listeners",
    "log.dir",
    "log.dirs",
    "metadata.log.dir",
    "node.id",
    "process.roles",
)
_MIB = 1024 * 1024
_REPLICATION = 3


@dataclass(frozen=True, kw_only=True)
class Listener:
    """A port for clients, and the advertised port if it is another one, such as a proxy's."""

    port: int
    advertised_port: int | None = None


@dataclass(frozen=True, kw_only=True)
class Node:
    """One node, which is broker and controller, and its place in the cluster.

    `voters` maps the id of each controller to its port, including this node. `listeners` maps the names of listeners to
    the ports for clients; the first one is also the inter-broker listener.
    """

    node_id: int = 1
    voters: Mapping[int, int]
    listeners: Mapping[str, Listener]

    @classmethod
    def single(cls, *, port: int, controller_port: int) -> "Node":
        return cls(voters={1: controller_port}, listeners={CLIENT_LISTENER: Listener(port=port)})

    @property
    def ports(self) -> tuple[int, ...]:
        return (*(listener.port for listener in self.listeners.values()), self.voters[self.node_id])


def require_unreserved(overrides: Mapping[str, str]) -> None:
    """Raise ReservedPropertyError for properties that only the embedded broker itself can set."""
    reserved = sorted(set(overrides) & set(RESERVED))
    if reserved:
        raise ReservedPropertyError(reserved)


def server_properties(node: Node, overrides: Mapping[str, str] | None = None) -> dict[str, str]:
    """Return the properties of a node; `overrides` wins if it names one that is not reserved.

    Topics have a replica on each node, at most three, and `min.insync.replicas` is two if there are three.
    """
    overrides = overrides or {}
    require_unreserved(overrides)
    replication = min(_REPLICATION, len(node.voters))
    in_sync = 2 if replication == _REPLICATION else 1
    protocols = [f"{name}:PLAINTEXT" for name in (CONTROLLER_LISTENER, *node.listeners)]
    listeners = [f"{name}://{HOST}:{listener.port}" for name, listener in node.listeners.items()]
    advertised = [
        f"{name}://{HOST}:{listener.advertised_port or listener.port}" for name, listener in node.listeners.items()
    ]
    return {
        "process.roles": "broker,controller",
        "node.id": str(node.node_id),
        "controller.quorum.voters": ",".join(f"{node_id}@{HOST}:{port}" for node_id, port in node.voters.items()),
        "controller.listener.names": CONTROLLER_LISTENER,
        "inter.broker.listener.name": next(iter(node.listeners)),
        "listeners": ",".join([*listeners, f"{CONTROLLER_LISTENER}://{HOST}:{node.voters[node.node_id]}"]),
        "advertised.listeners": ",".join(advertised),
        "listener.security.protocol.map": ",".join(protocols),
        "log.dirs": DATA_FOLDER,
        "auto.create.topics.enable": "false",
        "default.replication.factor": str(replication),
        "min.insync.replicas": str(in_sync),
        "offsets.topic.replication.factor": str(replication),
        "offsets.topic.num.partitions": "4",
        "transaction.state.log.replication.factor": str(replication),
        "transaction.state.log.min.isr": str(in_sync),
        "transaction.state.log.num.partitions": "4",
        "share.coordinator.state.topic.replication.factor": str(replication),
        "share.coordinator.state.topic.min.isr": str(in_sync),
        "share.coordinator.state.topic.num.partitions": "1",
        "group.initial.rebalance.delay.ms": "0",
        "group.min.session.timeout.ms": "1000",
        # After a crash the controller admits the broker again only when its old session has expired: 9 s by default.
        "broker.session.timeout.ms": "3000",
        "broker.heartbeat.interval.ms": "500",
        # Kafka's default is 128 MiB of a heap that is small here.
        "log.cleaner.dedupe.buffer.size": str(32 * _MIB),
        **overrides,
    }


def render_properties(properties: Mapping[str, str]) -> str:
    """Return a Java properties file (ASCII, one `name=value` per line)."""
    return "".join(f"{_escape(name, key=True)}={_escape(value)}\n" for name, value in properties.items())


def _escape(text: str, *, key: bool = False) -> str:
    escaped: list[str] = []
    for position, character in enumerate(text):
        if character == "\\" or (key and character in ":=#! ") or (character == " " and position == 0):
            escaped.append("\\" + character)
        elif character in "\t\n\r\f":
            escaped.append({"\t": "\\t", "\n": "\\n", "\r": "\\r", "\f": "\\f"}[character])
        elif character.isascii() and character.isprintable():
            escaped.append(character)
        else:
            units = character.encode("utf-16-be")
            escaped.extend(f"\\u{units[at]:02x}{units[at + 1]:02x}" for at in range(0, len(units), 2))
    return "".join(escaped)


# The supervisor appends the console to the broker's log, so it contains the JVM's own output and stack traces too.
LOG4J2_PROPERTIES = """\
status=WARN
shutdownHook=disable
appender.console.type=Console
appender.console.name=console
appender.console.layout.type=PatternLayout
appender.console.layout.pattern=%d{yyyy-MM-dd'T'HH:mm:ss.SSSXXX} %-5p [%t] %c{1}: %m%n
rootLogger.level=INFO
rootLogger.appenderRef.console.ref=console
# 300 lines of settings at each start, and one line for each producer's first transaction.
logger.config.name=org.apache.kafka.common.config.AbstractConfig
logger.config.level=WARN
"""
