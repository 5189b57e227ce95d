"""One call registers a service, and answers its checks and maintains its barrier until its client is closed."""

import asyncio
import json
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from aiohttp.test_utils import TestClient, TestServer
from fastapi import FastAPI
from flask import Flask
from starlette.applications import Starlette

from halfway.checks.caller import signed_headers
from halfway.client import (
    Check,
    ClientClosedError,
    Halfway,
    Message,
    NoBarrierError,
    Outcome,
    SyncHalfway,
    TransactionEndedError,
    join_aiohttp,
    join_flask,
    join_starlette,
)
from halfway.client.barrier import Barrier, InvalidRetentionError, MissingTableError, Store, sqlite_transactions
from halfway.protocol.keys import RANDOM_BYTES, CheckSecrets, key_text
from halfway.protocol.principal import PrincipalKind
from halfway.testing import MemoryServer
from tests.support.ids import named_id, new_id
from tests.support.rest.client import RestWorld
from tests.support.rest.guarded import guarded
from tests.support.waiting import GENEROUS_S, eventually

ORDER = Message(topic="orders", key="42", value="paid")
SOON = {"first_check_after_s": 0.1, "check_interval_s": 0.1}


def test_what_answers_may_be_given(barrier: Barrier) -> None:
    """`decide` answers instead of the barrier."""
    mine = new_id()

    def decide(check: Check) -> Outcome:
        return "commit" if check.id == mine else barrier.decide(check)

    with MemoryServer() as server:
        topic = server.new_topic()
        with SyncHalfway(server.url, "desk", barrier=barrier) as client:
            client.start(topics=[topic], policy=SOON, decide=decide)
            client.prepare([Message(topic=topic, value="mine")], id=mine)
            assert [record.value for record in server.wait_for_records(topic, 1)] == [b"mine"]


async def test_one_that_is_called_fetches_none(world: RestWorld, barrier: Barrier) -> None:
    async with Halfway(world.url, "desk", barrier=barrier) as client:
        await client.start(topics=["orders"], check_urls=["http://desk.example/check"])
        assert len(client._services) == 1  # it maintains the barrier
    async with Halfway(world.url, "desk") as client:
        await client.start(topics=["orders"], check_urls=["http://desk.example/check"])
        assert client._services == set()


async def test_what_cannot_work_is_told_at_the_start(world: RestWorld, tmp_path: Path) -> None:
    """Nothing answers checks, or the barrier's retention is too short; then nothing runs in the background."""
    async with Halfway(world.url, "desk") as client:
        with pytest.raises(NoBarrierError, match="a barrier, or `decide`"):
            await client.start(topics=["orders"])
        assert client._services == set()
    forgetful = Barrier("sqlite", sqlite_transactions(tmp_path / "shop.sqlite"), retention_s=60)
    async with Halfway(world.url, "desk", barrier=forgetful) as client:
        with pytest.raises(InvalidRetentionError):
            await client.start(topics=["orders"])
        assert client._services == set()


async def test_a_thread_starts_it_as_well(world: RestWorld, barrier: Barrier) -> None:
    def work() -> None:
        with SyncHalfway(world.url, "desk", barrier=barrier) as client:
            client.start(topics=["orders"])
            with client.transaction([ORDER]) as transaction:
                transaction.end("rollback", "too dear")
                with pytest.raises(TransactionEndedError):
                    transaction.end("commit")
            assert client.show(transaction.id)["state"] == "rolled_back"

    await asyncio.to_thread(work)


def test_a_transaction_of_sqlite_stands_whole_or_not_at_all(tmp_path: Path) -> None:
    begin = sqlite_transactions(tmp_path / "shop.sqlite")
    with begin() as connection:
        connection.execute("CREATE TABLE orders (id text)")
    with suppress(ZeroDivisionError), begin() as connection:
        connection.execute("INSERT INTO orders VALUES ('1')")
        raise ZeroDivisionError
    with begin() as connection:
        connection.execute("INSERT INTO orders VALUES ('2')")
    with begin() as connection:
        assert connection.execute("SELECT id FROM orders").fetchall() == [("2",)]


async def test_an_application_of_aiohttp_carries_it(world: RestWorld, barrier: Barrier) -> None:
    """Two groups share the endpoint; the clients are closed with the application."""
    clients = [Halfway(world.url, group, barrier=barrier) for group in ("desk", "till")]
    app = web.Application()
    for client in clients:
        join_aiohttp(app, client, topics=["orders"], check_url="http://desk.example/halfway/check")
    async with TestClient(TestServer(app)) as service:
        await clients[0].prepare([ORDER], id=named_id("a"))
        answer = await service.post("/halfway/check", json=question_of("desk"))
        assert (answer.status, await answer.json()) == (200, {"outcome": "rollback"})
        shown = [(await client.show_group())["check"]["urls"] for client in clients]
        assert shown == [["http://desk.example/halfway/check"]] * 2
    with pytest.raises(ClientClosedError):
        await clients[0].show_group()
    with pytest.raises(NoBarrierError):
        join_aiohttp(app, Halfway(world.url, "desk"), topics=["orders"], check_url="http://desk.example/check")


async def test_a_check_of_a_group_that_has_not_joined_is_not_decided(world: RestWorld, barrier: Barrier) -> None:
    """Its rows are in the database of another service, which shares the URL or had it before."""
    app, client = web.Application(), Halfway(world.url, "desk", barrier=barrier)
    join_aiohttp(app, client, topics=["orders"], check_url="http://desk.example/halfway/check")
    async with TestClient(TestServer(app)) as service, Halfway(world.url, "till") as other:
        await other.register(check_urls=["http://desk.example/halfway/check"], topics=["orders"])
        await other.prepare([ORDER], id=named_id("a"))
        answer = await service.post("/halfway/check", json=question_of("till"))
        assert answer.status == 400
        assert barrier.look(named_id("a")) is None


@pytest.mark.parametrize("framework", [Starlette, FastAPI])
async def test_an_application_of_starlette_or_fastapi_carries_it(
    world: RestWorld, barrier: Barrier, framework: type[Starlette]
) -> None:
    """Within its own lifespan, behind a proxy; the lifespan may create the table, and closes the clients at its end."""
    steps: list[str] = []

    @asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncIterator[dict[str, str]]:
        steps.append("begun")
        yield {"own": "state"}
        steps.append("ended")

    app, clients = framework(lifespan=lifespan), [Halfway(world.url, group, barrier=barrier) for group in ("a", "b")]
    app.state.halfway = clients[0]  # an attribute of its own
    for client in clients:
        join_starlette(app, client, topics=["orders"], check_url="http://desk.example/api/check", path="/check")
    async with app.router.lifespan_context(app) as state:
        assert (state, steps) == ({"own": "state"}, ["begun"])
        await clients[1].prepare([ORDER], id=named_id("a"))
        for group, outcome in (("b", "rollback"), ("third", None)):
            assert await asked_over_asgi(app, "/check", group) == outcome
        assert (await clients[0].show_group())["check"]["urls"] == ["http://desk.example/api/check"]
    assert steps == ["begun", "ended"]
    with pytest.raises(ClientClosedError):
        await clients[0].show_group()


async def test_a_mounted_application_that_a_client_has_joined_is_logged(
    world: RestWorld, barrier: Barrier, caplog: pytest.LogCaptureFixture
) -> None:
    """Its lifespan never runs, so the client is not started, and decides nothing."""
    inner, outer = FastAPI(), Starlette()
    join_starlette(inner, Halfway(world.url, "a", barrier=barrier), topics=["orders"], check_url="http://desk/check")
    outer.mount("/api", inner)
    async with outer.router.lifespan_context(outer):
        assert [await asked_over_asgi(outer, "/api/check", "a") for _ in range(2)] == ["unknown"] * 2
    assert [one.message for one in caplog.records if one.levelname == "ERROR"] == [
        "a client was not started, because the lifespan of its application did not run: join the outermost"
    ]


async def asked_over_asgi(app: Starlette, path: str, group: str) -> str | None:
    body = json.dumps(question_of(group)).encode()
    sent: list[Any] = []

    async def receive() -> Any:
        return {"type": "http.request", "body": body}

    async def send(event: Any) -> None:
        sent.append(event)

    scope = {"type": "http", "method": "POST", "path": path, "query_string": b"", "root_path": "", "headers": []}
    await app(scope, receive, send)
    outcome: str | None = json.loads(sent[1]["body"]).get("outcome")
    return outcome


def question_of(group: str) -> dict[str, object]:
    now = datetime.now(UTC).isoformat()
    asked = {"type": "transaction.check", "id": named_id("a"), "group": group, "prepared_at": now, "attempt": 1}
    return {**asked, "messages": []}


async def test_an_application_of_flask_carries_it(world: RestWorld, barrier: Barrier) -> None:
    """Two groups share the endpoint, whose body its own limit bounds; each may have another path."""

    def work() -> None:
        app, url = Flask("desk"), "http://desk.example/halfway/check"
        app.config["MAX_CONTENT_LENGTH"] = 10
        with SyncHalfway(world.url, "desk", barrier=barrier) as client:
            join_flask(app, client, topics=["orders"], check_url=url)
            client.prepare([ORDER], id=named_id("a"))
            for group, check_url in (("till", url), ("shop", "http://desk.example/other")):
                with SyncHalfway(world.url, group) as other:
                    join_flask(app, other, topics=["orders"], check_url=check_url, decide=lambda _: "commit")
            assert app.test_client().post(url, json=question_of("shop")).status_code == 400  # a group of another path
            assert barrier.look(named_id("a")) is None
            for group, path, outcome in (
                ("desk", url, "rollback"),
                ("till", url, "commit"),
                ("shop", "/other", "commit"),
            ):
                answer = app.test_client().post(path, json=question_of(group))
                assert (answer.status_code, answer.json) == (200, {"outcome": outcome})
        with SyncHalfway(world.url, "desk") as client, pytest.raises(NoBarrierError):
            join_flask(app, client, topics=["orders"], check_url="http://desk.example/third")

    await asyncio.to_thread(work)


@pytest.fixture
def away(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[MemoryServer, str, dict[str, Any]]]:
    """Give a server, a topic, and the settings of clients that soon start without the server."""
    monkeypatch.setattr(Halfway.start, "__kwdefaults__", {**(Halfway.start.__kwdefaults__ or {}), "timeout_s": 0.1})
    barrier = Barrier("sqlite", sqlite_transactions(tmp_path / "shop.sqlite"), store=Store())
    barrier.create()
    key = key_text(PrincipalKind.GROUP, bytes(RANDOM_BYTES))
    with MemoryServer() as server:
        yield server, server.new_topic(), {"barrier": barrier, "key": key, "prepare_timeout_s": 0.5}


async def test_an_application_with_a_key_starts_while_halfway_is_away(
    away: tuple[MemoryServer, str, dict[str, Any]],
) -> None:
    """How halfway signs checks is asked later; until then, no check is decided."""
    server, topic, settings = away
    app = web.Application()
    join_aiohttp(
        app,
        Halfway(server.url, "desk", **settings),
        topics=[topic],
        check_url="http://desk.example/check",
        decide=lambda _: "commit",
    )

    async def outcome() -> str:
        answer = await service.post("/check", json=question_of("desk"))
        return str((await answer.json())["outcome"])

    with server.down():
        service = TestClient(TestServer(app))
        await service.start_server()
        assert await outcome() == "unknown"
    async with service:
        await eventually(outcome, lambda told: told == "commit")


def test_so_does_one_of_flask(away: tuple[MemoryServer, str, dict[str, Any]]) -> None:
    server, topic, settings = away
    app = Flask("desk")
    with SyncHalfway(server.url, "desk", **settings) as client:
        with server.down():
            join_flask(app, client, topics=[topic], check_url="http://desk.example/check", decide=lambda _: "commit")
            assert app.test_client().post("/check", json=question_of("desk")).status_code == 503
        deadline = time.monotonic() + GENEROUS_S
        while app.test_client().post("/check", json=question_of("desk")).status_code != 200:
            assert time.monotonic() < deadline
            time.sleep(0.05)


async def test_an_application_verifies_each_groups_checks_if_its_client_has_a_key(barrier: Barrier) -> None:
    """Two groups share the endpoint of a service; a forged check would stop a local transaction."""
    secrets = CheckSecrets([b"m" * 32])
    async with guarded() as world:
        world.here.coordinator._check_secrets = secrets
        app = web.Application()
        for group in ("shop", "other"):
            client = Halfway(world.here.url, group, key=world.tokens[group], barrier=barrier)
            join_aiohttp(app, client, topics=["orders"], check_url="http://desk.example/check")
        now = datetime.now(UTC).isoformat()

        def question(group: str) -> bytes:
            asked = {"type": "transaction.check", "id": f"of-{group}", "group": group, "prepared_at": now, "attempt": 1}
            return json.dumps({**asked, "messages": []}).encode()

        async with TestClient(TestServer(app)) as service:
            for group, others in (("shop", "other"), ("other", "shop")):
                body = question(group)
                forged = dict(signed_headers("1", body, secrets.of(others)))
                for headers in ({}, forged):
                    answer = await service.post("/check", data=body, headers=headers)
                    assert answer.status == 401
                assert barrier.look(f"of-{group}") is None
                headers = dict(signed_headers("1", body, secrets.of(group)))
                answer = await service.post("/check", data=body, headers=headers)
                assert (answer.status, await answer.json()) == (200, {"outcome": "rollback"})
            answer = await service.post("/check", data=question("third"))
            assert (answer.status, "third" in await answer.text()) == (400, True)


async def test_without_a_key_or_signatures_there_is_no_verifier() -> None:
    async with guarded() as world:
        async with Halfway(world.here.url, "shop") as client:
            assert await client.check_verifier() is None
        async with Halfway(world.here.url, "shop", key=world.tokens["shop"]) as client:
            assert (await client.check_secrets(), await client.check_verifier()) == ([], None)

    def sync(url: str, key: str | None) -> list[str]:
        with SyncHalfway(url, "shop", key=key) as client:
            assert client.check_verifier() is not None
            return client.check_secrets()

    async with guarded() as world:
        world.here.coordinator._check_secrets = secrets = CheckSecrets([b"m" * 32])
        assert await asyncio.to_thread(sync, world.here.url, world.tokens["shop"]) == list(secrets.shown("shop"))


async def test_a_missing_table_of_the_barrier_ends_the_start(world: RestWorld, tmp_path: Path) -> None:
    """Otherwise each local transaction would fail. A database that cannot be reached yet ends no start."""
    missing = Barrier("sqlite", sqlite_transactions(tmp_path / "new.sqlite"), table="our_barrier")
    async with Halfway(world.url, "desk", barrier=missing) as client:
        with pytest.raises(MissingTableError, match=r"our_barrier.*`barrier\.create\(\)`.*`barrier\.migration\(\)`"):
            await client.start(topics=["orders"])
        assert client._services == set()
    away = Barrier("sqlite", sqlite_transactions(tmp_path / "no folder" / "shop.sqlite"))
    async with Halfway(world.url, "desk", barrier=away) as client:
        await client.start(topics=["orders"])


@pytest.mark.parametrize(
    "wrong, remedy",
    [
        ({"topics": "orders"}, r"topics is a str: give a list, \['orders'\]"),
        (
            {"topics": ["orders"], "check_urls": "http://a/check"},
            r"check_urls is a str: give a list, \['http://a/check'\]",
        ),
    ],
    ids=["topics", "check_urls"],
)
async def test_a_text_in_place_of_a_list_is_not_split_into_letters(
    world: RestWorld, barrier: Barrier, wrong: dict[str, Any], remedy: str
) -> None:
    async with Halfway(world.url, "desk", barrier=barrier) as client:
        for call in (client.register, client.start):
            with pytest.raises(TypeError, match=remedy):
                await call(**wrong)
        assert client._services == set()
