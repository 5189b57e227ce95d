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
    prepares them, with the barrier's row in the same database transaction, ends them afterwards, and returns once the
    end is final; then the callbacks of `on_commit` run. What is rolled back, with a nested block too, is never
    prepared. The database connection is the thread's while halfway is asked; it has no transaction and no locks any
    more when the end is sent.
    """

    def __init__(self, client: SyncHalfway, using: str = DEFAULT_DB_ALIAS, *, confirm: bool = True) -> None:
        """Take a client that has a `django_barrier` of the same database; raises NoBarrierError.

        An end that is not confirmed in the client's `end_timeout_s` is logged and left to check-back: the commit of
        the database stands, so nothing is raised. With `confirm=False` ends are sent in the background.
        """
        if client.barrier is None:
            raise NoBarrierError("the client has no barrier: open it with `barrier=django_barrier()`")
        self._client = client
        self._barrier = client.barrier
        self._using = using
        self._confirm = confirm

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

        halfway gets nothing before the commit. If the prepare fails, the commit rolls the database transaction
        back and raises what `SyncHalfway.prepare` raises. Raises NoTransactionError outside `atomic()`, and
        NestedTransactionError inside a `transaction` of the same client.
        """
        self._client.demand_no_block()
        connection = connections[self._using]
        if not connection.in_atomic_block:
            raise NoTransactionError("no transaction is open: send inside `transaction.atomic()`")
        message = Message(topic=topic, key=key, value=value, headers=headers or {}, partition=partition)
        message.as_json()  # a message that cannot be sent fails here, not at the commit
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
            confirm=self._confirm,
        )


@dataclass(frozen=True)
class _Sent:
    """A message among the callbacks of `on_commit`, where Django drops it with the savepoint that it belongs to."""

    producer: AtomicProducer
    sending: Sending
    message: Message

    def __call__(self) -> None:
        """Do nothing: the commit has sent the message."""


def _sent(connection: Any) -> list[_Sent]:
    return [callback for _, callback, _ in connection.run_on_commit if isinstance(callback, _Sent)]


_followed: weakref.WeakSet[Any] = weakref.WeakSet()


def _follow(connection: Any) -> None:
    """Intercept the commits of this connection, which one thread owns: Django has no hook before a commit."""
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
