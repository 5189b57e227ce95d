"""`halfway.testing`: a user's test gets the same results on a simulated and on a real broker."""

import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from halfway.client import (
    AlreadyEndedError,
    CheckWorker,
    IdReusedError,
    InvalidRequestError,
    Message,
    PrepareUnconfirmedError,
    SyncHalfway,
    UnknownGroupError,
    UnknownTransactionError,
    answer_check_sync,
)
from halfway.client.consumer import Record as ConsumedRecord
from halfway.protocol.ids import partition_for_key
from halfway.testing import KafkaServer, MemoryServer, Server, ServerError
from tests.support.brokers.fixtures import Kafka
from tests.support.waiting import GENEROUS_S

SOON = {"first_check_after_s": 0.1, "check_interval_s": 0.1, "max_interval_s": 0.1, "max_checks": 1000}


@pytest.fixture(scope="module", params=["memory", "kafka"])
def server(request: pytest.FixtureRequest) -> Iterator[Server]:
    kafka: Kafka | None = request.getfixturevalue("kafka") if request.param == "kafka" else None
    with MemoryServer() if kafka is None else KafkaServer(kafka.bootstrap_servers) as server:
        yield server


@pytest.fixture
def topic(server: Server) -> str:
    return server.new_topic("orders")


@pytest.fixture
def client(server: Server, topic: str) -> Iterator[SyncHalfway]:
    with SyncHalfway(server.url, f"shop-{topic}") as client:
        client.register(topics=[topic], policy=SOON)
        yield client


@pytest.fixture
def endpoint() -> Iterator[str]:
    """Run a service that answers every check with commit."""

    class Answer(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            question = self.rfile.read(int(self.headers["Content-Length"]))
            status, body = answer_check_sync(question, lambda _: "commit")
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Answer) as served:
        thread = threading.Thread(target=served.serve_forever, args=(0.01,))
        thread.start()
        yield f"http://127.0.0.1:{served.server_port}/check"
        served.shutdown()
        thread.join()


def test_nothing_is_seen_before_the_commit_and_everything_after_it(
    server: Server, client: SyncHalfway, topic: str
) -> None:
    messages = [
        Message(topic=topic, key="42", value={"total": 9.9}, headers={"trace": b"\xff"}, partition=1),
        Message(topic=topic, key=b"\x00", value=None),
    ]
    with client.transaction(messages) as transaction:
        assert list(server.records(topic)) == []
    by_key = {record.key: record for record in server.records(topic)}
    assert by_key[b"42"].json() == {"total": 9.9}
    assert (by_key[b"42"].partition, by_key[b"42"].header("trace"), by_key[b"\x00"].value) == (1, b"\xff", None)
    assert {record.header("halfway-message") for record in by_key.values()} == {b"1/2", b"2/2"}
    assert {record.header("halfway-transaction-id") for record in by_key.values()} == {transaction.id.encode()}
    assert ConsumedRecord(**vars(by_key[b"42"])).id.startswith(f"#{transaction.id}/1/")


def test_a_key_has_the_same_partition_everywhere(server: Server, client: SyncHalfway, topic: str) -> None:
    """The partition that Kafka's Java client chooses."""
    keys = [f"order-{number}" for number in range(9)]
    with client.transaction([Message(topic=topic, key=key, value="v") for key in keys]):
        pass
    places = {(record.key or b"").decode(): record.partition for record in server.records(topic)}
    assert [places[key] for key in keys] == [partition_for_key(key.encode(), 3) for key in keys]


def test_a_rollback_leaves_nothing(server: Server, client: SyncHalfway, topic: str) -> None:
    with pytest.raises(ZeroDivisionError), client.transaction([Message(topic=topic, value="v")]) as transaction:
        raise ZeroDivisionError
    client.end(transaction.id, "rollback")
    assert client.show(transaction.id)["state"] == "rolled_back"
    assert list(server.records(topic)) == []


def test_a_lost_end_is_asked_for(server: Server, client: SyncHalfway, topic: str, endpoint: str) -> None:
    client.register(topics=[topic], check_urls=[endpoint], policy=SOON)
    lost = client.new_id()
    client.prepare([Message(topic=topic, value="v")], id=lost)
    assert [record.value for record in server.wait_for_records(topic, 1, within_s=GENEROUS_S)] == [b"v"]
    assert client.show(lost)["cause"] == "check"


def test_what_goes_wrong_in_production_can_be_tried(
    server: Server, client: SyncHalfway, topic: str, endpoint: str
) -> None:
    """An end is lost, a check comes late, the coordinator is away, and another one takes over what is prepared."""
    client.register(topics=[topic], check_urls=[endpoint], policy=SOON)
    server.lose_ends()
    with server.checks_held():
        with client.transaction([Message(topic=topic, value="lost")]) as lost:
            pass
        client.check_secrets()  # any call: the coordinator has been asked since
        assert client.show(lost.id)["state"] == "prepared"
    server.wait_for_records(topic, 1, within_s=GENEROUS_S)
    assert client.show(lost.id)["cause"] == "check"

    client.register(topics=[topic], policy={"first_check_after_s": 60})
    kept, away = client.new_id(), Message(topic=topic, value="away")
    client.prepare([Message(topic=topic, value="kept")], id=kept)
    unconfirmed = pytest.raises(PrepareUnconfirmedError)
    with server.down(), SyncHalfway(server.url, client.group, prepare_timeout_s=0.2) as impatient:
        with server.down(), server.checks_held():
            server.restart()
        with unconfirmed:
            impatient.prepare([away], id=impatient.new_id())
    with client.transaction([Message(topic=topic, value="back")]):
        pass
    server.restart()
    client.end(kept, "commit")
    values = [record.value for record in server.wait_for_records(topic, 3)]
    assert sorted(map(str, values)) == ["b'back'", "b'kept'", "b'lost'"]


def test_checks_can_be_fetched(server: Server, client: SyncHalfway, topic: str) -> None:
    client.run_in_background(lambda inner: CheckWorker(inner, lambda _: "commit", wait_s=1).run())
    client.prepare([Message(topic=topic, value="v")], id=client.new_id())
    assert len(server.wait_for_records(topic, 1, within_s=GENEROUS_S)) == 1


def test_one_outcome_stands(server: Server, client: SyncHalfway, topic: str) -> None:
    with client.transaction([Message(topic=topic, value="v")]) as transaction:
        pass
    client.end(transaction.id, "commit")
    with pytest.raises(AlreadyEndedError):
        client.end(transaction.id, "rollback")
    assert len(server.records(topic)) == 1


def test_what_is_refused_is_refused_alike(server: Server, client: SyncHalfway, topic: str) -> None:
    client.register(topics=[topic, "no-such-topic"], policy=SOON)
    with pytest.raises(InvalidRequestError, match="unknown_topic"):
        client.prepare([Message(topic="no-such-topic", value="v")], id=client.new_id())
    with pytest.raises(InvalidRequestError, match="topic_not_allowed"):
        client.prepare([Message(topic="another", value="v")], id=client.new_id())
    with pytest.raises(UnknownTransactionError):
        client.end(client.new_id(), "commit")
    with SyncHalfway(server.url, "nobody") as stranger, pytest.raises(UnknownGroupError):
        stranger.prepare([Message(topic=topic, value="v")], id=stranger.new_id())


def test_topics_are_the_tests_own(server: Server, topic: str) -> None:
    with pytest.raises(ServerError, match="exists: give another name"):
        server.create_topic(topic)
    with pytest.raises(ServerError, match="no-such-topic does not exist"):
        server.records("no-such-topic")
    with pytest.raises(ServerError, match=r"has 0 records after 0\.1 s, not 1"):
        server.wait_for_records(topic, 1, within_s=0.1)


def test_an_id_is_of_one_transaction_and_an_unknown_end_leaves_it_open(client: SyncHalfway, topic: str) -> None:
    own = client.new_id()
    client.prepare([Message(topic=topic, value="first")], id=own, check_after_s=600)
    client.prepare([Message(topic=topic, value="first")], id=own, check_after_s=600)
    with pytest.raises(IdReusedError, match="id_reused"):
        client.prepare([Message(topic=topic, value="other")], id=own)
    client.end(own, "unknown")
    assert client.show(own)["state"] == "prepared"
    client.end(own, "rollback")
    assert client.show(own)["state"] == "rolled_back"


def test_one_whose_checks_are_exhausted_is_parked_until_somebody_ends_it(server: Server, topic: str) -> None:
    parking = SOON | {"max_checks": 1, "on_exhausted": "park"}
    with SyncHalfway(server.url, f"parking-{topic}") as client:
        client.start(topics=[topic], policy=parking, decide=lambda _: "unknown")
        parks = client.new_id()
        client.prepare([Message(topic=topic, value="late")], id=parks)
        deadline = time.monotonic() + GENEROUS_S
        while client.show(parks)["state"] != "parked":
            assert time.monotonic() < deadline
            time.sleep(0.05)
        client.end(parks, "commit")
    assert [record.value for record in server.wait_for_records(topic, 1, within_s=GENEROUS_S)] == [b"late"]
