"""The listener in RocketMQ's style: three outcomes, and an exception is unknown."""

import asyncio
from typing import Any

import pytest

from halfway.client import (
    Check,
    Halfway,
    InvalidRequestError,
    Message,
    Outcome,
    SyncHalfway,
    SyncTransactionProducer,
    TransactionProducer,
    answer_check,
)
from tests.support.rest.client import RestWorld
from tests.unit.client.test_checks import BODY

ORDER = Message(topic="orders", key="42", value="paid")


class Listener:
    """Returns or raises its argument."""

    async def execute_local_transaction(self, transaction_id: str, argument: Any) -> Outcome:
        if isinstance(argument, Exception):
            raise argument
        outcome: Outcome = argument
        return outcome

    async def check_local_transaction(self, check: Check) -> Outcome:
        return "rollback"


class SyncListener:
    """Returns or raises its argument, without an event loop."""

    def execute_local_transaction(self, transaction_id: str, argument: Any) -> Outcome:
        if isinstance(argument, Exception):
            raise argument
        outcome: Outcome = argument
        return outcome

    def check_local_transaction(self, check: Check) -> Outcome:
        return "rollback"


STATES: list[tuple[Any, str]] = [
    ("commit", "committed"),
    ("rollback", "rolled_back"),
    ("unknown", "prepared"),
    (ZeroDivisionError("stock"), "prepared"),
    ("COMMIT_MESSAGE", "prepared"),
    (None, "prepared"),
]


@pytest.mark.parametrize("listener", [Listener(), SyncListener()])
async def test_each_outcome_ends_the_transaction_so(world: RestWorld, listener: Listener | SyncListener) -> None:
    async with Halfway(world.url, "shop") as client:
        producer = TransactionProducer(client, listener)
        for argument, state in STATES:
            transaction_id, outcome = await producer.send_in_transaction([ORDER], argument)
            assert (await client.show(transaction_id))["state"] == state
            assert outcome == (argument if argument in ("commit", "rollback") else "unknown")
    assert len(world.memory.records("orders")) == 1


async def test_nothing_runs_without_a_prepare(world: RestWorld) -> None:
    async with Halfway(world.url, "shop") as client:
        producer = TransactionProducer(client, Listener())
        with pytest.raises(InvalidRequestError):
            await producer.send_in_transaction([Message(topic="absent")], AssertionError("it ran"))


async def test_checks_are_answered_by_the_listener(world: RestWorld) -> None:
    async with Halfway(world.url, "shop") as client:
        answer = await answer_check(BODY, TransactionProducer(client, Listener()).decide)
    assert answer == (200, b'{"outcome": "rollback", "nonce": "qL4c"}')


async def test_threads_send_in_the_same_way(world: RestWorld) -> None:
    def work() -> None:
        with SyncHalfway(world.url, "shop") as client:
            producer = SyncTransactionProducer(client, SyncListener())
            for argument, state in STATES:
                transaction_id, outcome = producer.send_in_transaction([ORDER], argument)
                assert client.show(transaction_id)["state"] == state
                assert outcome == (argument if argument in ("commit", "rollback") else "unknown")
            assert producer.decide == producer._listener.check_local_transaction

    await asyncio.to_thread(work)
    assert len(world.memory.records("orders")) == 1


def test_a_client_or_listener_of_the_other_kind_is_refused_before_anything_is_sent() -> None:
    with SyncHalfway("http://127.0.0.1:1", "shop") as sync:
        with pytest.raises(TypeError, match="use SyncTransactionProducer"):
            TransactionProducer(sync, Listener())  # type: ignore[arg-type]
        with pytest.raises(TypeError, match="execute_local_transaction is a coroutine function"):
            SyncTransactionProducer(sync, Listener())
    with pytest.raises(TypeError, match="use TransactionProducer"):
        SyncTransactionProducer(Halfway("http://127.0.0.1:1", "shop"), SyncListener())  # type: ignore[arg-type]
