"""A check while the local transaction holds the only connection of the service's pool, on a real PostgreSQL."""

import io
import json
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from datetime import UTC, datetime
from typing import Any
from uuid import uuid4

import pytest
from django.core.management import call_command
from django.db import connections, transaction
from django.test import Client, override_settings
from django.urls import path
from flask import Flask
from sqlalchemy import Engine, create_engine
from sqlalchemy.orm import Session

from halfway.client import FlaskChecks, WsgiChecks
from halfway.client.barrier import Barrier, LateTransactionError
from halfway.client.django import DjangoChecks, django_barrier
from tests.barrier.test_django import settings
from tests.barrier.test_drivers import Servers, asked, url
from tests.unit.client.django_project import project

pytestmark = [pytest.mark.xdist_group("databases"), pytest.mark.timeout(1800)]

FOR_EVER_S = 100_000
"""Longer than any test: who waited for a connection would never be answered."""

Ask = Callable[[Any, bytes], bytes]


@pytest.fixture
def engine(servers: Servers) -> Iterator[Engine]:
    engine = create_engine(url(servers, "postgresql+psycopg"), pool_size=1, max_overflow=0, pool_timeout=FOR_EVER_S)
    yield engine
    engine.dispose()


@contextmanager
def a_project(servers: Servers) -> Iterator[None]:
    """Run a Django project in the database of all tests, and leave nothing in it."""
    with project(**settings(servers, "postgresql")):
        yield
        with connections["default"].cursor() as cursor:
            cursor.execute("DROP TABLE orders")
        call_command("migrate", "halfway_client", "zero", verbosity=0)


def over_wsgi(decide: Any, body: bytes) -> bytes:
    environ = {"REQUEST_METHOD": "POST", "CONTENT_LENGTH": str(len(body)), "wsgi.input": io.BytesIO(body)}
    return b"".join(WsgiChecks(decide)(environ, lambda *_: None))


def over_flask(decide: Any, body: bytes) -> bytes:
    app = Flask("shop")
    app.add_url_rule("/check", "check", FlaskChecks(decide), methods=["POST"])
    return bytes(app.test_client().post("/check", data=body).data)


def over_django(decide: Any, body: bytes) -> bytes:
    with override_settings(ROOT_URLCONF=(path("check", DjangoChecks(decide)),)):
        return bytes(Client().post("/check", body, content_type="application/json").content)


def question(transaction_id: str) -> bytes:
    now = datetime.now(UTC).isoformat()
    asked = {"type": "transaction.check", "id": transaction_id, "group": "shop", "prepared_at": now}
    return json.dumps({**asked, "attempt": 1, "messages": []}).encode()


def outcome(answer: bytes) -> str:
    return str(json.loads(answer)["outcome"])


def until(expected: str, look: Callable[[], str | None]) -> None:
    deadline = time.monotonic() + 300
    while (found := look()) != expected:
        assert time.monotonic() < deadline, found
        time.sleep(0.02)


@pytest.mark.parametrize("ask", [over_wsgi, over_flask, over_django])
def test_a_check_beside_the_only_connection_is_answered(servers: Servers, engine: Engine, ask: Ask) -> None:
    """It does not wait for the local transaction, and what it decides later is what every later check reads."""
    barrier = Barrier("postgresql", engine.begin, table="used_up")
    barrier.create()
    committed, late = f"{uuid4()}", f"{uuid4()}"
    with a_project(servers) if ask is over_django else nullcontext():
        with Session(engine) as session, session.begin():
            barrier.insert(session, committed)
            assert engine.pool.checkedout() == 1  # type: ignore[attr-defined]  # a pool of this kind has it
            assert [outcome(ask(barrier.decide, question(each))) for each in (committed, late)] == ["unknown"] * 2
        until("commit", lambda: outcome(ask(barrier.decide, question(committed))))
        until("rollback", lambda: barrier.look(late))
        until("rollback", lambda: outcome(ask(barrier.decide, question(late))))
        with pytest.raises(LateTransactionError), Session(engine) as session, session.begin():
            barrier.insert(session, late)


def test_the_barrier_of_a_django_project_has_connections_beside_its_pool(servers: Servers) -> None:
    with a_project(servers):
        barrier = django_barrier()
        committed, still_open = f"{uuid4()}", f"{uuid4()}"
        with transaction.atomic():
            barrier.insert(connections["default"], committed)
        connections["default"].ensure_connection()
        with transaction.atomic():
            barrier.insert(connections["default"], still_open)
            connections.settings["default"]["OPTIONS"]["pool"] = {"max_size": 1}
            try:
                found = [barrier.decide(asked(each)) for each in (committed, still_open, f"{uuid4()}")]
            finally:
                del connections.settings["default"]["OPTIONS"]["pool"]
        assert found == ["commit", "unknown", "rollback"]


def test_a_decision_inside_the_transaction_of_a_test_sees_what_the_test_wrote(servers: Servers) -> None:
    """As in Django's `TestCase`, around which everything is rolled back; beside one it runs in a thread of its own."""

    def decide(check: Any) -> str:
        with connections["default"].cursor() as cursor:
            cursor.execute("SELECT count(*) FROM orders WHERE id = %s", [check.id])
            return "commit" if cursor.fetchone()[0] else "rollback"

    with a_project(servers):
        with transaction.atomic(), connections["default"].cursor() as cursor:
            cursor.execute("INSERT INTO orders (id) VALUES ('42')")
            assert outcome(over_django(decide, question("42"))) == "commit"
            transaction.set_rollback(True)
        until("rollback", lambda: outcome(over_django(decide, question("42"))))
