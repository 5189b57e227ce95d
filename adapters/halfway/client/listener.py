"""The way of RocketMQ: a listener that runs the local transaction, and is asked for it later."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from typing import Any, Protocol
from uuid import uuid4

from halfway.client.checks import Check, Decide
from halfway.client.client import Halfway
from halfway.client.messages import Message
from halfway.client.outcome import OUTCOMES, Outcome

log = logging.getLogger(__name__)


class TransactionListener(Protocol):
    """What a service implements."""

    async def execute_local_transaction(self, transaction_id: str, argument: Any) -> Outcome:
        """Run the local transaction, called once the messages are prepared; what it raises counts as `unknown`."""

    async def check_local_transaction(self, check: Check) -> Outcome:
        """Say later what became of it, `unknown` while that cannot be known; what it raises counts as `unknown`."""


class TransactionProducer:
    """Sends messages with a local transaction, as RocketMQ's producer of the same name does."""

    def __init__(self, client: Halfway, listener: TransactionListener) -> None:
        """Take the client and what runs and checks local transactions."""
        self._client = client
        self._listener = listener

    @property
    def decide(self) -> Decide:
        """What answers checks, for a check endpoint or a CheckWorker."""
        return self._listener.check_local_transaction

    async def send_in_transaction(
        self,
        messages: Iterable[Message],
        argument: Any = None,
        *,
        id: str | None = None,  # noqa: A002 - what REST calls it
        check_after_s: float | None = None,
        confirm: bool = True,
    ) -> tuple[str, Outcome]:
        """Prepare, run the local transaction with `argument`, and end; return the id and the outcome.

        Raises what `Halfway.prepare` raises, and then nothing was run; and what `Halfway.end` raises, unless
        `confirm=False` sends the end in the background.
        """
        transaction_id = id or uuid4().hex
        await self._client.prepare(messages, id=transaction_id, check_after_s=check_after_s)
        remark = None
        try:
            outcome = await self._listener.execute_local_transaction(transaction_id, argument)
        except Exception as error:
            log.exception("the local transaction of %s failed: it is left to check-back", transaction_id)
            outcome, remark = "unknown", f"execute_local_transaction raised {type(error).__name__}"
        if outcome not in OUTCOMES:
            log.error(
                "the local transaction of %s returned %r, not commit, rollback or unknown", transaction_id, outcome
            )
            outcome, remark = "unknown", "execute_local_transaction returned no outcome"
        await self._client.end(transaction_id, outcome, remark=remark, confirm=confirm)
        return transaction_id, outcome
