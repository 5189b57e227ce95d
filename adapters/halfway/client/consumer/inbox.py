"""A table in the service's own database that records which messages have taken effect."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any, Final, TypeVar
from uuid import uuid4

from halfway.client.barrier.barrier import Connect, UncommittedConnectionError
from halfway.client.barrier.dialect import Dialect
from halfway.client.barrier.drivers import carry_out, drive, require_transaction
from halfway.client.barrier.table import Steps, creation
from halfway.client.consumer.inbox_table import InboxTable

T = TypeVar("T")

_DAY_S: Final = 86_400


class Inbox:
    """The messages that have taken effect. A row is written in the transaction of the effect, so both commit or none.

    Consumers of several groups may share an inbox: each group has its own rows.
    """

    def __init__(
        self,
        dialect: Dialect | str,
        connect: Connect,
        *,
        table: str = "halfway_inbox",
        retention_s: float | None = 15 * _DAY_S,
    ) -> None:
        """Take a connection factory of the service's database, as `Barrier` does, and the retention of rows in seconds.

        With None, rows are never deleted.
        """
        self.retention_s = retention_s
        self._table = InboxTable(dialect, table)
        self._connect = connect

    def migration(self) -> list[str]:
        """Return the statements that create the table, for a migration tool."""
        return self._table.migration()

    def create(self) -> None:
        """Create the table and its index, unless they exist; every process may call it whenever it starts."""
        drive(creation(self._table), self._in_transaction)

    def connect(self) -> AbstractContextManager[Any]:
        """Open a connection whose transaction commits when its context exits."""
        return self._connect()

    def insert(self, connection: Any, consumer: str, message: str) -> bool:
        """Record a message in the transaction on this connection; return False if it has already taken effect."""
        require_transaction(connection)
        return carry_out(self._table.insert(consumer, message), connection)

    def has_former_rows(self, consumer: str) -> bool:
        """Return whether an earlier release recorded messages that are still there."""
        return self._in_transaction(self._table.has_former_rows(consumer))

    def was_recorded(self, connection: Any, consumer: str, former_id: str, since_s: float) -> bool:
        """Return whether an earlier release recorded a message, at this time (since the epoch) or later."""
        return carry_out(self._table.was_recorded(consumer, former_id, since_s), connection)

    def demand_commits(self) -> None:
        """Raise UncommittedConnectionError if written rows do not stay after a connection's context exits."""
        consumer, message = "#trial", uuid4().hex  # not a legal name of a consumer
        self._in_transaction(self._table.insert(consumer, message))
        if self._in_transaction(self._table.insert(consumer, message)):
            raise UncommittedConnectionError
        self._in_transaction(self._table.remove(consumer, message))

    def clean(self, limit: int) -> int:
        """Delete at most `limit` rows older than the retention, and none while another instance deletes."""
        return 0 if self.retention_s is None else self._in_transaction(self._table.clean(self.retention_s, limit))

    def _in_transaction(self, steps: Steps[T]) -> T:
        with self._connect() as connection:
            return carry_out(steps, connection)
