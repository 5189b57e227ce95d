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

    @classmethod
    def _missing_(cls, value: object) -> Dialect | None:
        """Take SQLAlchemy's other name of MariaDB."""
        return cls.MYSQL if value == "mariadb" else None


_SELECT: Final = "SELECT outcome FROM {table} WHERE transaction_id = {p}"

REMOVE: Final = "DELETE FROM {table} WHERE transaction_id = {p}"
"""Parameter: the id, in every dialect."""


@dataclass(frozen=True, kw_only=True)
class Statements:
    """The statements of one dialect; `{p}` stands for a driver's placeholder, `{table}` for the table's name."""

    create: tuple[str, ...]
    """Makes the table with one row, which tells it from every other table; no cleaning reaches its time."""
    insert: str
    """Parameters: transaction id, outcome. A row that stands is left as it is, and no row is counted."""
    mark: str = _SELECT
    """Parameter: the id of the row that tells the table from every other one."""
    select: str
    """Parameter: transaction id. The outcome, or no row."""
    begin: str | None
    """Begins a check's transaction so that its commit waits for nobody; None if no commit waits for a lock."""
    select_waits: bool
    """Whether a select may wait for a local transaction that is open."""
    read_lock_wait: str
    """How long this connection waits for a lock, a whole number."""
    bound_lock_wait: str
    """Bounds how long this connection waits for a lock, to at most a second."""
    restore_lock_wait: str
    """Puts back what `read_lock_wait` returned, which is `{value}`."""
    clean: str
    """Parameters: seconds, limit. Deletes the oldest rows that were decided longer ago, through the index."""
    elect: str | None
    """Returns 1 if this connection is the one that cleans now; None if `clean` sees to it or only one can write."""
    resign: str | None
    """Ends what `elect` began."""


_INDEX: Final = "CREATE INDEX IF NOT EXISTS {table}_decided_at ON {table} (decided_at)"
_INSERT_ONCE: Final = (
    "INSERT INTO {table} (transaction_id, outcome) VALUES ({p}, {p}) ON CONFLICT (transaction_id) DO NOTHING"
)
MARK_ID: Final = "#table"
"""Of the row that tells the table from every other one; no transaction has such an id."""

STATEMENTS: Final[dict[Dialect, Statements]] = {
    Dialect.POSTGRESQL: Statements(
        create=(
            (
                'CREATE TABLE IF NOT EXISTS {table} (transaction_id varchar(128) COLLATE "C" PRIMARY KEY,'
                " outcome varchar(8) NOT NULL, decided_at timestamptz NOT NULL DEFAULT clock_timestamp())"
            ),
            _INDEX,
            (
                "INSERT INTO {table} VALUES ('#table', substr(md5(CAST(random() AS text)), 1, 8), 'infinity')"
                " ON CONFLICT (transaction_id) DO NOTHING"
            ),
        ),
        insert=_INSERT_ONCE,
        select=_SELECT,
        begin=None,
        select_waits=False,
        # Not SET LOCAL, which does nothing on a connection that commits each statement. A transaction that is rolled
        # back takes the setting with it.
        read_lock_wait="SELECT setting FROM pg_settings WHERE name = 'lock_timeout'",
        bound_lock_wait="SET lock_timeout = 500",
        restore_lock_wait="SET lock_timeout = {value}",
        clean="WITH elected AS MATERIALIZED (SELECT pg_try_advisory_xact_lock(hashtext('{table}')) AS mine)"
        " DELETE FROM {table} WHERE (SELECT mine FROM elected) AND transaction_id IN (SELECT transaction_id"
        " FROM {table} WHERE decided_at < now() - {p} * interval '1 second'"
        " ORDER BY decided_at LIMIT {p})",
        elect=None,
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
            ("INSERT IGNORE INTO {table} VALUES ('#table', LEFT(MD5(CONCAT(RAND(), UUID())), 8), '2037-12-31')"),
        ),
        insert="INSERT IGNORE INTO {table} (transaction_id, outcome) VALUES ({p}, {p})",
        # A locking read sees no row that is not committed, at READ UNCOMMITTED neither.
        select=_SELECT + " LOCK IN SHARE MODE",
        begin=None,
        select_waits=True,
        read_lock_wait="SELECT @@SESSION.innodb_lock_wait_timeout",
        # 0, which MariaDB knows, is not to wait at all; MySQL's least is 1 s.
        bound_lock_wait="SET SESSION innodb_lock_wait_timeout = IF(LOCATE('MariaDB', VERSION()) > 0, 0, 1)",
        restore_lock_wait="SET SESSION innodb_lock_wait_timeout = {value}",
        clean="DELETE FROM {table} WHERE decided_at < NOW(3) - INTERVAL {p} SECOND ORDER BY decided_at LIMIT {p}",
        elect="SELECT GET_LOCK(SHA1(CONCAT(DATABASE(), '.{table}')), 0)",
        resign="SELECT RELEASE_LOCK(SHA1(CONCAT(DATABASE(), '.{table}')))",
    ),
    Dialect.SQLITE: Statements(
        create=(
            (
                "CREATE TABLE IF NOT EXISTS {table} (transaction_id text PRIMARY KEY, outcome text NOT NULL,"
                " decided_at real NOT NULL DEFAULT ((julianday('now') - 2440587.5) * 86400.0)) WITHOUT ROWID"
            ),
            _INDEX,
            (
                "INSERT INTO {table} VALUES ('#table', lower(hex(randomblob(4))), 9e9)"
                " ON CONFLICT (transaction_id) DO NOTHING"
            ),
        ),
        insert=_INSERT_ONCE,
        select=_SELECT,
        begin="BEGIN EXCLUSIVE",  # without a write-ahead log a commit waits for whoever reads
        select_waits=True,  # without a write-ahead log
        read_lock_wait="PRAGMA busy_timeout",
        bound_lock_wait="PRAGMA busy_timeout = 500",
        restore_lock_wait="PRAGMA busy_timeout = {value}",
        clean="DELETE FROM {table} WHERE transaction_id IN (SELECT transaction_id FROM {table}"
        " WHERE decided_at < (julianday('now') - 2440587.5) * 86400.0 - {p}"
        " ORDER BY decided_at LIMIT {p})",
        elect=None,
        resign=None,
    ),
}
