"""The SQL of the barrier for each database."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Final


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


TABLE_COUNT: Final[dict[Dialect, str]] = {
    Dialect.POSTGRESQL: "SELECT count(to_regclass('{table}'))",
    Dialect.MYSQL: "SELECT COUNT(*) FROM information_schema.tables"
    " WHERE table_schema = DATABASE() AND table_name = '{table}'",
    Dialect.SQLITE: "SELECT COUNT(*) FROM sqlite_master WHERE type = 'table' AND name = '{table}'",
}
"""Returns 1 if the table exists. It takes no lock that waits for a transaction, or that a transaction waits for."""

CREATE_ONCE: Final[dict[Dialect, str | None]] = {
    # Without the lock, one of two processes fails at a unique index of the catalogue. Without the condition,
    # CREATE INDEX would wait for every transaction that has written to the table, and hold up every later one. One
    # statement, because a connection that commits each statement would release the lock too early.
    Dialect.POSTGRESQL: "DO $$ BEGIN PERFORM pg_advisory_xact_lock(hashtext('create {table}'));"
    " IF to_regclass('{table}') IS NULL THEN {create}; END IF; END $$",
    Dialect.MYSQL: None,
    Dialect.SQLITE: None,
}
"""Creates the table with its index, while other processes do the same; None if IF NOT EXISTS is enough."""

_SELECT: Final = "SELECT outcome FROM {table} WHERE transaction_id = {p}"

REMOVE: Final = "DELETE FROM {table} WHERE transaction_id = {p}"
"""Parameter: the id, in every dialect."""


@dataclass(frozen=True, kw_only=True)
class Statements:
    """The statements of one dialect. `{p}` is replaced by a driver's placeholder, `{table}` by the table's name."""

    create: tuple[str, ...]
    """Creates the table and its index, unless they exist."""
    create_mark: str
    """Inserts the row that identifies the table, with a time that is never old enough for a deletion."""
    insert: str
    """Parameters: transaction id, outcome. An existing row stays unchanged, and the row count is 0."""
    mark: str = _SELECT
    """Parameter: the id of the row that identifies the table."""
    select: str
    """Parameter: transaction id. Returns the outcome, or no row."""
    begin: str | None
    """Begins a check's transaction so that its commit waits for no lock; None if commits never wait for locks."""
    select_waits: bool
    """Whether a select may wait for an open local transaction."""
    read_lock_wait: str
    """Returns how long this connection waits for a lock, a whole number."""
    bound_lock_wait: str
    """Limits how long this connection waits for a lock to at most a second."""
    restore_lock_wait: str
    """Restores the result of `read_lock_wait`, which replaces `{value}`."""
    clean: str
    """Parameters: seconds, limit. Deletes the oldest of the rows that are older than that, through the index."""
    elect: str | None
    """Returns 1 if this connection may delete rows now; None if `clean` ensures it, or if only one can write."""
    resign: str | None
    """Undoes `elect`."""


_INDEX: Final = "CREATE INDEX IF NOT EXISTS {table}_decided_at ON {table} (decided_at)"
_INSERT_ONCE: Final = (
    "INSERT INTO {table} (transaction_id, outcome) VALUES ({p}, {p}) ON CONFLICT (transaction_id) DO NOTHING"
)
MARK_ID: Final = "#table"
"""The id of the row that identifies the table. It is not a legal transaction id."""

STATEMENTS: Final[dict[Dialect, Statements]] = {
    Dialect.POSTGRESQL: Statements(
        create=(
            (
                'CREATE TABLE IF NOT EXISTS {table} (transaction_id varchar(128) COLLATE "C" PRIMARY KEY,'
                " outcome varchar(8) NOT NULL, decided_at timestamptz NOT NULL DEFAULT clock_timestamp())"
            ),
            _INDEX,
        ),
        create_mark="INSERT INTO {table} VALUES ('#table', substr(md5(CAST(random() AS text)), 1, 8), 'infinity')"
        " ON CONFLICT (transaction_id) DO NOTHING",
        insert=_INSERT_ONCE,
        select=_SELECT,
        begin=None,
        select_waits=False,
        # Not SET LOCAL, which has no effect on a connection that commits each statement. A rollback restores the
        # setting.
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
        ),
        create_mark="INSERT IGNORE INTO {table} VALUES ('#table', LEFT(MD5(CONCAT(RAND(), UUID())), 8), '2037-12-31')",
        insert="INSERT IGNORE INTO {table} (transaction_id, outcome) VALUES ({p}, {p})",
        # A locking read never sees an uncommitted row, not even at READ UNCOMMITTED.
        select=_SELECT + " LOCK IN SHARE MODE",
        begin=None,
        select_waits=True,
        read_lock_wait="SELECT @@SESSION.innodb_lock_wait_timeout",
        # 0 means no wait, but only in MariaDB. MySQL's minimum is 1 s.
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
        ),
        create_mark="INSERT INTO {table} VALUES ('#table', lower(hex(randomblob(4))), 9e9)"
        " ON CONFLICT (transaction_id) DO NOTHING",
        insert=_INSERT_ONCE,
        select=_SELECT,
        begin="BEGIN EXCLUSIVE",  # without a write-ahead log, a commit waits for readers
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
