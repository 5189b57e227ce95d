"""A cluster of three small real brokers, each a process that can be killed, stopped, paused and started again."""

from __future__ import annotations

import os
import random
import re
import subprocess
import time
import uuid
from base64 import urlsafe_b64encode
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Self

from confluent_kafka import (
    Consumer,
    ConsumerGroupTopicPartitions,
    ElectionType,
    KafkaError,
    KafkaException,
    TopicPartition,
)
from confluent_kafka.admin import (  # type: ignore[attr-defined]  # they are there
    AclBinding,
    AclBindingFilter,
    AclOperation,
    AclPermissionType,
    AdminClient,
    AlterConfigOpType,
    ConfigEntry,
    ConfigResource,
    ConfigSource,
    NewPartitions,
    NewTopic,
    OffsetSpec,
    PartitionMetadata,
    ResourcePatternType,
    ResourceType,
)

from halfway.embedded import KAFKA_VERSION, find_java, resolve_jars
from halfway.embedded.broker import (
    DATA_FOLDER,
    HOST,
    LOG4J2_PROPERTIES,
    Listener,
    Node,
    pick_port,
    render_properties,
    server_properties,
)
from halfway.embedded.process import SupervisedProcess
from tests.chaos.log_ends import lose_end
from tests.support.brokers.jvm import short_lived
from tests.support.brokers.raw import reassign, set_quota
from tests.support.coordinator.process import KillableProcess

NODES: Final = (1, 2, 3)
DIRECT: Final = "PLAINTEXT"
"""The listener without a proxy: for the brokers, for creating topics, and for the checker."""
_READY_WITHIN_S: Final = 300.0
_STOP_WITHIN_S: Final = 30.0
_LOOK_AGAIN_S: Final = 0.2
FORGOTTEN: Final = re.compile(r"partitions HashSet\(([^)]*)\).*likely deleted already and hence can be skipped")
_STARTED: Final = b"] Kafka Server started"
"""The log line of a broker that was admitted to its cluster."""
_OURS: Final = {
    # A dead client's membership and a dead broker's leadership must be detected within seconds.
    "group.min.session.timeout.ms": "1000",
    "replica.lag.time.max.ms": "5000",
    # Threads cost memory: three brokers and the coordinators share a small machine.
    "num.network.threads": "2",
    "num.io.threads": "4",
    "log.cleaner.threads": "1",
    "background.threads": "2",
    # Compaction and retention must run within minutes.
    "log.cleaner.backoff.ms": "3000",
    "log.retention.check.interval.ms": "10000",
    "log.segment.delete.delay.ms": "5000",
}
USER: Final = "halfway"
_SECRET: Final = "chaos"
LOGIN: Final[Mapping[str, str]] = {
    "security.protocol": "SASL_PLAINTEXT",
    "sasl.mechanism": "PLAIN",
    "sasl.username": USER,
    "sasl.password": _SECRET,
}
"""The login on the further listeners: a user that can be denied a topic."""


def _guarded(listeners: Iterable[str]) -> dict[str, str]:
    """Return the properties that apply ACLs only to clients of these listeners."""
    protocols = {"CONTROLLER": "PLAINTEXT", DIRECT: "PLAINTEXT", **dict.fromkeys(listeners, "SASL_PLAINTEXT")}
    login = f'org.apache.kafka.common.security.plain.PlainLoginModule required user_{USER}="{_SECRET}";'
    return {
        "listener.security.protocol.map": ",".join(f"{name}:{protocol}" for name, protocol in protocols.items()),
        "sasl.enabled.mechanisms": "PLAIN",
        **{f"listener.name.{name.lower()}.plain.sasl.jaas.config": login for name in listeners},
        "authorizer.class.name": "org.apache.kafka.metadata.authorizer.StandardAuthorizer",
        "super.users": "User:ANONYMOUS",
        "allow.everyone.if.no.acl.found": "true",
    }


@dataclass(frozen=True, kw_only=True)
class TopicKind:
    """A real topic: its number of replicas, and how many of them must be in sync."""

    name: str
    replication: int = len(NODES)
    in_sync: int = 2
    partitions: int = 2


class Broker(KillableProcess):
    """One broker, which is also one of the cluster's controllers."""

    def __init__(self, node: Node, directory: Path, java: Sequence[str], properties: Mapping[str, str]) -> None:
        self.node = node
        self._directory = directory
        self._java = java
        self._properties = properties
        self._starts = 0

    @property
    def name(self) -> str:
        return f"broker-{self.node.node_id}"

    @property
    def address(self) -> str:
        return f"{HOST}:{self.node.listeners[DIRECT].port}"

    def format(self, cluster_id: str) -> None:
        self._directory.mkdir(parents=True)
        guarded = _guarded([name for name in self.node.listeners if name != DIRECT])
        properties = render_properties(server_properties(self.node, {**_OURS, **guarded, **self._properties}))
        (self._directory / "server.properties").write_text(properties, encoding="ascii")
        (self._directory / "log4j2.properties").write_text(LOG4J2_PROPERTIES, encoding="ascii")
        command = ["kafka.tools.StorageTool", "format", f"--cluster-id={cluster_id}", "--config=server.properties"]
        subprocess.run([*self._java, *command], cwd=self._directory, check=True, capture_output=True, timeout=120)

    def launch(self) -> None:
        """Start the process and return at once."""
        assert not self.running
        self._starts = self._times_started()
        self._process = SupervisedProcess(
            [*self._java, "kafka.Kafka", "server.properties"], cwd=self._directory, log_path=self._log_path
        )

    @property
    def _log_path(self) -> Path:
        return self._directory / "broker.log"

    @property
    def has_started(self) -> bool:
        """Whether it has joined the cluster since it was launched."""
        return self._times_started() > self._starts

    def folder(self, topic: str, partition: int) -> Path:
        """Return where it keeps a replica."""
        return self._directory / DATA_FOLDER / f"{topic}-{partition}"

    def log_lines(self) -> Iterator[str]:
        """Return its log, over all its lives."""
        with self._log_path.open(encoding="utf-8", errors="replace") as file:
            yield from file

    def _times_started(self) -> int:
        return self._log_path.read_bytes().count(_STARTED) if self._log_path.exists() else 0

    def stop(self) -> None:
        """Shut it down (SIGTERM)."""
        assert self._process is not None
        self._process.terminate()
        if self._process.wait(_STOP_WITHIN_S) is None:
            self._process.kill()


class BrokerCluster:
    """Three brokers; `listeners` are more ports of each broker by name, as `{node: Listener}`, for `LOGIN`."""

    def __init__(
        self,
        directory: Path,
        listeners: Mapping[str, Mapping[int, Listener]] | None = None,
        properties: Mapping[str, str] | None = None,
        heap: str = "256m",
    ) -> None:
        taken: set[int] = {listener.port for ports in (listeners or {}).values() for listener in ports.values()}

        def free() -> int:
            taken.add(port := pick_port(taken))
            return port

        voters = {node: free() for node in NODES}
        java = _java_command(heap)
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
                properties or {},
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
        # A broker that was killed a moment ago is in sync in the others' metadata until its session is over.
        if away := [broker.name for broker in self.brokers if not broker.has_started]:
            return f"{away} have not started"
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

    def make_topics(self, *kinds: TopicKind) -> None:
        """Create them; retry if the client loses a broker that it had just found (on a busy machine)."""
        names = [kind.name for kind in kinds]
        new = [
            NewTopic(
                kind.name,
                num_partitions=kind.partitions,
                replication_factor=kind.replication,
                config={"min.insync.replicas": str(kind.in_sync)},
            )
            for kind in kinds
        ]

        def are_there() -> bool:
            for done in self.admin.create_topics(new, operation_timeout=30).values():
                with suppress(KafkaException):  # also if it exists already
                    done.result(60)
            return set(names) <= set(self.admin.list_topics(timeout=30).topics)

        _insist(are_there, f"the topics {names} are not there")

    def remove_topic(self, name: str) -> None:
        """Delete it, and return when no broker knows it any more."""

        def is_gone() -> bool:
            if name in self.admin.list_topics(timeout=30).topics:
                self.admin.delete_topics([name], operation_timeout=30)[name].result(60)
            return name not in self.admin.list_topics(timeout=30).topics

        _insist(is_gone, f"the topic {name} is still there")

    def make_again(self, name: str) -> None:
        """Delete an internal topic and create it with the same partitions, replicas and settings."""
        partitions = len(self.admin.list_topics(name, timeout=30).topics[name].partitions)
        [request] = self.admin.describe_configs([ConfigResource(ResourceType.TOPIC, name)]).values()
        own = {
            entry.name: str(entry.value)
            for entry in request.result(60).values()
            if entry.source == ConfigSource.DYNAMIC_TOPIC_CONFIG.value
        }
        self.remove_topic(name)
        again = NewTopic(name, num_partitions=partitions, replication_factor=len(NODES), config=own)

        def is_there() -> bool:
            with suppress(KafkaException):  # also if it exists already
                self.admin.create_topics([again], operation_timeout=30)[name].result(60)
            return name in self.admin.list_topics(timeout=30).topics

        _insist(is_there, f"the topic {name} is not there")

    def grow_topic(self, name: str, most: int) -> bool:
        """Add one partition, unless it has the maximum already."""
        before: list[int] = []

        def has_grown() -> bool:
            partitions = len(self.admin.list_topics(name, timeout=30).topics[name].partitions)
            before.append(partitions)
            if partitions == before[0] < most:
                new = [NewPartitions(name, partitions + 1)]
                self.admin.create_partitions(new, operation_timeout=30)[name].result(60)
            return True

        _insist(has_grown, f"the topic {name} has not grown")
        return before[0] < most

    def deny(self, name: str, operation: AclOperation, kind: ResourceType = ResourceType.TOPIC) -> None:
        """Deny clients that log in with `LOGIN` a permission for a topic, or for another resource."""
        denial = _denial(name, operation, kind)
        _insist(
            lambda: all(done.result(60) is None for done in self.admin.create_acls([denial]).values()),
            f"{name} is not denied",
        )

    def limit(self, bytes_a_second: int | None) -> None:
        """Limit what these clients may write by a quota; None removes it."""

        def is_set() -> bool:
            for broker in self.brokers:
                with suppress(OSError, AssertionError):  # it is down, or has lost the controller
                    set_quota(broker.address, "user", USER, "producer_byte_rate", bytes_a_second)
                    return True
            return False

        _insist(is_set, "the quota is not set")

    def allow(self, name: str, kind: ResourceType = ResourceType.TOPIC) -> None:
        """Take back the denials of `deny`."""
        every = AclBindingFilter(
            kind,
            name,
            ResourcePatternType.LITERAL,
            None,  # type: ignore[arg-type]  # for any client
            None,  # type: ignore[arg-type]
            AclOperation.ANY,
            AclPermissionType.ANY,
        )
        _insist(
            lambda: all(done.result(60) is not None for done in self.admin.delete_acls([every]).values()),
            f"{name} is not allowed again",
        )

    def ends(self, topic: str) -> dict[int, int]:
        """Return the end of each partition of a topic."""
        numbers = self.admin.list_topics(topic, timeout=30).topics[topic].partitions
        latest = OffsetSpec.latest()  # type: ignore[no-untyped-call]  # confluent-kafka leaves it out
        requests = self.admin.list_offsets({TopicPartition(topic, number): latest for number in numbers})
        return {place.partition: answer.result(60).offset for place, answer in requests.items()}

    def cut(self, topic: str, ends: Mapping[int, int]) -> None:
        """Delete the records of a compacted topic before these offsets, as a retention that was set by mistake does."""
        self.configure(topic, {"cleanup.policy": "delete"})
        places = [TopicPartition(topic, number, end) for number, end in ends.items()]

        def is_cut() -> bool:
            return all(done.result(60) is not None for done in self.admin.delete_records(places).values())

        _insist(is_cut, f"the records of {topic} are still there")
        self.configure(topic, {"cleanup.policy": "compact"})

    def lose_ends(self, topics: Collection[str], chance: random.Random) -> dict[tuple[str, int], int]:
        """Let an unclean election lose the ends of some partitions of these topics; return their new ends.

        For that the topics are on one broker, which is killed, until it leads them again. So no other topic loses
        anything, and the members of groups notice little.
        """
        broker, others = (shuffled := chance.sample(self.brokers, len(self.brokers)))[0], shuffled[1:]
        places = [place for place in self._replicas() if place[0] in topics]
        self._move(dict.fromkeys(places, (broker.node.node_id,)))
        for name in topics:
            self.configure(name, {"unclean.leader.election.enable": "true"})
        broker.kill()
        ends = {(name, number): lose_end(broker.folder(name, number), chance) for name, number in places}
        broker.launch()
        self.wait_until_ready()
        for name in topics:
            self.configure(name, {"unclean.leader.election.enable": "false"})
        self._move(dict.fromkeys(places, tuple(one.node.node_id for one in (broker, *others))))
        return ends

    def let_others_lead(self) -> None:
        """Make another replica of each partition the preferred one, and let Kafka elect those."""
        self._move({place: [*ids[1:], ids[0]] for place, ids in self._replicas().items()})
        self.admin.elect_leaders(ElectionType.PREFERRED, None).result(60)

    def move_some(self, chance: random.Random) -> None:
        """Move some of the internal topics, Kafka's too, to two brokers, enough for `min.insync.replicas`, and back."""
        internal = [place for place in self._replicas() if place[0].startswith("_")]
        names = sorted({name for name, _ in internal})
        chosen = chance.sample(names, chance.randrange(1, len(names) + 1))
        for size in (2, 2, len(NODES)):
            self._move({place: chance.sample(NODES, size) for place in internal if place[0] in chosen})

    def _replicas(self) -> dict[tuple[str, int], list[int]]:
        """Return the brokers of each partition; the first one is to lead it."""
        topics = sorted(self.admin.list_topics(timeout=30).topics.items())
        return {(name, number): one.replicas for name, topic in topics for number, one in topic.partitions.items()}

    def _move(self, wanted: Mapping[tuple[str, int], Sequence[int]]) -> None:
        """Move partitions to these brokers, and wait until all replicas are in sync; those that are deleted count."""

        def is_done() -> bool:
            topics = self.admin.list_topics(timeout=30).topics
            found = {place: topics[place[0]].partitions.get(place[1]) for place in wanted if place[0] in topics}
            if all(one is None or _are_at(one, wanted[place]) for place, one in found.items()):
                return True
            with suppress(OSError):
                reassign(self.brokers[0].address, wanted)
            return False

        _insist(is_done, f"they are not on their brokers: {wanted}")

    def values_since(self, topic: str, since: Mapping[int, int]) -> list[tuple[int, bytes]]:
        """Return the partition and the value of each committed record of a topic from these offsets on."""
        found, left = [], set(since)
        settings = {"enable.partition.eof": True, "enable.auto.commit": False, "log_level": 0}
        consumer = Consumer(
            {"bootstrap.servers": self.bootstrap_servers, "group.id": f"chaos-{uuid.uuid4()}", **settings}
        )
        try:
            consumer.assign([TopicPartition(topic, number, offset) for number, offset in since.items()])
            deadline = time.monotonic() + _READY_WITHIN_S
            while left:
                assert time.monotonic() < deadline, f"{topic} cannot be read"
                for message in consumer.consume(1000, timeout=0.5):
                    number, value = message.partition() or 0, message.value()
                    error = message.error()
                    if error is not None and error.code() == KafkaError._PARTITION_EOF:
                        left.discard(number)
                    elif error is None and isinstance(value, bytes):
                        found.append((number, value))
        finally:
            consumer.close()
        return found

    def settings(self, topic: str, names: Collection[str]) -> dict[str, str]:
        """Return the values of some settings of a topic."""
        found: dict[str, str] = {}

        def are_known() -> bool:
            [request] = self.admin.describe_configs([ConfigResource(ResourceType.TOPIC, topic)]).values()
            entries = request.result(60)
            found.update({name: str(entries[name].value) for name in names})
            return True

        _insist(are_known, f"the settings of {topic} are not known")
        return found

    def configure(self, topic: str, settings: Mapping[str, str]) -> None:
        """Set some settings of a topic."""
        entries = [
            ConfigEntry(name, value, incremental_operation=AlterConfigOpType.SET) for name, value in settings.items()
        ]
        resource = ConfigResource(ResourceType.TOPIC, topic, incremental_configs=entries)
        _insist(
            lambda: all(done.result(60) is None for done in self.admin.incremental_alter_configs([resource]).values()),
            f"{', '.join(settings)} of {topic} is not set",
        )

    def committed(self, group: str, topic: str) -> dict[int, int]:
        """Return the offsets of a topic that a consumer group has committed."""
        [request] = self.admin.list_consumer_group_offsets([ConsumerGroupTopicPartitions(group)]).values()
        return {one.partition: one.offset for one in request.result(60).topic_partitions if one.topic == topic}

    def below_min_isr(self, kind: TopicKind) -> bool:
        """Return whether a partition of a topic has too few replicas in sync to be written to."""
        partitions = self.admin.list_topics(kind.name, timeout=5).topics[kind.name].partitions
        return any(len(partition.isrs) < kind.in_sync for partition in partitions.values())

    def forgotten(self) -> Counter[str]:
        """Return the partitions that, according to Kafka, need no marker of a transaction.

        These are deleted partitions, and, because of a bug in Kafka, partitions without a leader at that moment: the
        transaction then hangs there forever.
        """
        counted: Counter[str] = Counter()
        for broker in self.brokers:
            for line in broker.log_lines():
                if (named := FORGOTTEN.search(line)) is not None:
                    counted.update(named[1].split(", "))
        return counted

    def close(self) -> None:
        for broker in self.brokers:
            if broker.running:
                broker.kill()


def _are_at(one: PartitionMetadata, brokers: Sequence[int]) -> bool:
    return one.replicas == [*brokers] and set(one.isrs) == set(brokers) and one.leader > 0


def _insist(act: Callable[[], bool], otherwise: str) -> None:
    """Repeat something until it succeeds, while brokers stop and start."""
    deadline = time.monotonic() + 2 * _READY_WITHIN_S
    while True:
        try:
            if act():
                return
            error = None
        except KafkaException as failed:
            error = failed
        if time.monotonic() > deadline:
            raise AssertionError(otherwise) from error
        time.sleep(_LOOK_AGAIN_S)


def _denial(name: str, operation: AclOperation, kind: ResourceType) -> AclBinding:
    user, denied = f"User:{USER}", AclPermissionType.DENY
    return AclBinding(kind, name, ResourcePatternType.LITERAL, user, "*", operation, denied)


def _java_command(heap: str) -> list[str]:
    return [
        str(find_java().path),
        *(f"-Xmx{heap}", "-XX:+UseSerialGC", "-Xshare:auto", "-XX:+ExitOnOutOfMemoryError", "-Djava.awt.headless=true"),
        *("-Dlog4j2.configurationFile=log4j2.properties", *short_lived()),
        *("-cp", os.pathsep.join(str(jar) for jar in resolve_jars(KAFKA_VERSION))),
    ]
