"""Anybody who reaches an endpoint may send a check; one that halfway has not signed decides only what is pending."""

import asyncio
import json
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import NullPool
from sqlalchemy.ext.asyncio import create_async_engine

from halfway.client import Check, Halfway, Message, SyncHalfway, answer_check, answer_check_sync
from halfway.client.barrier import AsyncBarrier, Barrier, sqlite_transactions
from tests.support.client.shop import transactional
from tests.support.ids import named_id
from tests.support.rest.client import RestWorld

ORDER = Message(topic="orders", key="42", value="paid")
LATER = named_id("later")
NOW = named_id("now")


def question(transaction_id: str, group: str = "shop") -> bytes:
    now = datetime.now(UTC).isoformat()
    check = {"type": "transaction.check", "id": transaction_id, "group": group, "prepared_at": now}
    return json.dumps({**check, "attempt": 1, "messages": []}).encode()


def outcome(answer: tuple[int, bytes]) -> str:
    return str(json.loads(answer[1])["outcome"])


@pytest.fixture
def barrier(tmp_path: Path) -> Barrier:
    barrier = Barrier("sqlite", sqlite_transactions(tmp_path / "shop.sqlite"))
    barrier.create()
    return barrier


async def test_it_takes_no_id_that_the_service_will_use_later(world: RestWorld, barrier: Barrier) -> None:
    """A transaction that is pending is decided; so is one that has a row, without asking halfway."""
    async with Halfway(world.url, "shop", barrier=barrier) as client:
        asked = [outcome(await answer_check(question(LATER, group), barrier.decide)) for group in ("shop", "bank")]
        assert asked == ["unknown", "unknown"]
        await client.prepare([ORDER], id=NOW)
        assert outcome(await answer_check(question(NOW, "bank"), barrier.decide)) == "unknown"
        assert outcome(await answer_check(question(NOW), barrier.decide)) == "rollback"
        async with client.transaction([ORDER], id=LATER) as transaction:
            with barrier._connect() as connection:
                barrier.insert(connection, transaction.id)
        assert outcome(await answer_check(question(LATER), barrier.decide)) == "commit"


async def test_the_same_with_a_client_for_threads(world: RestWorld, barrier: Barrier) -> None:
    def service() -> list[str]:
        def ask(transaction_id: str) -> str:
            return outcome(answer_check_sync(question(transaction_id), barrier.decide))

        with SyncHalfway(world.url, "shop", barrier=barrier) as client:
            client.prepare([ORDER], id=NOW)
            return [ask(LATER), ask(NOW), ask(LATER)]

    assert await asyncio.to_thread(service) == ["unknown", "rollback", "unknown"]


async def test_the_same_with_an_asynchronous_barrier(world: RestWorld, tmp_path: Path) -> None:
    engine = create_async_engine(f"sqlite+aiosqlite:///{tmp_path / 'shop.sqlite'}", poolclass=NullPool)
    transactional(engine.sync_engine)
    barrier = AsyncBarrier("sqlite", engine.begin)
    await barrier.create()
    async with Halfway(world.url, "shop", barrier=barrier) as client:
        await client.prepare([ORDER], id=NOW)
        found = [outcome(await answer_check(question(each), barrier.decide)) for each in (LATER, NOW)]
    assert found == ["unknown", "rollback"]
    await engine.dispose()


async def test_a_check_that_is_certain_needs_no_confirmation(world: RestWorld, barrier: Barrier) -> None:
    """It was signed, or fetched."""
    async with Halfway(world.url, "shop", barrier=barrier):
        document = json.loads(question("signed"))
        certain = Check.from_json(document, is_verified=True)
        assert await asyncio.to_thread(barrier.decide, certain) == "rollback"


@pytest.mark.parametrize("close", [True, False], ids=["closed client", "no client"])
async def test_without_a_client_that_can_be_asked_it_is_decided(
    world: RestWorld, barrier: Barrier, *, close: bool
) -> None:
    """Only a verifier protects then."""
    clients: list[Any] = []
    make: Callable[..., Any] = Halfway
    if close:
        async with make(world.url, "shop", barrier=barrier) as client:
            clients.append(client)
    assert outcome(await answer_check(question(LATER), barrier.decide)) == "rollback"


async def test_a_halfway_that_gives_no_answer_leaves_the_check_open(barrier: Barrier) -> None:
    async with Halfway("http://127.0.0.1:1", "shop", barrier=barrier):
        assert outcome(await answer_check(question(LATER), barrier.decide, within_s=30)) == "unknown"
