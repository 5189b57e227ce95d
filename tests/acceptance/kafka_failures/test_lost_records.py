"""Kafka loses what it has acknowledged: the owner of a shard notices it, and writes again what it has in memory.

A real broker loses the end of its logs when older copies of their folders are put back, as the follower that an unclean
election makes the leader has an older copy. Topics that are deleted, and records that are, are lost in the usual way.
"""

import asyncio
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from confluent_kafka import TopicPartition
from confluent_kafka.admin import AdminClient

from halfway.embedded import EmbeddedConfig, EmbeddedKafka
from tests.support.brokers.jvm import MORTAL, STARTED_WITHIN_S, short_lived
from tests.support.coordinator.by_hand import total
from tests.support.coordinator.process import CoordinatorProcess, NewCoordinator
from tests.support.coordinator.rest_client import QUIET, Connect, Rest, message
from tests.support.coordinator.topics import Cluster
from tests.support.waiting import eventually

pytestmark = [pytest.mark.xdist_group("losing_kafka"), pytest.mark.timeout(1800)]
KEPT = ("cleanup.policy", "max.message.bytes", "min.compaction.lag.ms", "max.compaction.lag.ms", "segment.ms")


@pytest.fixture(scope="module")
def kafka() -> Iterator[EmbeddedKafka]:
    config = EmbeddedConfig(jvm_options=short_lived(), properties=MORTAL, startup_timeout_s=STARTED_WITHIN_S)
    with EmbeddedKafka(config) as broker:
        yield broker


@pytest.fixture
def cluster(kafka: EmbeddedKafka) -> Cluster:
    return Cluster(kafka.bootstrap_servers)


@pytest.fixture
def coordinator(kafka: EmbeddedKafka, new_coordinator: NewCoordinator) -> CoordinatorProcess:
    return new_coordinator({"HALFWAY_SHARDS": "2"}, bootstrap_servers=kafka.bootstrap_servers).start()


@pytest.fixture
def rest(coordinator: CoordinatorProcess, connect: Connect) -> Rest:
    return connect(coordinator)


def folders(kafka: EmbeddedKafka, coordinator: CoordinatorProcess, kinds: Sequence[str]) -> list[Path]:
    topics = {coordinator.prefix + kind for kind in kinds}
    found = [path for path in (kafka.data_dir / "data").iterdir() if path.name.rpartition("-")[0] in topics]
    assert len(found) == 2 * len(kinds)
    return found


async def states(rest: Rest, ids: Sequence[str]) -> list[str]:
    """Ask as a client does, which tries again while a shard is taken over: Kafka may just have come back."""
    return [str((await rest.show(one, retry=True))["state"]) for one in ids]


async def prepared(rest: Rest, group: str, topic: str, name: str, count: int) -> list[str]:
    return [await rest.prepared(group, [message(topic, f"{name}-{number}")]) for number in range(count)]


async def until_written_again(rest: Rest, count: int) -> None:
    """Wait until this many transactions were found missing, and the log has all of them again."""

    async def written_again() -> float:
        return await total(rest, "halfway_missing_transactions_total", result="written_again")

    await eventually(written_again, lambda found: found >= count)
    assert await total(rest, "halfway_unwritten_transactions") == 0
    assert await total(rest, "halfway_missing_transactions_total", result="lost") == 0


async def restarted(coordinator: CoordinatorProcess) -> None:
    coordinator.kill()
    await asyncio.to_thread(coordinator.start)


@pytest.mark.parametrize("kinds", [("op",), ("half", "op", "parked")], ids="-".join)
async def test_the_end_of_a_log_that_kafka_lost_is_written_again(
    kinds: tuple[str, ...],
    kafka: EmbeddedKafka,
    coordinator: CoordinatorProcess,
    rest: Rest,
    cluster: Cluster,
    group: str,
    tmp_path: Path,
) -> None:
    """No acknowledged prepare and no acknowledged end is lost, although the process is killed and started later."""
    topic = await cluster.make_topic("orders")
    (await rest.put_group(group, topics=[topic], policy=QUIET)).expect(200, 201)
    before = await prepared(rest, group, topic, "before", 6)
    await asyncio.sleep(1)  # the copy may be of any moment before what follows
    found = folders(kafka, coordinator, kinds)
    for folder in found:
        shutil.copytree(folder, tmp_path / folder.name)
    pending = await prepared(rest, group, topic, "pending", 6)
    committed, rolled_back = before[:3], before[3:]
    for one in committed:
        await rest.commit(one)
    for one in rolled_back:
        (await rest.end(one, "rollback")).expect(200)
    # Kafka answers a commit before its markers are written, and can forget them when it dies: half would hang for ever.
    await cluster.read(topic, *(coordinator.prefix + kind for kind in ("half", "op", "parked")))

    kafka.kill()
    for folder in found:
        shutil.rmtree(folder)
        shutil.copytree(tmp_path / folder.name, folder)
    await asyncio.to_thread(kafka.start)
    await until_written_again(rest, 12 if "half" in kinds else 6)

    for _ in range(2):
        assert await states(rest, pending) == ["prepared"] * 6
        assert await states(rest, before) == ["committed"] * 3 + ["rolled_back"] * 3
        for one in committed:
            (await rest.end(one, "rollback", retry=True)).refused(409, "already_ended")
        for one in rolled_back:
            (await rest.end(one, "commit", retry=True)).refused(409, "already_ended")
        await restarted(coordinator)
    for one in pending:
        await rest.commit(one, retry=True)
    values = sorted(record.value or b"" for record in await cluster.read(topic))
    assert values == sorted([b"before-%d" % n for n in range(3)] + [b"pending-%d" % n for n in range(6)])


async def test_a_topic_that_was_made_again_is_filled_again(
    coordinator: CoordinatorProcess, rest: Rest, cluster: Cluster, group: str
) -> None:
    """Also if it is longer than before when the owner looks at it: its topic id is another one. An operator sees it."""
    topic = await cluster.make_topic("orders")
    (await rest.put_group(group, topics=[topic], policy=QUIET)).expect(200, 201)
    pending = await prepared(rest, group, topic, "pending", 6)
    half = coordinator.prefix + "half"
    settings = {name: value for name, value in (await cluster.config(half)).items() if name in KEPT and value}
    await asyncio.sleep(6)  # it has looked at the topic's id
    await cluster.delete_topic(half)
    await cluster.make_exactly(half, partitions=2, config=settings)
    await until_written_again(rest, len(pending))
    assert await total(rest, "halfway_log_losses_total") > 0
    assert await total(rest, "halfway_warnings", check="log") == 1
    status, document = await rest.health("/health/ready")
    assert (status, "Kafka has lost records" in document) == (200, True)
    await restarted(coordinator)
    assert await states(rest, pending) == ["prepared"] * 6
    for one in pending:
        await rest.commit(one, retry=True)
    assert len(await cluster.read(topic)) == 6


async def test_records_that_were_deleted_are_written_again(
    kafka: EmbeddedKafka, coordinator: CoordinatorProcess, rest: Rest, cluster: Cluster, group: str
) -> None:
    """As when the cleanup policy of half was changed to delete; the shards are served all the time.

    An owner has in memory what it took over, too.
    """
    topic = await cluster.make_topic("orders")
    (await rest.put_group(group, topics=[topic], policy=QUIET)).expect(200, 201)
    pending = await prepared(rest, group, topic, "pending", 6)
    await restarted(coordinator)
    half = coordinator.prefix + "half"
    await cluster.set_config(half, "cleanup.policy", "delete")
    admin = AdminClient({"bootstrap.servers": kafka.bootstrap_servers})
    up_to = [TopicPartition(name, number, end) for (name, number), end in cluster.ends([half]).items()]
    for done in admin.delete_records(up_to).values():
        done.result(60)
    await cluster.set_config(half, "cleanup.policy", "compact")
    await until_written_again(rest, len(pending))
    assert '"incarnation_failed"' not in coordinator.log
    await restarted(coordinator)
    assert await states(rest, pending) == ["prepared"] * 6
