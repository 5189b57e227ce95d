"""A real Kafka broker in its own directory, which ends with the process that started it."""

from __future__ import annotations

import contextlib
import fcntl
import os
import random
import re
import shutil
import socket
import subprocess
import tempfile
import time
import uuid
import weakref
from base64 import urlsafe_b64encode
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self

from halfway.embedded.errors import (
    BrokerExitedError,
    BrokerLog,
    BrokerNotReadyError,
    DataInUseError,
    FormatError,
    NotRunningError,
    PortTakenError,
    ReservedPropertyError,
    writing_to,
)
from halfway.embedded.java import KAFKA_VERSION, Progress, find_java, resolve_jars
from halfway.embedded.process import SupervisedProcess, cluster_id_query

HOST = "127.0.0.1"
TRIES = 200
LOWEST = 15_000
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
    def single(cls, *, port: int, controller_port: int) -> Node:
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


# For brokers that live for seconds: starting takes a third less CPU, but the code runs slower afterwards.
SHORT_LIVED: tuple[str, ...] = ("-XX:TieredStopAtLevel=1",)
LOG_FILE = "broker.log"
_PORT_ATTEMPTS = 5
_PATIENCE_S = 2
_RETRY_S = 0.05
_STOP_TIMEOUT_S = 20
_DATA_REMEDY = "give another folder as `data_dir` (halfway dev: --data-dir)"


@dataclass(frozen=True, kw_only=True)
class EmbeddedConfig:
    """The configuration of an embedded broker.

    data_dir: the broker's directory, kept for the next start; None for a temporary one, which close() deletes.
    keep_data: keep a temporary directory too.
    port: the port for clients, on 127.0.0.1; 0 for a free one. The controller always gets a free one.
    heap: the maximum size of Java's heap, as for -Xmx.
    properties: broker properties, which override our own.
    jvm_options: more options for Java, such as SHORT_LIVED.
    startup_timeout_s: seconds until the first answer, without the time for fetching the jars.
    progress: is called with a line of text at each step.
    """

    data_dir: Path | None = None
    keep_data: bool = False
    port: int = 0
    heap: str = "512m"
    properties: Mapping[str, str] = field(default_factory=dict)
    jvm_options: Sequence[str] = ()
    startup_timeout_s: float = 300
    kafka_version: str = KAFKA_VERSION
    progress: Progress | None = None


class EmbeddedKafka:
    """A Kafka broker of one node: `with EmbeddedKafka() as kafka: kafka.bootstrap_servers`.

    start() runs it and returns when it answers. stop() and kill() end it and keep its data and its port, so that the
    next start() continues with them. close(), which the `with` block calls, ends it and deletes a temporary directory.
    When this process dies, the broker is killed and the temporary directory is deleted.
    """

    def __init__(self, config: EmbeddedConfig | None = None) -> None:
        self._config = config or EmbeddedConfig()
        require_unreserved(self._config.properties)
        self._progress = self._config.progress or (lambda _line: None)
        self._process: SupervisedProcess | None = None
        self._paused = False
        self._node: Node | None = None
        self._directory: Path | None = None
        self._delete_directory: weakref.finalize[..., EmbeddedKafka] | None = None

    def __enter__(self) -> Self:
        try:
            self.start()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def bootstrap_servers(self) -> str:
        """`127.0.0.1:port`; NotRunningError before the first start()."""
        if self._node is None:
            raise NotRunningError
        return f"{HOST}:{self._node.ports[0]}"

    @property
    def pid(self) -> int:
        """The id of the Java process."""
        return self._running().pid

    @property
    def running(self) -> bool:
        """Whether the Java process lives, paused or not."""
        return self._process is not None and self._process.poll() is None

    @property
    def data_dir(self) -> Path:
        """The directory of the broker: its settings, its log and, in `data`, its topics."""
        if self._directory is None:
            raise NotRunningError
        return self._directory

    @property
    def log_path(self) -> Path:
        """The broker's log, appended to at each start."""
        return self.data_dir / LOG_FILE

    def start(self) -> str:
        """Run the broker, wait until it answers, and return its bootstrap servers; return at once if it is running.

        After stop(), kill() or a crash it has the same data and port. Raises a subclass of EmbeddedKafkaError.
        """
        if self.running:
            return self.bootstrap_servers
        java = find_java()
        jars = resolve_jars(self._config.kafka_version, progress=self._config.progress)
        self._make_directory()
        base = [
            str(java.path),
            *("-Xmx" + self._config.heap, "-XX:+UseG1GC", "-Xshare:auto", "-XX:+ExitOnOutOfMemoryError"),
            *("-Djava.awt.headless=true", "-Dlog4j2.configurationFile=log4j2.properties"),
            *self._config.jvm_options,
            *("-cp", os.pathsep.join(str(jar) for jar in jars)),
        ]
        self._progress(f"Starting Kafka {self._config.kafka_version} on Java {java.version}")
        started = time.monotonic()
        self._run_on_free_ports(base)
        self._progress(f"Kafka answers on {self.bootstrap_servers} after {time.monotonic() - started:.1f} s")
        return self.bootstrap_servers

    def stop(self) -> None:
        """Shut the broker down (SIGTERM), or kill it (SIGKILL) after 20 s. Do nothing if it has ended."""
        process = self._process
        if process is None:
            return
        if self._paused:
            process.resume()
        process.terminate()
        if process.wait(_STOP_TIMEOUT_S) is None:
            process.kill()
        self._process, self._paused = None, False

    def kill(self) -> None:
        """Kill the broker at once (SIGKILL), as a crash does. Do nothing if it has ended."""
        if self._process is not None:
            self._process.kill()
        self._process, self._paused = None, False

    def pause(self) -> None:
        """Pause the broker (SIGSTOP): it keeps its connections and does not answer."""
        self._running().pause()
        self._paused = True

    def resume(self) -> None:
        """Continue a paused broker (SIGCONT)."""
        self._running().resume()
        self._paused = False

    def close(self) -> None:
        """End the broker, and delete its directory if it is a temporary one."""
        if self._delete_directory is not None:
            self.kill()  # a shutdown is only needed for data that is kept
            self._delete_directory()
            self._delete_directory, self._directory, self._node = None, None, None
        else:
            self.stop()

    def _running(self) -> SupervisedProcess:
        if self._process is None or self._process.poll() is not None:
            raise NotRunningError
        return self._process

    def _make_directory(self) -> None:
        if self._directory is None and self._config.data_dir is not None:
            with writing_to(self._config.data_dir, _DATA_REMEDY):
                self._config.data_dir.mkdir(parents=True, exist_ok=True)
            self._directory = self._config.data_dir.absolute()
        elif self._directory is None:
            with writing_to(Path(tempfile.gettempdir()), "set TMPDIR to a folder that you may write to"):
                self._directory = Path(tempfile.mkdtemp(prefix="halfway-kafka-"))
            if not self._config.keep_data:
                self._delete_directory = weakref.finalize(self, _delete_directory, self._directory, os.getpid())

    def _run_on_free_ports(self, base: Sequence[str]) -> None:
        """Run the broker; if another process took a port that we picked, pick again."""
        first_start = self._node is None
        for attempt in range(1, _PORT_ATTEMPTS + 1):
            node = self._pick_node()
            try:
                self._run(base, node)
            except PortTakenError as error:
                was_picked = error.port != node.ports[0] or (first_start and self._config.port == 0)
                if not was_picked or attempt == _PORT_ATTEMPTS:
                    raise
            else:
                self._node = node
                return

    def _pick_node(self) -> Node:
        """Return the node: with the port that clients know, at first a free one, and a free controller port."""
        port = self._config.port if self._node is None else self._node.ports[0]
        if port:
            require_free(port)
        else:
            port = pick_port()
        return Node.single(port=port, controller_port=pick_port({port}))

    def _run(self, base: Sequence[str], node: Node) -> None:
        directory = self.data_dir
        deadline = time.monotonic() + self._config.startup_timeout_s
        log = BrokerLog(self.log_path)
        log.mark()
        with _exclusive_use(directory) as lock:
            properties = render_properties(server_properties(node, self._config.properties))
            (directory / "server.properties").write_text(properties, encoding="ascii")
            (directory / "log4j2.properties").write_text(LOG4J2_PROPERTIES, encoding="ascii")
            cluster_id = self._cluster_id() or self._format(base, log, deadline)
            process = SupervisedProcess(
                [*base, "kafka.Kafka", "server.properties"],
                cwd=directory,
                log_path=log.path,
                doomed=directory if self._delete_directory is not None else None,
                hold=lock,
            )
        try:
            self._wait_until_ready(process, node, cluster_id, log, deadline)
        except BaseException:
            process.kill()
            raise
        self._process, self._paused = process, False

    def _wait_until_ready(
        self, process: SupervisedProcess, node: Node, cluster_id: str, log: BrokerLog, deadline: float
    ) -> None:
        with cluster_id_query(f"{HOST}:{node.ports[0]}") as answer:
            while (found_id := answer()) != cluster_id:
                if (returncode := process.poll()) is not None:
                    if (port := bind_failure(log.text())) is not None:
                        raise PortTakenError(port or node.ports[0])
                    self._keep_log()
                    raise BrokerExitedError(returncode, log)
                if found_id is not None:  # a broker of another cluster took the port just before ours
                    raise PortTakenError(node.ports[0])
                if time.monotonic() > deadline:
                    self._keep_log()
                    raise BrokerNotReadyError(self._config.startup_timeout_s, log)

    def _cluster_id(self) -> str | None:
        """Return the cluster's id if the data directory is formatted, else None."""
        meta = self.data_dir / DATA_FOLDER / "meta.properties"
        with contextlib.suppress(FileNotFoundError):
            for line in meta.read_text(encoding="ascii").splitlines():
                name, _, value = line.partition("=")
                if name == "cluster.id":
                    return value.strip()
        return None

    def _format(self, base: Sequence[str], log: BrokerLog, deadline: float) -> str:
        """Format the data directory and return the new cluster's id."""
        cluster_id = urlsafe_b64encode(uuid.uuid4().bytes).decode("ascii").rstrip("=")
        # The value is joined to its option, because it may begin with a dash.
        options = [f"--cluster-id={cluster_id}", "--config=server.properties"]
        with log.path.open("ab") as output:
            try:
                formatted = subprocess.run(  # noqa: S603  our own command
                    [*base, "kafka.tools.StorageTool", "format", *options],
                    cwd=self.data_dir,
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    timeout=max(0.0, deadline - time.monotonic()),
                    check=False,
                )
            except subprocess.TimeoutExpired:
                self._keep_log()
                raise BrokerNotReadyError(self._config.startup_timeout_s, log) from None
        if formatted.returncode:
            self._keep_log()
            raise FormatError(formatted.returncode, log)
        return cluster_id

    def _keep_log(self) -> None:
        """Keep the directory after all, because an error is about to name the log in it."""
        if self._delete_directory is not None:
            self._delete_directory.detach()
            self._delete_directory = None


@contextlib.contextmanager
def _exclusive_use(directory: Path) -> Iterator[int]:
    """Lock a directory and yield the file descriptor; a process that inherits it keeps the lock.

    Kafka's own lock comes too late, when a second broker has already written to the log of the metadata. Raises
    DataInUseError, but not at once: the broker may be one that is just being killed.
    """
    with writing_to(directory, _DATA_REMEDY):
        lock = os.open(directory / "lock", os.O_RDWR | os.O_CREAT, 0o644)
    try:
        deadline = time.monotonic() + _PATIENCE_S
        while True:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise DataInUseError(directory) from None
                time.sleep(_RETRY_S)
        yield lock
    finally:
        os.close(lock)


def _delete_directory(directory: Path, owner_pid: int) -> None:
    if os.getpid() == owner_pid:  # not in a process that we forked
        shutil.rmtree(directory, ignore_errors=True)
