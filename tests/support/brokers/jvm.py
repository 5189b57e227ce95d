"""Options for the JVMs of test brokers: they live for seconds, so the cost of their start matters.

A class archive (class data sharing) holds Kafka's classes as the JVM has them once they are loaded, those for clients'
requests too: a start from it takes half the CPU time. The first run on a machine creates it, beside the list of Kafka's
jars in the cache folder.
"""

import hashlib
import os
import signal
import time
from functools import cache
from pathlib import Path

import pytest
from confluent_kafka import Consumer, Producer
from confluent_kafka.admin import AdminClient, NewTopic  # type: ignore[attr-defined]  # it is there

from halfway.embedded import KAFKA_VERSION, SHORT_LIVED, EmbeddedConfig, EmbeddedKafka, find_java, resolve_jars
from halfway.embedded.java import user_cache_dir
from tests.support.waiting import only_worker

STARTED_WITHIN_S = 300.0
"""Several may start at once on a slow machine; halfway itself waits less."""
STEADY = {
    # On a slow machine it is silent for seconds, and its controller must not fence it.
    "broker.session.timeout.ms": "30000",
    # Idle it takes half the CPU time then.
    "metadata.max.idle.interval.ms": "5000",
    "num.io.threads": "4",
    "num.network.threads": "2",
}
"""For a broker that is not killed."""
MORTAL = {"broker.session.timeout.ms": "10000"}
"""For one that is killed: its controller admits it again only when that time is over."""


@cache
def short_lived() -> tuple[str, ...]:
    """Return the options, with the archive if this Java can create one."""
    archive = _archive()
    return (*SHORT_LIVED, f"-XX:SharedArchiveFile={archive}") if archive.stat().st_size else SHORT_LIVED


@pytest.fixture
def short_lived_brokers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make every JVM that a test starts use these options, for brokers that a command or a server starts.

    They use the same Kafka jars as this process, also if the test has another home (as with `pytester`).
    """
    monkeypatch.setenv("XDG_CACHE_HOME", str(user_cache_dir().parent))
    monkeypatch.setenv("JDK_JAVA_OPTIONS", " ".join(f'"{option}"' for option in short_lived()))


def _archive() -> Path:
    """Return the archive for this Java and these jars; the file is empty if this Java cannot create one."""
    made_of = [find_java().path.resolve(), *resolve_jars(KAFKA_VERSION)]
    version = hashlib.sha256("\n".join(f"{path} {path.stat().st_mtime_ns}" for path in made_of).encode()).hexdigest()
    archive = user_cache_dir() / f"kafka-{KAFKA_VERSION}-used-{version[:16]}.jsa"
    with only_worker(archive.with_suffix(".lock")):
        if not archive.exists():
            unfinished = archive.with_suffix(f".{os.getpid()}")
            options = (*SHORT_LIVED, f"-XX:ArchiveClassesAtExit={unfinished}")
            with EmbeddedKafka(EmbeddedConfig(jvm_options=options, startup_timeout_s=STARTED_WITHIN_S)) as kafka:
                _use(kafka.bootstrap_servers)
                os.kill(kafka.pid, signal.SIGTERM)  # it writes the archive when it shuts down, however long that takes
                while kafka.running:
                    time.sleep(0.1)
            unfinished.touch()
            unfinished.replace(archive)
    return archive


def _use(bootstrap_servers: str) -> None:
    """Make a broker load its classes for topics, Kafka transactions and consumer groups."""
    given: dict[str, str | int | float | bool] = {"bootstrap.servers": bootstrap_servers, "log_level": 0}
    admin = AdminClient(given)
    (created,) = admin.create_topics([NewTopic("used", 1, 1)]).values()
    created.result(STARTED_WITHIN_S)
    producer = Producer({**given, "transactional.id": "user"})
    producer.init_transactions(STARTED_WITHIN_S)
    for end in (producer.commit_transaction, producer.abort_transaction):
        producer.begin_transaction()
        producer.produce("used", b"value")
        producer.flush(STARTED_WITHIN_S)
        end(STARTED_WITHIN_S)
    consumer = Consumer({**given, "group.id": "users", "auto.offset.reset": "earliest", "enable.auto.commit": False})
    consumer.subscribe(["used"])
    while (message := consumer.poll(STARTED_WITHIN_S)) is not None and message.error() is not None:
        time.sleep(0.1)
    consumer.commit(asynchronous=False)
    consumer.close()
