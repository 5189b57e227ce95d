"""The barrier of a service: written in its local transactions, read by its checks."""

from __future__ import annotations

import logging
from collections.abc import Callable, Generator, Mapping
from contextlib import AbstractAsyncContextManager, AbstractContextManager
from datetime import UTC, datetime
from typing import Any, Final, TypeVar

from halfway.client.barrier.dialect import Dialect
from halfway.client.barrier.drivers import carry_out, carry_out_async, require_transaction
from halfway.client.barrier.table import TABLE, BarrierTable, Steps
from halfway.client.checks import Check
from halfway.client.errors import HalfwayError
from halfway.client.outcome import Outcome

log = logging.getLogger(__name__)

T = TypeVar("T")
Connect = Callable[[], AbstractContextManager[Any]]
"""Gives a connection whose transaction commits when the context is left: `engine.begin` of SQLAlchemy, or
`lambda: psycopg.connect(...)`."""
ConnectAsync = Callable[[], AbstractAsyncContextManager[Any]]
"""The same of an asynchronous driver: `begin` of SQLAlchemy's asynchronous engine, or asyncpg's `pool.acquire`."""

_DAY_S: Final = 86_400


class InvalidRetentionError(HalfwayError, ValueError):
    """Rows would be cleaned while halfway may still ask about them: raise `retention_s`, or lower the policy's age."""


class _AnyBarrier:
    def __init__(self, dialect: Dialect | str, table: str, retention_s: float) -> None:
        self.retention_s = retention_s
        self._table = BarrierTable(dialect, table)

    def migration(self) -> list[str]:
        """Return the statements that make the table, for a migration tool."""
        return self._table.migration()

    def check_policy(self, policy: Mapping[str, Any]) -> None:
        """Compare the retention with a group's policy, as `Halfway.register` returns it.

        Raises InvalidRetentionError if rows would be cleaned before halfway stops asking.
        """
        max_age_s = float(policy["max_age_s"])
        if self.retention_s < 2 * max_age_s:
            raise InvalidRetentionError(
                f"retention_s {self.retention_s:.0f} is less than twice the group's max_age_s {max_age_s:.0f}:"
                f" give the barrier a retention_s of {2 * max_age_s:.0f} or more, or lower max_age_s"
            )

    def write(self, connection: Any, transaction_id: str) -> None:
        """Do what `insert` does, on the connection of a synchronous driver."""
        require_transaction(connection)
        carry_out(self._table.insert(transaction_id), connection)

    def _may_be_cleaned(self, prepared_at: str) -> bool:
        """Whether a transaction is so old that its row may be gone: then a check knows nothing, and must say so."""
        age_s = (datetime.now(UTC) - datetime.fromisoformat(prepared_at)).total_seconds()
        return age_s > self.retention_s / 2

    def _decision(self, transaction_id: str, prepared_at: str | None) -> Generator[Steps[Any], Any, Outcome]:
        """Yield the transactions that decide, one after the other, and return the outcome.

        Each looks in a transaction of its own, so that no isolation level hides what was committed in between.
        """
        try:
            outcome: Outcome | None = yield self._table.look(transaction_id)
            if outcome is not None:
                return outcome
            if prepared_at is not None and self._may_be_cleaned(prepared_at):
                log.warning("transaction %s is older than the barrier remembers: it is left open", transaction_id)
                return "unknown"
            first: bool = yield self._table.take_place(transaction_id)
            if first:
                return "rollback"
            outcome = yield self._table.look(transaction_id)
        except Exception as error:  # noqa: BLE001 - as a rule its row is locked by a local transaction that is open
            log.info("transaction %s cannot be decided now: %s: %s", transaction_id, type(error).__name__, error)
            return "unknown"
        return outcome or "unknown"


class Barrier(_AnyBarrier):
    """The barrier through a synchronous driver: psycopg, PyMySQL, sqlite3, SQLAlchemy, Django."""

    def __init__(
        self, dialect: Dialect | str, connect: Connect, *, table: str = TABLE, retention_s: float = 7 * _DAY_S
    ) -> None:
        """Take what connects to the service's database, and for how many seconds rows are kept."""
        super().__init__(dialect, table, retention_s)
        self._connect = connect

    def create(self) -> None:
        """Make the table and its index, unless they are there."""
        self._in_transaction(self._table.create())

    def insert(self, connection: Any, transaction_id: str) -> None:
        """Say in the local transaction on this connection that the transaction commits with it.

        Raises LateTransactionError if a check has been answered before: then let it roll the local transaction back.
        """
        self.write(connection, transaction_id)

    def look(self, transaction_id: str) -> Outcome | None:
        """Return the outcome that stands, None if there is none yet."""
        return self._in_transaction(self._table.look(transaction_id))

    def decide(self, check: Check) -> Outcome:
        """Answer a check; if it comes before the local transaction, that one cannot commit any more."""
        return self._decided(self._decision(check.id, check.prepared_at))

    def settle(self, transaction_id: str) -> Outcome:
        """Decide as a check does about a transaction that was prepared just now."""
        return self._decided(self._decision(transaction_id, None))

    def _decided(self, decision: Generator[Steps[Any], Any, Outcome]) -> Outcome:
        try:
            steps = next(decision)
            while True:
                try:
                    result = self._in_transaction(steps)
                except Exception as error:  # noqa: BLE001 - the decision says what follows
                    steps = decision.throw(error)
                else:
                    steps = decision.send(result)
        except StopIteration as end:
            return end.value  # type: ignore[no-any-return]  # the outcome

    def clean(self, limit: int) -> int:
        """Delete at most `limit` rows older than the retention; none while another instance does it."""
        return self._in_transaction(self._table.clean(self.retention_s, limit))

    def _in_transaction(self, steps: Steps[T]) -> T:
        with self._connect() as connection:
            return carry_out(steps, connection)


class AsyncBarrier(_AnyBarrier):
    """The barrier through an asynchronous driver: asyncpg, psycopg, asyncmy, SQLAlchemy."""

    def __init__(
        self, dialect: Dialect | str, connect: ConnectAsync, *, table: str = TABLE, retention_s: float = 7 * _DAY_S
    ) -> None:
        """Take what connects to the service's database, and for how many seconds rows are kept."""
        super().__init__(dialect, table, retention_s)
        self._connect = connect

    async def create(self) -> None:
        """Do what `Barrier.create` does."""
        await self._in_transaction(self._table.create())

    async def insert(self, connection: Any, transaction_id: str) -> None:
        """Do what `Barrier.insert` does."""
        require_transaction(connection)
        await carry_out_async(self._table.insert(transaction_id), connection)

    async def look(self, transaction_id: str) -> Outcome | None:
        """Do what `Barrier.look` does."""
        return await self._in_transaction(self._table.look(transaction_id))

    async def decide(self, check: Check) -> Outcome:
        """Do what `Barrier.decide` does."""
        return await self._decided(self._decision(check.id, check.prepared_at))

    async def settle(self, transaction_id: str) -> Outcome:
        """Do what `Barrier.settle` does."""
        return await self._decided(self._decision(transaction_id, None))

    async def _decided(self, decision: Generator[Steps[Any], Any, Outcome]) -> Outcome:
        try:
            steps = next(decision)
            while True:
                try:
                    result = await self._in_transaction(steps)
                except Exception as error:  # noqa: BLE001 - the decision says what follows
                    steps = decision.throw(error)
                else:
                    steps = decision.send(result)
        except StopIteration as end:
            return end.value  # type: ignore[no-any-return]  # the outcome

    async def clean(self, limit: int) -> int:
        """Do what `Barrier.clean` does."""
        return await self._in_transaction(self._table.clean(self.retention_s, limit))

    async def _in_transaction(self, steps: Steps[T]) -> T:
        async with self._connect() as connection:
            return await carry_out_async(steps, connection)
