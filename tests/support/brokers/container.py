"""Kafka in the Docker engine, configured like the embedded broker."""

import time
from pathlib import PurePosixPath
from typing import Self

from docker.errors import DockerException  # type: ignore[import-untyped]  # it has no types
from testcontainers.core.config import testcontainers_config
from testcontainers.core.container import DockerContainer, Reaper

from halfway.embedded import KAFKA_VERSION
from halfway.embedded.broker import CLIENT_LISTENER, CONTROLLER_LISTENER, Node, render_properties, server_properties
from halfway.embedded.process import cluster_id_query

IMAGE = f"apache/kafka:{KAFKA_VERSION}"
PORT = 9092
CONTROLLER_PORT = 9093
SETTINGS = PurePosixPath("/tmp/halfway.properties")  # noqa: S108  inside the container
DATA = PurePosixPath("/tmp/halfway-data")  # noqa: S108  inside the container
# The clients' port is known only when the container runs, so it waits for the settings with it.
RUN = f"""
set -e
until grep -q '^# complete' {SETTINGS} 2>/dev/null; do sleep 0.1; done
cd /opt/kafka/bin
./kafka-storage.sh format --cluster-id="$(./kafka-storage.sh random-uuid)" --config={SETTINGS}
exec ./kafka-server-start.sh {SETTINGS}
"""


class KafkaContainer(DockerContainer):
    """The image `apache/kafka`. start() returns when it answers, or raises TimeoutError after `timeout_s` seconds."""

    def __init__(self, image: str = IMAGE, *, timeout_s: float = 90) -> None:
        super().__init__(image)
        self._timeout_s = timeout_s
        self.with_exposed_ports(PORT)
        self.with_command(["sh", "-c", RUN])

    @property
    def bootstrap_servers(self) -> str:
        return f"{self.get_container_host_ip()}:{self.get_exposed_port(PORT)}"

    def start(self) -> Self:
        super().start()
        try:
            self._configure_broker()
        except BaseException:
            self.stop()
            raise
        return self

    def _configure_broker(self) -> None:
        settings = container_properties(self.bootstrap_servers)
        self.copy_into_container(f"{settings}# complete\n".encode("ascii"), str(SETTINGS))
        deadline = time.monotonic() + self._timeout_s
        with cluster_id_query(self.bootstrap_servers) as answer:
            while answer() is None:
                if time.monotonic() > deadline:
                    out, err = self.get_logs()
                    log = (out + err).decode(errors="replace")[-4000:]
                    raise TimeoutError(f"Kafka in Docker does not answer on {self.bootstrap_servers}. Its log:\n{log}")


def reap_if_possible() -> None:
    """Let testcontainers' reaper remove containers of a killed run; continue without it if it is not available."""
    if testcontainers_config.ryuk_disabled:
        return
    try:
        Reaper.get_instance()
    except DockerException:
        testcontainers_config.ryuk_disabled = True


def container_properties(bootstrap_servers: str) -> str:
    """Return `server.properties` for a broker in a container that clients reach by `bootstrap_servers`."""
    return render_properties(
        server_properties(Node.single(port=PORT, controller_port=CONTROLLER_PORT))
        | {
            "listeners": f"{CLIENT_LISTENER}://0.0.0.0:{PORT},{CONTROLLER_LISTENER}://127.0.0.1:{CONTROLLER_PORT}",
            "advertised.listeners": f"{CLIENT_LISTENER}://{bootstrap_servers}",
            "log.dirs": str(DATA),
        }
    )
