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
    """The statements of one dialect; `{p}` stands for a driver's placeholder, `{table}` for the table."""

    create: tuple[str, ...]
    insert: str
    """Parameters: transaction id, outcome. Leaves a row that stands as it is."""
    begin_check: str
    """The first statement of a check's transaction: it bounds the wait for a local transaction that is open."""
    select: str
    """Parameter: transaction id."""
    decided_before: str
    """Parameters: seconds, limit. The ids that were decided longer ago, the oldest first."""
    delete: str
    """Parameter: transaction id."""


_SELECT: Final = "SELECT outcome FROM {table} WHERE transaction_id = {p}"
_DELETE: Final = "DELETE FROM {table} WHERE transaction_id = {p}"

STATEMENTS: Final[dict[Dialect, Statements]] = {
    Dialect.POSTGRESQL: Statements(
        create=(
            "CREATE TABLE IF NOT EXISTS {table} (transaction_id varchar(128) PRIMARY KEY, outcome varchar(8) NOT NULL,"
            " decided_at timestamptz NOT NULL DEFAULT clock_timestamp())",
            "CREATE INDEX IF NOT EXISTS {table}_decided_at ON {table} (decided_at)",
        ),
        insert="INSERT INTO {table} (transaction_id, outcome) VALUES ({p}, {p}) ON CONFLICT (transaction_id) DO NOTHING",
        begin_check="SET LOCAL lock_timeout = '500ms'",
        select=_SELECT,
        decided_before="SELECT transaction_id FROM {table} WHERE decided_at < now() - make_interval(secs => {p})"
        " ORDER BY decided_at LIMIT {p} FOR UPDATE SKIP LOCKED",
        delete=_DELETE,
    ),
}
