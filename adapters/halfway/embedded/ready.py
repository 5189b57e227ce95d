"""Checks whether a broker is ready, as a client does."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from confluent_kafka import KafkaException
from confluent_kafka.admin import AdminClient

_REQUEST_S = 0.5


@contextmanager
def cluster_id_query(bootstrap_servers: str) -> Iterator[Callable[[], str | None]]:
    """Yield a function that returns the cluster's id once a broker there serves clients, else None.

    It requests metadata, which contain a broker once the controller has admitted it. Each call takes at most half a
    second.
    """
    client = AdminClient(
        {
            "bootstrap.servers": bootstrap_servers,
            "log_level": 0,
            "reconnect.backoff.ms": 20,
            "reconnect.backoff.max.ms": 100,
        },
    )

    def answer() -> str | None:
        try:
            metadata = client.list_topics(timeout=_REQUEST_S)
        except KafkaException:
            return None
        return str(metadata.cluster_id) if metadata.brokers else None

    yield answer
