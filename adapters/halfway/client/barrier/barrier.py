"""What the barrier does, as steps of SQL that any driver can carry out."""

from __future__ import annotations

import re
from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Final, Literal, TypeVar

from halfway.client.barrier.dialect import STATEMENTS, Dialect
from halfway.client.errors import HalfwayError

T = TypeVar("T")
Outcome = Literal["commit", "rollback", "unknown"]

_COMMITTED: Final = "commit"
_ROLLED_BACK: Final = "rollback"
_NAME: Final = re.compile(r"[a-z_][a-z0-9_]{0,47}")
_DAY_S: Final = 86_400


class LateTransactionError(HalfwayError):
    """A check was answered `rollback` for this transaction before: roll the local transaction back."""


class InvalidRetentionError(HalfwayError, ValueError):
    """Rows would be cleaned while halfway may still ask about them: raise `retention_s`, or lower the policy's age."""


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


class Barrier:
    """The barrier's table in one database.

    `insert` belongs into the local transaction. `look`, and if that finds nothing `take_place`, answer a check, each in
    a transaction on another connection.
    """

    def __init__(
        self, dialect: Dialect | str, *, table: str = "halfway_barrier", retention_s: float = 7 * _DAY_S
    ) -> None:
        """Choose the table's name, and for how many seconds its rows are kept."""
        if not _NAME.fullmatch(table):
            raise ValueError(f"table {table!r}: give a lower-case name of at most 48 letters, digits and _")
        self.retention_s = retention_s
        self._table = table
        self._statements = STATEMENTS[Dialect(dialect)]

    def create(self) -> Steps[None]:
        """Make the table and its index, unless they are there."""
        for sql in self._statements.create:
            yield self._statement(sql)

    def insert(self, transaction_id: str) -> Steps[None]:
        """Say in the local transaction that this transaction commits with it; raises LateTransactionError."""
        done = yield self._statement(self._statements.insert, transaction_id, _COMMITTED)
        if done.written == 0:
            raise LateTransactionError(
                f"transaction {transaction_id} is decided already: roll the local transaction back"
            )

    def look(self, transaction_id: str) -> Steps[Outcome | None]:
        """Return the outcome that stands, None if there is none yet."""
        found = yield self._statement(self._statements.select, transaction_id)
        return _outcome(found.rows[0][0]) if found.rows else None

    def take_place(self, transaction_id: str) -> Steps[bool]:
        """Roll back a transaction that has no row: from its commit on, a local transaction fails. Whether it was first.

        Waits at most a second for a local transaction that is open; then the driver raises its error.
        """
        statements = self._statements
        before = None
        if statements.read_lock_wait is not None:
            before = (yield self._statement(statements.read_lock_wait)).rows[0][0]
        yield self._statement(statements.bound_lock_wait)
        try:
            done = yield self._statement(statements.insert, transaction_id, _ROLLED_BACK)
        finally:
            if statements.restore_lock_wait is not None:
                yield Statement(statements.restore_lock_wait.format(value=int(before or 0)))
        return done.written > 0

    def decided(self, *, from_s: float, to_s: float, limit: int) -> Steps[list[tuple[str, Outcome]]]:
        """Return what was decided from `from_s` seconds ago to `to_s` seconds ago, the oldest first."""
        found = yield self._statement(self._statements.decided, from_s, to_s, limit)
        return [(str(row[0]), _outcome(row[1])) for row in found.rows]

    def clean(self, limit: int) -> Steps[int | None]:
        """Delete at most `limit` rows older than the retention; None if another instance does it at this moment."""
        statements = self._statements
        if statements.elect is not None and (yield self._statement(statements.elect)).rows[0][0] != 1:
            return None
        try:
            done = yield self._statement(statements.clean, self.retention_s, limit)
        finally:
            if statements.resign is not None:
                yield self._statement(statements.resign)
        return done.written

    def may_be_cleaned(self, prepared_at: str) -> bool:
        """Whether a transaction is so old that its row may be gone: then a check knows nothing, and must say so."""
        age_s = (datetime.now(UTC) - datetime.fromisoformat(prepared_at)).total_seconds()
        return age_s > self.retention_s / 2

    def check_policy(self, policy: Mapping[str, Any]) -> None:
        """Compare the retention with a group's policy, as `Halfway.register` returns it.

        Raises InvalidRetentionError if rows would be cleaned before halfway stops asking.
        """
        max_age_s = float(policy["max_age_s"])
        if self.retention_s < 2 * max_age_s:
            raise InvalidRetentionError(
                f"retention_s {self.retention_s:.0f} is less than twice the group's max_age_s {max_age_s:.0f}:"
                f" give the barrier a retention_s of {2 * max_age_s:.0f} or more, or lower max_age_s"
            )

    def _statement(self, sql: str, *parameters: object) -> Statement:
        return Statement(sql.replace("{table}", self._table), parameters)


def _outcome(stored: str) -> Outcome:
    return "commit" if stored == _COMMITTED else "rollback"
