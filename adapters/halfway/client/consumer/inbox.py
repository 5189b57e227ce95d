"""The inbox: a table in the service's own database that records which messages have taken effect.

Its statements run on any driver. Old rows are deleted while the consumer runs, once topics keep their messages no
longer.
"""

from __future__ import annotations

import logging
import random
import re
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, Generic, TypeVar
from uuid import uuid4

from confluent_kafka import KafkaError, KafkaException
from confluent_kafka.admin import (  # type: ignore[attr-defined]  # public, but not for mypy
    AdminClient,
    ConfigResource,
    ResourceType,
)

from halfway.client.barrier.barrier import Connect, ConnectAsync, UncommittedConnectionError
from halfway.client.barrier.drivers import (
    blocking,
    carry_out,
    carry_out_async,
    demand_opener,
    drive,
    in_transaction,
    in_transaction_async,
    is_sqlalchemy,
    require_transaction,
    run_sync,
)
from halfway.client.barrier.table import (
    BATCH,
    INDEX,
    Dialect,
    MissingTableError,
    SqlTable,
    Steps,
    creation,
    pause_s,
    rows_written,
)
from halfway.client.consumer.record import connection_settings, loggable
from halfway.client.errors import HalfwayError

_CREATE: Final = {
    Dialect.POSTGRESQL: (
        (
            'CREATE TABLE IF NOT EXISTS {table} (consumer varchar(128) COLLATE "C" NOT NULL,'
            ' message varchar(300) COLLATE "C" NOT NULL,'
            " processed_at timestamptz NOT NULL DEFAULT clock_timestamp(), PRIMARY KEY (consumer, message))"
        ),
        INDEX,
    ),
    Dialect.MYSQL: (
        (
            "CREATE TABLE IF NOT EXISTS {table} (consumer varchar(128) NOT NULL, message varchar(300) NOT NULL,"
            " processed_at timestamp(3) NOT NULL DEFAULT CURRENT_TIMESTAMP(3), PRIMARY KEY (consumer, message),"
            " KEY {table}_processed_at (processed_at)) ENGINE=InnoDB CHARACTER SET ascii COLLATE ascii_bin"
        ),
    ),
    Dialect.SQLITE: (
        (
            "CREATE TABLE IF NOT EXISTS {table} (consumer text NOT NULL, message text NOT NULL,"
            " processed_at real NOT NULL DEFAULT ((julianday('now') - 2440587.5) * 86400.0),"
            " PRIMARY KEY (consumer, message)) WITHOUT ROWID"
        ),
        INDEX,
    ),
}
_INSERT: Final = "INSERT INTO {table} (consumer, message) VALUES ({p}, {p}) ON CONFLICT (consumer, message) DO NOTHING"
_INSERT_IGNORE: Final = "INSERT IGNORE INTO {table} (consumer, message) VALUES ({p}, {p})"
_KEY: Final = re.compile(r"[!-~]+")
"""What MySQL stores as it is: INSERT IGNORE would shorten or replace anything else, and take two keys for one."""
_LOOK: Final = "SELECT 1 FROM {table} WHERE consumer = {p} AND message = {p}"
_REMOVE: Final = "DELETE FROM {table} WHERE consumer = {p} AND message = {p}"


class InboxTable(SqlTable):
    """The inbox's table in one dialect. `insert` runs in the transaction of the effect."""

    def __init__(self, dialect: Dialect | str, name: str) -> None:
        super().__init__(dialect, name, _CREATE, key="consumer, message", time="processed_at")
        self._insert = _INSERT_IGNORE if self.dialect is Dialect.MYSQL else _INSERT

    def insert(self, consumer: str, message: str) -> Steps[bool]:
        """Return False, and leave the row as it is, if there is one."""
        for name, value, longest in (("consumer", consumer, 128), ("message", message, 300)):
            if len(value) > longest or not _KEY.fullmatch(value):
                raise ValueError(
                    f"{name} is {value[:80]!r}, {len(value)} characters: it must have 1 to {longest} visible ASCII"
                    " characters and no spaces; for anything else give a digest of it"
                )
        return rows_written((yield self._statement(self._insert, consumer, message))) > 0

    def has(self, consumer: str, message: str) -> Steps[bool]:
        return bool((yield self._statement(_LOOK, consumer, message)).rows)

    def remove(self, consumer: str, message: str) -> Steps[None]:
        yield self._statement(_REMOVE, consumer, message)


C = TypeVar("C")
T = TypeVar("T")

_DAY_S: Final = 86_400


class _BaseInbox(Generic[C]):
    def __init__(
        self,
        dialect: Dialect | str,
        connect: C,
        *,
        table: str = "halfway_inbox",
        retention_s: float | None = 15 * _DAY_S,
    ) -> None:
        """Take a connection factory of the service's database, as `Barrier` does, and the retention of rows in seconds.

        With None, rows are never deleted.
        """
        demand_opener("connect", connect)
        self.retention_s = retention_s
        self._table = InboxTable(dialect, table)
        self.connect = connect

    def migration(self) -> list[str]:
        """Return the statements that create the table, for a migration tool."""
        return self._table.migration()

    def _write(self, connection: Any, consumer: str, message: str) -> bool:
        require_transaction(connection)
        return carry_out(self._table.insert(consumer, message), connection)

    def _read(self, connection: Any, consumer: str, message: str) -> bool:
        return carry_out(self._table.has(consumer, message), connection)


class AsyncInbox(_BaseInbox[ConnectAsync]):
    """An `Inbox` for asynchronous drivers, in a consumer of your own."""

    async def create(self) -> None:
        """Create the table and its index, unless they exist; every process may call it whenever it starts."""
        await drive(creation(self._table), self._in_transaction)

    async def insert(self, connection: Any, consumer: str, message: str) -> bool:
        """Record a message in the transaction on this connection; return False if it has already taken effect."""
        if is_sqlalchemy(connection):
            return await run_sync(connection, self._write, consumer, message)
        require_transaction(connection)
        return await carry_out_async(self._table.insert(consumer, message), connection)

    async def still_has(self, connection: Any, consumer: str, message: str) -> bool:
        """Return whether the open transaction has the row of a message; raises the driver's error if it has failed.

        Ask before the commit: if a handler catches an error of the database, PostgreSQL answers COMMIT with a rollback
        and no error, and MySQL has begun a new transaction after a deadlock.
        """
        if is_sqlalchemy(connection):
            return await run_sync(connection, self._read, consumer, message)
        return await carry_out_async(self._table.has(consumer, message), connection)

    async def clean(self, limit: int) -> int:
        """Delete at most `limit` rows older than the retention, and none while another instance deletes."""
        return 0 if self.retention_s is None else await self._in_transaction(self._table.clean(self.retention_s, limit))

    async def demand_commits(self) -> None:
        """Raise UncommittedConnectionError if written rows do not stay after a connection's context exits.

        Raises MissingTableError if there is no table.
        A consumer of your own calls it at its start; `Consumer` does so by itself.
        """
        consumer, message = "#trial", uuid4().hex  # not a legal name of a consumer
        try:
            await self._in_transaction(self._table.insert(consumer, message))
        except Exception as error:
            if await self._in_transaction(self._table.exists()):
                raise
            raise MissingTableError(
                "the inbox's table does not exist in this database: call `inbox.create()` before, or run the statements"
                " of `inbox.migration()` in a migration"
            ) from error
        if await self._in_transaction(self._table.insert(consumer, message)):
            raise UncommittedConnectionError
        await self._in_transaction(self._table.remove(consumer, message))

    async def _in_transaction(self, steps: Steps[T]) -> T:
        return await in_transaction_async(self.connect, self._table.dialect, steps)


class Inbox(_BaseInbox[Connect]):
    """The messages that have taken effect. A row is written in the transaction of the effect, so both commit or none.

    Consumers of several groups may share an inbox: each group has its own rows.
    """

    create = blocking(AsyncInbox.create)
    clean = blocking(AsyncInbox.clean)
    demand_commits = blocking(AsyncInbox.demand_commits)

    def insert(self, connection: Any, consumer: str, message: str) -> bool:
        """Record a message in the transaction on this connection; return False if it has already taken effect."""
        return self._write(connection, consumer, message)

    def still_has(self, connection: Any, consumer: str, message: str) -> bool:
        """Same as `AsyncInbox.still_has`."""
        return self._read(connection, consumer, message)

    async def _in_transaction(self, steps: Steps[T]) -> T:
        return in_transaction(self.connect, self._table.dialect, steps)


log = logging.getLogger(__name__)

_TIMEOUT_S: Final = 5.0


class RetentionTooShortError(HalfwayError, ValueError):
    """Rows of the inbox would be deleted while a topic still has their records: raise `retention_s`."""


class UnknownTopicError(HalfwayError, ValueError):
    """A topic does not exist: create it first."""


def check_topics(
    settings: Mapping[str, Any], topics: Sequence[str], others: Sequence[str], inbox_s: float | None
) -> None:
    """Raise if a topic does not exist, or if one of `topics` has a longer retention than the inbox (`inbox_s`).

    A record that is read again after its row was deleted takes effect again. Topics that the credential may not
    describe are logged and not compared.
    """
    admin = AdminClient(connection_settings(settings))
    resources = [ConfigResource(ResourceType.TOPIC, topic) for topic in {*topics, *others}]
    for resource, answer in admin.describe_configs(resources, request_timeout=_TIMEOUT_S).items():
        try:
            config = {name: entry.value for name, entry in answer.result().items()}
        except KafkaException as error:
            _raise_unless_forbidden(resource.name, error)
            continue
        if inbox_s is not None and resource.name in topics:
            _compare(resource.name, config, inbox_s)


def _raise_unless_forbidden(topic: str, error: KafkaException) -> None:
    code = error.args[0].code()
    if code == KafkaError.UNKNOWN_TOPIC_OR_PART:
        raise UnknownTopicError(f"the topic {topic} does not exist: create it first") from None
    if code != KafkaError.TOPIC_AUTHORIZATION_FAILED:
        raise error
    log.warning("cannot read the settings of topic %s: its retention is not checked; allow DescribeConfigs", topic)


def _compare(topic: str, config: Mapping[str, str | None], inbox_s: float) -> None:
    retention_ms = int(config.get("retention.ms") or -1)
    if "delete" not in (config.get("cleanup.policy") or "") or retention_ms < 0:
        raise RetentionTooShortError(
            f"the topic {topic} keeps records for ever, the inbox keeps rows for {inbox_s:.0f} s: give the inbox"
            " retention_s=None, or the topic a retention"
        )
    # Kafka deletes a record together with its segment, which is closed up to segment.ms after its first record.
    topic_s = (retention_ms + int(config.get("segment.ms") or 0)) / 1000
    if inbox_s < topic_s:
        raise RetentionTooShortError(
            f"the topic {topic} keeps records for up to {topic_s:.0f} s (retention.ms and segment.ms), the inbox keeps"
            f" rows for {inbox_s:.0f} s: give the inbox a retention_s of {topic_s:.0f} or more"
        )


class Cleaning(threading.Thread):
    """Deletes old rows about every `every_s` seconds, on its own connections. One instance deletes at a time."""

    def __init__(self, clean: Callable[[int], int], every_s: float) -> None:
        super().__init__(name="halfway-inbox-cleaning", daemon=True)
        self._clean_rows = clean
        self._every_s = every_s
        self._stopping = threading.Event()

    def run(self) -> None:
        """Run until stopped. Failures are logged and retried."""
        while not self._stopping.wait(self._every_s * random.uniform(0.5, 1.5)):  # noqa: S311 - instances take turns
            try:
                self._clean()
            except Exception as error:
                log.error("old rows of the inbox were not deleted", exc_info=loggable(error))  # noqa: TRY400

    def _clean(self) -> None:
        while not self._stopping.is_set():
            started = time.monotonic()
            if self._clean_rows(BATCH) < BATCH:
                return
            self._stopping.wait(pause_s(time.monotonic() - started))

    def stop(self) -> None:
        """Stop after the current batch, and wait for it."""
        self._stopping.set()
        self.join()
