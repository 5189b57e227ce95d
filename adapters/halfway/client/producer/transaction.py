"""A transaction around a block of the service's code."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from contextvars import ContextVar, Token
from types import TracebackType
from typing import TYPE_CHECKING, Self

from halfway.client.commit_uncertainty import may_have_committed
from halfway.client.concurrency.blocking import call_async
from halfway.client.errors import HalfwayError, MissingRowError, NestedTransactionError, TransactionEndedError

if TYPE_CHECKING:
    from halfway.client.barrier.barrier import WatchedRow
    from halfway.client.messages import Message
    from halfway.client.outcome import Outcome
    from halfway.client.producer.client import Halfway

_open: ContextVar[Transaction | None] = ContextVar("halfway_transaction", default=None)


class Transaction:
    """Messages that are written to their topics if and only if the block commits.

    The block starts only after the prepare is durable. When the block ends:

    - without an exception, the transaction commits. If the client has a barrier and its row is missing, it ends as the
      barrier says, and MissingRowError is raised;
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
        client: Halfway,
        messages: tuple[Message, ...],
        *,
        id: str,  # noqa: A002 - what REST calls it
        new_id: bool,
        check_after_s: float | None,
        confirm: bool,
    ) -> None:
        """Store the parameters of the prepare."""
        self.id = id
        self._new_id = new_id
        self._client = client
        self._messages = messages
        self._check_after_s = check_after_s
        self._confirm = confirm
        self._row: WatchedRow | None = None
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
        if self._client.barrier is not None:
            self._row = self._client.barrier.watch(self.id)
        await self._client.prepare(self._messages, id=self.id, check_after_s=self._check_after_s, new_id=self._new_id)

    def abandon(self) -> None:
        """End a prepare in the background that was answered after its caller was interrupted."""
        self._client.abandon(self.id, new_id=self._new_id)

    async def finish(self, error: BaseException | None) -> None:
        """End the transaction according to how its block ended, unless the block has ended it explicitly."""
        if self._ended:
            return
        if error is None:
            await self._demand_row()
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

    def _is_open(self, client: Halfway, opener: object) -> bool:
        return self._client is client and self._opener == opener and not self._ended

    def leave_scope(self) -> None:
        """Undo `enter_scope`."""
        if self._scope is not None:
            # A framework may exit a block in another context than it entered it, as FastAPI does for dependencies.
            with contextlib.suppress(ValueError):
                _open.reset(self._scope)
            self._scope = None

    async def _demand_row(self) -> None:
        """Raise MissingRowError if the block has not written the barrier's row.

        Only if this process has not seen it written with this barrier, its table is read. A commit without the row
        would contradict the answer to a check, which is rollback.
        """
        barrier = self._client.barrier
        if barrier is None or self._row is None or self._row.is_written:
            return
        cause: Exception | None = None
        try:
            if await call_async(barrier.look, self.id) == "commit":
                return
        except Exception as error:  # noqa: BLE001 - of any driver
            cause = error
        except BaseException as error:
            self._settle(error)
            raise
        missing = MissingRowError(
            f"the block of transaction {self.id} ended without the barrier's row: call"
            " `barrier.insert(connection, transaction.id)` as the first statement of its local transaction"
        )
        self._settle(missing)
        raise missing from cause

    def _settle(self, error: BaseException) -> None:
        """End the transaction in the background, so that the block's exception is neither delayed nor replaced."""
        self._ended = True
        outcome: Outcome = "rollback" if self._new_id and not may_have_committed(error) else "unknown"
        with contextlib.suppress(HalfwayError):  # the client is closed, so check-back resolves it
            self._client.settle(self.id, outcome, remark=type(error).__name__)


def demand_no_block(client: Halfway) -> None:
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


def _open_transaction(client: Halfway, opener: object) -> Transaction | None:
    """Return the open transaction of this client around the caller, even with blocks of other clients in between."""
    transaction = _open.get()
    while transaction is not None and not transaction._is_open(client, opener):  # noqa: SLF001 - of this module
        transaction = transaction._outer  # noqa: SLF001 - as above
    return transaction
