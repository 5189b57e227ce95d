"""What is sent inside Django's `atomic()`, with its migration, on real servers."""

import asyncio
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import pymysql
import pytest
from django.core.management import call_command
from django.db import DatabaseError, connections, transaction

from halfway.client import Message, MissingRowError, SyncHalfway
from halfway.client.django import AtomicProducer, django_barrier
from tests.barrier.test_drivers import AT_ONCE_S, Servers, asked, decided, kill_mariadb, kill_postgresql
from tests.barrier.test_sessions import written
from tests.support.databases.servers import USER
from tests.support.rest.client import RestWorld
from tests.unit.client.django_project import count, insert, project

pytestmark = [pytest.mark.xdist_group("databases"), pytest.mark.timeout(1800)]


def settings(servers: Servers, vendor: str) -> dict[str, Any]:
    if vendor == "postgresql":
        host = str(servers["postgresql"].folder)
        return {"ENGINE": "django.db.backends.postgresql", "NAME": "postgres", "USER": USER, "HOST": host}
    pymysql.version_info = (2, 2, 1, "final", 0)  # of the driver that Django demands
    pymysql.install_as_MySQLdb()
    return {"ENGINE": "django.db.backends.mysql", "NAME": "test", "USER": USER, "HOST": servers["mysql"].socket}


def sends(client: SyncHalfway, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Send, roll back a nested block and a whole one; return what checks were told meanwhile and afterwards."""
    producer, prepare, barrier = AtomicProducer(client), client.prepare, django_barrier()
    verdicts: list[str] = []

    def checked(messages: Any, **named: Any) -> None:
        prepare(messages, **named)
        began = time.monotonic()
        verdicts.append(barrier.decide(asked(named["id"])))
        assert time.monotonic() - began < AT_ONCE_S

    monkeypatch.setattr(client, "prepare", checked)
    with transaction.atomic():
        insert("1")
        first = producer.send("orders", "1", "one")
        with transaction.atomic():
            producer.send("orders", "1", "gone")
            transaction.set_rollback(True)
    assert client.show(first)["state"] == "committed"
    with transaction.atomic():
        insert("2")
        producer.send("orders", "1", "gone")
        transaction.set_rollback(True)
    assert barrier.clean(10) == 0
    return [*verdicts, barrier.decide(asked(first)), barrier.decide(asked("never"))]


def catches_an_error(client: SyncHalfway) -> None:
    """Catch an error of PostgreSQL, whose COMMIT then is a rollback without an error."""

    @contextmanager
    def begin() -> Iterator[Any]:
        with transaction.atomic():
            yield connections["default"]

    def fail() -> None:
        with connections["default"].cursor() as cursor, suppress(DatabaseError):
            cursor.execute("SELECT 1 / 0")

    def in_block() -> None:
        with client.transaction([Message(topic="orders", key="1", value="gone")], begin):
            fail()

    def in_atomic() -> None:
        with transaction.atomic():
            AtomicProducer(client).send("orders", "1", "gone")
            fail()

    for work in (in_block, in_atomic):
        with pytest.raises(DatabaseError, match="aborted"):
            work()


def goes_on_after_a_rollback(client: SyncHalfway) -> None:
    """As after a deadlock that is caught: MariaDB has rolled back, and begins a new transaction."""

    def in_atomic() -> None:
        with transaction.atomic():
            AtomicProducer(client).send("orders", "1", "gone")
            with connections["default"].cursor() as cursor:
                cursor.execute("ROLLBACK")
                cursor.execute("SELECT 1")

    with pytest.raises(MissingRowError, match="savepoint"):
        in_atomic()


def loses_its_connection(client: SyncHalfway, servers: Servers, monkeypatch: pytest.MonkeyPatch) -> str:
    """Lose the connection between the prepare and the commit; return what a check is told afterwards."""
    producer, prepare = AtomicProducer(client), client.prepare
    sent: list[str] = []

    def kill(messages: Any, **named: Any) -> None:
        prepare(messages, **named)
        raw = connections["default"].connection
        if connections["default"].vendor == "postgresql":
            kill_postgresql(servers, raw.info.backend_pid)
        else:
            kill_mariadb(servers, raw.thread_id())

    def local() -> None:
        with transaction.atomic():
            insert("3")
            sent.append(producer.send("orders", "1", "killed"))

    with monkeypatch.context() as patch:
        patch.setattr(client, "prepare", kill)
        with pytest.raises(DatabaseError):
            local()
    client.end(sent[0], "unknown")  # after the one in the background
    assert client.show(sent[0])["state"] == "prepared"
    return decided(django_barrier(), sent[0])


@pytest.mark.parametrize("vendor", ["postgresql", "mysql"])
async def test_a_project_on_a_server(servers: Servers, world: RestWorld, vendor: str) -> None:
    def work() -> list[str]:
        with project(**settings(servers, vendor)):
            with (
                SyncHalfway(world.url, "shop", barrier=django_barrier()) as client,
                pytest.MonkeyPatch.context() as patch,
            ):
                verdicts = sends(client, patch)
                catches_an_error(client) if vendor == "postgresql" else goes_on_after_a_rollback(client)
            with (
                SyncHalfway(world.url, "shop", barrier=django_barrier()) as client,
                pytest.MonkeyPatch.context() as patch,
            ):
                verdicts.append(loses_its_connection(client, servers, patch))
            assert count() == 1
            with connections["default"].cursor() as cursor:
                cursor.execute("DROP TABLE orders")
            call_command("migrate", "halfway_client", "zero", verbosity=0)
        return verdicts

    assert await asyncio.to_thread(work) == ["unknown", "commit", "rollback", "rollback"]
    assert written(world) == [b"one"]
