"""The barrier of a service: its local transactions write it, and its checks read it."""

from __future__ import annotations

import contextlib
import inspect
import logging
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Mapping
from contextlib import AbstractAsyncContextManager, AbstractContextManager
from datetime import UTC, datetime
from typing import Any, Final, Generic, ParamSpec, TypeVar, cast
from uuid import uuid4

from halfway.client.barrier.drivers import (
    at_once,
    blocking,
    carry_out,
    carry_out_async,
    demand_opener,
    drive,
    in_transaction,
    in_transaction_async,
    is_sqlalchemy,
    pool_of,
    require_transaction,
    run_sync,
)
from halfway.client.barrier.stored import ParkedMessages, Store, StoredFigures, StoredTable
from halfway.client.barrier.table import TABLE, BarrierTable, Dialect, MissingTableError, Steps, creation
from halfway.client.checks.answers import Check
from halfway.client.errors import HalfwayError
from halfway.client.messages import Outcome, is_conflict

log = logging.getLogger(__name__)

P = ParamSpec("P")
T = TypeVar("T")
C = TypeVar("C")
Connect = Callable[[], AbstractContextManager[Any]]
"""Opens a connection whose transaction commits when its context exits: `engine.begin` of SQLAlchemy, or
`lambda: psycopg.connect(...)`."""
ConnectAsync = Callable[[], AbstractAsyncContextManager[Any]]
"""The same for an asynchronous driver: `begin` of SQLAlchemy's asynchronous engine, or asyncpg's `pool.acquire`."""

RETENTION_S: Final = 7 * 86_400.0
"""The default retention of rows."""


class InvalidRetentionError(HalfwayError, ValueError):
    """Rows would be deleted while halfway may still ask about them: raise `retention_s`, or lower the policy's age."""


class UncommittedConnectionError(HalfwayError, TypeError):
    """The connection factory returns connections that do not commit when their context exits: use one that commits."""

    def __init__(self) -> None:
        super().__init__(
            "the connection factory returns connections that do not commit when their context exits: use `engine.begin`"
            " of SQLAlchemy (not `engine.connect`), `lambda: psycopg.connect(...)`, or a context manager that commits"
            " (PyMySQL's and asyncmy's connections close without a commit)"
        )


class OtherDatabaseError(HalfwayError):
    """The row would be in another database than the one that checks read: give the client the barrier of this one."""


def _owner_and_code(function: Callable[[], Any]) -> tuple[Any, Any]:
    """Return the object of a method, and what a lambda has in common for all its calls."""
    method = getattr(function, "__func__", None)
    inner = inspect.unwrap(method or function)  # all functions of `contextmanager` have the code of its helper
    code = getattr(inner, "__code__", inner)
    return (code if method is None else function.__self__), code  # type: ignore[attr-defined]  # of a method


class _BaseBarrier(ABC, Generic[C]):
    def __init__(
        self,
        dialect: Dialect | str,
        connect: C,
        *,
        table: str = TABLE,
        retention_s: float = RETENTION_S,
        store: Store | None = None,
    ) -> None:
        """Take a connection factory of the service's database, and the retention of rows in seconds.

        With a `store`, messages can wait in a second table while halfway is away.
        """
        demand_opener("connect", connect)
        self.retention_s = retention_s
        self._connect = connect
        self._table = BarrierTable(dialect, table)
        self.store = StoredTable(dialect, table, store)
        """The messages that wait. Every process reads it, so that checks are answered alike; see `Store`."""
        self._mark: str | None = None
        self._verified_pools: weakref.WeakSet[Any] = weakref.WeakSet()
        self._committing: weakref.WeakKeyDictionary[Any, weakref.WeakSet[Any]] = weakref.WeakKeyDictionary()
        """The code of the functions whose connections were seen to commit, by the object whose method it is."""
        self._clients: weakref.WeakValueDictionary[str, Any] = weakref.WeakValueDictionary()
        """The clients that can say whether halfway has sent a check, by group."""

    def migration(self) -> list[str]:
        """Return the statements that create the table, for a migration tool."""
        return self._table.migration() + (self.store.migration() if self.store.bounds else [])

    def check_policy(self, policy: Mapping[str, Any]) -> None:
        """Compare the retention with a group's policy, as `Halfway.register` returns it.

        Raises InvalidRetentionError if rows would be deleted before halfway stops asking.
        """
        max_age_s = float(policy["max_age_s"])
        if self.retention_s < 2 * max_age_s:
            raise InvalidRetentionError(
                f"retention_s {self.retention_s:.0f} is less than twice the group's max_age_s {max_age_s:.0f}:"
                f" give the barrier a retention_s of {2 * max_age_s:.0f} or more, or lower max_age_s"
            )

    def write(self, connection: Any, transaction_id: str) -> None:
        """Insert like `insert`, on the connection of a synchronous driver."""
        require_transaction(connection)
        if self._must_verify(connection):
            self._verify(connection, carry_out(self._table.mark(), connection))
        carry_out(self._table.insert(transaction_id), connection)

    def join(self, group: str, client: Any) -> None:
        """Ask a client of this group, a Halfway or a SyncHalfway, about checks that anybody may have sent."""
        self._clients[group] = client

    def _client_for(self, check: Check) -> Any | None:
        """Return the client to ask before a row is written for a check; None if it is certain, or if there is none."""
        if check.is_verified:
            return None
        return self._clients.get(check.group) or next(iter(self._clients.values()), None)

    def still_has(self, transaction_id: str) -> Steps[bool]:
        """Return the steps that read whether the open local transaction still has the row that it wrote."""
        return self._table.still_has(transaction_id)

    def commits_after(self, begin: Callable[[], Any]) -> bool:
        """Return whether connections of this function were seen to commit when their context exits."""
        owner, code = _owner_and_code(begin)
        with contextlib.suppress(TypeError):  # it cannot be a key
            return code in self._committing.get(owner, ())
        return False

    def note_commit_after(self, begin: Callable[[], Any]) -> None:
        """Remember that a connection of this function has committed when its context exited."""
        owner, code = _owner_and_code(begin)
        with contextlib.suppress(TypeError):
            self._committing.setdefault(owner, weakref.WeakSet()).add(code)

    def _must_verify(self, connection: Any) -> bool:
        """Return whether to verify that checks read this table; this happens once per engine."""
        pool = pool_of(connection)
        return self._mark is not None and pool is not None and pool not in self._verified_pools

    def _verify(self, connection: Any, mark: str | None) -> None:
        if mark not in {None, self._mark}:
            raise OtherDatabaseError(
                "this connection uses another database than the client's barrier: give the client the barrier of this"
                " database (if the table was created again in the meantime, restart the service)"
            )
        self._verified_pools.add(pool_of(connection))

    def _may_be_deleted(self, prepared_at: str) -> bool:
        """Return whether a transaction is so old that its row may be deleted; a check then answers unknown."""
        age_s = (datetime.now(UTC) - datetime.fromisoformat(prepared_at)).total_seconds()
        return age_s > self.retention_s / 2

    def _decision(
        self, transaction_id: str, prepared_at: str | None, *, may_write: bool = True
    ) -> Generator[Steps[Any], Any, Outcome | None]:
        """Yield the database transactions of a decision in order, and return the outcome.

        Return None if a row would have to be written and must not be.
        Each read has its own transaction, so that no isolation level hides a commit in between.
        """
        try:
            outcome: Outcome | None = yield self.store.look(transaction_id)
            if outcome is not None:
                return outcome
            if prepared_at is not None and self._may_be_deleted(prepared_at):
                log.warning("transaction %s is older than the barrier's retention: it stays open", transaction_id)
                return "unknown"
            if not may_write:
                return None
            is_first: bool = yield self._table.take_place(transaction_id)
            outcome = yield self.store.look(transaction_id)  # only a committed row is an answer
            if is_first and outcome is None:
                log.error("transaction %s cannot be decided: %s", transaction_id, UncommittedConnectionError())
        except Exception as error:  # noqa: BLE001 - usually, an open local transaction locks the row
            log.info("transaction %s cannot be decided now: %s: %s", transaction_id, type(error).__name__, error)
            return "unknown"
        return outcome or "unknown"

    async def _run(self, transactions: Generator[Steps[Any], Any, T]) -> T:
        return await drive(transactions, self._in_transaction)

    @abstractmethod
    async def carry_out(self, steps: Steps[T], connection: Any) -> T:
        """Execute steps in the open transaction of a connection."""

    @abstractmethod
    async def _in_transaction(self, steps: Steps[T]) -> T: ...

    @abstractmethod
    async def _is_pending(self, client: Any, check: Check) -> bool: ...

    def _verification(self) -> Generator[Steps[Any], Any, None]:
        """Yield the database transactions that read the table's mark, and test that a written row stays."""
        self._mark = yield from self._table.identify()
        if self.store.bounds and not (yield self.store.exists()):
            raise MissingTableError(
                "the barrier has a store, but its table does not exist: call `barrier.create()` before the client"
                " starts, or run the statements of `migration(dialect, store=True)` in a migration"
            )
        trial = f"#{uuid4().hex}"  # not a legal transaction id
        yield self._table.take_place(trial)
        try:
            stays = (yield self._table.look(trial)) is not None
        except Exception as error:
            if not is_conflict(error):
                raise
            # Nobody else knows the row: the connection that wrote it still locks it, so it has not committed.
            raise UncommittedConnectionError from error
        if not stays:
            raise UncommittedConnectionError
        yield self._table.remove(trial)
        self.note_commit_after(cast("Callable[[], Any]", self._connect))


class AsyncBarrier(_BaseBarrier[ConnectAsync]):
    """The barrier for asynchronous drivers: asyncpg, psycopg, asyncmy, SQLAlchemy."""

    async def create(self) -> None:
        """Create the table and its index, unless they exist; every process may call it whenever it starts."""
        await self._run(creation(self._table))
        if self.store.bounds:
            await self._run(creation(self.store))

    async def insert(self, connection: Any, transaction_id: str) -> None:
        """Same as `Barrier.insert`."""
        if is_sqlalchemy(connection):
            await run_sync(connection, self.write, transaction_id)
            return
        require_transaction(connection)
        await carry_out_async(self._table.insert(transaction_id), connection)

    async def learn(self) -> None:
        """Remember which table checks read, so that an insert into another one is detected.

        Raises MissingTableError, and UncommittedConnectionError if rows that are written there do not stay.
        """
        await self._run(self._verification())

    async def look(self, transaction_id: str) -> Outcome | None:
        """Return the outcome in the table, None if there is none yet; `unknown` while its messages are stored."""
        return await self._in_transaction(self.store.look(transaction_id))

    async def has_committed(self, transaction_id: str) -> bool:
        """Return whether the row of a local transaction is committed, also if its messages are stored."""
        return await self._in_transaction(self._table.look(transaction_id)) == "commit"

    async def stored(self) -> StoredFigures:
        """Return how much waits in the store, for metrics and alerts."""
        return await self._in_transaction(self.store.figures())

    async def parked(self) -> list[ParkedMessages]:
        """Return the stored transactions that are not sent until `resolve` says how, oldest first; at most 100."""
        return await self._in_transaction(self.store.parked())

    async def resolve(self, transaction_id: str, *, delivered: bool) -> bool:
        """Resolve a parked transaction: forget it if its messages are in their topics, otherwise send them.

        Return False if it is not parked.
        """
        return await self._in_transaction(self.store.resolve(transaction_id, delivered=delivered))

    async def in_transaction(self, steps: Steps[T]) -> T:
        """Execute steps in a transaction on a connection of the barrier."""
        return await self._in_transaction(steps)

    async def decide(self, check: Check) -> Outcome:
        """Answer a check. If it comes before the local transaction, that transaction can no longer commit.

        If the check is not verified, halfway is asked first whether there is such a transaction. Otherwise anybody
        could decide ids that the service will use later.
        """
        client = self._client_for(check)
        outcome = await self._run(self._decision(check.id, check.prepared_at, may_write=client is None))
        if outcome is None and client is not None and await self._is_pending(client, check):
            outcome = await self._run(self._decision(check.id, check.prepared_at))
        return outcome or "unknown"

    async def settle(self, transaction_id: str) -> Outcome:
        """Decide like a check, for a transaction that was prepared just now."""
        return await self._run(self._decision(transaction_id, None)) or "unknown"

    async def clean(self, limit: int) -> int:
        """Delete at most `limit` rows older than the retention, and none while another instance deletes."""
        return await self._in_transaction(self._table.clean(self.retention_s, limit))

    async def carry_out(self, steps: Steps[T], connection: Any) -> T:
        return await carry_out_async(steps, connection)

    async def _in_transaction(self, steps: Steps[T]) -> T:
        return await in_transaction_async(self._connect, self._table.dialect, steps)

    async def _is_pending(self, client: Any, check: Check) -> bool:
        return bool(await client.is_pending(check.id, check.group))


class Barrier(_BaseBarrier[Connect]):
    """The barrier for synchronous drivers: psycopg, PyMySQL, sqlite3, SQLAlchemy, Django."""

    def insert(self, connection: Any, transaction_id: str) -> None:
        """Write the row in the local transaction on this connection, so that both commit together.

        Raises LateTransactionError if a check has been answered before, and ConflictError after a conflict with another
        transaction. Let either roll the local transaction back.
        """
        self.write(connection, transaction_id)

    create = blocking(AsyncBarrier.create)
    learn = blocking(AsyncBarrier.learn)
    look = blocking(AsyncBarrier.look)
    has_committed = blocking(AsyncBarrier.has_committed)
    decide = blocking(AsyncBarrier.decide)
    settle = blocking(AsyncBarrier.settle)
    clean = blocking(AsyncBarrier.clean)
    stored = blocking(AsyncBarrier.stored)
    parked = blocking(AsyncBarrier.parked)
    resolve = blocking(AsyncBarrier.resolve)

    def in_transaction(self, steps: Steps[T]) -> T:
        """Execute steps in a transaction on a connection of the barrier."""
        return at_once(self._in_transaction(steps))

    async def carry_out(self, steps: Steps[T], connection: Any) -> T:
        return carry_out(steps, connection)

    async def _in_transaction(self, steps: Steps[T]) -> T:
        return in_transaction(self._connect, self._table.dialect, steps)

    async def _is_pending(self, client: Any, check: Check) -> bool:
        return bool(client.is_pending_sync(check.id, check.group))
