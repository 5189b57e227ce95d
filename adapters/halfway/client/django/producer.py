"""Sending inside `transaction.atomic()`: the messages share the fate of its database transaction."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from django.db import DEFAULT_DB_ALIAS, Error, connections

from halfway.client.barrier import NoTransactionError
from halfway.client.messages import Data, Message, Value
from halfway.client.sending import MixedProducersError, NoBarrierError, Sending
from halfway.client.sync import SyncHalfway


class AtomicProducer:
    """Sends inside `transaction.atomic()`, nested ones and ATOMIC_REQUESTS included.

    The messages of one database transaction are one transaction of halfway's. The commit of the outermost block
    prepares them, with the barrier's row in the same database transaction, and ends them afterwards in the background.
    What is rolled back, with a nested block too, is never prepared. The database connection is held while halfway is
    asked to prepare.
    """

    def __init__(self, client: SyncHalfway, using: str = DEFAULT_DB_ALIAS) -> None:
        """Take a client that has a `django_barrier` of the same database; raises NoBarrierError."""
        if client.barrier is None:
            raise NoBarrierError("the client has no barrier: open it with `barrier=django_barrier()`")
        self._client = client
        self._barrier = client.barrier
        self._using = using

    def send(
        self,
        topic: str,
        key: Data = None,
        value: Value = None,
        *,
        headers: Mapping[str, Data] | None = None,
        partition: int | None = None,
    ) -> str:
        """Send a message if the atomic block that is open commits; return the id of halfway's transaction.

        Nothing is asked of halfway before the commit, which then raises what `SyncHalfway.prepare` raises, and
        has rolled the database transaction back. Raises NoTransactionError outside `atomic()`.
        """
        connection = connections[self._using]
        if not connection.in_atomic_block:
            raise NoTransactionError("no transaction is open: send inside `transaction.atomic()`")
        message = Message(topic=topic, key=key, value=value, headers=headers or {}, partition=partition)
        message.as_json()  # what cannot be sent is told here, not at the commit
        before = _sent(connection)
        if before and before[0].producer is not self:
            raise MixedProducersError("another producer has sent in this transaction: use one for all its messages")
        sent = _Sent(self, before[0].sending if before else Sending(), message)
        _follow(connection)
        connection.on_commit(sent)
        return sent.sending.id

    def commit(self, connection: Any, sent: list[_Sent], commit: Callable[[], None]) -> None:
        """Commit a database transaction with what was sent in it."""

        def undo() -> None:  # as Django does it, but only for errors of the database
            try:
                connection.rollback()
            except Error:
                connection.close()

        sending = sent[0].sending
        for one in sent:
            sending.add(one.message)
        sending.commit(
            self._client,
            insert=lambda transaction_id: self._barrier.write(connection, transaction_id),
            commit=commit,
            undo=undo,
        )


@dataclass(frozen=True)
class _Sent:
    """A message among the callbacks of `on_commit`, where Django drops it with the savepoint that it belongs to."""

    producer: AtomicProducer
    sending: Sending
    message: Message

    def __call__(self) -> None:
        """Do nothing: it was sent by the commit."""


def _sent(connection: Any) -> list[_Sent]:
    return [callback for _, callback, _ in connection.run_on_commit if isinstance(callback, _Sent)]


_followed: weakref.WeakSet[Any] = weakref.WeakSet()


def _follow(connection: Any) -> None:
    """Be called by the commits of this connection, which belongs to one thread: Django has no hook before a commit."""
    if connection in _followed:
        return
    original = connection.commit

    def commit() -> None:
        sent = _sent(connection)
        if not sent:
            original()
            return
        connection.run_on_commit = [each for each in connection.run_on_commit if not isinstance(each[1], _Sent)]
        sent[0].producer.commit(connection, sent, original)

    connection.commit = commit
    _followed.add(connection)
