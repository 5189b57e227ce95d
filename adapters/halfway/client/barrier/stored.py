"""Messages that wait in the service's own database until halfway is back, each under the id of its transaction.

A row is written in the local transaction, beside the barrier's row. From then on only the sender ends that transaction:
a check is answered `unknown` until the row says that it was given to halfway, and `commit` afterwards. So if halfway
no longer knows an id that was not given, nobody has committed it, and its messages may be sent under another id.
"""

from __future__ import annotations

import base64
import hashlib
import json
import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass
from secrets import token_hex
from typing import Any, Final

from halfway.client.barrier.drivers import NoTransactionError
from halfway.client.barrier.table import TABLE, BarrierTable, Dialect, SqlTable, Steps, rows_written
from halfway.client.errors import HalfwayError, demand_positive
from halfway.client.ids import canonical
from halfway.client.messages import Message, Outcome, is_conflict

log = logging.getLogger(__name__)

_COLUMNS: Final = (
    " group_name varchar(255) NOT NULL, messages {text} NOT NULL, size integer NOT NULL,"
    " given integer NOT NULL DEFAULT 0, reason varchar(500),"
)
_CREATE: Final = {
    Dialect.POSTGRESQL: "CREATE TABLE IF NOT EXISTS {table} (place bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,"
    ' transaction_id varchar(128) COLLATE "C" NOT NULL UNIQUE,'
    + _COLUMNS.replace("{text}", "text")
    + " stored_at timestamptz NOT NULL DEFAULT clock_timestamp())",
    Dialect.MYSQL: "CREATE TABLE IF NOT EXISTS {table} (place bigint AUTO_INCREMENT PRIMARY KEY,"
    " transaction_id varchar(128) CHARACTER SET ascii COLLATE ascii_bin NOT NULL UNIQUE,"
    + _COLUMNS.replace("{text}", "longtext CHARACTER SET ascii")
    + " stored_at timestamp(3) NOT NULL DEFAULT CURRENT_TIMESTAMP(3)) ENGINE=InnoDB",
    Dialect.SQLITE: "CREATE TABLE IF NOT EXISTS {table} (place integer PRIMARY KEY,"
    " transaction_id text NOT NULL UNIQUE,"
    + _COLUMNS.replace("{text}", "text")
    + " stored_at real NOT NULL DEFAULT ((julianday('now') - 2440587.5) * 86400.0))",
}
_AGE: Final = {
    Dialect.POSTGRESQL: "EXTRACT(EPOCH FROM clock_timestamp() - {stored_at})",
    Dialect.MYSQL: "TIMESTAMPDIFF(MICROSECOND, {stored_at}, NOW(3)) / 1000000",
    Dialect.SQLITE: "(julianday('now') - 2440587.5) * 86400.0 - {stored_at}",
}
"""Seconds since a row was stored."""
_GIVEN: Final = dict.fromkeys(Dialect, "SELECT given FROM {table} WHERE transaction_id = {p}")
_GIVEN[Dialect.MYSQL] += " LOCK IN SHARE MODE"  # otherwise READ UNCOMMITTED sees what the sender has not committed
_MEASURED_FOR_S: Final = 1.0
"""How long a process relies on the size of the store that it has read."""


class StoreFullError(HalfwayError):
    """The store has reached its bound, and halfway is away: the local transaction is rolled back. Try again later."""


_NO_STORE: Final = "the client's barrier has no store: open it with `Barrier(..., store=Store())`, and create its table"


class NoStoreError(HalfwayError, TypeError):
    """The client's barrier has no store: open it with `Barrier(..., store=Store())`, and create its table."""


@dataclass(frozen=True, kw_only=True)
class Store:
    """The bounds of the messages that wait in the barrier's database. Several processes may exceed them a little."""

    max_rows: int = 100_000
    max_bytes: int = 256 * 2**20

    def __post_init__(self) -> None:
        """Raise InvalidSettingError for a store that takes nothing."""
        demand_positive(1, max_rows=self.max_rows, max_bytes=self.max_bytes)


@dataclass(frozen=True, kw_only=True)
class StoredFigures:
    """What waits in the store."""

    waiting: int
    """Transactions that are sent when halfway is back."""
    parked: int
    """Transactions that a person has to resolve."""
    bytes: int
    """The size of all messages."""
    oldest_s: float
    """For how many seconds the oldest of all has been waiting; 0 if there is none."""


@dataclass(frozen=True, kw_only=True)
class ParkedMessages:
    """A transaction that is not sent until `resolve` says how."""

    id: str
    reason: str
    age_s: float
    messages: list[dict[str, Any]]
    """As in the API's prepare; none if they cannot be read."""


@dataclass(frozen=True, kw_only=True)
class StoredMessage(Message):
    """A message as it was stored: a repeat of its prepare has the same content."""

    document: dict[str, Any]

    def as_json(self) -> dict[str, Any]:
        return self.document


@dataclass(frozen=True)
class StoredTransaction:
    """A row of the store."""

    id: str
    messages: tuple[StoredMessage, ...]
    is_given: bool
    """Whether halfway had it prepared: somebody may have committed it."""
    place: int
    """Its place in the order of the store."""

    @property
    def keys(self) -> set[tuple[str, bytes]]:
        """What later messages must not overtake."""
        documents = [message.document for message in self.messages]
        return {(one["topic"], _bytes_of(one["key"])) for one in documents if one["key"] is not None}


def _bytes_of(key: str | dict[str, str]) -> bytes:
    return key.encode() if isinstance(key, str) else base64.b64decode(key["data"])


def _read(text: str) -> list[StoredMessage]:
    """Return stored messages; none if they cannot be read."""
    try:
        return [StoredMessage(topic=one["topic"], document=one) for one in json.loads(text)]
    except (ValueError, TypeError, KeyError, RecursionError):
        return []


class StoredTable(SqlTable):
    """The store's table in one dialect. It is beside the barrier's, and exists only if it was created."""

    def __init__(self, dialect: Dialect | str, barrier: str, bounds: Store | None) -> None:
        """Take the name of the barrier's table. Without bounds nothing is stored by this process."""
        creation = {each: (sql,) for each, sql in _CREATE.items()}
        super().__init__(dialect, f"{barrier}_stored", creation, key="transaction_id", time="stored_at")
        self.bounds = bounds
        self._barrier = BarrierTable(dialect, barrier)
        self._owner = token_hex(4)
        self.is_away = False
        """Whether this process has found halfway away, or messages that wait for it, since the store was empty."""
        self._is_created = False
        self._measured_at = -_MEASURED_FOR_S
        self._rows = self._bytes = 0

    def exists(self) -> Steps[bool]:
        self._is_created = self._is_created or (yield from super().exists())
        return self._is_created

    def waits(self, group: str) -> Steps[bool]:
        """Return whether messages of a group wait, so that later ones must not overtake them."""
        result = yield self._statement("SELECT 1 FROM {table} WHERE group_name = {p} AND reason IS NULL LIMIT 1", group)
        self.is_away = bool(result.rows)
        return self.is_away

    def demand_room(self, size: int = 1) -> Steps[None]:
        """Raise StoreFullError if the store has no room for messages of this size; NoStoreError if it is not used."""
        if self.bounds is None:
            raise NoStoreError(_NO_STORE)
        is_old = time.monotonic() - self._measured_at >= _MEASURED_FOR_S
        if is_old or self._rows >= self.bounds.max_rows or self._bytes + size > self.bounds.max_bytes:
            result = yield self._statement("SELECT COUNT(*), COALESCE(SUM(size), 0) FROM {table}")
            self._rows, self._bytes = map(int, result.rows[0])
            self._measured_at = time.monotonic()
        if self._rows >= self.bounds.max_rows or self._bytes + size > self.bounds.max_bytes:
            raise StoreFullError(
                f"halfway is away, and {self._rows} transactions with {self._bytes} bytes are stored, which leaves no"
                f" room for {size} bytes: try again later,"
                f" or raise max_rows ({self.bounds.max_rows}) or max_bytes ({self.bounds.max_bytes}) of Store"
            )

    def add(self, transaction_id: str, group: str, messages: Sequence[Message]) -> Steps[None]:
        """Store messages in the local transaction, as its last statement: its rows get the order of commits."""
        documents = [message.as_json() for message in messages]
        text = json.dumps(documents, separators=(",", ":"), allow_nan=False)
        yield from self.demand_room(len(text))
        if not (yield from self._barrier.still_has(transaction_id)):
            raise NoTransactionError(
                f"the row of transaction {transaction_id} is gone: the local transaction was rolled back before its end"
            )
        insert = "INSERT INTO {table} (transaction_id, group_name, messages, size) VALUES ({p}, {p}, {p}, {p})"
        yield self._statement(insert, canonical(transaction_id), group, text, len(text))
        level = logging.DEBUG if self.is_away else logging.INFO  # an outage stores thousands
        log.log(level, "the messages of transaction %s are stored until halfway is back", transaction_id)
        self.is_away = True
        self._rows += 1
        self._bytes += len(text)

    def look(self, transaction_id: str) -> Steps[Outcome | None]:
        """Return what a check gets: the outcome of the barrier, but `unknown` while only the sender may end it."""
        outcome = yield from self._barrier.look(transaction_id)
        if outcome != "commit" or not (yield from self.exists()):
            return outcome
        try:
            result = yield from self._read_committed(_GIVEN[self.dialect], canonical(transaction_id))
        except Exception as error:
            if not is_conflict(error):
                raise
            return "unknown"  # the sender is writing it
        if result.rows:
            return "commit" if result.rows[0][0] else "unknown"
        return (yield from self._barrier.look(transaction_id))  # it may have got another id since the first look

    def oldest(self, group: str, limit: int, after: int = 0) -> Steps[list[StoredTransaction]]:
        """Return the transactions to send that follow a place, in their order.

        None while another process sends those of this group.
        """
        if not (yield from self.waits(group)):
            return []
        name = f"#sender/{hashlib.sha256(group.encode()).hexdigest()[:32]}"  # not a legal transaction id
        if not (yield from self._barrier.lease(name, self._owner)):
            return []
        result = yield self._statement(
            "SELECT transaction_id, messages, given, place FROM {table}"
            " WHERE group_name = {p} AND reason IS NULL AND place > {p} ORDER BY place LIMIT {p}",
            group,
            after,
            limit,
        )
        found = []
        for own, text, given, place in result.rows:
            if messages := _read(text):
                found.append(StoredTransaction(own, tuple(messages), bool(given), int(place)))
            else:
                yield from self.park(own, "its messages cannot be read: they were changed, or are nested too deeply")
        return found

    def go_on(self, committed: Sequence[str], prepared: Sequence[str]) -> Steps[set[str]]:
        """Delete what is committed, and note that halfway has what is prepared, before that is committed.

        Return those that are noted: they are still stored.
        """
        for own in sorted(committed):  # in one order, so that two processes cannot lock each other out
            yield self._statement(self.sql.remove, own)
        update = "UPDATE {table} SET given = given + 1 WHERE transaction_id = {p} AND reason IS NULL"
        given = set()
        for own in sorted(prepared):
            if rows_written((yield self._statement(update, own))):
                given.add(own)
        return given

    def rename(self, transaction_id: str, new_id: str, *, was_rolled_back: bool) -> Steps[bool]:
        """Give a transaction another id; return False if it is no longer stored, or may have been committed.

        From then on a check of the former id is answered `rollback`, should halfway get its prepare after all.
        """
        update = "UPDATE {table} SET transaction_id = {p}, given = 0 WHERE transaction_id = {p} AND reason IS NULL"
        result = yield self._statement(update + ("" if was_rolled_back else " AND given = 0"), new_id, transaction_id)
        if rows_written(result) == 0:
            return False
        yield from self._barrier.overrule(transaction_id, new_id)
        return True

    def park(self, transaction_id: str, reason: str) -> Steps[bool]:
        """Leave a transaction to a person; return False if it is no longer stored."""
        update = "UPDATE {table} SET reason = {p} WHERE transaction_id = {p} AND reason IS NULL"
        if not rows_written((yield self._statement(update, reason[:500], transaction_id))):
            return False
        log.error("stored transaction %s is not sent until `resolve` says how: %s", transaction_id, reason)
        return True

    def parked(self) -> Steps[list[ParkedMessages]]:
        """Return what is parked, oldest first; at most 100."""
        yield from self._demand_table()
        age = _AGE[self.dialect].replace("{stored_at}", "stored_at")
        result = yield self._statement(
            f"SELECT transaction_id, reason, {age}, messages FROM {{table}} WHERE reason IS NOT NULL"  # noqa: S608
            " ORDER BY place LIMIT 100"
        )
        return [
            ParkedMessages(id=own, reason=reason, age_s=float(age_s), messages=[one.document for one in _read(text)])
            for own, reason, age_s, text in result.rows
        ]

    def resolve(self, transaction_id: str, *, delivered: bool) -> Steps[bool]:
        """Delete a parked transaction that was delivered, or send it again; return whether it was parked."""
        yield from self._demand_table()
        again = "UPDATE {table} SET reason = NULL, given = 0 WHERE transaction_id = {p} AND reason IS NOT NULL"
        delete = "DELETE FROM {table} WHERE transaction_id = {p} AND reason IS NOT NULL"
        return rows_written((yield self._statement(delete if delivered else again, transaction_id))) > 0

    def _demand_table(self) -> Steps[None]:
        if not (yield from self.exists()):
            raise NoStoreError(_NO_STORE)

    def figures(self) -> Steps[StoredFigures]:
        """Return what waits."""
        yield from self._demand_table()
        age = _AGE[self.dialect].replace("{stored_at}", "MIN(stored_at)")
        select = f"SELECT COUNT(*), COUNT(reason), COALESCE(SUM(size), 0), COALESCE({age}, 0) FROM {{table}}"  # noqa: S608
        rows, parked, size, oldest_s = (yield self._statement(select)).rows[0]
        return StoredFigures(waiting=rows - parked, parked=parked, bytes=int(size), oldest_s=float(oldest_s))


def migration(dialect: Dialect | str, table: str = TABLE, *, store: bool = False) -> list[str]:
    """Return the statements that create a barrier's table, for a migration tool; with `store`, those of its store.

    Alembic's dialect names work too.
    """
    return StoredTable(dialect, table, None).migration() if store else BarrierTable(dialect, table).migration()
