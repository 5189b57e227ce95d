"""One table in the service's own database that says which messages have taken effect."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any, Final, TypeVar
from uuid import uuid4

from halfway.client.barrier.barrier import Connect, UncommittedConnectionError
from halfway.client.barrier.dialect import Dialect
from halfway.client.barrier.drivers import carry_out, require_transaction
from halfway.client.barrier.table import Steps
from halfway.client.consumer.inbox_table import InboxTable

T = TypeVar("T")

_DAY_S: Final = 86_400


class Inbox:
    """Which messages have taken effect; a row is written in the transaction of the effect, so both stand or neither.

    Consumers of several groups may share one: each has rows of its own.
    """

    def __init__(
        self,
        dialect: Dialect | str,
        connect: Connect,
        *,
        table: str = "halfway_inbox",
        retention_s: float | None = 15 * _DAY_S,
    ) -> None:
        """Take what connects to the service's database, as `Barrier` does, and for how many seconds rows are kept.

        With None they are kept for ever.
        """
        self.retention_s = retention_s
        self._table = InboxTable(dialect, table)
        self._connect = connect

    def migration(self) -> list[str]:
        """Return the statements that make the table, for a migration tool."""
        return self._table.migration()

    def create(self) -> None:
        """Make the table and its index, unless they are there."""
        self._in_transaction(self._table.create())

    def connect(self) -> AbstractContextManager[Any]:
        """Open a connection whose transaction commits when its context is left."""
        return self._connect()

    def insert(self, connection: Any, consumer: str, message: str) -> bool:
        """Take note, in the transaction on this connection, of a message; False if it has taken effect before."""
        require_transaction(connection)
        return carry_out(self._table.insert(consumer, message), connection)

    def demand_commits(self) -> None:
        """Raise UncommittedConnectionError if what is written does not stay when a connection's context is left."""
        consumer, message = "#trial", uuid4().hex  # no consumer has such a name
        self._in_transaction(self._table.insert(consumer, message))
        if self._in_transaction(self._table.insert(consumer, message)):
            raise UncommittedConnectionError
        self._in_transaction(self._table.remove(consumer, message))

    def clean(self, limit: int) -> int:
        """Delete at most `limit` rows older than the retention; none while another instance does it."""
        return 0 if self.retention_s is None else self._in_transaction(self._table.clean(self.retention_s, limit))

    def _in_transaction(self, steps: Steps[T]) -> T:
        with self._connect() as connection:
            return carry_out(steps, connection)
