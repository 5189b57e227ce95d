"""Three real brokers, and a topic that has lost one broker too many: other topics are not affected."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import pytest
from confluent_kafka import ElectionType, TopicPartition
from confluent_kafka.cimpl import NewTopic

from halfway.kafka.clients.config import KafkaConfig
from halfway.kafka.clients.reader import PartitionEnds
from halfway.kafka.topics.metadata import TopicMetadata, WritablePartitions
from halfway.protocol.errors import KafkaUnavailableError, LaneLostError, TopicUnavailableError
from halfway.protocol.records import Message
from tests.chaos.brokers import Broker, BrokerCluster, TopicKind
from tests.support.ownership.cluster_harness import (
    PATIENCE_S,
    Instance,
    commit_of,
    config_for,
    half,
    in_shard,
    read_topic,
    running,
)
from tests.support.waiting import until_true

SHARDS = 4
UNHURRIED = {"broker.session.timeout.ms": "6000", "replica.lag.time.max.ms": "20000"}
"""On a slow machine live brokers are silent for seconds, and must stay unfenced and in sync."""
pytestmark = pytest.mark.xdist_group("brokers lost")  # one cluster for all of them


@pytest.fixture(scope="module")
def brokers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[BrokerCluster]:
    directory: Path = tmp_path_factory.mktemp("brokers")
    with BrokerCluster(directory, properties=UNHURRIED) as cluster:
        yield cluster


class Verifier:
    """A process that creates and verifies the internal topics, and then does nothing."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None

    def ensure(self, config: KafkaConfig) -> None:
        """Return when everything is verified."""
        given = (config.properties["bootstrap.servers"], config.prefix, str(config.shards))
        self._process = subprocess.Popen(
            [sys.executable, "-c", _VERIFY, *given], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        assert self._process.stdout is not None
        assert any(line == b"verified\n" for line in self._process.stdout), "it ended before"

    @property
    def alive(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def close(self) -> None:
        """Allow it to end."""
        if self._process is not None:
            self._process.communicate(timeout=PATIENCE_S)


_VERIFY = """
import asyncio, sys
from halfway.kafka.clients.config import KafkaConfig
from halfway.kafka.topics.provisioning import InternalTopics

servers, prefix, shards = sys.argv[1:]
config = KafkaConfig(
    properties={"bootstrap.servers": servers}, prefix=prefix, shards=int(shards), max_prepare_bytes=1_000_000
)
topics = InternalTopics(config)
asyncio.run(topics.ensure(timeout_s=180))
topics.close()
print("verified", flush=True)
sys.stdin.read()
"""


@pytest.fixture
def verifier() -> Iterator[Verifier]:
    made = Verifier()
    yield made
    made.close()


def create(brokers: BrokerCluster, name: str, replicas: list[int], **settings: str) -> None:
    """Create a topic with one partition on these brokers."""
    new = NewTopic(name, 1, replica_assignment=[replicas], config=settings)
    brokers.admin.create_topics([new])[name].result(PATIENCE_S)


@contextmanager
def killed(broker: Broker) -> Iterator[None]:
    """Kill a broker, and launch it again at the end of the block."""
    broker.kill()
    try:
        yield
    finally:
        broker.launch()


async def write_until_undisturbed(instance: Instance, topic: str) -> list[bytes]:
    """Write commits until three in a row succeed in one incarnation; return the messages, in order.

    A lost broker may have been the transaction coordinator of either of the lane's two producers, which take turns. The
    incarnation ends after the commit in which a producer loses its coordinator, so the third shows that both are well.
    """
    written: list[bytes] = []
    served: list[str | None] = []
    while len(served) < 3 or len({*served[-3:]}) > 1:
        name = f"undisturbed-{len(written)}"
        one = half(in_shard(1, name, shards=SHARDS), Message(topic=topic, value=name.encode()))
        await instance.write_until_taken(commit_of(1, one, 0))
        written.append(name.encode())
        served.append(instance.incarnation)
    return written


@pytest.mark.timeout(900)
async def test_a_topic_below_its_min_insync_replicas_holds_up_its_own_ends_only(
    brokers: BrokerCluster, verifier: Verifier, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither later ends are affected nor, if a Kafka transaction hangs on it, the shards of its incarnation.

    And a process that has just verified the topics of a new cluster survives the loss of a broker.
    """
    config = config_for(brokers.bootstrap_servers, max_stall_s=15, shards=SHARDS)
    verifier.ensure(config)
    good, under = config.prefix + "good", config.prefix + "under"
    create(brokers, good, [1, 2, 3])
    create(brokers, under, [2, 3], **{"min.insync.replicas": "2"})
    bad, worse, first, second = (
        half(in_shard(shard, name, shards=SHARDS), Message(topic=topic, value=name.encode()))
        for shard, name, topic in ((0, "bad", under), (0, "worse", under), (1, "first", good), (1, "second", good))
    )
    fresh = TopicMetadata.fresh

    def unaware(self: TopicMetadata, names: Iterable[str], timeout: float) -> Mapping[str, WritablePartitions | None]:
        """Report every topic as healthy, as at the moment in which a broker is lost."""
        found = fresh(self, names, timeout)
        return {name: None if one is None else WritablePartitions(name, one.partitions) for name, one in found.items()}

    async with running(config) as instance:

        def short() -> bool:
            try:
                openings = instance.destinations.fresh([under], PATIENCE_S)[under]
            except KafkaUnavailableError:  # the controller may have been lost with the broker
                return False
            return openings is not None and bool(openings.closed)

        await instance.write_until_taken(commit_of(1, first, 0))
        with killed(brokers.brokers[2]):
            await until_true(short, "the broker is missed")
            between = await write_until_undisturbed(instance, good)
            await instance.serves(range(SHARDS))
            failures = len(instance.observer.told("lane_failed", "reason"))
            with pytest.raises(TopicUnavailableError, match=r"min\.insync\.replicas"):
                await instance.write(commit_of(0, bad, 0))
            await instance.write_until_taken(commit_of(1, second, 0))
            assert len(instance.observer.told("lane_failed", "reason")) == failures

            with monkeypatch.context() as patched:
                patched.setattr(TopicMetadata, "fresh", unaware)
                with pytest.raises(LaneLostError):
                    await instance.write(commit_of(0, worse, 0))
            await instance.serves(range(SHARDS))
            assert short()
            assert len(instance.observer.told("lane_failed", "reason")) == failures + 1

        await asyncio.to_thread(brokers.wait_until_ready)
        for one in (bad, worse):
            await instance.write_until_taken(commit_of(0, one, 0))
    assert verifier.alive
    assert [seen.value for seen in read_topic(config, good)] == [b"first", *between, b"second"]
    assert [seen.value for seen in read_topic(config, under)] == [b"bad", b"worse"]


async def test_the_end_of_a_partition_is_told_after_its_leader_went_and_came_back(brokers: BrokerCluster) -> None:
    """The same broker leads in a later epoch, and librdkafka would send the cached one for up to 15 minutes."""
    topic, config = "led", config_for(brokers.bootstrap_servers)
    brokers.make_topics(TopicKind(name=topic, partitions=1))
    brokers.wait_until_ready()
    ends = PartitionEnds(config, topic)

    async def end() -> int:
        return await ends.end(0, deadline=asyncio.get_running_loop().time() + PATIENCE_S)

    def leader() -> int:
        number: int = brokers.admin.list_topics(topic).topics[topic].partitions[0].leader
        return number

    before = leader()
    broker = next(broker for broker in brokers.brokers if broker.name == f"broker-{before}")

    def come_back() -> None:
        broker.launch()
        brokers.wait_until_ready()

    def leads_again() -> bool:
        brokers.admin.elect_leaders(ElectionType.PREFERRED, [TopicPartition(topic, 0)]).result()  # refused until it may
        return leader() == before

    assert await end() == 0
    await asyncio.to_thread(broker.stop)
    await until_true(lambda: leader() != before, what="another broker leads")
    await asyncio.to_thread(come_back)
    await until_true(leads_again, what="the broker leads again")
    assert await end() == 0
    await ends.stop()
