"""The embedded broker, with the real Kafka."""

import os
import re
import signal
import socket
import uuid
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from confluent_kafka import Consumer, KafkaException, Producer, TopicPartition
from confluent_kafka.admin import AdminClient
from confluent_kafka.cimpl import NewTopic

from halfway.embedded import (
    BrokerExitedError,
    BrokerNotReadyError,
    DataInUseError,
    EmbeddedConfig,
    EmbeddedKafka,
    EmbeddedKafkaError,
    FormatError,
    NotRunningError,
    PortTakenError,
)
from halfway.embedded.broker import Node, pick_port
from tests.support.brokers.jvm import MORTAL, STARTED_WITHIN_S, short_lived
from tests.support.processes import alive, eventually

TIMEOUT_S = 90


def config(*, properties: Mapping[str, str] | None = None, **fields: Any) -> EmbeddedConfig:
    return EmbeddedConfig(
        jvm_options=short_lived(),
        properties={**MORTAL, **(properties or {})},
        startup_timeout_s=STARTED_WITHIN_S,
        **fields,
    )


def create_topic(servers: str) -> str:
    name = f"topic-{uuid.uuid4()}"
    admin = AdminClient({"bootstrap.servers": servers})
    admin.create_topics([NewTopic(name, 1, 1)])[name].result(TIMEOUT_S)
    return name


def produce(servers: str, topic: str, value: bytes) -> None:
    errors: list[object] = []
    producer = Producer({"bootstrap.servers": servers, "message.timeout.ms": TIMEOUT_S * 1000})
    producer.produce(topic, value, on_delivery=lambda error, _message: errors.append(error))
    assert producer.flush(TIMEOUT_S) == 0
    assert errors == [None]


def consume(servers: str, topic: str) -> bytes | None:
    consumer = Consumer({"bootstrap.servers": servers, "group.id": f"group-{uuid.uuid4()}"})
    try:
        consumer.assign([TopicPartition(topic, 0, 0)])
        message = consumer.poll(TIMEOUT_S)
        assert message is not None
        assert message.error() is None
        return message.value()
    finally:
        consumer.close()


def cluster_id(servers: str, timeout_s: float = TIMEOUT_S) -> str:
    return str(AdminClient({"bootstrap.servers": servers, "log_level": 0}).list_topics(timeout=timeout_s).cluster_id)


@pytest.fixture(scope="module")
def told() -> list[str]:
    """Return what the broker tells of its progress."""
    return []


@pytest.fixture(scope="module")
def taken() -> Iterator[int]:
    """Return a port that another process has got."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server.getsockname()[1]


@pytest.fixture(scope="module")
def broker(told: list[str], taken: int, tmp_path_factory: pytest.TempPathFactory) -> Iterator[EmbeddedKafka]:
    """Return a running broker; the port that it picked first was lost at the last moment, its folder has any name."""
    with pytest.MonkeyPatch.context() as patch:
        nodes = iter([Node.single(port=taken, controller_port=pick_port())])
        pick = EmbeddedKafka._pick_node
        patch.setattr(EmbeddedKafka, "_pick_node", lambda kafka: next(nodes, None) or pick(kafka))
        folder = tmp_path_factory.mktemp("given") / "a, b: é#=%20"
        with EmbeddedKafka(config(progress=told.append, data_dir=folder)) as running:
            yield running


@pytest.fixture(scope="module")
def topic(broker: EmbeddedKafka) -> str:
    """Create a topic with one message: `first`."""
    name = create_topic(broker.bootstrap_servers)
    produce(broker.bootstrap_servers, name, b"first")
    return name


@pytest.mark.xdist_group("embedded")
class TestARunningBroker:
    def test_messages_come_back(self, broker: EmbeddedKafka, topic: str) -> None:
        assert consume(broker.bootstrap_servers, topic) == b"first"

    def test_transactions_and_groups_work_at_once(self, broker: EmbeddedKafka, topic: str) -> None:
        producer = Producer({"bootstrap.servers": broker.bootstrap_servers, "transactional.id": str(uuid.uuid4())})
        producer.init_transactions(TIMEOUT_S)
        producer.begin_transaction()
        producer.produce(topic, b"second")
        producer.commit_transaction(TIMEOUT_S)
        consumer = Consumer({"bootstrap.servers": broker.bootstrap_servers, "group.id": str(uuid.uuid4())})
        consumer.commit(offsets=[TopicPartition(topic, 0, 1)], asynchronous=False)
        assert consumer.committed([TopicPartition(topic, 0)], TIMEOUT_S)[0].offset == 1
        consumer.close()

    def test_topics_are_not_made_by_asking_for_them(self, broker: EmbeddedKafka) -> None:
        name = str(uuid.uuid4())
        admin = AdminClient({"bootstrap.servers": broker.bootstrap_servers})
        admin.list_topics(name, timeout=TIMEOUT_S)
        assert name not in admin.list_topics(timeout=TIMEOUT_S).topics

    def test_it_is_one_java_process_on_the_loopback_interface(self, broker: EmbeddedKafka) -> None:
        assert broker.bootstrap_servers.startswith("127.0.0.1:")
        assert "java" in Path(f"/proc/{broker.pid}/cmdline").read_text(encoding="utf-8")
        assert broker.running

    def test_a_port_lost_to_another_process_at_the_last_moment_is_picked_anew(
        self, broker: EmbeddedKafka, taken: int
    ) -> None:
        assert broker.bootstrap_servers != f"127.0.0.1:{taken}"
        assert cluster_id(broker.bootstrap_servers)

    def test_progress_is_told_and_java_is_named(self, broker: EmbeddedKafka, told: list[str]) -> None:
        assert any("Starting Kafka 4.3.1 on Java" in line for line in told)
        assert broker.bootstrap_servers in told[-1]

    def test_its_log_is_kept_in_its_directory(self, broker: EmbeddedKafka) -> None:
        assert broker.log_path.parent == broker.data_dir
        # The log line appears a moment after the answer.
        assert eventually(lambda: "Kafka Server started" in broker.log_path.read_text(encoding="utf-8"))

    def test_starting_it_again_changes_nothing(self, broker: EmbeddedKafka) -> None:
        pid = broker.pid
        assert broker.start() == broker.bootstrap_servers
        assert broker.pid == pid

    def test_a_second_one_in_its_directory_is_refused(self, broker: EmbeddedKafka) -> None:
        with pytest.raises(DataInUseError, match=re.escape(str(broker.data_dir))):
            EmbeddedKafka(config(data_dir=broker.data_dir)).start()
        assert broker.running

    def test_a_second_one_on_its_port_is_refused_by_the_port_s_number(self, broker: EmbeddedKafka) -> None:
        port = int(broker.bootstrap_servers.rsplit(":", 1)[1])
        with (
            pytest.raises(PortTakenError, match=f"Port {port} on 127.0.0.1 is taken"),
            EmbeddedKafka(config(port=port)),
        ):
            pass

    def test_paused_it_answers_nothing_and_resumed_it_goes_on(self, broker: EmbeddedKafka) -> None:
        broker.pause()
        with pytest.raises(KafkaException):
            cluster_id(broker.bootstrap_servers, 1)
        assert broker.running
        broker.resume()
        assert cluster_id(broker.bootstrap_servers)

    def test_it_starts_again_after_a_crash(self, broker: EmbeddedKafka, topic: str) -> None:
        os.kill(broker.pid, signal.SIGKILL)
        assert eventually(lambda: not broker.running)
        broker.start()
        assert consume(broker.bootstrap_servers, topic) == b"first"

    def test_stopped_while_it_is_paused_it_ends_and_starts_again_with_its_data_on_its_port(
        self, broker: EmbeddedKafka, topic: str
    ) -> None:
        servers, pid = broker.bootstrap_servers, broker.pid
        broker.pause()
        broker.stop()
        assert not alive(pid)
        assert not broker.running
        assert broker.start() == servers
        assert broker.pid != pid
        assert consume(servers, topic) == b"first"


def test_stopped_it_leaves_no_process_and_closed_no_directory() -> None:
    kafka = EmbeddedKafka(config())
    kafka.start()
    assert kafka._process is not None
    processes = (kafka.pid, kafka._process._supervisor.pid)
    directory = kafka.data_dir
    kafka.stop()
    assert [pid for pid in processes if alive(pid)] == []
    assert directory.exists()
    with pytest.raises(NotRunningError):
        _ = kafka.pid
    kafka.close()
    assert not directory.exists()


@pytest.mark.parametrize(
    "properties,error,says",
    [
        ({"log.retention.ms": "soon"}, FormatError, "Invalid value soon"),
        ({"authorizer.class.name": "no.such.Class"}, BrokerExitedError, "no.such.Class"),
    ],
)
def test_a_broker_that_does_not_start_says_why_and_where_its_log_is(
    properties: dict[str, str],
    error: type[EmbeddedKafkaError],
    says: str,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    with pytest.raises(error, match=says) as raised, EmbeddedKafka(config(properties=properties)):
        pass
    (log_path,) = tmp_path.glob("*/broker.log")  # kept though its directory is a temporary one
    assert str(log_path) in str(raised.value)


def test_a_broker_that_does_not_answer_in_time_is_ended(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    for timeout_s in (0, 0.8):  # while its directory is formatted, and after
        kafka = EmbeddedKafka(EmbeddedConfig(startup_timeout_s=timeout_s))
        with pytest.raises(BrokerNotReadyError, match=rf"within {timeout_s} s.*broker\.log"):
            kafka.start()
        assert not kafka.running
