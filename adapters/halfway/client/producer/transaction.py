"""A transaction around a block of the service's code.

Its messages are prepared before the database transaction's commit and ended after it.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
from collections.abc import Callable, Iterable, Sequence
from contextvars import ContextVar, Token
from dataclasses import dataclass
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, Protocol, Self

from halfway.client.barrier.drivers import carry_out
from halfway.client.barrier.stored import NoStoreError, StoredTable
from halfway.client.errors import (
    AWAY,
    HalfwayError,
    MissingRowError,
    NestedTransactionError,
    RefusedError,
    TransactionEndedError,
    is_refused_for_its_time,
)
from halfway.client.messages import Message, Outcome, may_have_committed
from halfway.client.threads import call_async

if TYPE_CHECKING:
    from halfway.client.barrier.barrier import AsyncBarrier, Barrier
    from halfway.client.calls.group import GroupCalls


log = logging.getLogger(__name__)

WhenAway = Literal["raise", "store"]
"""What to do if halfway does not confirm a prepare: raise its error, or store the messages in the local transaction."""

_open: ContextVar[Transaction | None] = ContextVar("halfway_transaction", default=None)


class Transaction:
    """Messages that are written to their topics if and only if the block commits.

    The block starts only after the prepare is durable. When the block ends:

    - without an exception, the transaction commits. If the client has a barrier, its row is read before. If the row is
      missing, the transaction ends as the barrier says, and MissingRowError is raised;
    - with an exception, if the client has a barrier, the barrier decides, so the two never contradict each other;
    - with an exception that may come from a commit of the database (a lost connection, a time-out, a cancellation),
      without a barrier, the transaction ends as `unknown`, and check-back asks the service;
    - with any other exception, without a barrier, the transaction rolls back. So without a barrier, the commit of the
      database must be the last statement of the block. If the caller gave the id, the transaction ends as `unknown`
      instead, because another caller may commit under the same id.

    `end`, `commit`, `rollback` and `unknown` end it explicitly inside the block. Get it from `Halfway.transaction`.
    """

    def __init__(
        self,
        client: GroupCalls,
        messages: tuple[Message, ...],
        *,
        id: str,
        new_id: bool,
        check_after_s: float | None,
        confirm: bool,
    ) -> None:
        self.id = id
        self._new_id = new_id
        self._client = client
        self.messages = messages
        self._check_after_s = check_after_s
        self._confirm = confirm
        self.has_committed = False
        """Whether the local transaction is known to have committed, so that the barrier need not be asked."""
        self._is_tried = False
        """Whether a prepare was sent."""
        self.keeps_unconfirmed = False
        """Whether its messages are stored if the prepare is not confirmed, because halfway is away."""
        self.is_stored = False
        """Whether the local transaction stores the messages, and the sender ends the transaction."""
        self._started = False
        self._ended = False
        self._opener: object = None
        self._scope: Token[Transaction | None] | None = None
        self._outer: Transaction | None = None

    async def __aenter__(self) -> Self:
        """Prepare. Raises the errors of `Halfway.prepare`; the block does not run then."""
        self.enter_scope()
        try:
            await self.begin()
        except BaseException:
            self.leave_scope()
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """End the transaction according to how the block ended. The block's own exception propagates."""
        self.leave_scope()
        await self.finish(error)

    async def end(self, outcome: Outcome, remark: str | None = None) -> None:
        """Report the outcome of the local transaction; raises TransactionEndedError if it was reported before."""
        if self._ended:
            raise TransactionEndedError(f"the end of transaction {self.id} was already sent: begin a new one")
        self._ended = True
        await self._client.end(self.id, outcome, remark=remark, confirm=self._confirm)

    async def commit(self, remark: str | None = None) -> None:
        """Report that the local transaction has committed."""
        await self.end("commit", remark)

    async def rollback(self, remark: str | None = None) -> None:
        """Report that the local transaction was rolled back and never commits."""
        await self.end("rollback", remark)

    async def unknown(self, remark: str | None = None) -> None:
        """Leave the outcome to check-back."""
        await self.end("unknown", remark)

    async def begin(self) -> None:
        """Prepare the messages."""
        if self._started:
            raise TransactionEndedError(f"the transaction {self.id} was already entered: begin a new one")
        self._started = True
        if self.is_stored:
            return
        try:
            try:
                await self._prepare()
            except RefusedError as error:
                if not self._new_id or not is_refused_for_its_time(error):
                    raise
                self.id = self._client.new_id()  # the answer told the coordinator's time
                await self._prepare()
        except AWAY as error:
            if not self.keeps_unconfirmed:
                raise
            log.info("halfway is away: the messages of transaction %s will be stored: %s", self.id, error)
            self.is_stored = True

    async def _prepare(self) -> None:
        self._is_tried = True
        await self._client.prepare(
            self.messages,
            id=self.id,
            check_after_s=self._check_after_s,
            new_id=self._new_id,
            keep=self.keeps_unconfirmed,
        )

    def abandon(self) -> None:
        """End a prepare in the background whose answer is unknown, or came after its caller was interrupted."""
        self._client.abandon(self.id, new_id=self._new_id and not self.is_stored)

    async def finish(self, error: BaseException | None) -> None:
        """End the transaction according to how its block ended, unless the block has ended it explicitly."""
        if self._ended:
            return
        if self.is_stored:
            self._ended = True
            if error is not None and self._is_tried:
                self.abandon()  # the prepare may have arrived
        elif error is None:
            await self._demand_row()
            if not self._ended:
                await self.end("commit")
        else:
            self._settle(error)

    def enter_scope(self) -> None:
        """Record in this task that the transaction is open; raises NestedTransactionError."""
        self._outer = _open.get()
        self._opener = _current_opener()  # child tasks and threads inherit the variable, but not the open transaction
        if (outer := _open_transaction(self._client, self._opener)) is not None:
            raise NestedTransactionError(
                f"the transaction {outer.id} is open in this task: put all messages into one transaction"
            )
        self._scope = _open.set(self)

    def _is_open(self, client: GroupCalls, opener: object) -> bool:
        return self._client is client and self._opener == opener and not self._ended

    def leave_scope(self) -> None:
        """Undo `enter_scope`."""
        if self._scope is not None:
            # A framework may exit a block in another context than it entered it, as FastAPI does for dependencies.
            with contextlib.suppress(ValueError):
                _open.reset(self._scope)
            self._scope = None

    async def _demand_row(self) -> None:
        """Raise MissingRowError unless the barrier says that the local transaction has committed.

        That the block wrote the row is not enough: an error that it caught may have rolled the row back. A commit
        without the row would contradict the answer to a check, which is rollback. If the row cannot be read in time,
        the barrier ends the transaction in the background, or a check does.
        """
        barrier = self._client.barrier
        if barrier is None or self.has_committed:
            return
        try:
            async with asyncio.timeout(self._client.end_timeout_s):
                outcome = await call_async(barrier.look, self.id)
        except BaseException as error:
            self._settle(error)
            if not isinstance(error, Exception):
                raise
            text = "the end of transaction %s is left to check-back: the barrier cannot be read: %s: %s"
            log.warning(text, self.id, type(error).__name__, error)
            return
        if outcome != "commit":
            missing = MissingRowError(
                f"the local transaction of {self.id} has not committed: call"
                " `barrier.insert(connection, transaction.id)` as its first statement, commit it within the block, and"
                " let an error that rolls it back leave the block"
            )
            self._settle(missing)
            raise missing

    def _settle(self, error: BaseException) -> None:
        """End the transaction in the background, so that the block's exception is neither delayed nor replaced."""
        self._ended = True
        outcome: Outcome = "rollback" if self._new_id and not may_have_committed(error) else "unknown"
        with contextlib.suppress(HalfwayError):  # the client is closed, so check-back resolves it
            self._client.settle(self.id, outcome, remark=type(error).__name__)


def demand_no_block(client: GroupCalls) -> None:
    """Raise NestedTransactionError if a block of this client is open in this task or thread.

    Messages that are sent in a session there would be a separate transaction, with its own outcome.
    """
    if (outer := _open_transaction(client, _current_opener())) is not None:
        raise NestedTransactionError(
            f"the transaction {outer.id} is open in this task: add the message to it, or send outside of its block"
        )


def _current_opener() -> object:
    """Return the current task, or the thread if there is none."""
    try:
        task = asyncio.current_task()
    except RuntimeError:
        task = None
    return task or threading.get_ident()


def _open_transaction(client: GroupCalls, opener: object) -> Transaction | None:
    """Return the open transaction of this client around the caller, even with blocks of other clients in between."""
    transaction = _open.get()
    while transaction is not None and not transaction._is_open(client, opener):  # noqa: SLF001 - of this module
        transaction = transaction._outer  # noqa: SLF001 - as above
    return transaction


class MixedProducersError(HalfwayError):
    """Two producers send in one database transaction: send all its messages with one of them."""


class NoBarrierError(HalfwayError, TypeError):
    """The client has no barrier, which is needed to know after a crash whether the database committed: give it one."""


@dataclass(frozen=True)
class LocalStore:
    """The barrier's store, in an open local transaction of a synchronous connection."""

    table: StoredTable
    group: str
    connection: Any

    def waits(self) -> bool:
        return carry_out(self.table.waits(self.group), self.connection)

    def add(self, id: str, messages: Sequence[Message]) -> None:
        carry_out(self.table.add(id, self.group, messages), self.connection)


def store_when_away(
    when_away: WhenAway, barrier: Barrier | AsyncBarrier | None, group: str
) -> Callable[[Any], LocalStore] | None:
    """Return what gives the store on a connection, None to raise instead; raises NoStoreError if there is none."""
    if when_away not in {"raise", "store"}:
        raise ValueError(f"when_away is {when_away!r}: give 'raise' or 'store'")
    if when_away == "raise":
        return None
    if barrier is None or barrier.store.bounds is None:
        raise NoStoreError("when_away='store' needs a store in the client's barrier: `Barrier(..., store=Store())`")
    return partial(LocalStore, barrier.store, group)


class SendingClient(Protocol):
    def new_id(self) -> str:
        """Return an id that is born now."""

    def prepare(self, messages: Iterable[Message], *, id: str, new_id: bool, keep: bool) -> None:
        """Prepare messages."""

    def begin_end(self, id: str, outcome: Outcome, *, remark: str | None = None) -> Callable[[], None]:
        """Send an end; return a function that waits until it is final or given up."""


class Sending:
    """The messages of one database transaction. They are one halfway transaction.

    Its producer writes the barrier's row with the first message. If the row is gone at the commit, the database has
    rolled it back: MySQL begins a new transaction after a deadlock, in which the service goes on if it catches that.
    """

    def __init__(self, client: SendingClient) -> None:
        self.id = client.new_id()
        self._messages: list[Message] = []
        self._is_stored = False

    def __len__(self) -> int:
        return len(self._messages)

    def add(self, message: Message) -> None:
        """Add a message; raises UnserialisableMessageError already here, not at the commit."""
        message.as_json()
        self._messages.append(message)

    def keep(self, count: int) -> None:
        """Keep only the first `count` messages, after a rollback to a savepoint."""
        del self._messages[count:]

    def commit(
        self,
        client: SendingClient,
        *,
        insert: Callable[[str], None],
        still_has: Callable[[str], bool],
        commit: Callable[[], None],
        rollback: Callable[[], None],
        confirm: bool,
        store: LocalStore | None = None,
        afterwards: Callable[[Callable[[], None]], None] = lambda wait: wait(),
    ) -> None:
        """Commit the database transaction, and with it the messages.

        1. Look for the barrier's row. It is locked until the commit, so the answer to a check in the meantime is
           `unknown`.
        2. Prepare. If halfway refuses the id for its time, because the first message was sent too long ago or the clock
           is wrong, write a row with a new id, and prepare that. If this fails, or the row of step 1 is gone, roll the
           database transaction back.
           With a `store`: if earlier messages are in it, or the prepare is not confirmed, store these messages in the
           same database transaction. Then only the sender ends this transaction, and 3 is the last step.
        3. Commit the database transaction. If this raises, it may have committed: check-back asks the barrier.
        4. Send the end at once. It continues in the background even if an exception is raised from now on. The local
           outcome is final: if the end fails, this is logged, not raised, and check-back resolves the transaction.
        5. With `confirm`, wait until the end is final, at most `end_timeout_s`. `afterwards` may delay this wait until
           the database connection is returned to its pool.
        """
        if not self._messages:
            commit()
            return
        try:
            self._demand_row(still_has)
            self._prepare(client, insert, store)
        except BaseException:
            with contextlib.suppress(Exception):  # if the connection is lost, the database rolls back by itself
                rollback()
            raise
        if self._is_stored:
            commit()
            return
        try:
            commit()
        except BaseException as error:
            self._begin_end(client, "unknown", type(error).__name__)
            raise
        wait = self._begin_end(client, "commit", None)
        if confirm:
            afterwards(wait)

    def _demand_row(self, still_has: Callable[[str], bool]) -> None:
        if not still_has(self.id):
            raise MissingRowError(
                f"the database rolled back the transaction of {self.id} before its commit: let an error of the database"
                " end it, or catch it around a savepoint"
            )

    def _prepare(self, client: SendingClient, insert: Callable[[str], None], store: LocalStore | None) -> None:
        self._is_stored = store is not None and store.waits()
        if not self._is_stored:
            try:
                self._prepare_now(client, insert, keep=store is not None)
                # Another process may have stored earlier messages while this one was prepared.
                self._is_stored = store is not None and store.waits()
            except AWAY as error:
                if store is None:
                    raise
                log.info("halfway is away: the messages of transaction %s are stored: %s", self.id, error)
                self._is_stored = True
        if store is not None and self._is_stored:
            store.add(self.id, self._messages)

    def _prepare_now(self, client: SendingClient, insert: Callable[[str], None], *, keep: bool) -> None:
        try:
            client.prepare(self._messages, id=self.id, new_id=True, keep=keep)
        except RefusedError as error:
            if not is_refused_for_its_time(error):
                raise
            self.id = client.new_id()
            insert(self.id)
            client.prepare(self._messages, id=self.id, new_id=True, keep=keep)

    def _begin_end(self, client: SendingClient, outcome: Outcome, remark: str | None) -> Callable[[], None]:
        """Send the end, and return a function that waits for it.

        Neither raises an exception: it would look as if the database had not committed.
        """
        try:
            wait = client.begin_end(self.id, outcome, remark=remark)
        except Exception as error:  # noqa: BLE001 - see above
            log.warning("the %s of transaction %s is left to check-back: %s", outcome, self.id, error)
            return lambda: None

        def wait_quietly() -> None:
            try:
                wait()
            except Exception as error:  # noqa: BLE001 - see above
                log.warning("the wait for the %s of transaction %s failed: %s", outcome, self.id, error)

        return wait_quietly
