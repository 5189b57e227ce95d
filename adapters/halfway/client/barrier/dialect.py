"""The SQL of the barrier for each database."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Final


class Dialect(StrEnum):
    """A database that the barrier's SQL is written for."""

    POSTGRESQL = "postgresql"
    MYSQL = "mysql"
    """MySQL and MariaDB, with InnoDB."""
    SQLITE = "sqlite"


@dataclass(frozen=True, kw_only=True)
class Statements:
    """The statements of one dialect; `{p}` stands for a driver's placeholder, `{table}` for the table's name."""

    create: tuple[str, ...]
    insert: str
    """Parameters: transaction id, outcome. A row that stands is left as it is, and no row is counted."""
    select: str
    """Parameter: transaction id. The outcome, or no row."""
    read_lock_wait: str | None
    """How long this connection waits for a lock, if that must be put back after a check."""
    bound_lock_wait: str
    """Bounds how long the check waits for a local transaction that is open, to less than a second or to one."""
    restore_lock_wait: str | None
    """Puts back what `read_lock_wait` returned, which is `{value}`."""
    decided: str
    """Parameters: seconds, seconds, limit. Id and outcome of what was decided between so long ago and so long ago."""
    clean: str
    """Parameters: seconds, limit. Deletes the oldest rows that were decided longer ago, through the index."""
    elect: str | None
    """Returns 1 if this connection is the one that cleans now; None if the database has one writer anyway."""
    resign: str | None
    """Ends that; None if the end of the transaction does."""


_INDEX: Final = "CREATE INDEX IF NOT EXISTS {table}_decided_at ON {table} (decided_at)"
_INSERT_ONCE: Final = (
    "INSERT INTO {table} (transaction_id, outcome) VALUES ({p}, {p}) ON CONFLICT (transaction_id) DO NOTHING"
)
_SELECT: Final = "SELECT outcome FROM {table} WHERE transaction_id = {p}"

STATEMENTS: Final[dict[Dialect, Statements]] = {
    Dialect.POSTGRESQL: Statements(
        create=(
            (
                'CREATE TABLE IF NOT EXISTS {table} (transaction_id varchar(128) COLLATE "C" PRIMARY KEY,'
                " outcome varchar(8) NOT NULL, decided_at timestamptz NOT NULL DEFAULT clock_timestamp())"
            ),
            _INDEX,
        ),
        insert=_INSERT_ONCE,
        select=_SELECT,
        read_lock_wait=None,
        bound_lock_wait="SET LOCAL lock_timeout = '500ms'",
        restore_lock_wait=None,
        decided="SELECT transaction_id, outcome FROM {table}"
        " WHERE decided_at BETWEEN now() - {p} * interval '1 second' AND now() - {p} * interval '1 second'"
        " ORDER BY decided_at LIMIT {p}",
        clean="DELETE FROM {table} WHERE transaction_id IN (SELECT transaction_id FROM {table}"
        " WHERE decided_at < now() - {p} * interval '1 second' ORDER BY decided_at LIMIT {p})",
        elect="SELECT CASE WHEN pg_try_advisory_xact_lock(hashtext('{table}')) THEN 1 ELSE 0 END",
        resign=None,
    ),
    Dialect.MYSQL: Statements(
        create=(
            (
                "CREATE TABLE IF NOT EXISTS {table} (transaction_id varchar(128) CHARACTER SET ascii COLLATE ascii_bin"
                " PRIMARY KEY, outcome varchar(8) NOT NULL,"
                " decided_at timestamp(3) NOT NULL DEFAULT CURRENT_TIMESTAMP(3), KEY {table}_decided_at (decided_at))"
                " ENGINE=InnoDB"
            ),
        ),
        insert="INSERT IGNORE INTO {table} (transaction_id, outcome) VALUES ({p}, {p})",
        select=_SELECT,
        read_lock_wait="SELECT @@SESSION.innodb_lock_wait_timeout",
        bound_lock_wait="SET SESSION innodb_lock_wait_timeout = 1",
        restore_lock_wait="SET SESSION innodb_lock_wait_timeout = {value}",
        decided="SELECT transaction_id, outcome FROM {table} WHERE decided_at BETWEEN"
        " NOW(3) - INTERVAL {p} SECOND AND NOW(3) - INTERVAL {p} SECOND ORDER BY decided_at LIMIT {p}",
        clean="DELETE FROM {table} WHERE decided_at < NOW(3) - INTERVAL {p} SECOND ORDER BY decided_at LIMIT {p}",
        elect="SELECT GET_LOCK('{table}', 0)",
        resign="SELECT RELEASE_LOCK('{table}')",
    ),
    Dialect.SQLITE: Statements(
        create=(
            (
                "CREATE TABLE IF NOT EXISTS {table} (transaction_id text PRIMARY KEY, outcome text NOT NULL,"
                " decided_at real NOT NULL DEFAULT ((julianday('now') - 2440587.5) * 86400.0)) WITHOUT ROWID"
            ),
            _INDEX,
        ),
        insert=_INSERT_ONCE,
        select=_SELECT,
        read_lock_wait="PRAGMA busy_timeout",
        bound_lock_wait="PRAGMA busy_timeout = 500",
        restore_lock_wait="PRAGMA busy_timeout = {value}",
        decided="SELECT transaction_id, outcome FROM {table} WHERE decided_at BETWEEN"
        " (julianday('now') - 2440587.5) * 86400.0 - {p} AND (julianday('now') - 2440587.5) * 86400.0 - {p}"
        " ORDER BY decided_at LIMIT {p}",
        clean="DELETE FROM {table} WHERE transaction_id IN (SELECT transaction_id FROM {table}"
        " WHERE decided_at < (julianday('now') - 2440587.5) * 86400.0 - {p} ORDER BY decided_at LIMIT {p})",
        elect=None,
        resign=None,
    ),
}
