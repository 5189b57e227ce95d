"""A transaction around a block of the service's own code."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from contextvars import ContextVar, Token
from types import TracebackType
from typing import TYPE_CHECKING, Self

from halfway.client.doubt import may_have_committed
from halfway.client.errors import HalfwayError, NestedTransactionError, TransactionEndedError

if TYPE_CHECKING:
    from halfway.client.client import Halfway
    from halfway.client.messages import Message
    from halfway.client.outcome import Outcome

_open: ContextVar[Transaction | None] = ContextVar("halfway_transaction", default=None)


class Transaction:
    """Messages that are written to their topics if the block commits, and never if it does not.

    The block is entered only after the prepare is durable. When it is left:

    - without an exception the transaction commits;
    - with an exception, if the client has a barrier, that decides, so the two never contradict each other;
    - with one that may have come while the database was committing (a lost connection, a time-out, a cancellation) it
      is ended as `unknown` if there is no barrier, and check-back asks the service;
    - with any other exception it rolls back if there is no barrier. So without one let the database's commit be the
      last thing that the block does. If the caller gave the id it is `unknown` then, because another caller may be
      committing under the same id.

    `end`, `commit`, `rollback` and `unknown` inside the block end it explicitly. Get it from `Halfway.transaction`.
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
        """Keep what will be prepared."""
        self.id = id
        self._new_id = new_id
        self._client = client
        self._messages = messages
        self._check_after_s = check_after_s
        self._confirm = confirm
        self._begun = False
        self._ended = False
        self._opener: object = None
        self._scope: Token[Transaction | None] | None = None
        self._outer: Transaction | None = None

    async def __aenter__(self) -> Self:
        """Prepare; raises what `Halfway.prepare` raises, and nothing of the block runs then."""
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
        """End the transaction by how the block was left; the block's own exception goes on."""
        self.leave_scope()
        await self.finish(error)

    async def end(self, outcome: Outcome, remark: str | None = None) -> None:
        """Report the outcome of the local transaction; TransactionEndedError if it was reported before."""
        if self._ended:
            raise TransactionEndedError(f"the end of transaction {self.id} was sent before: begin a new one")
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
        if self._begun:
            raise TransactionEndedError(f"the transaction {self.id} was entered before: begin a new one")
        self._begun = True
        await self._client.prepare(self._messages, id=self.id, check_after_s=self._check_after_s, new_id=self._new_id)

    def abandon(self) -> None:
        """Settle in the background a prepare that was answered after its caller had been interrupted."""
        self._client.abandon(self.id, new_id=self._new_id)

    async def finish(self, error: BaseException | None) -> None:
        """End the transaction by how its block was left, unless the block has ended it."""
        if self._ended:
            return
        if error is None:
            await self.end("commit")
        else:
            self._settle(error)

    def enter_scope(self) -> None:
        """Remember in this task that the transaction is open; raises NestedTransactionError."""
        self._outer = _open.get()
        self._opener = _opener()  # a child task or a thread inherits the variable, but its transactions are its own
        if (outer := _found_open(self._client, self._opener)) is not None:
            raise NestedTransactionError(
                f"the transaction {outer.id} is open in this task: put all messages into one transaction"
            )
        self._scope = _open.set(self)

    def _is_open(self, client: Halfway, opener: object) -> bool:
        return self._client is client and self._opener == opener and not self._ended

    def leave_scope(self) -> None:
        """Undo `enter_scope`."""
        if self._scope is not None:
            # Frameworks may leave a block in another context than the one that entered it: FastAPI its dependencies.
            with contextlib.suppress(ValueError):
                _open.reset(self._scope)
            self._scope = None

    def _settle(self, error: BaseException) -> None:
        """End in the background, so that the block's exception is neither delayed nor replaced."""
        self._ended = True
        outcome: Outcome = "rollback" if self._new_id and not may_have_committed(error) else "unknown"
        with contextlib.suppress(HalfwayError):  # the client is closed: check-back asks
            self._client.settle(self.id, outcome, remark=type(error).__name__)


def demand_no_block(client: Halfway) -> None:
    """Raise NestedTransactionError if a block of this client is open in this task or thread.

    Messages that are sent inside a session there would be another transaction, with a fate of its own.
    """
    if (outer := _found_open(client, _opener())) is not None:
        raise NestedTransactionError(
            f"the transaction {outer.id} is open in this task: give it this message, too, or send outside of its block"
        )


def _opener() -> object:
    """Return the task that runs, the thread if none does."""
    try:
        task = asyncio.current_task()
    except RuntimeError:
        task = None
    return task or threading.get_ident()


def _found_open(client: Halfway, opener: object) -> Transaction | None:
    """Return the block of this client that is open around the caller, with others' blocks in between or not."""
    each = _open.get()
    while each is not None and not each._is_open(client, opener):  # noqa: SLF001 - this module's own
        each = each._outer  # noqa: SLF001 - as above
    return each
