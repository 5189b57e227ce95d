"""halfway in a Django project. In INSTALLED_APPS, it adds the migration of the barrier's table.

Messages that are sent inside `transaction.atomic()` are committed or rolled back with the database transaction. The
barrier is in a database of the project, and the check endpoint is a view.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Unpack

from django.db import DEFAULT_DB_ALIAS, Error, connections, transaction
from django.http import HttpResponse

from halfway.client.barrier import RETENTION_S, TABLE, Barrier, NoTransactionError, Store
from halfway.client.barrier.drivers import carry_out
from halfway.client.checks.answers import ANSWER_WITHIN_S, CONTENT_TYPE, Check, CheckVerifier, DecideSync
from halfway.client.checks.endpoints import Endpoint, answer_request
from halfway.client.messages import Message, MessageOptions, Outcome
from halfway.client.producer.sync import SyncHalfway
from halfway.client.producer.transaction import MixedProducersError, NoBarrierError, Sending, WhenAway, store_when_away


class AtomicProducer:
    """Sends messages inside `transaction.atomic()`, also in nested blocks and with ATOMIC_REQUESTS.

    The messages of one database transaction are one halfway transaction. The first writes the barrier's row in the
    database transaction. The commit of the outermost block prepares them, ends them afterwards, and returns once the
    end is final. Then the callbacks of `on_commit` run. Messages that are rolled back, also by a nested block, are
    never prepared. The thread holds the database connection during the calls to halfway; when the end is sent, it has
    no transaction and no locks any more.
    """

    def __init__(
        self, client: SyncHalfway, using: str = DEFAULT_DB_ALIAS, *, confirm: bool = True, when_away: WhenAway = "raise"
    ) -> None:
        """Take a client that has a `django_barrier` of the same database; raises NoBarrierError.

        If an end is not confirmed within the client's `end_timeout_s`, this is logged and left to check-back. Nothing
        is raised, because the database has committed. With `confirm=False` ends are sent in the background. With
        `when_away="store"` the database transaction stores the messages if halfway does not confirm the prepare.
        """
        if client.barrier is None:
            raise NoBarrierError("the client has no barrier: open it with `barrier=django_barrier()`")
        self._client = client
        self._barrier = client.barrier
        self._using = using
        self._confirm = confirm
        self._store = store_when_away(when_away, client.barrier, client.group)

    def send(self, topic: str, key: Any = None, value: Any = None, **options: Unpack[MessageOptions]) -> str:
        """Send a message if the open atomic block commits; return the id of the halfway transaction.

        halfway gets nothing before the commit, and that uses another id if this is refused for its time. If the prepare
        fails, the commit rolls the database transaction back and raises the error of `SyncHalfway.prepare`. Raises
        NoTransactionError outside `atomic()`, and NestedTransactionError inside a `transaction` of the same client.
        """
        self._client.demand_no_block()
        connection = connections[self._using]
        if not connection.in_atomic_block:
            raise NoTransactionError("no transaction is open: send inside `transaction.atomic()`")
        message = Message(topic=topic, key=key, value=value, **options)
        message.as_json()  # a message that cannot be serialised fails here, not at the commit
        earlier = _pending_messages(connection)
        if earlier and earlier[0].producer is not self:
            raise MixedProducersError("another producer has sent in this transaction: use one for all its messages")
        sending = earlier[0].sending if earlier else Sending(self._client)
        if not earlier:
            self._barrier.write(connection, sending.id)
        pending = _PendingMessage(self, sending, message)
        _intercept_commits(connection)
        connection.on_commit(pending)
        return sending.id

    def commit(self, connection: Any, pending: list[_PendingMessage], commit: Callable[[], None]) -> None:
        """Commit a database transaction together with its messages."""

        def rollback() -> None:  # like Django, but Django does this only for errors of the database
            try:
                connection.rollback()
            except Error:
                connection.close()

        sending = pending[0].sending
        for each in pending:
            sending.add(each.message)
        sending.commit(
            self._client,
            insert=lambda transaction_id: self._barrier.write(connection, transaction_id),
            still_has=lambda transaction_id: carry_out(self._barrier.still_has(transaction_id), connection),
            commit=commit,
            rollback=rollback,
            confirm=self._confirm,
            store=self._store and self._store(connection),
        )


@dataclass(frozen=True)
class _PendingMessage:
    """A message as a callback of `on_commit`: Django drops it if its savepoint is rolled back."""

    producer: AtomicProducer
    sending: Sending
    message: Message

    def __call__(self) -> None:
        """Do nothing: the commit has already sent the message."""


def _pending_messages(connection: Any) -> list[_PendingMessage]:
    return [callback for _, callback, _ in connection.run_on_commit if isinstance(callback, _PendingMessage)]


_intercepted: weakref.WeakSet[Any] = weakref.WeakSet()


def _intercept_commits(connection: Any) -> None:
    """Intercept the commits of this connection, because Django has no hook before a commit. One thread owns it."""
    if connection in _intercepted:
        return
    original = connection.commit

    def commit() -> None:
        pending = _pending_messages(connection)
        if not pending:
            original()
            return
        connection.run_on_commit = [
            entry for entry in connection.run_on_commit if not isinstance(entry[1], _PendingMessage)
        ]
        pending[0].producer.commit(connection, pending, original)

    connection.commit = commit
    _intercepted.add(connection)


def django_barrier(
    using: str = DEFAULT_DB_ALIAS, *, table: str = TABLE, retention_s: float = RETENTION_S, store: Store | None = None
) -> Barrier:
    """Return the barrier in the database `using` of DATABASES. The other parameters are those of `Barrier`.

    Checks and deletions use their own short-lived connections, outside of a pool in OPTIONS. They therefore work in a
    view with ATOMIC_REQUESTS, in any thread, and when the pool is exhausted.
    """

    @contextmanager
    def connect() -> Iterator[Any]:
        connection = connections.create_connection(using)
        options = {name: value for name, value in connection.settings_dict["OPTIONS"].items() if name != "pool"}
        connection.settings_dict = {**connection.settings_dict, "OPTIONS": options}
        try:
            connection.set_autocommit(False)
            yield connection
            connection.commit()
        finally:
            connection.close()

    return Barrier(connections[using].vendor, connect, table=table, retention_s=retention_s, store=store)


class DjangoChecks(Endpoint[DecideSync]):
    """A view: `path("check", DjangoChecks(barrier.decide))`. It needs no CSRF token, and runs outside a transaction."""

    csrf_exempt = True

    def __init__(self, decide: DecideSync, verifier: CheckVerifier | None = None) -> None:
        super().__init__(decide, verifier)
        for alias in connections:  # otherwise ATOMIC_REQUESTS would hold a transaction open during the barrier's
            transaction.non_atomic_requests(alias)(self)

    def __call__(self, request: Any) -> HttpResponse:
        """Answer one request. The body is limited here, not by DATA_UPLOAD_MAX_MEMORY_SIZE."""
        # Only the transaction of a test (`TestCase`) can be open here. Other threads would not see its writes.
        in_test = any(connection.in_atomic_block for connection in connections.all(initialized_only=True))
        status, answer = answer_request(
            request.method,
            request.read,
            self._decide if in_test else self._decide_and_close,
            within_s=None if in_test else ANSWER_WITHIN_S,
            headers=request.headers,
            verifier=self._verifier,
        )
        return HttpResponse(answer, status=status, content_type=CONTENT_TYPE)

    def _decide_and_close(self, check: Check) -> Outcome:
        try:
            return self._decide(check)
        finally:
            connections.close_all()  # the connections of this thread, which ends
