"""Ask a broker for its cluster, as a client does."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from confluent_kafka import KafkaException
from confluent_kafka.admin import AdminClient

_ASK_TIMEOUT_S = 0.5


@contextmanager
def ask(bootstrap_servers: str) -> Iterator[Callable[[], str | None]]:
    """Give a function that asks for the cluster's metadata: its id once a broker there serves clients, else None.

    A broker is among the metadata only when its controller has let it in; each call waits half a second for it at most.
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
            metadata = client.list_topics(timeout=_ASK_TIMEOUT_S)
        except KafkaException:
            return None
        return str(metadata.cluster_id) if metadata.brokers else None

    yield answer
