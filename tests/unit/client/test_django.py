"""Messages inside Django's `atomic()` are committed or rolled back with its database transaction, on a real SQLite."""

import asyncio
import io
import json
import re
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from django.core.management import call_command
from django.db import IntegrityError, connection, connections, transaction
from django.http import HttpResponse
from django.test import Client, override_settings
from django.urls import path

from halfway.checks.caller import signed_headers
from halfway.client import (
    CheckVerifier,
    InvalidRequestError,
    Message,
    MixedProducersError,
    NestedTransactionError,
    NoBarrierError,
    PrepareUnconfirmedError,
    SyncHalfway,
    UnserialisableMessageError,
)
from halfway.client.barrier import NoTransactionError, Store
from halfway.client.django import AtomicProducer, DjangoChecks, django_barrier
from halfway.protocol.keys import CheckSecrets
from tests.support.client.shop import final_state, prepares, values
from tests.support.rest.client import RestWorld
from tests.unit.client.django_project import count, forget_connection, insert, project
from tests.unit.client.test_checks import BODY, QUESTION

PAGE = Path(__file__).parents[3] / "docs" / "python.md"


@pytest.fixture
def database(tmp_path: Path) -> Iterator[None]:
    with project(ENGINE="django.db.backends.sqlite3", NAME=str(tmp_path / "shop.sqlite"), ATOMIC_REQUESTS=True):
        yield


@pytest.fixture
def client(world: RestWorld, database: None) -> SyncHalfway:
    return SyncHalfway(world.url, "shop", barrier=django_barrier(), prepare_timeout_s=60)


async def run(
    client: SyncHalfway, service: Callable[[AtomicProducer], None], raises: type[Exception] | None = None
) -> None:
    """Run a service in a thread, and wait for its ends."""

    def work() -> None:
        with pytest.raises(raises) if raises else nullcontext():
            service(AtomicProducer(client))
        assert connections["default"].get_autocommit()
        assert connections["default"].run_on_commit == []
        forget_connection()
        client.close()

    await asyncio.to_thread(work)


async def counts() -> tuple[int, int]:
    """Return the numbers of committed orders and rows of the barrier."""
    return await asyncio.to_thread(lambda: (count(), count("halfway_barrier")))


async def test_the_outermost_commit_sends_everything_as_one_transaction(world: RestWorld, client: SyncHalfway) -> None:
    def service(producer: AtomicProducer) -> None:
        with transaction.atomic(durable=True):
            ids.append(producer.send("orders", "42", {"total": 9.9}))
            with transaction.atomic():
                insert("42")
                ids.append(producer.send("coupons", "42", b"\x00", headers={"trace": b"\xff"}))
            transaction.on_commit(lambda: ids.append("on_commit"))
            assert world.requests.counts.total() == 1  # the registration

    ids: list[str] = []
    await run(client, service)
    assert ids == [ids[0], ids[0], "on_commit"]
    assert await final_state(world, ids[0]) == "committed"
    assert prepares(world) == 2  # with the end
    assert values(world) == [b'{"total":9.9}']
    assert await counts() == (1, 1)


def fail(producer: AtomicProducer) -> None:
    with transaction.atomic():
        insert("1")
        producer.send("orders", "1", "v")
        _ = 1 / 0


def fail_inside(producer: AtomicProducer) -> None:
    with transaction.atomic():
        insert("1")
        producer.send("orders", "1", "v")
        with transaction.atomic(savepoint=False):
            producer.send("orders", "1", "w")
            insert("1")


def ask_for_a_rollback(producer: AtomicProducer) -> None:
    with transaction.atomic():
        insert("1")
        producer.send("orders", "1", "v")
        transaction.set_rollback(True)


def lose_the_connection(producer: AtomicProducer) -> None:
    with transaction.atomic():
        insert("1")
        producer.send("orders", "1", "v")
        connections["default"].close()


@pytest.mark.parametrize(
    "service, raises",
    [(fail, ZeroDivisionError), (fail_inside, IntegrityError), (ask_for_a_rollback, None), (lose_the_connection, None)],
)
async def test_what_is_rolled_back_is_never_prepared(
    world: RestWorld, client: SyncHalfway, service: Any, raises: type[Exception] | None
) -> None:
    await run(client, service, raises)
    assert (prepares(world), await counts()) == (0, (0, 0))


async def test_a_nested_block_that_is_rolled_back_takes_its_messages_with_it(
    world: RestWorld, client: SyncHalfway
) -> None:
    def service(producer: AtomicProducer) -> None:
        def nested(value: str, inner: Callable[[], None] | None = None, *, back: bool) -> None:
            with transaction.atomic():
                producer.send("orders", "1", value)
                if inner is not None:
                    inner()
                if back:
                    transaction.set_rollback(True)

        with transaction.atomic():
            nested("gone first", back=True)
            producer.send("orders", "1", "one")
            nested("two", lambda: nested("gone inside", back=True), back=False)
            nested("gone", lambda: nested("gone though released", back=False), back=True)
            producer.send("orders", "1", "three")
        with transaction.atomic():
            nested("gone too", back=True)

    await run(client, service)
    assert values(world) == [b"one", b"two", b"three"]
    assert await counts() == (0, 1)


async def test_without_autocommit_each_commit_sends_once(world: RestWorld, client: SyncHalfway) -> None:
    def service(producer: AtomicProducer) -> None:
        transaction.set_autocommit(False)
        for number in range(2):
            insert(f"{number}")
            with transaction.atomic():
                producer.send("orders", "1", f"{number}")
            assert count() == number
            transaction.commit()
        transaction.set_autocommit(True)

    await run(client, service)
    assert values(world) == [b"0", b"1"]
    assert await counts() == (2, 2)


async def test_a_prepare_that_fails_rolls_the_database_back(world: RestWorld, client: SyncHalfway) -> None:
    def local(producer: AtomicProducer, topic: str) -> None:
        with transaction.atomic():
            insert("1")
            producer.send(topic, "1", "v")

    def service(producer: AtomicProducer) -> None:
        with pytest.raises(InvalidRequestError):
            local(producer, "absent")
        down = SyncHalfway(
            "http://127.0.0.1:1", "shop", barrier=client.barrier, prepare_timeout_s=0.2, end_timeout_s=0.2
        )
        with down, pytest.raises(PrepareUnconfirmedError):
            local(AtomicProducer(down), "orders")
        assert count() == 0
        local(producer, "orders")

    await run(client, service)
    assert values(world) == [b"v"]
    assert await counts() == (1, 1)


async def test_a_view_with_atomic_requests_sends_when_it_has_answered(world: RestWorld, client: SyncHalfway) -> None:
    producers: list[AtomicProducer] = []

    def order(request: Any, key: str) -> HttpResponse:
        insert(key)
        producers[0].send("orders" if key != "absent" else key, key, "v")
        if key == "fails":
            raise ZeroDivisionError
        return HttpResponse("ordered")

    def service(producer: AtomicProducer) -> None:
        producers.append(producer)
        browser = Client(raise_request_exception=False)
        with override_settings(ROOT_URLCONF=(path("orders/<key>", order),)):
            statuses.extend(browser.get(f"/orders/{key}").status_code for key in ("42", "fails", "absent"))

    statuses: list[int] = []
    await run(client, service)
    assert (statuses, values(world)) == ([200, 500, 500], [b"v"])
    assert await counts() == (1, 1)


async def test_a_transaction_around_an_atomic_block_takes_the_projects_connection(
    world: RestWorld, client: SyncHalfway
) -> None:
    def service(_: AtomicProducer) -> None:
        assert client.barrier is not None
        for number, known in enumerate((connection, connections["default"])):
            with client.transaction([Message(topic="orders", value=f"{number}")]) as around, transaction.atomic():
                insert(f"{number}")
                client.barrier.insert(known, around.id)
            assert client.barrier.look(around.id) == "commit"
            with pytest.raises(NoTransactionError):
                client.barrier.insert(known, "a")

    await run(client, service)
    assert values(world) == [b"0", b"1"]
    assert await counts() == (2, 2)


async def test_inside_a_block_of_the_same_client_it_is_refused(world: RestWorld, client: SyncHalfway) -> None:
    def service(producer: AtomicProducer) -> None:
        with client.transaction([Message(topic="coupons", value="v")]) as outer:
            with transaction.atomic(), pytest.raises(NestedTransactionError, match=outer.id):
                producer.send("orders", "1", "nested")
            outer.commit()

    await run(client, service)
    assert (values(world), len(world.memory.records("coupons"))) == ([], 1)


async def test_bad_use_names_the_remedy_and_prepares_nothing(world: RestWorld, client: SyncHalfway) -> None:
    def service(producer: AtomicProducer) -> None:
        with pytest.raises(NoTransactionError, match=r"inside `transaction\.atomic\(\)`"):
            producer.send("orders", "1", "v")
        with pytest.raises(NoBarrierError, match=r"django_barrier\(\)"):
            AtomicProducer(SyncHalfway(world.url, "shop"))
        with transaction.atomic():
            with pytest.raises(UnserialisableMessageError):
                producer.send("orders", "1", {"at": object()})
            producer.send("orders", "1", "v")
            with pytest.raises(MixedProducersError, match="use one for all"):
                AtomicProducer(client).send("orders", "1", "v")
            transaction.set_rollback(True)

    await run(client, service)
    assert prepares(world) == 0


def test_the_check_view_answers_whatever_the_project_demands_of_others(tmp_path: Path) -> None:
    """No CSRF token, no atomic request that would lock the database, and no limit to small bodies."""
    with project(
        ENGINE="django.db.backends.sqlite3",
        NAME=str(tmp_path / "shop.sqlite"),
        ATOMIC_REQUESTS=True,
        OPTIONS={"transaction_mode": "IMMEDIATE"},
    ):
        views = (path("check", DjangoChecks(django_barrier().decide)), path("commit", DjangoChecks(lambda _: "commit")))
        browser = Client(enforce_csrf_checks=True)
        with override_settings(ROOT_URLCONF=views):
            answer = browser.post("/check", BODY, content_type="application/json")
            assert (answer.status_code, json.loads(answer.content)) == (
                200,
                {"outcome": "unknown", "nonce": "qL4c"},  # the check is about an old prepare
            )
            large = json.dumps({**QUESTION, "messages": [{"value": "x" * 3_000_000}]})
            assert json.loads(browser.post("/commit", large, content_type="application/json").content) == {
                "outcome": "commit",
                "nonce": "qL4c",
            }
            assert browser.post("/commit", "nonsense", content_type="text/plain").status_code == 400
            assert browser.get("/check").status_code == 405
        secrets = CheckSecrets([b"m" * 32])
        signed = signed_headers("order-42:1", BODY, secrets.of("shop"))
        verified = DjangoChecks(lambda _: "commit", CheckVerifier(*secrets.shown("shop")))
        with override_settings(ROOT_URLCONF=(path("check", verified),)):
            sent = [
                browser.post("/check", BODY, content_type="application/json", headers=one)
                for one in ({}, signed, signed)
            ]
            assert [answer.status_code for answer in sent] == [401, 200, 401]


def test_the_migrations_make_the_tables_and_take_them_back(database: None) -> None:
    shown = io.StringIO()
    call_command("sqlmigrate", "halfway_client", "create_barrier", stdout=shown)
    assert "CREATE TABLE IF NOT EXISTS halfway_barrier" in shown.getvalue()
    call_command("makemigrations", check=True, dry_run=True, verbosity=0)
    assert count("halfway_barrier") == 0
    barrier = django_barrier(store=Store())
    barrier.learn()
    assert barrier.stored().waiting == 0
    call_command("migrate", "halfway_client", "zero", verbosity=0)
    assert [name for name in connections["default"].introspection.table_names() if "halfway" in name] == []


async def test_the_project_in_the_documentation_works(world: RestWorld, database: None) -> None:
    (block,) = re.findall(
        r"^```text\n(from django.*?)^```$", PAGE.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE
    )
    order = SimpleNamespace(objects=SimpleNamespace(create=insert))
    names: dict[str, Any] = {"Order": order}

    def work() -> bytes:
        exec(block.replace("http://halfway:8080", world.url), names)  # noqa: S102 - from our own page
        names["place_order"]("42")
        with override_settings(ROOT_URLCONF=tuple(names["urlpatterns"])):
            answer = Client().post("/check", BODY, content_type="application/json")
        names["halfway"].close()
        forget_connection()
        return bytes(answer.content)

    assert b"unknown" in await asyncio.to_thread(work)  # the check is about an old prepare
    assert (values(world), await counts()) == ([b'{"order":"42","total":9.9}'], (1, 1))
