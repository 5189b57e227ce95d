"""A cluster of three small real brokers, each a process that can be killed, stopped, frozen and started again."""

from __future__ import annotations

import os
import subprocess
import time
import uuid
from base64 import urlsafe_b64encode
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final, Self

from confluent_kafka import KafkaException
from confluent_kafka.admin import AdminClient, NewTopic  # type: ignore[attr-defined]  # they are there

from halfway.embedded import KAFKA_VERSION, SHORT_LIVED, find_java, resolve_jars
from halfway.embedded.ports import HOST, pick_port
from halfway.embedded.process import SupervisedProcess
from halfway.embedded.properties import LOG4J2_PROPERTIES, Listener, Node, render_properties, server_properties

NODES: Final = (1, 2, 3)
DIRECT: Final = "PLAINTEXT"
"""The listener without a proxy: for the brokers themselves, for the one who makes topics, and for the checker."""
_READY_WITHIN_S: Final = 120.0
_STOP_WITHIN_S: Final = 30.0
_LOOK_AGAIN_S: Final = 0.1
_TRIES: Final = 5
_OURS: Final = {
    # A dead client's group membership and a dead broker's leadership are to be found out within seconds.
    "group.min.session.timeout.ms": "1000",
    "replica.lag.time.max.ms": "5000",
    # Threads cost memory: three brokers and the coordinators share a small machine.
    "num.network.threads": "2",
    "num.io.threads": "4",
    "log.cleaner.threads": "1",
    "background.threads": "2",
}


class Broker:
    """One broker, which is its cluster's controller too in its turn."""

    def __init__(self, node: Node, directory: Path, java: Sequence[str]) -> None:
        self.node = node
        self._directory = directory
        self._java = java
        self._process: SupervisedProcess | None = None
        self.paused = False

    @property
    def name(self) -> str:
        return f"broker-{self.node.node_id}"

    @property
    def address(self) -> str:
        return f"{HOST}:{self.node.listeners[DIRECT].port}"

    @property
    def running(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def format(self, cluster_id: str) -> None:
        self._directory.mkdir(parents=True)
        properties = render_properties(server_properties(self.node, _OURS))
        (self._directory / "server.properties").write_text(properties, encoding="ascii")
        (self._directory / "log4j2.properties").write_text(LOG4J2_PROPERTIES, encoding="ascii")
        command = ["kafka.tools.StorageTool", "format", f"--cluster-id={cluster_id}", "--config=server.properties"]
        subprocess.run([*self._java, *command], cwd=self._directory, check=True, capture_output=True, timeout=120)

    def launch(self) -> None:
        """Start the process and return at once."""
        assert not self.running
        self._process = SupervisedProcess(
            [*self._java, "kafka.Kafka", "server.properties"],
            cwd=self._directory,
            log_path=self._directory / "broker.log",
        )

    def stop(self) -> None:
        """End it in order (SIGTERM)."""
        assert self._process is not None
        self._process.terminate()
        if self._process.wait(_STOP_WITHIN_S) is None:
            self._process.kill()

    def kill(self) -> None:
        """End it as a crash does (SIGKILL)."""
        self.paused = False
        if self._process is not None:
            self._process.kill()

    def pause(self) -> None:
        """Freeze it (SIGSTOP)."""
        assert self._process is not None
        self._process.pause()
        self.paused = True

    def resume(self) -> None:
        """Let it go on (SIGCONT)."""
        assert self._process is not None
        self._process.resume()
        self.paused = False


class BrokerCluster:
    """Three brokers; `listeners` are further ports of each broker by name, as `{node: Listener}`."""

    def __init__(self, directory: Path, listeners: Mapping[str, Mapping[int, Listener]] | None = None) -> None:
        taken: set[int] = {one.port for ports in (listeners or {}).values() for one in ports.values()}

        def free() -> int:
            taken.add(port := pick_port(taken))
            return port

        voters = {node: free() for node in NODES}
        java = _java_command()
        self.brokers = tuple(
            Broker(
                Node(
                    node_id=node,
                    voters=voters,
                    listeners={
                        DIRECT: Listener(port=free()),
                        **{name: ports[node] for name, ports in (listeners or {}).items()},
                    },
                ),
                directory / f"broker-{node}",
                java,
            )
            for node in NODES
        )
        self._admin: AdminClient | None = None

    def __enter__(self) -> Self:
        try:
            cluster_id = urlsafe_b64encode(uuid.uuid4().bytes).decode("ascii").rstrip("=")
            for broker in self.brokers:
                broker.format(cluster_id)
                broker.launch()
            self.wait_until_ready()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def bootstrap_servers(self) -> str:
        return ",".join(broker.address for broker in self.brokers)

    @property
    def admin(self) -> AdminClient:
        if self._admin is None:
            self._admin = AdminClient({"bootstrap.servers": self.bootstrap_servers, "log_level": 0})
        return self._admin

    def wait_until_ready(self, within_s: float = _READY_WITHIN_S) -> None:
        """Wait until all brokers are in the cluster and every replica is in sync."""
        deadline = time.monotonic() + within_s
        while (lacking := self._lacking()) is not None:
            if time.monotonic() > deadline:
                raise AssertionError(f"the cluster is not whole after {within_s:g} s: {lacking}")
            time.sleep(_LOOK_AGAIN_S)

    def _lacking(self) -> str | None:
        try:
            metadata = self.admin.list_topics(timeout=1)
        except KafkaException as error:
            return str(error)
        if len(metadata.brokers) < len(self.brokers):
            return f"brokers {sorted(metadata.brokers)}"
        for name, topic in metadata.topics.items():
            for number, partition in topic.partitions.items():
                if len(partition.isrs) < len(partition.replicas) or partition.leader < 0:
                    return f"{name}[{number}]: in sync {partition.isrs} of {partition.replicas}"
        return None

    def make_topics(self, *names: str, partitions: int) -> None:
        """Make them; asked again where the client lost a broker that it had just found (on a busy machine)."""
        new = [NewTopic(name, num_partitions=partitions, replication_factor=len(self.brokers)) for name in names]
        error: KafkaException | None = None
        for _ in range(_TRIES):
            for done in self.admin.create_topics(new, operation_timeout=30).values():
                try:
                    done.result(60)
                except KafkaException as failed:  # also where it is there already
                    error = failed
            if set(names) <= set(self.admin.list_topics(timeout=30).topics):
                return
            time.sleep(_LOOK_AGAIN_S)
        raise AssertionError(f"the topics {names} are not there") from error

    def close(self) -> None:
        for broker in self.brokers:
            if broker.running:
                broker.kill()


def _java_command() -> list[str]:
    return [
        str(find_java().path),
        *("-Xmx256m", "-XX:+UseSerialGC", "-Xshare:auto", "-XX:+ExitOnOutOfMemoryError", "-Djava.awt.headless=true"),
        *("-Dlog4j2.configurationFile=log4j2.properties", *SHORT_LIVED),
        *("-cp", os.pathsep.join(str(jar) for jar in resolve_jars(KAFKA_VERSION))),
    ]
