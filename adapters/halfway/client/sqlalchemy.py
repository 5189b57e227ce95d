"""Sending inside a session or connection of SQLAlchemy 2: the messages share the fate of its database transaction."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any, Final

from sqlalchemy import TwoPhaseTransaction, event
from sqlalchemy.orm import Session, SessionTransaction, scoped_session
from sqlalchemy.util import await_only

from halfway.client.barrier import AsyncBarrier, Barrier, UnsupportedConnectionError
from halfway.client.barrier.drivers import require_transaction, sqlalchemy_connection
from halfway.client.blocking import finished
from halfway.client.client import Halfway
from halfway.client.forks import ForkSafeLock
from halfway.client.messages import Data, Message, Value
from halfway.client.outcome import Outcome
from halfway.client.sending import Endings, MixedProducersError, NoBarrierError, Sending
from halfway.client.sync import SyncHalfway

if TYPE_CHECKING:
    from sqlalchemy import Connection, Dialect, PoolProxiedConnection, RootTransaction
    from sqlalchemy.ext.asyncio import AsyncConnection, AsyncSession

_KEY: Final = "halfway.client"
_WAITS: Final = "halfway.client.waits"


class SessionProducer:
    """Sends inside a Session or a Connection.

    The messages of one database transaction are one transaction of halfway's. `commit` prepares them, with the
    barrier's row in the same database transaction, ends them afterwards, and returns once the end is final. What is
    rolled back, to a savepoint too, is never prepared. The database connection is held while halfway is asked to
    prepare. A Session gives it back before the end is waited for, a Connection is its caller's.
    """

    def __init__(self, client: SyncHalfway, *, confirm: bool = True) -> None:
        """Take a client that has a barrier; raises NoBarrierError.

        An end that is not confirmed in the client's `end_timeout_s` is logged and left to check-back: the commit of
        the database stands, so nothing is raised. With `confirm=False` ends are sent in the background.
        """
        self._confirm = confirm
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

        halfway gets nothing before the commit. If the prepare fails, the commit rolls the database transaction
        back and raises what `SyncHalfway.prepare` raises. Raises NestedTransactionError inside a `transaction` of the
        same client.
        """
        message = Message(topic=topic, key=key, value=value, headers=headers or {}, partition=partition)
        self._client.demand_no_block()
        return _send(self._client, self._barrier, session, message, confirm=self._confirm)


class AsyncSessionProducer:
    """`SessionProducer` for an AsyncSession or an AsyncConnection, with `Halfway` in the same event loop."""

    def __init__(self, client: Halfway, *, confirm: bool = True) -> None:
        """Take what `SessionProducer` takes; a commit that is cancelled while it waits sends the end all the same."""
        self._confirm = confirm
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
        """Send as `SessionProducer.send` does."""
        message = Message(topic=topic, key=key, value=value, headers=headers or {}, partition=partition)
        self._client.demand_no_block()
        return await session.run_sync(
            lambda inner: _send(self._client, self._barrier, inner, message, confirm=self._confirm)
        )


class _InGreenlet:
    """An asynchronous client for code that SQLAlchemy runs in a greenlet."""

    def __init__(self, client: Halfway) -> None:
        self._client = client
        self.demand_no_block = client.demand_no_block

    def prepare(self, messages: Iterable[Message], *, id: str, new_id: bool) -> None:  # noqa: A002 - what REST calls it
        await_only(self._client.prepare(messages, id=id, new_id=new_id))

    def begin_end(
        self,
        id: str,  # noqa: A002 - as above
        outcome: Outcome,
        *,
        remark: str | None = None,
    ) -> Callable[[], None]:
        ending = self._client.begin_end(id, outcome, remark=remark)
        return lambda: None if ending is None or ending.done() else await_only(finished(ending))


class _Local:
    """A database transaction with messages, stored in the `info` of its DBAPI connection."""

    def __init__(
        self, client: Endings, barrier: Barrier | AsyncBarrier, connection: Connection, transaction: RootTransaction
    ) -> None:
        self.client = client
        self.sending = Sending()
        self.confirm = False
        self.sessions: weakref.WeakSet[Session] = weakref.WeakSet()
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
        self.sending.keep(self._savepoints.get(name, 0))  # an unknown savepoint is older than the first message

    def commit(self, commit: Callable[[], None], undo: Callable[[], None]) -> None:
        connection = self._connection()
        if connection is None or not self.is_of(connection.get_transaction()):
            commit()  # this commit is of a later transaction; ours was not committed
            return
        self.sending.commit(
            self.client,
            insert=lambda transaction_id: self._barrier.write(connection, transaction_id),
            commit=commit,
            undo=undo,
            confirm=self.confirm,
            afterwards=self._afterwards,
        )

    def _afterwards(self, wait: Callable[[], None]) -> None:
        """Wait once the Session that commits has given its connection back; at once if a Connection commits."""
        waits: list[Callable[[], None]] | None = next(
            (one.info[_WAITS] for one in self.sessions if _WAITS in one.info), None
        )
        if waits is None:
            wait()
        else:
            waits.append(wait)


def _send(client: Endings, barrier: Barrier | AsyncBarrier, session: Any, message: Message, *, confirm: bool) -> str:
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
    local.confirm = local.confirm or confirm
    session = session() if isinstance(session, scoped_session) else session
    if isinstance(session, Session):
        local.sessions.add(session)
    return local.sending.id


def _begin_commit(session: Session) -> None:
    session.info.setdefault(_WAITS, [])


def _end_commit(session: Session, transaction: SessionTransaction) -> None:
    if transaction.parent is None:
        for wait in session.info.pop(_WAITS, ()):
            wait()


# Of every Session, and before what a service listens with: that may raise, or be the first to send.
event.listen(Session, "before_commit", _begin_commit, insert=True)
event.listen(Session, "after_transaction_end", _end_commit, insert=True)


def _barrier(barrier: Barrier | AsyncBarrier | None) -> Barrier | AsyncBarrier:
    if barrier is None:
        raise NoBarrierError("the client has no barrier: open it with `barrier=`")
    return barrier


_followed: weakref.WeakSet[Dialect] = weakref.WeakSet()
_following = ForkSafeLock()


def _follow(dialect: Dialect) -> None:
    """Intercept the commits, rollbacks and savepoints of a dialect.

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
