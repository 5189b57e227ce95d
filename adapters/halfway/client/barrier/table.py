"""The barrier's operations on its table, as SQL steps that any driver can execute."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Generator, Sequence
from dataclasses import dataclass
from typing import Any, Final, TypeVar

from halfway.client.barrier.dialect import MARK_ID, REMOVE, STATEMENTS, Dialect
from halfway.client.doubt import is_conflict
from halfway.client.errors import HalfwayError
from halfway.client.outcome import Outcome

T = TypeVar("T")

TABLE: Final = "halfway_barrier"
"""The table's name unless another is chosen."""

_COMMITTED: Final = "commit"
_ROLLED_BACK: Final = "rollback"
_NAME: Final = re.compile(r"[a-z_][a-z0-9_]{0,47}")
_ID: Final = re.compile(r"[A-Za-z0-9._~-]{1,128}")


class LateTransactionError(HalfwayError):
    """The transaction is decided already, as a rule by a check that said `rollback`: roll the local one back."""


class ConflictError(HalfwayError):
    """Another transaction, such as a check's, stood in the way, and nothing was written: roll back and run it again."""


class UncountedRowsError(HalfwayError, TypeError):
    """The driver does not say whether the row was written, as in psycopg's pipeline mode: insert outside of it."""


@dataclass(frozen=True, slots=True)
class Statement:
    """One statement to execute, its parameters in order."""

    sql: str
    parameters: tuple[object, ...] = ()


@dataclass(frozen=True, slots=True)
class Result:
    """What a statement returned: its rows, and how many rows it wrote."""

    rows: Sequence[Sequence[Any]]
    written: int


Steps = Generator[Statement, Result, T]
"""Statements of one database transaction; the caller sends the result of each back."""


class BarrierTable:
    """The barrier's table in one dialect.

    `insert` belongs into the local transaction. `look`, and if that finds nothing `take_place`, answer a check, each in
    a transaction on another connection.
    """

    def __init__(self, dialect: Dialect | str, name: str) -> None:
        """Choose the table's name."""
        if not _NAME.fullmatch(name):
            raise ValueError(f"table {name!r}: give a lower-case name of at most 48 letters, digits and _")
        self.sql = STATEMENTS[Dialect(dialect)]
        self._name = name

    def create(self) -> Steps[None]:
        """Make the table and its index, unless they are there."""
        for sql in self.migration():
            yield Statement(sql)

    def migration(self) -> list[str]:
        """Return the statements that make the table, for a migration tool."""
        return [sql.replace("{table}", self._name) for sql in self.sql.create]

    def insert(self, transaction_id: str) -> Steps[None]:
        """Write the row in the local transaction, so that both commit together.

        Raises LateTransactionError; and ConflictError if the database refuses the row because of what others did
        since the transaction's first read: what they did cannot be seen from inside it.
        """
        if not _ID.fullmatch(transaction_id):
            raise ValueError(f"transaction id {transaction_id!r}: give the id of the prepared transaction")
        try:
            done = yield self._statement(self.sql.insert, transaction_id, _COMMITTED)
        except Exception as error:
            if not is_conflict(error):
                raise
            raise ConflictError(
                f"another transaction stood in the way of {transaction_id}, or a check: roll the local transaction back"
                " and run it again"
            ) from error
        if rows_written(done) == 0:
            raise LateTransactionError(
                f"transaction {transaction_id} is decided already: roll the local transaction back"
            )

    def mark(self) -> Steps[str | None]:
        """Return what tells this table from every other one; None if it was made before there was such a row."""
        found = yield self._statement(self.sql.mark, MARK_ID)
        return found.rows[0][0] if found.rows else None

    def look(self, transaction_id: str) -> Steps[Outcome | None]:
        """Return the outcome that stands, None if there is none yet."""
        select = _one(self._statement(self.sql.select, transaction_id))
        found = yield from self._waiting_shortly(select) if self.sql.select_waits else select
        if not found.rows:
            return None
        return "commit" if found.rows[0][0] == _COMMITTED else "rollback"

    def take_place(self, transaction_id: str) -> Steps[bool]:
        """Roll back a transaction that has no row, so that its local transaction fails; return whether this was first.

        Waits at most a second for a local transaction that is open; then the driver raises its error.
        """
        done = yield from self._waiting_shortly(self._rolled_back(transaction_id))
        return rows_written(done) > 0

    def remove(self, transaction_id: str) -> Steps[None]:
        """Delete a row that stands for no transaction."""
        yield self._statement(REMOVE, transaction_id)

    def clean(self, older_than_s: float, limit: int) -> Steps[int]:
        """Delete the oldest rows, at most `limit`, unless another instance is deleting; return how many."""
        elect, resign = (None if sql is None else self._statement(sql) for sql in (self.sql.elect, self.sql.resign))
        return (yield from clean_by_one(self._statement(self.sql.clean, older_than_s, limit), elect, resign))

    def _rolled_back(self, transaction_id: str) -> Steps[Result]:
        if self.sql.begin is not None:
            with contextlib.suppress(Exception):  # some drivers have begun a transaction by now, others have none
                yield Statement("ROLLBACK")
            yield Statement(self.sql.begin)
        return (yield self._statement(self.sql.insert, transaction_id, _ROLLED_BACK))

    def _waiting_shortly(self, steps: Steps[Result]) -> Steps[Result]:
        before = (yield Statement(self.sql.read_lock_wait)).rows[0][0]
        restore = Statement(self.sql.restore_lock_wait.format(value=int(before)))
        yield Statement(self.sql.bound_lock_wait)
        try:
            result = yield from steps
        except Exception:
            with contextlib.suppress(Exception):  # PostgreSQL refuses it, and has rolled the setting back
                yield restore
            raise
        yield restore
        return result

    def _statement(self, sql: str, *parameters: object) -> Statement:
        return Statement(sql.replace("{table}", self._name), parameters)


def migration(dialect: Dialect | str, table: str = TABLE) -> list[str]:
    """Return the statements that make a barrier's table, for a migration tool; Alembic's and Django's names do too."""
    return BarrierTable(dialect, table).migration()


def rows_written(done: Result) -> int:
    """Return how many rows a statement wrote; raises UncountedRowsError if its driver does not know."""
    if done.written < 0:
        raise UncountedRowsError(
            "the driver does not say whether the row was written: if the connection is in pipeline mode, insert"
            " outside `connection.pipeline()`"
        )
    return done.written


def clean_by_one(clean: Statement, elect: Statement | None, resign: Statement | None) -> Steps[int]:
    """Delete rows unless another connection is the one that cleans now; return how many were deleted."""
    if elect is not None and (yield elect).rows[0][0] != 1:
        return 0
    try:
        done = yield clean
    finally:
        if resign is not None:
            yield resign
    return done.written


def _one(statement: Statement) -> Steps[Result]:
    return (yield statement)
