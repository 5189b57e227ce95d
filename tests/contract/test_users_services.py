"""`halfway.testing`: whole services, with a barrier or a session, get the same results over either server."""

import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.error import HTTPError
from urllib.request import Request, urlopen

import pytest
from sqlalchemy import Engine, create_engine, text
from sqlalchemy.orm import Session

from halfway.client import AlreadyEndedError, InvalidRequestError, Message, Outcome, SyncHalfway
from halfway.client.barrier import Barrier, LateTransactionError
from halfway.client.sqlalchemy import SessionProducer
from halfway.testing import Server
from tests.contract.test_users_servers import SOON, client, server, topic
from tests.support.ids import new_id
from tests.support.waiting import GENEROUS_S

__all__ = ["client", "server", "topic"]

MIB = 1024 * 1024
PARKING = SOON | {"max_checks": 1, "on_exhausted": "park"}


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[Engine]:
    engine = create_engine(f"sqlite:///{tmp_path / 'shop.sqlite'}")
    with engine.begin() as connection:
        connection.execute(text("PRAGMA journal_mode = WAL"))
        connection.execute(text("CREATE TABLE orders (id text PRIMARY KEY)"))
    yield engine
    engine.dispose()


@pytest.fixture
def barrier(engine: Engine) -> Barrier:
    barrier = Barrier("sqlite", engine.begin)
    barrier.create()
    return barrier


def until(client: SyncHalfway, transaction_id: str, state: str) -> None:
    deadline = time.monotonic() + GENEROUS_S
    while (found := client.show(transaction_id)["state"]) != state:
        assert time.monotonic() < deadline, found
        time.sleep(0.02)


def post(url: str, body: object = None) -> tuple[int, dict[str, Any]]:
    data = json.dumps({} if body is None else body).encode()
    request = Request(url, data=data, headers={"Content-Type": "application/json"}, method="POST")  # noqa: S310 - ours
    try:
        with urlopen(request, timeout=GENEROUS_S) as answer:  # noqa: S310 - ours
            return answer.status, json.load(answer)
    except HTTPError as error:
        with error:
            return error.code, json.load(error)


def test_one_that_is_parked_is_prepared_again_by_a_resume(server: Server, topic: str) -> None:
    with SyncHalfway(server.url, f"resumed-{topic}") as client:
        answers_nonsense = f"{server.url}/v1/groups"
        client.register(topics=[topic], policy=PARKING, check_urls=[answers_nonsense])
        own = client.new_id()
        client.prepare([Message(topic=topic, value="late")], id=own)
        until(client, own, "parked")
        status, resumed = post(f"{server.url}/v1/transactions/{own}/resume")
        assert (status, resumed["state"]) == (200, "prepared")
        client.end(own, "commit")
        status, problem = post(f"{server.url}/v1/transactions/{own}/resume")
        assert (status, problem["error_code"]) == (409, "already_ended")
    assert [record.value for record in server.wait_for_records(topic, 1, within_s=GENEROUS_S)] == [b"late"]


@pytest.mark.parametrize(
    "messages, status, code",
    [
        (lambda topic: [{"topic": topic, "value": "x" * 5 * MIB}], 413, "message_too_large"),
        (lambda topic: [{"topic": topic, "value": "x" * MIB}] * 5, 413, "message_too_large"),
        (lambda topic: [{"topic": topic, "value": "x" * 2 * MIB}], 413, "message_too_large"),
        (lambda topic: [{"topic": topic, "value": "x"}] * 1025, 422, "invalid_request"),
        (lambda _: [], 422, "invalid_request"),
        (lambda topic: [{"topic": topic, "value": "x", "partition": 3}], 422, "invalid_request"),
    ],
    ids=["a message", "all messages", "the topic's limit", "too many", "none", "a partition"],
)
def test_what_is_too_large_is_refused_alike(
    server: Server, client: SyncHalfway, topic: str, messages: Callable[[str], Any], status: int, code: str
) -> None:
    body = {"group": f"shop-{topic}", "id": new_id(), "messages": messages(topic)}
    answered, problem = post(f"{server.url}/v1/transactions", body)
    assert (answered, problem["error_code"]) == (status, code)
    assert list(server.records(topic)) == []


def test_an_unknown_end_is_asked_for(server: Server, topic: str) -> None:
    verdicts: list[Outcome] = ["unknown"]
    with SyncHalfway(server.url, f"unknown-{topic}") as client:
        client.start(topics=[topic], policy=SOON, decide=lambda _: verdicts[0])
        with client.transaction([Message(topic=topic, value="v")]) as transaction:
            transaction.unknown("the database was restarted")
        assert client.show(transaction.id)["state"] == "prepared"
        verdicts[0] = "commit"
        until(client, transaction.id, "committed")
        assert client.show(transaction.id)["cause"] == "check"
        with pytest.raises(AlreadyEndedError):
            client.end(transaction.id, "rollback")


@pytest.mark.parametrize("commits", [True, False])
def test_the_barrier_answers_when_the_end_is_lost(
    server: Server, topic: str, engine: Engine, barrier: Barrier, commits: bool
) -> None:
    with SyncHalfway(server.url, f"barrier-{topic}", barrier=barrier) as client:
        client.start(topics=[topic], policy=SOON)
        own = client.new_id()
        lost = [Message(topic=topic, value="v")]
        if commits:
            with engine.begin() as connection:  # a check that arrives in the meantime is answered unknown
                barrier.insert(connection, own)
                client.prepare(lost, id=own)
        else:
            client.prepare(lost, id=own)
        until(client, own, "committed" if commits else "rolled_back")
        if not commits:
            with pytest.raises(LateTransactionError), engine.begin() as connection:
                barrier.insert(connection, own)
    assert len(server.records(topic)) == int(commits)


def test_what_is_sent_inside_a_session_shares_its_fate(
    server: Server, topic: str, engine: Engine, barrier: Barrier
) -> None:
    with SyncHalfway(server.url, f"session-{topic}", barrier=barrier) as client:
        client.register(topics=[topic], policy=SOON)
        producer = SessionProducer(client)
        with Session(engine) as session:
            for end in (session.commit, session.rollback):
                session.execute(text("INSERT INTO orders VALUES (:id)"), {"id": end.__name__})
                own = producer.send(session, topic, "42", end.__name__)
                end()
                if end == session.commit:
                    assert client.show(own)["state"] == "committed"
            producer.send(session, f"absent-{topic}", "42", "refused")
            with pytest.raises(InvalidRequestError, match="topic_not_allowed"):
                session.commit()
    assert [record.value for record in server.records(topic)] == [b"commit"]
