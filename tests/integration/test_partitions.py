"""The positions of a reader, and the time of its last progress, on a real broker."""

import math
import time
from collections.abc import Iterator

import pytest
from confluent_kafka import OFFSET_BEGINNING

from halfway.kafka.clients.config import KafkaConfig
from halfway.kafka.clients.reader import Place, Reader
from halfway.kafka.clients.transactional_producer import initialised
from tests.support.brokers.fixtures import Kafka
from tests.support.ownership.cluster_harness import PATIENCE_S, config_for, create_topics, delete_topics, produce


@pytest.fixture
def config(kafka: Kafka) -> KafkaConfig:
    return config_for(kafka.bootstrap_servers)


@pytest.fixture
def place(config: KafkaConfig) -> Iterator[Place]:
    """Return the only partition of an empty topic."""
    topic = config.prefix + "log"
    create_topics(config, {topic: 1})
    yield topic, 0
    delete_topics(config, [topic])


@pytest.fixture
def reader(config: KafkaConfig) -> Iterator[Reader]:
    reader = Reader(config)
    yield reader
    reader.close()


def ignore(_place: Place, _message: object) -> None:
    """Ignore a record."""


def read_to(reader: Reader, place: Place, position: int) -> None:
    assert reader.read_until({place: position}, time.monotonic() + PATIENCE_S, ignore)


def test_a_reader_moves_by_what_it_reads_not_by_what_it_is_given(
    config: KafkaConfig, place: Place, reader: Reader
) -> None:
    """A partition that was only added has not moved; its end and each record move it."""
    reader.add({place: OFFSET_BEGINNING})
    assert reader.moved_at == -math.inf
    began = time.monotonic()
    read_to(reader, place, 0)
    at_end = reader.moved_at
    assert began < at_end < time.monotonic()
    produce(config, place[0], 0, b"k", b"v")
    assert reader.moved_at == at_end
    read_to(reader, place, 1)
    assert reader.moved_at > at_end
    assert reader.records == 1


def test_a_reader_that_is_told_the_same_end_again_has_not_moved(place: Place, reader: Reader) -> None:
    """Kafka reports the end again after every start of a fetch: that is an answer, but no progress."""
    reader.add({place: OFFSET_BEGINNING})
    read_to(reader, place, 0)
    at_end = reader.moved_at
    reader.remove([place])
    reader.add({place: 0})
    reader.read(0.2, ignore)
    until = time.monotonic() + PATIENCE_S
    while place not in reader.heard:
        assert time.monotonic() < until, "the end is not told"
        reader.read(0.2, ignore)
    assert reader.positions == {place: 0}
    assert reader.moved_at == at_end


def test_what_was_aborted_moves_a_reader_that_is_given_none_of_it(
    config: KafkaConfig, place: Place, reader: Reader
) -> None:
    """During the Kafka transaction it stays before it; then only the reported end moves it past."""
    reader.add({place: OFFSET_BEGINNING})
    [producer] = initialised(config, [config.prefix + "aborting"], time.monotonic() + PATIENCE_S)
    producer.begin()
    producer.produce(place[0], b"never", b"k", 0)
    assert producer.flush(time.monotonic() + PATIENCE_S, lambda: False)
    read_to(reader, place, 0)
    before = reader.moved_at
    producer.abort(PATIENCE_S)
    producer.abandon()
    read_to(reader, place, 2)
    assert reader.moved_at > before
    assert reader.records == 0
