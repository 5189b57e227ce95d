"""Periodic work of the barrier.

It deletes old rows, sends the ends of decided transactions that are still open, and sends the messages that local
transactions have stored while halfway was away.
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from typing import Final, Literal, TypeVar

from halfway.client.barrier.barrier import AsyncBarrier, Barrier
from halfway.client.barrier.stored import StoredTransaction
from halfway.client.barrier.table import BATCH, Steps, pause_s
from halfway.client.calls.group import GroupCalls
from halfway.client.errors import (
    NOT_HALFWAY,
    AlreadyEndedError,
    ClientClosedError,
    HalfwayError,
    IdInFutureError,
    IdReusedError,
    InvalidRequestError,
    OutcomeExpiredError,
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


T = TypeVar("T")

_WINDOW: Final = 500
"""How many of the oldest transactions are looked at, and prepared side by side."""
_MAX_PAUSE_S: Final = 15.0
_TRIES_AT_OLDER: Final = 5

_NOT_FOR_GOOD: Final = {NOT_HALFWAY, "topic_not_allowed"}
"""Refusals that end: a process that starts, or an operator, gives the group its new topic."""

_Result = Literal["prepared", "committed", "rolled back", "expired"] | HalfwayError


@dataclass
class _Round:
    """What one pass over the store has done."""

    sent: int = 0
    failed: dict[str, HalfwayError] = field(default_factory=dict)
    """Transactions that halfway did not take now. What shares a key with them waits too."""
    after: int = 0
    """All up to this place have failed or wait for one that has: what is looked at begins behind it."""
    keys: set[tuple[str, bytes]] = field(default_factory=set)
    """Those of all up to `after`."""
    renamed: set[str] = field(default_factory=set)
    """New ids. If halfway does not take one either, its clock is wrong."""


class StoredSender:
    """A task that sends stored messages: in the order of their commits by key, each exactly once.

    Every process of a service may run it; one sends at a time. A step that is repeated changes nothing, because each
    transaction keeps its id: if halfway has it, the prepare is the same prepare, and a commit is the same commit.

    1. End what halfway has pending and the barrier has decided: those are older than what is stored.
    2. Prepare the oldest stored transactions, side by side.
    3. Note of those that no older one of the same key precedes that they were given to halfway. Only from here on
       anybody says commit.
    4. Commit them. Then the next of each key follow, with 3. Delete those that are committed.

    If halfway says of an id that it was rolled back, or no longer knows it (it is older than the outcome horizon) and
    it was not given, nobody has committed it and nobody can: the row gets a new id. If it was given, only the topics
    can tell whether it was committed: it is parked, and so is what halfway refuses for good.
    """

    def __init__(self, client: GroupCalls, barrier: Barrier | AsyncBarrier, *, every_s: float = 1.0) -> None:
        """Configure the task: it looks for stored messages about every `every_s` seconds."""
        self._client = client
        self._barrier = barrier
        self._store = barrier.store
        self._every_s = every_s
        self._tries_at_older = 0

    async def run(self) -> None:
        """Run until cancelled. Failures are logged and retried. Raises ClientClosedError and WrongEventLoopError."""
        pause_s = self._every_s
        while True:
            await asyncio.sleep(pause_s * random.uniform(0.5, 1.5))  # noqa: S311 - processes take turns
            try:
                await self.send()
            except (ClientClosedError, WrongEventLoopError):
                raise
            except Exception as error:  # noqa: BLE001 - of halfway, or of any driver
                pause_s = min(2 * pause_s, _MAX_PAUSE_S)
                log.warning("stored messages were not sent, trying again: %s: %s", type(error).__name__, error)
            else:
                pause_s = self._every_s

    async def send(self) -> int:
        """Send all that is stored, and return how many transactions; raises the first error if some are left."""
        done, older_are_ended = _Round(), False
        while transactions := await self._next(done):
            if not older_are_ended:
                await self._end_older()
                older_are_ended = True
            await self._send(transactions, done)
        if done.sent:
            log.info("%d stored transactions were sent", done.sent)
        if done.failed:
            raise next(iter(done.failed.values()))
        return done.sent

    async def _next(self, done: _Round) -> list[StoredTransaction]:
        """Return what can be sent now: of the oldest, those that have not failed and wait for no failed one."""
        while window := await self._run(self._store.oldest(self._client.group, _WINDOW, done.after)):
            found, keys, is_first = [], set(done.keys), True
            for one in window:
                if one.id not in done.failed and keys.isdisjoint(one.keys):
                    found.append(one)
                    is_first = False
                    continue
                keys |= one.keys
                if is_first:
                    done.keys, done.after = set(keys), one.place
            if found:
                return found
        return []

    async def _end_older(self) -> None:
        """End older transactions; raise if this fails, but not for ever: one of them may be unable to end.

        An outage uses no tries up: what is stored would overtake what is older as soon as it is over.
        """
        try:
            await BarrierMaintenance(self._client, self._barrier, older_than_s=0).reconcile()
        except (ClientClosedError, WrongEventLoopError):
            raise
        except HalfwayError as error:
            await self._client.show_group()  # raises while halfway is away, which is no try
            self._tries_at_older += 1
            if self._tries_at_older < _TRIES_AT_OLDER:
                raise
            log.warning("older transactions are not ended before what is stored: %s", error)
        self._tries_at_older = 0

    async def _send(self, transactions: Sequence[StoredTransaction], done: _Round) -> None:
        """Send what can be sent of these; what shares a key with one that cannot waits for the next pass."""
        results = await _all(transactions, self._prepare)
        waiting, committed, held = list(transactions), list[str](), set[tuple[str, bytes]]()
        while first := _first_of_each_key(waiting, held):
            prepared = [one.id for one in first if results[one.id] == "prepared"]
            given = await self._run(self._store.go_on(committed, prepared))
            done.sent += len(committed)
            results |= await _all([one for one in first if one.id in given], self._commit)
            committed = [one.id for one in first if results[one.id] == "committed"]
            for one in first:
                if not await self._settle(one, results[one.id], done):
                    held |= one.keys
            sent = {one.id for one in first}
            waiting = [one for one in waiting if one.id not in sent]
        await self._run(self._store.go_on(committed, []))
        done.sent += len(committed)

    async def _settle(self, transaction: StoredTransaction, result: _Result, done: _Round) -> bool:
        """Record a result; return whether later transactions of the same keys may follow now."""
        match result:
            case "committed":
                return True
            case "prepared":
                return False  # another process sends it, or has sent it
            case "rolled back" | "expired" if transaction.id in done.renamed:
                done.failed[transaction.id] = HalfwayError(f"halfway takes no new id: {transaction.id} is {result}")
            case "rolled back" | "expired":
                new_id, certain = self._client.new_id(), result == "rolled back"
                if await self._run(self._store.rename(transaction.id, new_id, was_rolled_back=certain)):
                    done.renamed.add(new_id)
                    log.info("stored transaction %s is %s at halfway: it is now %s", transaction.id, result, new_id)
                    return False
                await self._park(transaction, "it may have been committed, and halfway no longer knows its outcome")
                return True
            case InvalidRequestError() | IdReusedError() if result.error_code not in _NOT_FOR_GOOD:
                await self._park(transaction, str(result))
                return True
            case _:
                done.failed[transaction.id] = result
        return False

    async def _park(self, transaction: StoredTransaction, reason: str) -> None:
        await self._run(self._store.park(transaction.id, reason))

    async def _prepare(self, transaction: StoredTransaction) -> _Result:
        try:
            await self._client.prepare(transaction.messages, id=transaction.id, keep=True)
        except AlreadyEndedError as error:
            return _RESULTS.get(error.state, error)
        except OutcomeExpiredError:
            return "expired"
        except (IdInFutureError, IdReusedError) as error:
            # Nobody says commit before it is given: what halfway has under this id, if anything, is rolled back.
            return error if transaction.is_given else "expired"
        return "prepared"

    async def _commit(self, transaction: StoredTransaction) -> _Result:
        try:
            await self._client.end(transaction.id, "commit", remark="stored while halfway was away")
        except AlreadyEndedError:
            return "rolled back"
        return "committed"

    async def _run(self, steps: Steps[T]) -> T:
        return await call_async(self._barrier.in_transaction, steps)


_RESULTS: Final[Mapping[str, _Result]] = {"committed": "committed", "rolled_back": "rolled back", "parked": "prepared"}
"""A parked transaction is prepared: a commit ends it."""


async def _all(
    transactions: Sequence[StoredTransaction], call: Callable[[StoredTransaction], Awaitable[_Result]]
) -> dict[str, _Result]:
    """Call for all side by side, and return the results by id."""

    async def result_of(transaction: StoredTransaction) -> _Result:
        try:
            return await call(transaction)
        except (ClientClosedError, WrongEventLoopError):
            raise
        except HalfwayError as error:
            return error

    results = await asyncio.gather(*map(result_of, transactions))
    return {one.id: result for one, result in zip(transactions, results, strict=True)}


def _first_of_each_key(
    transactions: Iterable[StoredTransaction], held: AbstractSet[tuple[str, bytes]]
) -> list[StoredTransaction]:
    """Return the transactions that no older one of the same key precedes, and whose keys are not held up."""
    first: list[StoredTransaction] = []
    keys = set(held)
    for one in transactions:
        if keys.isdisjoint(one.keys):
            first.append(one)
        keys |= one.keys
    return first
