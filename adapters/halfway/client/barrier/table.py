"""The barrier's operations on its table, as SQL statements that any driver can execute."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Generator, Sequence
from dataclasses import dataclass
from typing import Any, Final, Protocol, TypeVar

from halfway.client.barrier.dialect import CREATE_ONCE, MARK_ID, REMOVE, STATEMENTS, TABLE_COUNT, Dialect
from halfway.client.commit_uncertainty import is_conflict
from halfway.client.errors import HalfwayError
from halfway.client.outcome import Outcome

T = TypeVar("T")

TABLE: Final = "halfway_barrier"
"""The table's default name."""

_COMMITTED: Final = "commit"
_ROLLED_BACK: Final = "rollback"
_NAME: Final = re.compile(r"[a-z_][a-z0-9_]{0,47}")
_ID: Final = re.compile(r"[A-Za-z0-9._~-]{1,128}")


class LateTransactionError(HalfwayError):
    """The transaction is already decided, usually by a check that answered `rollback`: roll the local one back.

    A check is answered `unknown` while a row is written but not committed, so write it as the first statement.
    """


class ConflictError(HalfwayError):
    """There was a conflict with another transaction or a check, and nothing was written: roll back and run it again."""


class MissingTableError(HalfwayError):
    """The barrier's table does not exist: create it with `barrier.create()`, or in a migration."""


class UncountedRowsError(HalfwayError, TypeError):
    """The driver does not report whether the row was written, as in psycopg's pipeline mode: insert outside of it."""


@dataclass(frozen=True, slots=True)
class Statement:
    """One statement to execute, with its parameters in order."""

    sql: str
    parameters: tuple[object, ...] = ()


@dataclass(frozen=True, slots=True)
class Result:
    """The result of a statement: its rows, and how many rows it wrote."""

    rows: Sequence[Sequence[Any]]
    written: int


Steps = Generator[Statement, Result, T]
"""Statements of one database transaction. The caller sends each result back into the generator."""


class BarrierTable:
    """The barrier's table in one dialect.

    `insert` runs in the local transaction. A check runs `look`, and then `take_place` if there is no row, each in its
    own transaction on another connection.
    """

    def __init__(self, dialect: Dialect | str, name: str) -> None:
        """Set the table's name; raise ValueError if it is not legal."""
        if not _NAME.fullmatch(name):
            raise ValueError(f"table {name!r}: give a lower-case name of at most 48 letters, digits and _")
        self._dialect = Dialect(dialect)
        self.sql = STATEMENTS[self._dialect]
        self._name = name

    def exists(self) -> Steps[bool]:
        """Return whether the table is there, with the row that identifies it."""
        return (yield from table_exists(self._dialect, self._name)) and (yield from self.mark()) is not None

    def create(self) -> Steps[None]:
        """Create the table and its index, unless they exist, and the row that identifies it."""
        yield from create_table(self._dialect, self._name, self.sql.create)
        yield self._statement(self.sql.create_mark)

    def identify(self) -> Generator[Steps[Any], Any, str | None]:
        """Yield the database transactions that read the mark; raises MissingTableError if there is no such table."""
        exists = yield table_exists(self._dialect, self._name)
        try:
            return (yield self.mark())  # type: ignore[no-any-return]
        except Exception as error:
            if exists:
                raise
            raise MissingTableError(
                f"the barrier's table {self._name} does not exist in this database: call `barrier.create()` before the"
                " client starts, or run the statements of `barrier.migration()` in a migration"
            ) from error

    def migration(self) -> list[str]:
        """Return the statements that create the table, for a migration tool."""
        return [sql.replace("{table}", self._name) for sql in (*self.sql.create, self.sql.create_mark)]

    def insert(self, transaction_id: str) -> Steps[None]:
        """Write the row in the local transaction, so that both commit together.

        Raises LateTransactionError; and ConflictError if the database refuses the row because of changes by others
        since the transaction's first read, which are not visible in this transaction.
        """
        if not _ID.fullmatch(transaction_id):
            raise ValueError(f"transaction id {transaction_id!r}: give the id of the prepared transaction")
        try:
            result = yield self._statement(self.sql.insert, transaction_id, _COMMITTED)
        except Exception as error:
            if not is_conflict(error):
                raise
            raise ConflictError(
                f"transaction {transaction_id} conflicts with another transaction or a check: roll the local"
                " transaction back and run it again"
            ) from error
        if rows_written(result) == 0:
            raise LateTransactionError(
                f"transaction {transaction_id} is already decided: roll the local transaction back. If a check came"
                " before this row, make the row the first statement of local transactions"
            )

    def mark(self) -> Steps[str | None]:
        """Return the value that identifies this table, None if the table is from a release without such a row."""
        result = yield self._statement(self.sql.mark, MARK_ID)
        return result.rows[0][0] if result.rows else None

    def look(self, transaction_id: str) -> Steps[Outcome | None]:
        """Return the outcome in the table, None if there is none yet."""
        select = _step(self._statement(self.sql.select, transaction_id))
        result = yield from self._with_short_lock_wait(select) if self.sql.select_waits else select
        if not result.rows:
            return None
        return "commit" if result.rows[0][0] == _COMMITTED else "rollback"

    def take_place(self, transaction_id: str) -> Steps[bool]:
        """Insert a rollback unless there is a row, so that the local transaction fails; return whether it was inserted.

        Waits at most a second for an open local transaction; then the driver raises its error.
        """
        result = yield from self._with_short_lock_wait(self._insert_rollback(transaction_id))
        return rows_written(result) > 0

    def remove(self, transaction_id: str) -> Steps[None]:
        """Delete a row that belongs to no transaction."""
        yield self._statement(REMOVE, transaction_id)

    def clean(self, older_than_s: float, limit: int) -> Steps[int]:
        """Delete at most `limit` of the oldest rows, unless another instance is deleting; return their number."""
        elect, resign = (None if sql is None else self._statement(sql) for sql in (self.sql.elect, self.sql.resign))
        return (yield from clean_exclusively(self._statement(self.sql.clean, older_than_s, limit), elect, resign))

    def _insert_rollback(self, transaction_id: str) -> Steps[Result]:
        if self.sql.begin is not None:
            yield from begin_writing(self.sql.begin)
        return (yield self._statement(self.sql.insert, transaction_id, _ROLLED_BACK))

    def _with_short_lock_wait(self, steps: Steps[Result]) -> Steps[Result]:
        lock_wait = (yield Statement(self.sql.read_lock_wait)).rows[0][0]
        restore = Statement(self.sql.restore_lock_wait.format(value=int(lock_wait)))
        yield Statement(self.sql.bound_lock_wait)
        try:
            result = yield from steps
        except Exception:
            with contextlib.suppress(Exception):  # PostgreSQL refuses it, and has already restored the setting
                yield restore
            raise
        yield restore
        return result

    def _statement(self, sql: str, *parameters: object) -> Statement:
        return Statement(sql.replace("{table}", self._name), parameters)


def migration(dialect: Dialect | str, table: str = TABLE) -> list[str]:
    """Return the statements that create a barrier's table, for a migration tool. Alembic's dialect names work too."""
    return BarrierTable(dialect, table).migration()


def rows_written(result: Result) -> int:
    """Return how many rows a statement wrote; raises UncountedRowsError if its driver does not know."""
    if result.written < 0:
        raise UncountedRowsError(
            "the driver does not report whether the row was written: if the connection is in pipeline mode, insert"
            " outside `connection.pipeline()`"
        )
    return result.written


class Table(Protocol):
    """A table of this client, in one dialect."""

    def exists(self) -> Steps[bool]:
        """Return whether the table is there with all that `create` writes; takes no lock."""

    def create(self) -> Steps[None]:
        """Create what is missing."""


def creation(table: Table) -> Generator[Steps[Any], Any, None]:
    """Yield the database transactions that create a table unless it exists.

    Every process of a service may run them whenever it starts. If the table exists, they only read: a lock would wait
    for open transactions, and hold up the others behind it.
    """
    if (yield table.exists()):
        return
    try:
        yield table.create()
    except Exception:
        if not (yield table.exists()):  # otherwise another process has just created it
            raise


def table_exists(dialect: Dialect, name: str) -> Steps[bool]:
    """Return whether a table exists."""
    result = yield Statement(TABLE_COUNT[dialect].replace("{table}", name))
    return bool(result.rows[0][0])


def create_table(dialect: Dialect, name: str, statements: Sequence[str]) -> Steps[None]:
    """Execute the statements that create a table and its index, as one that succeeds or fails."""
    once = CREATE_ONCE[dialect]
    if dialect is Dialect.SQLITE:
        yield from begin_writing("BEGIN IMMEDIATE")
    for sql in statements if once is None else [once.replace("{create}", "; ".join(statements))]:
        yield Statement(sql.replace("{table}", name))


def begin_writing(begin: str) -> Steps[None]:
    """Begin a transaction of SQLite that writes. One that reads first fails if another one has written since."""
    with contextlib.suppress(Exception):  # some drivers have already begun a transaction, others have not
        yield Statement("ROLLBACK")
    yield Statement(begin)


def clean_exclusively(clean: Statement, elect: Statement | None, resign: Statement | None) -> Steps[int]:
    """Delete rows unless another connection is deleting now; return their number."""
    if elect is not None and (yield elect).rows[0][0] != 1:
        return 0
    try:
        result = yield clean
    finally:
        if resign is not None:
            yield resign
    return result.written


def _step(statement: Statement) -> Steps[Result]:
    return (yield statement)
