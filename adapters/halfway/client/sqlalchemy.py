"""Sending inside a session or connection of SQLAlchemy 2: the messages share the fate of its database transaction."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any, Final

from sqlalchemy import TwoPhaseTransaction
from sqlalchemy.util import await_only

from halfway.client.barrier import AsyncBarrier, Barrier, UnsupportedConnectionError
from halfway.client.barrier.drivers import require_transaction, sqlalchemy_connection
from halfway.client.client import Halfway
from halfway.client.messages import Data, Message, Value
from halfway.client.outcome import Outcome
from halfway.client.sending import Endings, MixedProducersError, NoBarrierError, Sending
from halfway.client.sync import SyncHalfway

if TYPE_CHECKING:
    from sqlalchemy import Connection, Dialect, PoolProxiedConnection, RootTransaction
    from sqlalchemy.ext.asyncio import AsyncConnection, AsyncSession
    from sqlalchemy.orm import Session, scoped_session

_KEY: Final = "halfway.client"


class SessionProducer:
    """Sends inside a Session or a Connection.

    The messages of one database transaction are one transaction of halfway's. `commit` prepares them, with the
    barrier's row in the same database transaction, and ends them afterwards in the background. What is rolled back,
    to a savepoint too, is never prepared. The database connection is held while halfway is asked to prepare.
    """

    def __init__(self, client: SyncHalfway) -> None:
        """Take a client that has a barrier; raises NoBarrierError."""
        self._client = client
        self._barrier = _barrier(client.barrier)

    def send(
        self,
        session: Session | scoped_session[Any] | Connection,
        topic: str,
        key: Data = None,
        value: Value = None,
        *,
        headers: Mapping[str, Data] | None = None,
        partition: int | None = None,
    ) -> str:
        """Send a message if the transaction that is open commits; return the id of halfway's transaction.

        Nothing is asked of halfway before the commit, which then raises what `SyncHalfway.prepare` raises, and
        has rolled the database transaction back.
        """
        message = Message(topic=topic, key=key, value=value, headers=headers or {}, partition=partition)
        return _send(self._client, self._barrier, session, message)


class AsyncSessionProducer:
    """`SessionProducer` for an AsyncSession or an AsyncConnection, with `Halfway` in the same event loop."""

    def __init__(self, client: Halfway) -> None:
        """Take a client that has a barrier; raises NoBarrierError."""
        self._client = _InGreenlet(client)
        self._barrier = _barrier(client.barrier)

    async def send(
        self,
        session: AsyncSession | AsyncConnection,
        topic: str,
        key: Data = None,
        value: Value = None,
        *,
        headers: Mapping[str, Data] | None = None,
        partition: int | None = None,
    ) -> str:
        """Do what `SessionProducer.send` does."""
        message = Message(topic=topic, key=key, value=value, headers=headers or {}, partition=partition)
        return await session.run_sync(lambda inner: _send(self._client, self._barrier, inner, message))


class _InGreenlet:
    """A client as code sees it that SQLAlchemy runs for an asynchronous connection."""

    def __init__(self, client: Halfway) -> None:
        self._client = client

    def prepare(self, messages: Iterable[Message], *, id: str) -> None:  # noqa: A002 - what REST calls it
        await_only(self._client.prepare(messages, id=id))

    def end(
        self,
        id: str,  # noqa: A002 - as above
        outcome: Outcome,
        *,
        remark: str | None = None,
        confirm: bool,
    ) -> None:
        await_only(self._client.end(id, outcome, remark=remark, confirm=confirm))


class _Local:
    """A database transaction in which something is sent, kept with its DBAPI connection."""

    def __init__(
        self, client: Endings, barrier: Barrier | AsyncBarrier, connection: Connection, transaction: RootTransaction
    ) -> None:
        self.client = client
        self.sending = Sending()
        self._barrier = barrier
        self._connection = weakref.ref(connection)
        self._transaction = weakref.ref(transaction)
        self._savepoints: dict[str, int] = {}

    def is_open(self) -> bool:
        transaction = self._transaction()
        return transaction is not None and transaction.is_active

    def is_of(self, transaction: RootTransaction | None) -> bool:
        return transaction is not None and self._transaction() is transaction

    def savepoint(self, name: str) -> None:
        self._savepoints[name] = len(self.sending)

    def rollback_to(self, name: str) -> None:
        self.sending.keep(self._savepoints.get(name, 0))  # one that is not known is older than the first message

    def commit(self, commit: Callable[[], None], undo: Callable[[], None]) -> None:
        connection = self._connection()
        if connection is None or not self.is_of(connection.get_transaction()):
            commit()  # of a later transaction; this one was not committed
            return
        self.sending.commit(
            self.client,
            insert=lambda transaction_id: self._barrier.write(connection, transaction_id),
            commit=commit,
            undo=undo,
        )


def _send(client: Endings, barrier: Barrier | AsyncBarrier, session: Any, message: Message) -> str:
    if hasattr(session, "sync_session") or hasattr(session, "sync_connection"):
        raise UnsupportedConnectionError(f"{type(session).__name__} is asynchronous: send with an AsyncSessionProducer")
    connection: Connection = sqlalchemy_connection(session)
    require_transaction(connection)
    transaction = connection.get_transaction() or connection.begin()
    if isinstance(transaction, TwoPhaseTransaction):
        raise UnsupportedConnectionError("this transaction has two phases: send after it, with `Halfway.transaction`")
    local: _Local | None = connection.info.get(_KEY)
    if local is None or not local.is_of(transaction):
        if local is not None and local.is_open():
            raise UnsupportedConnectionError("another Connection uses this connection of the driver: give each its own")
        _follow(connection.dialect)
        local = connection.info[_KEY] = _Local(client, barrier, connection, transaction)
    if local.client is not client:
        raise MixedProducersError(
            "another producer has sent in this database transaction: use one for all its messages"
        )
    local.sending.add(message)
    return local.sending.id


def _barrier(barrier: Barrier | AsyncBarrier | None) -> Barrier | AsyncBarrier:
    if barrier is None:
        raise NoBarrierError("the client has no barrier: open it with `barrier=`")
    return barrier


_followed: weakref.WeakSet[Dialect] = weakref.WeakSet()
_following = threading.Lock()


def _follow(dialect: Dialect) -> None:
    """Follow what the dialect does to transactions.

    SQLAlchemy's events come before a commit, and none comes when a commit of a Connection has succeeded or a savepoint
    is named. These methods of its dialects are where every commit and savepoint goes through, of a Session's, a
    Connection's or an asynchronous one's; that `do_commit` returns is the only sure sign of success.
    """
    with _following:
        if dialect in _followed:
            return
        do_commit, do_rollback = dialect.do_commit, dialect.do_rollback
        do_savepoint, do_rollback_to_savepoint = dialect.do_savepoint, dialect.do_rollback_to_savepoint

        def commit(dbapi_connection: PoolProxiedConnection) -> None:
            local: _Local | None = dbapi_connection.info.pop(_KEY, None)
            if local is None:
                do_commit(dbapi_connection)
            else:
                local.commit(lambda: do_commit(dbapi_connection), lambda: do_rollback(dbapi_connection))

        def rollback(dbapi_connection: PoolProxiedConnection) -> None:
            dbapi_connection.info.pop(_KEY, None)
            do_rollback(dbapi_connection)

        def savepoint(connection: Connection, name: str) -> None:
            do_savepoint(connection, name)
            if (local := connection.info.get(_KEY)) is not None:
                local.savepoint(name)

        def rollback_to_savepoint(connection: Connection, name: str) -> None:
            if (local := connection.info.get(_KEY)) is not None:
                local.rollback_to(name)
            do_rollback_to_savepoint(connection, name)

        vars(dialect).update(
            do_commit=commit,
            do_rollback=rollback,
            do_savepoint=savepoint,
            do_rollback_to_savepoint=rollback_to_savepoint,
        )
        _followed.add(dialect)
