"""RocketMQ's way: three outcomes, and what the listener raises is unknown."""

from typing import Any

import pytest

from halfway.client import Check, Halfway, InvalidRequestError, Message, Outcome, TransactionProducer, answer_check
from tests.support.rest.client import RestWorld
from tests.unit.client.test_checks import BODY

ORDER = Message(topic="orders", key="42", value="paid")


class Listener:
    """Does as its argument says."""

    async def execute_local_transaction(self, transaction_id: str, argument: Any) -> Outcome:
        if isinstance(argument, Exception):
            raise argument
        outcome: Outcome = argument
        return outcome

    async def check_local_transaction(self, check: Check) -> Outcome:
        return "rollback"


async def test_each_outcome_ends_the_transaction_so(world: RestWorld) -> None:
    async with Halfway(world.url, "shop") as client:
        producer = TransactionProducer(client, Listener())
        for argument, state in [
            ("commit", "committed"),
            ("rollback", "rolled_back"),
            ("unknown", "prepared"),
            (ZeroDivisionError("stock"), "prepared"),
            ("COMMIT_MESSAGE", "prepared"),
            (None, "prepared"),
        ]:
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
