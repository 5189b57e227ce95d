"""A frozen owner (SIGSTOP): calls to it, the consumers that it holds back, and the end of both."""

import asyncio
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
from confluent_kafka import OFFSET_BEGINNING, Consumer, Producer, TopicPartition

from tests.faults import plan
from tests.support.brokers.fixtures import Kafka
from tests.support.coordinator.fleet import SHARDS, Fleet, id_in, settled, shares
from tests.support.coordinator.rest_client import QUIET, Answer, Connect, Rest, message
from tests.support.coordinator.topics import Cluster
from tests.support.waiting import eventually, until_true

IN_TRANSACTION = "lane.4.tombstones.after"
"""All records are produced, and the commit is not yet requested."""


@pytest.fixture
def fleet(kafka: Kafka, tmp_path: Path) -> Iterator[Fleet]:
    fleet = Fleet(kafka.bootstrap_servers, tmp_path)
    try:
        yield fleet
        assert [line for member in fleet.members for line in member.log.splitlines() if '"exception"' in line] == []
    finally:
        for member in fleet.members:
            if member.running:
                member.resume()
        fleet.close()


def stands(answer: Answer) -> bool:
    """Return whether a call was done; otherwise it is 503 with Retry-After, or 404 if its prepare was not done."""
    if answer.status in (200, 201):
        return True
    if answer.status == 404:
        return False
    assert answer.status == 503, answer
    assert answer.error_code in {"shard_unavailable", "outcome_unknown", "end_unconfirmed"}, answer
    assert int(answer.headers["Retry-After"]) >= 1
    return False


async def test_a_frozen_owner_holds_up_nobody_but_its_own_shards(
    fleet: Fleet, connect: Connect, cluster: Cluster, topic: str, group: str
) -> None:
    """Calls to it are 503 with Retry-After by their deadline, later at once; when it has lost its shards they are done.

    Each message is stored once, even if the frozen owner had received the call.
    """
    # The session is so long that it is still the owner after the deadlines.
    fleet.settings |= {"HALFWAY_SESSION_TIMEOUT_S": "20", "HALFWAY_REQUEST_TIMEOUT_S": "5"}
    fleet.start(3)
    rests = [connect(member) for member in fleet.members]
    found = await settled(rests)
    asked, frozen = rests[0], fleet.members[2]
    await asked.put_group(group, topics=[topic], policy=QUIET)
    names = {shard: [id_in(shard) for _ in range(40)] for shard in range(SHARDS)}
    for shard in found[2]:
        for name in names[shard][:20]:
            (await asked.prepare(group, [message(topic, name)], as_id=name, retry=True)).expect(200, 201)

    frozen.pause()
    of_the_frozen = [name for shard in sorted(found[2]) for name in names[shard]]
    others = [name for shard in sorted(found[0] | found[1]) for name in names[shard]]
    answers = [asyncio.create_task(try_both(asked, group, topic, name)) for name in of_the_frozen]
    listed = asyncio.create_task(asked.call("GET", "/transactions"))
    for name in others:
        (await asked.prepare(group, [message(topic, name)], as_id=name, retry=True)).expect(200, 201)
        await asked.commit(name, retry=True)
    first = await asyncio.gather(*answers)
    assert not all(first), "it was not frozen"
    (await listed).refused(503, "shard_unavailable")

    for name in of_the_frozen:  # the next owner does repeated calls, and nothing twice
        (await asked.prepare(group, [message(topic, name)], as_id=name, retry=True)).expect(200, 201)
        await asked.commit(name, retry=True)
    await eventually(lambda: shares(rests[:2]), lambda found: set().union(*found) == set(range(SHARDS)))
    frozen.resume()
    await settled(rests)
    for name in of_the_frozen:
        assert (await asked.commit(name, retry=True))["changed"] is False
    values = Counter((record.value or b"").decode() for record in await cluster.read(topic))
    assert values == Counter([*others, *of_the_frozen])


async def try_both(rest: Rest, group: str, topic: str, name: str) -> bool:
    """Prepare and commit, once each; return whether both were done."""
    prepared = stands(await rest.prepare(group, [message(topic, name)], as_id=name))
    return stands(await rest.end(name, "commit")) and prepared


class Flow:
    """A plain producer, and a `read_committed` consumer of the partition that it writes to."""

    def __init__(self, kafka: Kafka, topic: str) -> None:
        self._servers, self._topic = kafka.bootstrap_servers, topic
        self._producer = Producer({"bootstrap.servers": kafka.bootstrap_servers})
        self._consumer = Consumer(
            {
                "bootstrap.servers": kafka.bootstrap_servers,
                "group.id": f"flow-{topic}",
                "enable.auto.commit": False,
                "isolation.level": "read_committed",
                "fetch.wait.max.ms": 20,
            }
        )
        self._consumer.assign([TopicPartition(topic, 0, OFFSET_BEGINNING)])
        self.values: list[bytes] = []

    def write(self, value: bytes) -> None:
        """Return once it is stored."""
        self._producer.produce(self._topic, value, partition=0)
        assert self._producer.flush(60) == 0

    def end(self) -> int:
        """Return the end of the partition, including open Kafka transactions."""
        reader = Consumer(
            {"bootstrap.servers": self._servers, "group.id": "flow-end", "isolation.level": "read_uncommitted"}
        )
        try:
            return int(reader.get_watermark_offsets(TopicPartition(self._topic, 0), timeout=60)[1])
        finally:
            reader.close()

    def read(self) -> list[bytes]:
        """Return all records that the consumer has received so far."""
        while (record := self._consumer.poll(0.1)) is not None:
            assert record.error() is None, record.error()
            self.values.append(record.value() or b"")
        return self.values

    def close(self) -> None:
        self._consumer.close()


async def test_consumers_that_a_frozen_owner_holds_back_go_on_when_another_takes_over(
    fleet: Fleet, kafka: Kafka, connect: Connect, cluster: Cluster, topic: str, group: str
) -> None:
    """It is frozen in an open Kafka transaction, and stays frozen; the next owner aborts the transaction."""
    # The consumers must not continue because of the broker's own time-out.
    fleet.settings["HALFWAY_TRANSACTION_TIMEOUT_S"] = "600"
    fleet.start(1)
    victim = fleet.add_faulty()
    await asyncio.to_thread(victim.start)
    rests = [connect(member) for member in fleet.members]
    found = await settled(rests)
    there, here = rests
    await there.put_group(group, topics=[topic], policy=QUIET)
    name = id_in(min(found[1]))
    await here.prepared(group, [message(topic, "held back", partition=0)], as_id=name)
    flow = Flow(kafka, topic)
    try:
        await asyncio.to_thread(flow.write, b"before")
        await until_true(lambda: flow.read() == [b"before"], what="the consumer is given what is there")
        end = await asyncio.to_thread(flow.end)
        victim.faults.plan(plan.Fault(point=IN_TRANSACTION, action="pause"))
        commit = asyncio.create_task(here.end(name, "commit"))
        await asyncio.to_thread(victim.faults.until_reached, IN_TRANSACTION)
        await until_true(lambda: flow.end() > end, what="the message is at the broker")
        victim.pause()
        await asyncio.to_thread(flow.write, b"after")
        await until_true(lambda: flow.read() == [b"before", b"after"], what="the consumer goes on")
        await there.commit(name, retry=True)
        await until_true(lambda: flow.read() == [b"before", b"after", b"held back"], what="the message")
        victim.faults.release()
        victim.resume()
        await until_true(lambda: '"incarnation_failed"' in victim.log, what="it knows that it was fenced")
        commit.cancel()
        assert len(await cluster.read(topic)) == 3
    finally:
        await asyncio.to_thread(flow.close)
