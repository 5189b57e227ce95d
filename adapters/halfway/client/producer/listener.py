"""The API in RocketMQ's style: a listener runs the local transaction, and answers checks about it later."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Iterable
from typing import Any, Protocol, Unpack, cast

from halfway.client.checks.answers import Check, Decide, DecideSync
from halfway.client.messages import OUTCOMES, Message, Outcome
from halfway.client.producer.client import Halfway, TransactionOptions
from halfway.client.producer.sync import SyncHalfway
from halfway.client.threads import call_async, is_async

log = logging.getLogger(__name__)


class TransactionListener(Protocol):
    """The interface that a service implements. Methods that are not coroutine functions run in a thread."""

    def execute_local_transaction(self, transaction_id: str, argument: Any) -> Outcome | Awaitable[Outcome]:
        """Run the local transaction. Called once the messages are prepared; an exception counts as `unknown`."""

    def check_local_transaction(self, check: Check) -> Outcome | Awaitable[Outcome]:
        """Return the outcome later, `unknown` while it is not known; an exception counts as `unknown`."""


class TransactionProducer:
    """Sends messages with a local transaction, as RocketMQ's producer of the same name does."""

    def __init__(self, client: Halfway, listener: TransactionListener) -> None:
        if not isinstance(client, Halfway):
            raise TypeError(f"TransactionProducer takes a Halfway: use SyncTransactionProducer with {type(client)}")
        self._client = client
        self._listener = listener

    @property
    def decide(self) -> Decide:
        """The function that answers checks, for a check endpoint or a CheckWorker."""
        return self._listener.check_local_transaction

    async def send_in_transaction(
        self, messages: Iterable[Message], argument: Any = None, **options: Unpack[TransactionOptions]
    ) -> tuple[str, Outcome]:
        """Prepare, run the local transaction with `argument`, and end; return the id and the outcome.

        The options are those of `Halfway.transaction`. Raises the errors of `Halfway.prepare`, before the local
        transaction has run, and the errors of `Halfway.end`, unless `confirm=False` sends the end in the background.
        """
        async with self._client.transaction(messages, **options) as transaction:
            try:
                result: object = await call_async(self._listener.execute_local_transaction, transaction.id, argument)
            except Exception as error:  # noqa: BLE001 - of the listener
                result = error
            outcome, remark = _outcome(transaction.id, result)
            await transaction.end(outcome, remark)
        return transaction.id, outcome


class SyncTransactionProducer:
    """`TransactionProducer` for threads: the methods of its listener are no coroutine functions."""

    def __init__(self, client: SyncHalfway, listener: TransactionListener) -> None:
        if not isinstance(client, SyncHalfway):
            raise TypeError(f"SyncTransactionProducer takes a SyncHalfway: use TransactionProducer with {type(client)}")
        for method in (listener.execute_local_transaction, listener.check_local_transaction):
            if is_async(method):
                raise TypeError(f"{method.__qualname__} is a coroutine function: use TransactionProducer with Halfway")
        self._client = client
        self._listener = listener

    @property
    def decide(self) -> DecideSync:
        """The function that answers checks, for a check endpoint or `SyncHalfway.start`."""
        return cast("DecideSync", self._listener.check_local_transaction)

    def send_in_transaction(
        self, messages: Iterable[Message], argument: Any = None, **options: Unpack[TransactionOptions]
    ) -> tuple[str, Outcome]:
        """Same as `TransactionProducer.send_in_transaction`."""
        with self._client.transaction(messages, **options) as transaction:
            try:
                result: object = self._listener.execute_local_transaction(transaction.id, argument)
            except Exception as error:  # noqa: BLE001 - of the listener
                result = error
            outcome, remark = _outcome(transaction.id, result)
            transaction.end(outcome, remark)
        return transaction.id, outcome


def _outcome(transaction_id: str, result: object) -> tuple[Outcome, str | None]:
    """Return the outcome for the result or exception of a local transaction, and a remark if it is not an outcome."""
    if isinstance(result, Exception):
        log.error("the local transaction of %s failed: check-back asks for it", transaction_id, exc_info=result)
        return "unknown", f"execute_local_transaction raised {type(result).__name__}"
    if isinstance(result, str) and result in OUTCOMES:
        return result, None  # type: ignore[return-value]  # it is one of them
    log.error("the local transaction of %s returned %r, not commit, rollback or unknown", transaction_id, result)
    return "unknown", "execute_local_transaction returned no outcome"
