"""The five ways in which a transaction with messages fails, and how halfway handles each."""

import asyncio
import json
from itertools import count

import pytest

from halfway.protocol.records import OpKind
from tests.support.brokers.guarded import GuardedKafka
from tests.support.coordinator.endpoints import CheckEndpoint
from tests.support.coordinator.process import CoordinatorProcess, NewCoordinator
from tests.support.coordinator.rest_client import QUIET, Connect, Json, Rest, message, preparation
from tests.support.coordinator.topics import Cluster, InternalTopics
from tests.support.ids import new_id
from tests.support.waiting import eventually, until_true

SOON = {"first_check_after_s": 0.5, "check_interval_s": 0.2, "max_interval_s": 0.2, "max_checks": 1000}


class OrderDatabase:
    """The producer service's database: the orders that its local transactions committed."""

    def __init__(self) -> None:
        self.committed: set[str] = set()

    def verdict(self, check: Json) -> str:
        """Answer a check from the database."""
        return "commit" if check["messages"][0]["key"] in self.committed else "rollback"


@pytest.fixture
def database(endpoint: CheckEndpoint) -> OrderDatabase:
    """Return the database from which the check endpoint answers."""
    orders = OrderDatabase()
    endpoint.answer(orders.verdict)
    return orders


class TestTheHalfSendFails:
    """The prepare is not acknowledged: the local transaction is not run, and consumers never see a message."""

    @pytest.mark.xdist_group("guarded_kafka")
    async def test_because_kafka_does_not_answer(
        self,
        new_coordinator: NewCoordinator,
        connect: Connect,
        guarded_kafka: GuardedKafka,
        endpoint: CheckEndpoint,
        database: OrderDatabase,
        group: str,
    ) -> None:
        """503 `outcome_unknown`: the service rolls back, and if the half was stored after all, so does the check."""
        cluster = Cluster(guarded_kafka.bootstrap_servers)
        topic = await cluster.make_topic()
        # Kafka stops for about two seconds, and the instance must keep its membership.
        coordinator = new_coordinator(
            {"HALFWAY_REQUEST_TIMEOUT_S": "3", "HALFWAY_SESSION_TIMEOUT_S": "10"},
            bootstrap_servers=guarded_kafka.bootstrap_servers,
        )
        coordinator.start()
        rest = connect(coordinator)
        (await rest.put_group(group, topics=[topic], urls=[endpoint.url], policy=SOON)).expect(201)
        await self._ordered(rest, database, group, topic, "before")
        guarded_kafka.pause()

        answers = await asyncio.gather(
            *(rest.prepare(group, [message(topic, "never", key=f"order-{number}")]) for number in range(1, 4))
        )

        for answer in answers:
            answer.refused(503, "outcome_unknown")
            assert int(answer.headers["Retry-After"]) > 0
        guarded_kafka.resume()
        # The service has run no local transaction for them; it continues with the next order.
        await self._ordered(rest, database, group, topic, "after")
        await eventually(lambda: rest.page(group=group, state="prepared"), lambda page: page["transactions"] == [])
        # Which partition each is in depends on how many prepares were not acknowledged.
        assert sorted(record.value or b"" for record in await cluster.read(topic)) == [b"after", b"before"]
        for one in (await rest.page(group=group, state="rolled_back"))["transactions"]:
            assert one["cause"] == "check"

    async def _ordered(self, rest: Rest, database: OrderDatabase, group: str, topic: str, value: str) -> None:
        """Place orders until a prepare is acknowledged: only then is there a local transaction."""
        for number in count(100):
            key = f"order-{value}-{number}"
            prepared = await rest.prepare(group, [message(topic, value, key=key)])
            if prepared.status == 201:
                database.committed.add(key)
                ended = await rest.end(prepared.body["id"], "commit", retry=True)
                assert ended.expect(200)["state"] == "committed"
                return
            prepared.expect(503)


async def test_the_local_transaction_fails(
    rest: Rest, cluster: Cluster, internal: InternalTopics, endpoint: CheckEndpoint, database: OrderDatabase, group: str
) -> None:
    """The service rolls back: consumers see none of its messages, and no check is sent."""
    topics = await cluster.make_topics("coupon", "shipping", "points", "cart")
    (await rest.put_group(group, topics=topics, urls=[endpoint.url], policy=QUIET)).expect(201)
    transaction = await rest.prepared(group, [message(topic, key="order-1") for topic in topics])

    ended = await rest.end(transaction, "rollback", remark="IntegrityError: no coupon left")

    assert ended.expect(200)["state"] == "rolled_back"
    assert await cluster.read(*topics) == []
    assert await internal.kinds(transaction) == [(OpKind.ROLLED_BACK, "producer")]
    assert (await rest.show(transaction))["remark"] == "IntegrityError: no coupon left"
    assert endpoint.asked == []


async def test_the_half_is_stored_but_its_answer_is_lost(
    rest: Rest,
    coordinator: CoordinatorProcess,
    cluster: Cluster,
    internal: InternalTopics,
    endpoint: CheckEndpoint,
    database: OrderDatabase,
    group: str,
    topic: str,
) -> None:
    """The service takes this for a failure and runs nothing; the half is pending until its check says rollback."""
    (await rest.put_group(group, topics=[topic], urls=[endpoint.url], policy=SOON)).expect(201)
    own = new_id()
    body = json.dumps(preparation(group, [message(topic, key="order-1")], as_id=own)).encode()
    head = (
        f"POST /v1/transactions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(body)}\r\n\r\n"
    )
    _, writer = await asyncio.open_connection("127.0.0.1", coordinator.port)
    writer.write(head.encode() + body)
    await writer.drain()

    # The service dies here, before it reads the answer; the half is stored.
    await eventually(lambda: rest.get(own), lambda answer: answer.status == 200)
    writer.transport.abort()

    shown = await eventually(lambda: rest.show(own), lambda shown: shown["state"] != "prepared")
    assert (shown["state"], shown["cause"]) == ("rolled_back", "check")
    assert (await internal.kinds(own))[-1] == (OpKind.ROLLED_BACK, "check")
    assert await cluster.read(topic) == []


async def test_the_end_is_lost(
    rest: Rest, cluster: Cluster, internal: InternalTopics, endpoint: CheckEndpoint, database: OrderDatabase, group: str
) -> None:
    """The service dies between its database commit and its end: when it is back, the check finds the commit.

    All messages of the transaction are delivered once, over all topics.
    """
    topics = await cluster.make_topics("coupon", "shipping", "points", "cart")
    (await rest.put_group(group, topics=topics, urls=[endpoint.url], policy=SOON)).expect(201)
    await endpoint.stop()
    paid = await rest.prepared(group, [message(topic, "paid", key="order-1") for topic in topics])
    unpaid = await rest.prepared(group, [message(topic, "unpaid", key="order-2") for topic in topics])
    database.committed.add("order-1")
    await eventually(lambda: rest.show(paid), lambda shown: shown["last_error"])
    assert await cluster.read(*topics) == []

    await endpoint.start()

    shown = await rest.until(paid, "committed")
    assert shown["cause"] == "check"
    shown = await rest.until(unpaid, "rolled_back")
    assert shown["cause"] == "check"
    records = await cluster.read(*topics)
    assert {(record.topic, record.value) for record in records} == {(topic, b"paid") for topic in topics}
    assert len(records) == len(topics)
    assert (await internal.kinds(paid))[-1] == (OpKind.COMMITTED, "check")
    # A service that comes back late still gets consistent answers.
    assert (await rest.commit(paid))["changed"] is False
    (await rest.end(unpaid, "commit")).refused(409, "already_ended")
    await until_true(lambda: len(endpoint.asked) >= 2, what="asked about both")
