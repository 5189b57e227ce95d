"""A real Kafka broker in its own directory, which ends with the process that started it."""

import contextlib
import fcntl
import os
import shutil
import subprocess
import tempfile
import time
import uuid
import weakref
from base64 import urlsafe_b64encode
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Self

from halfway.embedded.errors import (
    BrokerExitedError,
    BrokerLog,
    BrokerNotReadyError,
    DataInUseError,
    FormatError,
    NotRunningError,
    PortTakenError,
    writing_to,
)
from halfway.embedded.java import KAFKA_VERSION, Progress, find_java, resolve_jars
from halfway.embedded.process import SupervisedProcess, cluster_id_query
from halfway.embedded.properties import (
    DATA_FOLDER,
    HOST,
    LOG4J2_PROPERTIES,
    Node,
    bind_failure,
    pick_port,
    render_properties,
    require_free,
    require_unreserved,
    server_properties,
)

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

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
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
