"""The barrier's operations on its table, as SQL statements that any driver can execute, for each database.

Old rows are deleted slowly, for the sake of the service's own transactions.
"""

from __future__ import annotations

import contextlib
import re
import sqlite3
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, closing, contextmanager
from dataclasses import dataclass
from enum import StrEnum
from importlib.resources import files
from os import PathLike
from typing import Any, Final, TypeVar

from halfway.client.errors import HalfwayError, demand, matches
from halfway.client.ids import canonical
from halfway.client.messages import Outcome, is_conflict


class Dialect(StrEnum):
    """A database that the barrier supports."""

    POSTGRESQL = "postgresql"
    MYSQL = "mysql"
    """MySQL and MariaDB, with InnoDB."""
    SQLITE = "sqlite"

    @classmethod
    def _missing_(cls, value: object) -> Dialect:
        """Accept SQLAlchemy's name for MariaDB; any other value raises ValueError."""
        if value == "mariadb":
            return cls.MYSQL
        raise ValueError(f"dialect {value!r}: give 'postgresql', 'mysql' (also for MariaDB) or 'sqlite'")


@dataclass(frozen=True, kw_only=True)
class Statements:
    """The statements of one dialect, from its file, which says what each is for.

    `{table}`, `{key}` and `{time}` are replaced by the names of the table and its columns, `{p}` by a placeholder.
    """

    exists: str
    create: tuple[str, ...]
    create_once: str = "{create}"
    mark: str
    read_mark: str
    begin: str | None = None
    insert: str
    take_place: str | None = None
    look: str
    read_lock_wait: str = ""
    bound_lock_wait: str = ""
    restore_lock_wait: str = ""
    read_only: str | None = None
    remove: str
    clean: str
    elect: str | None = None
    resign: str | None = None


_NAMES: Final = {"halfway_barrier": "{table}", "transaction_id": "{key}", "decided_at": "{time}"}
_PLACEHOLDER: Final = re.compile(r"\$[0-9]|\?")


def _read(dialect: Dialect) -> Statements:
    text = files(__package__).joinpath("sql", f"{dialect}.sql").read_text(encoding="utf-8")
    for name, placeholder in _NAMES.items():
        text = text.replace(name, placeholder)
    found: dict[str, Any] = {}
    for section in text.split("-- name: ")[1:]:
        name, _, body = section.partition("\n")
        lines = [line.strip() for line in body.splitlines() if not line.startswith("--")]
        statements = [" ".join(one.split()) for one in "\n".join(lines).split(";\n") if one.strip()]
        found[name] = tuple(_PLACEHOLDER.sub("{p}", one.removesuffix(";")) for one in statements)
    return Statements(create=found.pop("create"), **{name: one for name, (one,) in found.items()})


STATEMENTS: Final = {dialect: _read(dialect) for dialect in Dialect}
INDEX: Final = STATEMENTS[Dialect.SQLITE].create[1]
"""Creates the index on the time, where the table's own statement cannot."""


T = TypeVar("T")

TABLE: Final = "halfway_barrier"
"""The table's default name."""

_LEASE: Final = {
    Dialect.POSTGRESQL: {"{now}": "clock_timestamp()", "{until}": "clock_timestamp() + interval '30 seconds'"},
    Dialect.MYSQL: {"{now}": "NOW(3)", "{until}": "NOW(3) + INTERVAL 30 SECOND"},
    Dialect.SQLITE: {
        "{now}": "(julianday('now') - 2440587.5) * 86400.0",
        "{until}": "(julianday('now') - 2440587.5) * 86400.0 + 30",
    },
}
_COMMITTED: Final = "commit"
_ROLLED_BACK: Final = "rollback"
_NAME: Final = re.compile(r"[a-z_][a-z0-9_]{0,47}")
_ID: Final = re.compile(r"[A-Za-z0-9._~-]{1,128}")


class LateTransactionError(HalfwayError):
    """The transaction is already decided: roll the local one back.

    Either an earlier call with the same id has committed, or a check was answered `rollback`. A check is answered
    `unknown` while a row is written but not committed, so write it as the first statement.
    """

    has_committed = False
    """Whether a local transaction with this id is known to have committed: this one is a repeat of what is done.

    Only a block with `begin` looks. If not, look into your database: the messages may have got another id in a store.
    """


class ConflictError(HalfwayError):
    """There was a conflict with another transaction or a check, and nothing was written: roll back and run it again."""


class MissingTableError(HalfwayError):
    """The barrier's table does not exist: create it with `barrier.create()`, or in a migration."""


class ReadOnlyDatabaseError(Exception):
    """The barrier's connections reach a read replica, which must not answer checks: a check gets `unknown`."""


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


class SqlTable:
    """A table in the service's database: its creation, and the deletion of its old rows."""

    def __init__(
        self, dialect: Dialect | str, name: str, creation: Mapping[Dialect, tuple[str, ...]], *, key: str, time: str
    ) -> None:
        """Take the statements that create the table and its index unless they exist, and the columns of key and time.

        Raises InvalidSettingError if the name is not legal.
        """
        is_name = _NAME.fullmatch(name.removesuffix("_stored"))
        demand(is_name, "table", name, "a lower-case name of at most 48 letters, digits and _")
        self.dialect = Dialect(dialect)
        self.sql = STATEMENTS[self.dialect]
        self._creation = creation[self.dialect]
        self._name = name
        self._key = key
        self._time = time

    def exists(self) -> Steps[bool]:
        """Return whether the table is there with all that `create` writes; takes no lock."""
        result = yield self._statement(self.sql.exists)
        return bool(result.rows[0][0])

    def create(self) -> Steps[None]:
        """Create what is missing, as one statement that succeeds or fails."""
        if self.dialect is Dialect.SQLITE:
            yield from begin_writing("BEGIN IMMEDIATE")
        is_one = self.sql.create_once != "{create}"
        for sql in ["; ".join(self._creation)] if is_one else self._creation:
            yield self._statement(self.sql.create_once.replace("{create}", sql))

    def migration(self) -> list[str]:
        """Return the statements that create the table, for a migration tool."""
        return [self._statement(sql).sql for sql in self._creation]

    def clean(self, older_than_s: float, limit: int) -> Steps[int]:
        """Delete at most `limit` of the oldest rows, unless another instance is deleting; return their number."""
        elect, resign = self.sql.elect, self.sql.resign
        if elect is not None and (yield self._statement(elect)).rows[0][0] != 1:
            return 0
        try:
            result = yield self._statement(self.sql.clean, older_than_s, limit)
        finally:
            if resign is not None:
                yield self._statement(resign)
        return result.written

    def _read_committed(self, sql: str, *parameters: object) -> Steps[Result]:
        """Read with a statement that waits for open transactions, in a dialect that bounds the wait."""
        select = _step(self._statement(sql, *parameters))
        return (yield from self._with_short_lock_wait(select) if self.sql.read_lock_wait else select)

    def _with_short_lock_wait(self, steps: Steps[Result]) -> Steps[Result]:
        lock_wait = (yield Statement(self.sql.read_lock_wait)).rows[0][0]
        restore = Statement(self.sql.restore_lock_wait.format(value=int(lock_wait)))
        yield Statement(self.sql.bound_lock_wait)
        try:
            result = yield from steps
        except Exception:
            with contextlib.suppress(Exception):  # the connection may be lost
                yield restore
            raise
        yield restore
        return result

    def _statement(self, sql: str, *parameters: object) -> Statement:
        for name, value in (("{table}", self._name), ("{key}", self._key), ("{time}", self._time)):
            sql = sql.replace(name, value)
        return Statement(sql, parameters)


class BarrierTable(SqlTable):
    """The barrier's table in one dialect.

    `insert` runs in the local transaction. A check runs `look`, and then `take_place` if there is no row, each in its
    own transaction on another connection.
    """

    def __init__(self, dialect: Dialect | str, name: str) -> None:
        creation = {each: statements.create for each, statements in STATEMENTS.items()}
        super().__init__(dialect, name, creation, key="transaction_id", time="decided_at")

    def exists(self) -> Steps[bool]:
        return (yield from super().exists()) and (yield from self.mark()) is not None

    def create(self) -> Steps[None]:
        yield from super().create()
        yield self._statement(self.sql.mark)

    def migration(self) -> list[str]:
        return [*super().migration(), self._statement(self.sql.mark).sql]

    def identify(self) -> Generator[Steps[Any], Any, str | None]:
        """Yield the database transactions that read the mark; raises MissingTableError if there is no such table."""
        exists = yield super().exists()
        try:
            return (yield self.mark())  # type: ignore[no-any-return]
        except Exception as error:
            if exists:
                raise
            raise MissingTableError(
                f"the barrier's table {self._name} does not exist in this database: call `barrier.create()` before the"
                " client starts, or run the statements of `barrier.migration()` in a migration"
            ) from error

    def insert(self, transaction_id: str) -> Steps[None]:
        """Write the row in the local transaction, so that both commit together.

        Raises LateTransactionError; and ConflictError if the database refuses the row because of changes by others
        since the transaction's first read, which are not visible in this transaction.
        """
        demand(matches(_ID, transaction_id), "transaction_id", transaction_id, "the id of the prepared transaction")
        transaction_id = canonical(transaction_id)
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
        result = yield self._statement(self.sql.read_mark)
        return result.rows[0][0] if result.rows else None

    def look(self, transaction_id: str) -> Steps[Outcome | None]:
        """Return the outcome in the table, None if there is none yet."""
        result = yield from self._read_committed(self.sql.look, canonical(transaction_id))
        if not result.rows:
            return None
        return "commit" if result.rows[0][0] == _COMMITTED else "rollback"

    def still_has(self, transaction_id: str) -> Steps[bool]:
        """Return whether the row of the open local transaction is there; raises the driver's error if it has failed.

        After a rollback within the block a check may have written another one, with its own outcome.
        """
        result = yield self._statement(self.sql.look, canonical(transaction_id))
        return bool(result.rows) and result.rows[0][0] == _COMMITTED

    def take_place(self, transaction_id: str) -> Steps[bool]:
        """Insert a rollback unless there is a row, so that the local transaction fails; return whether it was inserted.

        Waits at most a second for an open local transaction; then the driver raises its error. Raises
        ReadOnlyDatabaseError, or the driver's error, on a read replica.
        """
        if self.sql.read_only is not None and (yield Statement(self.sql.read_only)).rows[0][0]:
            raise ReadOnlyDatabaseError(
                "the database is read-only, so it may be a replica that lacks what has just committed: give the"
                " barrier connections to the primary"
            )
        if self.sql.take_place is not None:
            result = yield self._statement(self.sql.take_place, transaction_id, _ROLLED_BACK)
        else:
            result = yield from self._with_short_lock_wait(self._insert_rollback(transaction_id))
        return rows_written(result) > 0

    def overrule(self, transaction_id: str, new_id: str) -> Steps[None]:
        """Say rollback for an id that can commit no more, and commit for the id that takes its place."""
        yield self._statement(self.sql.insert, transaction_id, _ROLLED_BACK)  # its row may have been deleted
        update = "UPDATE {table} SET outcome = {p} WHERE transaction_id = {p}"
        yield self._statement(update, _ROLLED_BACK, transaction_id)
        yield self._statement(self.sql.insert, new_id, _COMMITTED)

    def lease(self, name: str, owner: str) -> Steps[bool]:
        """Take or renew a lease of 30 s; return whether this owner, of 8 characters, has it."""
        yield self._statement(self.sql.insert, name, owner)
        update = (
            "UPDATE {table} SET outcome = {p}, {time} = {until} WHERE {key} = {p} AND (outcome = {p} OR {time} < {now})"
        )
        for word, sql in _LEASE[self.dialect].items():
            update = update.replace(word, sql)
        return rows_written((yield self._statement(update, owner, name, owner))) > 0

    def remove(self, transaction_id: str) -> Steps[None]:
        """Delete a row that belongs to no transaction."""
        yield self._statement(self.sql.remove, transaction_id)

    def _insert_rollback(self, transaction_id: str) -> Steps[Result]:
        if self.sql.begin is not None:
            yield from begin_writing(self.sql.begin)
        return (yield self._statement(self.sql.insert, transaction_id, _ROLLED_BACK))


def rows_written(result: Result) -> int:
    """Return how many rows a statement wrote; raises UncountedRowsError if its driver does not know."""
    if result.written < 0:
        raise UncountedRowsError(
            "the driver does not report whether the row was written: if the connection is in pipeline mode, insert"
            " outside `connection.pipeline()`"
        )
    return result.written


def creation(table: SqlTable) -> Generator[Steps[Any], Any, None]:
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


def begin_writing(begin: str) -> Steps[None]:
    """Begin a transaction of SQLite that writes. One that reads first fails if another one has written since."""
    with contextlib.suppress(Exception):  # some drivers have already begun a transaction, others have not
        yield Statement("ROLLBACK")
    yield Statement(begin)


def _step(statement: Statement) -> Steps[Result]:
    return (yield statement)


_BUSY_S = 30.0


def sqlite_transactions(
    path: str | PathLike[str], *, busy_s: float = _BUSY_S
) -> Callable[[], AbstractContextManager[sqlite3.Connection]]:
    """Return a connection factory for a file. Each connection is one transaction, which its context commits or undoes.

    A statement waits up to `busy_s` seconds for another connection that writes.
    """

    @contextmanager
    def begin() -> Iterator[sqlite3.Connection]:
        with closing(sqlite3.connect(path, timeout=busy_s)) as connection, connection:
            yield connection

    return begin


BATCH: Final = 100
"""The rows that one transaction deletes. A concurrent transaction may have to wait as long as that takes."""
_SHARE: Final = 0.1
"""Batches are being deleted for at most this share of the time, so deletion is slower while the database is busy."""
_MIN_PAUSE_S: Final = 0.02


def pause_s(took_s: float) -> float:
    """Return the pause after a batch that took `took_s` seconds. At most 2,000 to 5,000 rows are deleted per second."""
    return max(_MIN_PAUSE_S, took_s * (1 / _SHARE - 1))
