"""The inbox's operations on its table, as SQL statements that any driver can execute."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final

from halfway.client.barrier.dialect import Dialect
from halfway.client.barrier.table import (
    Statement,
    Steps,
    clean_exclusively,
    create_table,
    rows_written,
    table_exists,
)

_NAME: Final = re.compile(r"[a-z_][a-z0-9_]{0,47}")


@dataclass(frozen=True, kw_only=True)
class _Statements:
    """The statements of one dialect. `{p}` is replaced by a driver's placeholder, `{table}` by the table's name."""

    create: tuple[str, ...]
    insert: str
    """Parameters: consumer, message. An existing row stays unchanged, and the row count is 0."""
    former: str
    """Returns a row if a message was recorded under its former id. Parameters: consumer, former id, seconds since the
    epoch: an older row is that of another message."""
    clean: str
    """Parameters: seconds, limit. Deletes the oldest of the rows that are older than that, through the index."""
    elect: str | None = None
    """Returns 1 if this connection may delete rows now; None if `clean` ensures it, or if only one can write."""
    resign: str | None = None
    """Undoes `elect`."""


_INDEX: Final = "CREATE INDEX IF NOT EXISTS {table}_processed_at ON {table} (processed_at)"
_INSERT_ONCE: Final = (
    "INSERT INTO {table} (consumer, message) VALUES ({p}, {p}) ON CONFLICT (consumer, message) DO NOTHING"
)
_FORMER: Final = "SELECT 1 FROM {table} WHERE consumer = {p} AND message = {p} AND processed_at >= "
_ANY_FORMER: Final = "SELECT 1 FROM {table} WHERE consumer = {p} AND message > '$' LIMIT 1"
"""Ids of this release begin with #, which is before $; those of earlier releases begin with what is behind it."""
_REMOVE: Final = "DELETE FROM {table} WHERE consumer = {p} AND message = {p}"

_STATEMENTS: Final = {
    Dialect.POSTGRESQL: _Statements(
        create=(
            (
                'CREATE TABLE IF NOT EXISTS {table} (consumer varchar(128) COLLATE "C" NOT NULL,'
                ' message varchar(300) COLLATE "C" NOT NULL,'
                " processed_at timestamptz NOT NULL DEFAULT clock_timestamp(), PRIMARY KEY (consumer, message))"
            ),
            _INDEX,
        ),
        insert=_INSERT_ONCE,
        former=_FORMER + "to_timestamp({p})",
        clean="WITH elected AS MATERIALIZED (SELECT pg_try_advisory_xact_lock(hashtext('{table}')) AS mine)"
        " DELETE FROM {table} WHERE (SELECT mine FROM elected) AND (consumer, message) IN (SELECT consumer, message"
        " FROM {table} WHERE processed_at < now() - {p} * interval '1 second' ORDER BY processed_at LIMIT {p})",
    ),
    Dialect.MYSQL: _Statements(
        create=(
            (
                "CREATE TABLE IF NOT EXISTS {table} (consumer varchar(128) NOT NULL, message varchar(300) NOT NULL,"
                " processed_at timestamp(3) NOT NULL DEFAULT CURRENT_TIMESTAMP(3), PRIMARY KEY (consumer, message),"
                " KEY {table}_processed_at (processed_at)) ENGINE=InnoDB CHARACTER SET ascii COLLATE ascii_bin"
            ),
        ),
        insert="INSERT IGNORE INTO {table} (consumer, message) VALUES ({p}, {p})",
        former=_FORMER + "FROM_UNIXTIME({p})",
        clean="DELETE FROM {table} WHERE processed_at < NOW(3) - INTERVAL {p} SECOND ORDER BY processed_at LIMIT {p}",
        elect="SELECT GET_LOCK(SHA1(CONCAT(DATABASE(), '.{table}')), 0)",
        resign="SELECT RELEASE_LOCK(SHA1(CONCAT(DATABASE(), '.{table}')))",
    ),
    Dialect.SQLITE: _Statements(
        create=(
            (
                "CREATE TABLE IF NOT EXISTS {table} (consumer text NOT NULL, message text NOT NULL,"
                " processed_at real NOT NULL DEFAULT ((julianday('now') - 2440587.5) * 86400.0),"
                " PRIMARY KEY (consumer, message)) WITHOUT ROWID"
            ),
            _INDEX,
        ),
        insert=_INSERT_ONCE,
        former=_FORMER + "{p}",
        clean="DELETE FROM {table} WHERE (consumer, message) IN (SELECT consumer, message FROM {table}"
        " WHERE processed_at < (julianday('now') - 2440587.5) * 86400.0 - {p} ORDER BY processed_at LIMIT {p})",
    ),
}


class InboxTable:
    """The inbox's table in one dialect. `insert` runs in the transaction of the effect."""

    def __init__(self, dialect: Dialect | str, name: str) -> None:
        """Set the table's name; raise ValueError if it is not legal."""
        if not _NAME.fullmatch(name):
            raise ValueError(f"table {name!r}: give a lower-case name of at most 48 letters, digits and _")
        self._dialect = Dialect(dialect)
        self._sql = _STATEMENTS[self._dialect]
        self._name = name

    def migration(self) -> list[str]:
        """Return the statements that create the table."""
        return [sql.replace("{table}", self._name) for sql in self._sql.create]

    def create(self) -> Steps[None]:
        """Create the table and its index, unless they exist."""
        yield from create_table(self._dialect, self._name, self._sql.create)

    def exists(self) -> Steps[bool]:
        """Return whether the table is there."""
        return (yield from table_exists(self._dialect, self._name))

    def insert(self, consumer: str, message: str) -> Steps[bool]:
        """Record a message; return False if it was recorded before."""
        result = yield self._statement(self._sql.insert, consumer, message)
        return rows_written(result) > 0

    def has_former_rows(self, consumer: str) -> Steps[bool]:
        """Return whether an earlier release recorded messages that are still there."""
        return bool((yield self._statement(_ANY_FORMER, consumer)).rows)

    def was_recorded(self, consumer: str, former_id: str, since_s: float) -> Steps[bool]:
        """Return whether a message was recorded under its former id, at this time or later."""
        return bool((yield self._statement(self._sql.former, consumer, former_id, since_s)).rows)

    def remove(self, consumer: str, message: str) -> Steps[None]:
        """Delete the row of a message."""
        yield self._statement(_REMOVE, consumer, message)

    def clean(self, older_than_s: float, limit: int) -> Steps[int]:
        """Delete at most `limit` of the oldest rows, unless another instance is deleting; return their number."""
        elect, resign = (None if sql is None else self._statement(sql) for sql in (self._sql.elect, self._sql.resign))
        return (yield from clean_exclusively(self._statement(self._sql.clean, older_than_s, limit), elect, resign))

    def _statement(self, sql: str, *parameters: object) -> Statement:
        return Statement(sql.replace("{table}", self._name), parameters)
