"""Periodic work of the barrier: deletes old rows, and sends the ends of decided transactions that are still open."""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import Awaitable, Callable

from halfway.client.barrier.barrier import AsyncBarrier, Barrier
from halfway.client.barrier.table import BATCH, pause_s
from halfway.client.calls.group import GroupCalls
from halfway.client.errors import (
    AlreadyEndedError,
    ClientClosedError,
    HalfwayError,
    RefusedError,
    WrongEventLoopError,
    demand_positive,
)
from halfway.client.threads import call_async

log = logging.getLogger(__name__)


class BarrierMaintenance:
    """A task that deletes old rows of the barrier's table, and reconciles its rows with halfway.

    Every instance of a service may run it; one of them deletes at a time. It lists the group's pending and parked
    transactions, and ends those that the barrier has decided, so a lost end needs no check.
    """

    def __init__(
        self,
        client: GroupCalls,
        barrier: Barrier | AsyncBarrier,
        *,
        every_s: float = 60.0,
        batch: int = BATCH,
        older_than_s: float = 30.0,
    ) -> None:
        """Configure the task: it works about every `every_s` seconds, and deletes at most `batch` rows per transaction.

        A concurrent local transaction may wait as long as the deletion of a batch takes. Transactions that were
        prepared less than `older_than_s` seconds ago are not reconciled.
        """
        demand_positive(every_s=every_s)
        demand_positive(1, batch=batch)
        self._client = client
        self._barrier = barrier
        self._every_s = every_s
        self._batch = batch
        self._older_than_s = older_than_s

    async def run(self) -> None:
        """Run until cancelled. Failures are logged and retried.

        Raises InvalidRetentionError at the start, ClientClosedError and WrongEventLoopError.
        """
        self._barrier.check_policy(await self._policy())
        while True:
            await asyncio.sleep(self._every_s * random.uniform(0.5, 1.5))  # noqa: S311 - instances take turns
            await self._log_failure_of(self.clean, "old rows of the barrier were not deleted")
            await self._log_failure_of(self.reconcile, "the barrier was not reconciled")

    async def clean(self) -> int:
        """Delete the rows older than the retention in batches; return their number."""
        total = 0
        while True:
            started = time.monotonic()
            deleted = await call_async(self._barrier.clean, self._batch)
            total += deleted
            if deleted < self._batch:
                return total
            await asyncio.sleep(pause_s(time.monotonic() - started))

    async def reconcile(self) -> int:
        """End the transactions that the barrier has decided and that halfway still has open; return their number."""
        ended = 0
        for state in ("prepared", "parked"):
            async for transaction_id in self._client.list_ids(state=state, older_than_s=self._older_than_s):
                ended += await self._reconcile(transaction_id)
        return ended

    async def _reconcile(self, transaction_id: str) -> bool:
        try:
            outcome = await call_async(self._barrier.look, transaction_id)  # unknown, if the sender ends it
        except Exception as error:  # noqa: BLE001 - of any driver; usually, the local transaction is still open
            log.info("the barrier's row of %s could not be read: %s: %s", transaction_id, type(error).__name__, error)
            return False
        if outcome not in {"commit", "rollback"}:
            return False
        try:
            await self._client.end(transaction_id, outcome, remark="reconciled with the barrier")
        except AlreadyEndedError:
            log.exception("the outcome of transaction %s differs from the database's, %s", transaction_id, outcome)
            return False
        except RefusedError as error:
            log.info("transaction %s was ended by another caller: %s", transaction_id, error)
            return False
        return True

    async def _policy(self) -> dict[str, float]:
        while True:
            try:
                return dict((await self._client.show_group())["policy"])
            except RefusedError:
                raise
            except HalfwayError as error:
                log.warning("the group's policy could not be read, trying again: %s", error)
                await asyncio.sleep(self._every_s)

    async def _log_failure_of(self, work: Callable[[], Awaitable[int]], failure: str) -> None:
        try:
            await work()
        except (ClientClosedError, WrongEventLoopError):
            raise
        except HalfwayError as error:  # usually no coordinator was there for a moment
            log.warning("%s, trying again: %s", failure, error)
        except Exception:
            log.exception(failure)
