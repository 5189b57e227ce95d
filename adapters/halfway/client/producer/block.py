"""A block that opens the local transaction itself, so that nothing can be forgotten and no order has to be known."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Coroutine
from contextlib import AsyncExitStack, suppress
from types import TracebackType
from typing import TYPE_CHECKING, Any

from halfway.client.barrier.barrier import UncommittedConnectionError
from halfway.client.barrier.drivers import ASYNC_WITH, WITH, at_once, demand_opener, is_open, opened_by, transaction_of
from halfway.client.barrier.table import LateTransactionError
from halfway.client.errors import MissingRowError
from halfway.client.messages import is_conflict
from halfway.client.producer.transaction import NoBarrierError, Transaction, WhenAway, store_when_away
from halfway.client.threads import awaited

if TYPE_CHECKING:
    from halfway.client.barrier.barrier import AsyncBarrier, Barrier

_REMEDY = "Let an error of the database leave the block, or catch it around a savepoint."

Begin = Callable[[], Any]
"""Opens the local transaction: returns a context manager whose connection commits when it is left."""


class _Block(ABC):
    """Prepares, opens the local transaction, writes the barrier's row, and yields the connection.

    When the block ends, the local transaction commits, and then the transaction ends. An exception rolls both back.
    """

    _ways: tuple[str, ...] = (ASYNC_WITH, WITH)

    def __init__(
        self,
        transaction: Transaction,
        begin: Begin,
        barrier: Barrier | AsyncBarrier | None,
        group: str,
        when_away: WhenAway,
    ) -> None:
        if barrier is None:
            raise NoBarrierError(
                "`begin` needs a barrier, which knows whether it committed: give the client `barrier=`"
            )
        demand_opener("begin", begin)
        self._transaction = transaction
        self._begin = begin
        self._barrier = barrier
        self._group = group
        self._stores = store_when_away(when_away, barrier, group) is not None
        transaction.keeps_unconfirmed = self._stores
        self._local = AsyncExitStack()
        self._is_open = False
        """Whether the local transaction was open at the end of the block."""

    @property
    def id(self) -> str:
        return self._transaction.id

    async def _enter(self) -> Any:
        if self._stores and self._barrier.store.is_away:
            self._transaction.is_stored = await self._waits()
        await self._start()
        try:
            connection = self._connection = await self._connect()
            await awaited(self._barrier.insert(connection, self.id))
        except BaseException as error:
            await self._leave(error)
            if isinstance(error, LateTransactionError):
                with suppress(Exception):  # of any driver
                    error.has_committed = await awaited(self._barrier.has_committed(self.id))
            raise
        return connection

    async def _leave(self, error: BaseException | None) -> None:
        """Leave the local transaction, and end the transaction as that has ended."""
        if error is None:
            try:
                await self._finish()
            except BaseException as failure:
                await self._leave(failure)
                raise
        try:
            await self._local.__aexit__(type(error) if error else None, error, error.__traceback__ if error else None)
            doubt = None if error else await self._doubt()
            self._transaction.has_committed = error is doubt is None
        except BaseException as failure:
            await self._end(failure)
            raise
        await self._end(error or doubt)
        if isinstance(doubt, UncommittedConnectionError | MissingRowError):
            raise doubt

    async def _finish(self) -> None:
        """Store the messages if necessary, and look whether the local transaction can still commit.

        PostgreSQL answers the COMMIT of a transaction in which a statement failed with a rollback and no error, and
        MySQL begins a new transaction after a deadlock: a block that catches the error would send its messages.
        """
        if self._stores:
            await self._store()
        self._is_open = is_open(self._connection)  # otherwise the block has ended it
        if not self._is_open or self._transaction.is_stored:  # the store has looked
            return
        try:
            has_row = await self._barrier.carry_out(self._barrier.still_has(self.id), self._connection)
        except Exception as error:
            error.add_note(_REMEDY)
            raise
        if not has_row:
            raise self._rolled_back()

    def _rolled_back(self) -> MissingRowError:
        return MissingRowError(f"the local transaction of {self.id} was rolled back within its block. {_REMEDY}")

    async def _connect(self) -> Any:
        connection = await self._open(opened_by("begin", self._begin, *self._ways))
        if (transaction := transaction_of(connection)) is not None:
            await self._open(transaction)
        return connection

    async def _waits(self) -> bool:
        """Return whether messages still wait, so that halfway need not be asked in vain; raises StoreFullError."""
        async with self._local:
            connection, store = await self._connect(), self._barrier.store
            if not await self._barrier.carry_out(store.waits(self._group), connection):
                return False
            await self._barrier.carry_out(store.demand_room(), connection)
            return True

    async def _store(self) -> None:
        """Store the messages if halfway is away, or if they would overtake others that are stored."""
        transaction, store = self._transaction, self._barrier.store
        if transaction.is_stored or await self._barrier.carry_out(store.waits(self._group), self._connection):
            await self._barrier.carry_out(
                store.add(transaction.id, self._group, transaction.messages), self._connection
            )
            transaction.is_stored = True

    async def _doubt(self) -> Exception | None:
        """Return why the local transaction may not have committed; None if it has.

        The table is read at the first use of a function, if the block ended the local transaction itself, and if the
        connection is still in a transaction, as when `begin` has joined another one. If the table cannot be read, the
        barrier ends the transaction in the background, or a check does.
        """
        if self._is_open and not is_open(self._connection) and self._barrier.commits_after(self._begin):
            return None
        try:
            outcome = await awaited(self._barrier.look(self.id))
        except Exception as error:  # noqa: BLE001 - of any driver
            return UncommittedConnectionError() if is_conflict(error) else error  # it still locks the row
        if outcome not in {"commit", "unknown"}:  # unknown: its messages are stored
            return UncommittedConnectionError() if self._is_open else self._rolled_back()
        if self._is_open:
            self._barrier.note_commit_after(self._begin)
        return None

    async def _open(self, context: Any) -> Any:
        if ASYNC_WITH in self._ways and hasattr(context, ASYNC_WITH):
            return await self._local.enter_async_context(context)
        return self._local.enter_context(context)

    @abstractmethod
    def _start(self) -> Coroutine[Any, Any, None]: ...

    @abstractmethod
    def _end(self, error: BaseException | None) -> Coroutine[Any, Any, None]: ...


class Block(_Block):
    """The block for `async with`. Get it from `Halfway.transaction`."""

    async def __aenter__(self) -> Any:
        return await self._enter()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._leave(error)

    async def _start(self) -> None:
        await self._transaction.__aenter__()

    async def _end(self, error: BaseException | None) -> None:
        await self._transaction.__aexit__(None, error, None)


class SyncBlock(_Block):
    """The block for `with`. Get it from `SyncHalfway.transaction`."""

    _ways = (WITH,)

    def __init__(self, sync: Any, *parameters: Any) -> None:
        """Take the SyncTransaction too, which prepares and ends in the thread of the client."""
        super().__init__(*parameters)
        self._sync = sync

    def __enter__(self) -> Any:
        return at_once(self._enter())

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        at_once(self._leave(error))

    async def _start(self) -> None:
        self._sync.__enter__()

    async def _end(self, error: BaseException | None) -> None:
        self._sync.__exit__(None, error, None)
