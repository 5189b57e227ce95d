"""Sends messages in a session or connection of SQLAlchemy 2, committed or rolled back with its transaction."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, Final, Unpack

from sqlalchemy import TwoPhaseTransaction, event
from sqlalchemy.orm import Session, SessionTransaction, scoped_session
from sqlalchemy.util import await_only

from halfway.client.barrier import AsyncBarrier, Barrier, UnsupportedConnectionError
from halfway.client.barrier.drivers import carry_out, is_asynchronous, require_transaction, sqlalchemy_connection
from halfway.client.messages import Message, MessageOptions, Outcome
from halfway.client.producer.client import Halfway
from halfway.client.producer.sync import SyncHalfway
from halfway.client.producer.transaction import (
    LocalStore,
    MixedProducersError,
    NoBarrierError,
    Sending,
    SendingClient,
    WhenAway,
    store_when_away,
)
from halfway.client.threads import ForkSafeLock, wait_for

if TYPE_CHECKING:
    from sqlalchemy import Connection, Dialect, PoolProxiedConnection, RootTransaction
    from sqlalchemy.ext.asyncio import AsyncConnection, AsyncSession

_KEY: Final = "halfway.client"
_WAITS: Final = "halfway.client.waits"


class _BaseProducer:
    """Sends in sessions and connections, with the calls of `sending`."""

    def __init__(
        self, client: Halfway | SyncHalfway, sending: SendingClient, *, confirm: bool, when_away: WhenAway
    ) -> None:
        if client.barrier is None:
            raise NoBarrierError("the client has no barrier: open it with `barrier=`")
        self._sending = sending
        self._barrier = client.barrier
        self._confirm = confirm
        self._store = store_when_away(when_away, client.barrier, client.group)
        self._demand_no_block = client.demand_no_block

    def _send(self, session: Any, message: Message) -> str:
        if is_asynchronous(session):
            raise UnsupportedConnectionError(
                f"{type(session).__name__} is asynchronous: send with an AsyncSessionProducer"
            )
        connection: Connection = sqlalchemy_connection(session)
        require_transaction(connection)
        transaction = connection.get_transaction() or connection.begin()
        if isinstance(transaction, TwoPhaseTransaction):
            raise UnsupportedConnectionError(
                "two-phase transactions are not supported: send after it, with `Halfway.transaction`"
            )
        local: _LocalTransaction | None = connection.info.get(_KEY)
        if local is None or not local.belongs_to(transaction):
            if local is not None and local.is_open():
                raise UnsupportedConnectionError("another Connection uses this driver connection: give each its own")
            _intercept(connection.dialect)
            local = connection.info[_KEY] = _LocalTransaction(self._sending, self._barrier, connection, transaction)
        if local.client is not self._sending:
            raise MixedProducersError(
                "another producer has sent in this database transaction: use one for all its messages"
            )
        local.add(connection, message)
        local.confirm = local.confirm or self._confirm
        local.store = local.store or self._store
        session = session() if isinstance(session, scoped_session) else session
        if isinstance(session, Session):
            local.sessions.add(session)
        return local.sending.id


class SessionProducer(_BaseProducer):
    """Sends messages in a Session or a Connection.

    The messages of one database transaction are one halfway transaction. The first writes the barrier's row in the
    database transaction. `commit` prepares them, ends them afterwards, and returns once the end is final. Messages that
    are rolled back, also to a savepoint, are never prepared. The database connection is held during the prepare. A
    Session returns it to the pool before it waits for the end; a Connection belongs to its caller.
    """

    def __init__(self, client: SyncHalfway, *, confirm: bool = True, when_away: WhenAway = "raise") -> None:
        """Take a client that has a barrier; raises NoBarrierError.

        If an end is not confirmed within the client's `end_timeout_s`, this is logged and left to check-back. Nothing
        is raised, because the database has committed. With `confirm=False` ends are sent in the background. With
        `when_away="store"` the database transaction stores the messages if halfway does not confirm the prepare.
        """
        super().__init__(client, client, confirm=confirm, when_away=when_away)

    def send(
        self,
        session: Session | scoped_session[Any] | Connection,
        topic: str,
        key: Any = None,
        value: Any = None,
        **options: Unpack[MessageOptions],
    ) -> str:
        """Send a message if the open transaction commits; return the id of the halfway transaction.

        halfway gets nothing before the commit, and that uses another id if this is refused for its time. If the prepare
        fails, the commit rolls the database transaction back and raises the error of `SyncHalfway.prepare`. Raises
        NestedTransactionError inside a `transaction` of the same client.
        """
        message = Message(topic=topic, key=key, value=value, **options)
        self._demand_no_block()
        return self._send(session, message)


class AsyncSessionProducer(_BaseProducer):
    """`SessionProducer` for an AsyncSession or an AsyncConnection, with `Halfway` in the same event loop."""

    def __init__(self, client: Halfway, *, confirm: bool = True, when_away: WhenAway = "raise") -> None:
        """Take the parameters of `SessionProducer`. If a commit is cancelled while it waits, the end is still sent."""
        super().__init__(client, _GreenletClient(client), confirm=confirm, when_away=when_away)

    async def send(
        self,
        session: AsyncSession | AsyncConnection,
        topic: str,
        key: Any = None,
        value: Any = None,
        **options: Unpack[MessageOptions],
    ) -> str:
        """Same as `SessionProducer.send`."""
        message = await Message(topic=topic, key=key, value=value, **options)
        self._demand_no_block()
        return await session.run_sync(self._send, message)


class _GreenletClient:
    """Calls an asynchronous client from code that SQLAlchemy runs in a greenlet."""

    def __init__(self, client: Halfway) -> None:
        self._client = client
        self.new_id = client.new_id

    def prepare(self, messages: Iterable[Message], *, id: str, new_id: bool, keep: bool) -> None:
        await_only(self._client.prepare(messages, id=id, new_id=new_id, keep=keep))

    def begin_end(self, id: str, outcome: Outcome, *, remark: str | None = None) -> Callable[[], None]:
        task = self._client.begin_end(id, outcome, remark=remark)
        return lambda: None if task is None or task.done() else await_only(wait_for(task))


class _LocalTransaction:
    """A database transaction with messages, stored in the `info` of its DBAPI connection."""

    def __init__(
        self,
        client: SendingClient,
        barrier: Barrier | AsyncBarrier,
        connection: Connection,
        transaction: RootTransaction,
    ) -> None:
        self.client = client
        self.sending = Sending(client)
        self.confirm = False
        self.store: Callable[[Connection], LocalStore] | None = None
        self.sessions: weakref.WeakSet[Session] = weakref.WeakSet()
        self._barrier = barrier
        self._connection = weakref.ref(connection)
        self._transaction = weakref.ref(transaction)
        self._savepoints: dict[str, int] = {}

    def is_open(self) -> bool:
        transaction = self._transaction()
        return transaction is not None and transaction.is_active

    def belongs_to(self, transaction: RootTransaction | None) -> bool:
        return transaction is not None and self._transaction() is transaction

    def savepoint(self, name: str) -> None:
        self._savepoints[name] = len(self.sending)

    def rollback_to(self, name: str) -> None:
        self.sending.keep(self._savepoints.get(name, 0))  # an unknown savepoint is older than the first message

    def add(self, connection: Connection, message: Message) -> None:
        self.sending.add(message)
        if len(self.sending) == 1:
            try:
                self._barrier.write(connection, self.sending.id)
            except BaseException:
                self.sending.keep(0)
                raise

    def commit(self, commit: Callable[[], None], rollback: Callable[[], None]) -> None:
        connection = self._connection()
        if connection is None or not self.belongs_to(connection.get_transaction()):
            commit()  # this is the commit of a later transaction; this transaction was not committed
            return
        self.sending.commit(
            self.client,
            insert=lambda transaction_id: self._barrier.write(connection, transaction_id),
            still_has=lambda transaction_id: carry_out(self._barrier.still_has(transaction_id), connection),
            commit=commit,
            rollback=rollback,
            confirm=self.confirm,
            store=self.store and self.store(connection),
            afterwards=self._afterwards,
        )

    def _afterwards(self, wait: Callable[[], None]) -> None:
        """Wait after the committing Session has returned its connection; at once if a Connection commits."""
        waits: list[Callable[[], None]] | None = next(
            (session.info[_WAITS] for session in self.sessions if _WAITS in session.info), None
        )
        if waits is None:
            wait()
        else:
            waits.append(wait)


def _begin_commit(session: Session) -> None:
    session.info.setdefault(_WAITS, [])


def _end_commit(session: Session, transaction: SessionTransaction) -> None:
    if transaction.parent is None:
        for wait in session.info.pop(_WAITS, ()):
            wait()


# For every Session, and before the listeners of the service, which may raise or be the first to send.
event.listen(Session, "before_commit", _begin_commit, insert=True)
event.listen(Session, "after_transaction_end", _end_commit, insert=True)


_intercepted: weakref.WeakSet[Dialect] = weakref.WeakSet()
_interception_lock = ForkSafeLock()


def _intercept(dialect: Dialect) -> None:
    """Intercept the commits, rollbacks and savepoints of a dialect.

    SQLAlchemy has an event before a commit, but none after a successful commit of a Connection, and none with the name
    of a savepoint. Every commit and savepoint uses these methods of the dialect, in a Session, a Connection and their
    asynchronous variants. Only the return of `do_commit` proves success.
    """
    with _interception_lock:
        if dialect in _intercepted:
            return
        do_commit, do_rollback = dialect.do_commit, dialect.do_rollback
        do_savepoint, do_rollback_to_savepoint = dialect.do_savepoint, dialect.do_rollback_to_savepoint

        def commit(dbapi_connection: PoolProxiedConnection) -> None:
            local: _LocalTransaction | None = dbapi_connection.info.pop(_KEY, None)
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
        _intercepted.add(dialect)
