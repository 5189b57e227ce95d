"""Periodic work of the barrier: deletes old rows, and ends transactions that it has decided and nobody ended."""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import Awaitable, Callable

from halfway.client.barrier.barrier import AsyncBarrier, Barrier
from halfway.client.blocking import awaited
from halfway.client.client import Halfway
from halfway.client.errors import (
    AlreadyEndedError,
    ClientClosedError,
    HalfwayError,
    RefusedError,
    WrongEventLoopError,
)
from halfway.client.pacing import BATCH, pause_s

log = logging.getLogger(__name__)


class BarrierMaintenance:
    """A task that cleans the barrier's table and reconciles its rows with halfway.

    Every instance of a service may run it: one of them cleans at a time. It reads what halfway has pending or parked
    for the group, and ends what the barrier has decided, so an end that was lost needs no check.
    """

    def __init__(
        self,
        client: Halfway,
        barrier: Barrier | AsyncBarrier,
        *,
        every_s: float = 60.0,
        batch: int = BATCH,
        older_than_s: float = 30.0,
    ) -> None:
        """Work about every `every_s` seconds; delete at most `batch` rows in one transaction.

        A local transaction beside it may wait as long as a batch takes.

        What was prepared less than `older_than_s` ago is left to its own end.
        """
        self._client = client
        self._barrier = barrier
        self._every_s = every_s
        self._batch = batch
        self._older_than_s = older_than_s

    async def run(self) -> None:
        """Run until cancelled; failures are logged and tried again.

        Raises InvalidRetentionError at once, ClientClosedError and WrongEventLoopError.
        """
        self._barrier.check_policy(await self._policy())
        while True:
            await asyncio.sleep(self._every_s * random.uniform(0.5, 1.5))  # noqa: S311 - instances take turns
            await self._logged(self.clean, "the barrier was not cleaned")
            await self._logged(self.reconcile, "the barrier was not reconciled")

    async def clean(self) -> int:
        """Delete what is older than the retention, in batches; return how many rows."""
        total = 0
        while True:
            began = time.monotonic()
            deleted = await awaited(self._barrier.clean, self._batch)
            total += deleted
            if deleted < self._batch:
                return total
            await asyncio.sleep(pause_s(time.monotonic() - began))

    async def reconcile(self) -> int:
        """End what the barrier has decided and halfway still has open; return how many transactions."""
        ended = 0
        for state in ("prepared", "parked"):
            async for transaction_id in self._client.list_ids(state=state, older_than_s=self._older_than_s):
                ended += await self._reconcile(transaction_id)
        return ended

    async def _reconcile(self, transaction_id: str) -> bool:
        try:
            outcome = await awaited(self._barrier.look, transaction_id)
        except Exception as error:  # noqa: BLE001 - any driver's: as a rule its local transaction is open
            log.info("the barrier's row of %s could not be read: %s: %s", transaction_id, type(error).__name__, error)
            return False
        if outcome is None:
            return False
        try:
            await self._client.end(transaction_id, outcome, remark="reconciled with the barrier")
        except AlreadyEndedError:
            log.exception("transaction %s has not the outcome of the database, %s", transaction_id, outcome)
            return False
        except RefusedError as error:
            log.info("transaction %s was ended by another: %s", transaction_id, error)
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

    async def _logged(self, work: Callable[[], Awaitable[int]], failure: str) -> None:
        try:
            await work()
        except (ClientClosedError, WrongEventLoopError):
            raise
        except Exception:
            log.exception(failure)
