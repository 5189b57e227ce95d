"""Callers of the coordinator, each with one transaction or batch at a time, in as few steps as possible.

A caller of its own connection to each instance (`HttpCaller`), of a stream that all share (`StreamCaller`), or of one
`halfway.client` that all share, in a task or in a thread (`ClientCaller`, `ThreadCaller`).
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from http import HTTPStatus
from queue import SimpleQueue
from threading import Thread
from typing import TYPE_CHECKING, Final, cast

from bench.audit import SentTransaction
from bench.load.wire import Batches, Operations, Singles, WireError, Work, id_in, retry_after, split
from bench.plan import LoadPlan
from halfway.client import Halfway, HalfwayError, Message, SyncHalfway
from halfway.embedded.broker import HOST
from tests.support.coordinator.stream_client import Answer, StreamClient

if TYPE_CHECKING:
    from bench.load.__main__ import Load

NO_ANSWER: Final = "none"
_OVERLOADED: Final = HTTPStatus.TOO_MANY_REQUESTS
_REFUSALS: Final = (_OVERLOADED, HTTPStatus.SERVICE_UNAVAILABLE)
_RETRY_S: Final = 1.0
"""After this time an unanswered end is sent again, and a connection that was refused is opened again."""
_SHOWN: Final = 300


class Caller:
    """The part of a caller that its desk uses."""

    def __init__(self, desk: Load) -> None:
        """Report results to the desk."""
        self.desk = desk
        self.started, self.phase = 0.0, ""
        """When its current transaction began, and in which phase."""

    def begin(self, now: float) -> None:
        """Begin a transaction, or a batch; latency counts from `now`."""
        self.started, self.phase = now, self.desk.phase

    def close(self) -> None:
        """Close; transactions under way are recorded as unconfirmed."""


class _Link(asyncio.Protocol):
    """A connection, with at most one request at a time."""

    def __init__(self, caller: HttpCaller) -> None:
        self._caller = caller
        self._received = b""
        self.transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast("asyncio.Transport", transport)
        self._caller.desk.opened(1)

    def connection_lost(self, exc: Exception | None) -> None:
        if self.transport is not None:
            self.close()
            self._caller.lost(exc)

    def close(self) -> None:
        transport, self.transport = self.transport, None
        if transport is not None:
            self._caller.desk.opened(-1)
            transport.abort()

    def data_received(self, data: bytes) -> None:
        if self._received:
            data = self._received + data
        try:
            answer = split(data)
        except WireError as error:
            self._caller.fail(str(error))
            return
        if answer is None:
            self._received = data
            return
        status, body, self._received = answer
        self._caller.answered(status, body, data)


class HttpCaller(Caller):
    """Prepares and commits over its own connections, one to each instance.

    With patience, it gives up a prepare that is refused or not answered, and repeats an end: its local transaction is
    committed. Without, both are failures.
    """

    def __init__(self, desk: Load, requests: Singles | Batches, plan: LoadPlan, turn: int) -> None:
        """Keep the parts; nothing connects yet."""
        super().__init__(desk)
        self._requests = requests
        self._plan = plan
        self._turn = turn
        self._owners = [plan.ports.index(port) for port in plan.owners] if plan.to_owner else []
        self._links: list[_Link | None] = [None] * len(plan.ports)
        self._patient = plan.patience_s is not None
        self._work = Work((), b"")
        self._sent: Sequence[SentTransaction] = ()
        self._request = b""
        self._number = 0
        self._busy = self._waiting = self._closed = False

    async def connect(self) -> None:
        """Open the connections that are not open."""
        loop = asyncio.get_running_loop()
        for at, port in enumerate(self._plan.ports):
            while (link := self._links[at]) is None or link.transport is None:
                try:
                    async with self.desk.connecting:
                        _, self._links[at] = await loop.create_connection(lambda: _Link(self), HOST, port)
                except OSError as error:
                    self.desk.failed(f"no connection: {error!r}")
                    await asyncio.sleep(_RETRY_S)

    def begin(self, now: float) -> None:
        """Begin a transaction, or a batch; latency counts from `now`."""
        super().begin(now)
        self._busy = True
        self._sent, self._work = (), self._requests.next()
        self._send(self._work.request)

    def close(self) -> None:
        """Close the connections; transactions under way are recorded as unconfirmed."""
        self._closed = True
        for link in self._links:
            if link is not None:
                link.close()
        if self._busy:
            self._record_unknown()
            self.desk.failed("no answer came in time")

    def _send(self, request: bytes) -> None:
        self._turn += 1
        self._request = request
        link = self._links[self._owners[self._work.shard] if self._owners else self._turn % len(self._links)]
        if link is None or link.transport is None:
            self._resume(request=request)
            return
        self._number += 1
        self._waiting = True
        self.desk.sent(self, self._number)
        link.transport.write(request)

    # --- answers

    def answered(self, status: int, body: bytes, answer: bytes) -> None:
        """Handle an answer."""
        if not self._waiting:
            self.desk.failed(f"an answer to nothing: {body[:_SHOWN]!r}")
            return
        self._waiting = False
        self.desk.answered(str(status), ending=bool(self._sent))
        if self._patient and b"\r\nConnection: close\r\n" in answer:
            self._disconnect()
        if self._patient and status in _REFUSALS:
            self._refused(status, answer)
            return
        try:
            if self._sent:
                self._requests.require_ended(self._sent, status, body)
                self.desk.confirmed(self, self._sent)
                self._become_idle()
            else:
                self._prepared(self._requests.prepared(self._work, status, body), body)
        except WireError as error:
            self.fail(str(error))

    def _prepared(self, sent: Sequence[SentTransaction], body: bytes) -> None:
        if len(sent) < len(self._work.contents):
            prepared = {content for content, _ in sent}
            self.desk.unanswered([content for content in self._work.contents if content not in prepared])
            self.desk.failed(f"of a batch of prepares some failed: {body[:_SHOWN]!r}")
        self._sent = sent
        if sent:
            self._send(self._requests.end(sent))
        else:
            self._become_idle()

    def _refused(self, status: int, answer: bytes) -> None:
        wait_s = retry_after(answer)
        self.desk.without_retry_after += wait_s is None
        if b"\r\nContent-Type: application/problem+json" not in answer:
            self.desk.failed(f"a refusal without a problem document: {answer[-_SHOWN:]!r}")
        if self._sent:
            self._resume(wait_s or _RETRY_S, self._request)
            return
        if status != _OVERLOADED:  # what is refused because of the load must not be stored
            self.desk.unanswered(self._work.contents, self._work.chosen)
        self._become_idle()

    def end_patience(self, request: int) -> None:
        """Give up waiting, if this request is not answered yet."""
        if self._waiting and self._number == request:
            self._give_up()

    def lost(self, error: Exception | None) -> None:
        """Handle a connection that the server closed."""
        if self._waiting:
            self.fail(f"a connection was closed before the answer: {error!r}")
        elif not self._busy and not self._closed:
            self.desk.gone(self)
            self._resume()

    def fail(self, what: str) -> None:
        """Record an answer that is not the expected one, or no answer."""
        self.desk.failed(what)
        self._disconnect()
        if not self._busy:
            self.lost(None)
            return
        if self._patient and self._waiting:
            self._give_up()
            return
        self._record_unknown()
        self._become_idle()

    def _give_up(self) -> None:
        self._waiting = False
        self.desk.answered(NO_ANSWER, ending=bool(self._sent))
        self._disconnect()
        if self._sent:
            self._resume(_RETRY_S, self._request)
        else:
            self._record_unknown()
            self._become_idle()

    def _record_unknown(self) -> None:
        """Record the transactions whose result is unknown."""
        if self._sent:
            self.desk.unconfirmed(self._sent)
        else:
            self.desk.unanswered(self._work.contents, self._work.chosen)
        self._waiting = False

    def _disconnect(self) -> None:
        for link in self._links:
            if link is not None:
                link.close()

    def _become_idle(self) -> None:
        if any(link is None or link.transport is None for link in self._links):
            self._resume()
            return
        self._busy = False
        self.desk.ready(self)

    def _resume(self, after_s: float = 0.0, request: bytes | None = None) -> None:
        """Open lost connections, then send a request again, or be idle."""

        async def later() -> None:
            await asyncio.sleep(after_s)
            await self.connect()
            if request is None:
                self._become_idle()
            else:
                self._send(request)

        self.desk.spawn(later())


class StreamCaller(Caller):
    """Prepares and commits one transaction at a time over a stream that all callers share."""

    def __init__(self, stream: StreamClient, operations: Operations, desk: Load) -> None:
        """Keep the shared parts, and report to the desk as idle."""
        super().__init__(desk)
        self._stream = stream
        self._operations = operations
        self._content = 0
        self._id = b""
        desk.ready(self)

    def begin(self, now: float) -> None:
        """Begin a transaction; latency counts from `now`."""
        super().begin(now)
        self._content, prepare = self._operations.next_prepare()
        self._stream.send("prepare", prepare, self._prepared)

    def _prepared(self, answer: Answer | None) -> None:
        if answer is None or answer.status != HTTPStatus.CREATED:
            self.desk.unanswered((self._content,))
            self._failed("prepare", answer)
            return
        self._id = id_in(bytes(answer.body))
        self._stream.send("end", self._operations.end(self._id), self._ended)

    def _ended(self, answer: Answer | None) -> None:
        transactions = ((self._content, self._id),)
        if answer is None or answer.status != self._operations.ended:
            self.desk.unconfirmed(transactions)
            self._failed("commit", answer)
            return
        # An accepted end must be committed too, because nothing fails here.
        self.desk.confirmed(self, transactions)
        self.desk.ready(self)

    def _failed(self, what: str, answer: Answer | None) -> None:
        shown = "not answered" if answer is None else f"answered {answer.status}: {bytes(answer.problem)[:_SHOWN]!r}"
        self.desk.failed(f"a {what} was {shown}")
        if answer is not None:
            self.desk.ready(self)


class ClientCaller(Caller):
    """Prepares and commits one transaction at a time through a `halfway.client` that all callers share."""

    def __init__(self, client: Halfway, messages: Iterator[tuple[int, Message]], desk: Load) -> None:
        """Keep the shared parts, and report to the desk as idle."""
        super().__init__(desk)
        self._client = client
        self._messages = messages
        self._under_way: asyncio.Task[None] | None = None
        desk.ready(self)

    def begin(self, now: float) -> None:
        """Begin a transaction; latency counts from `now`."""
        super().begin(now)
        self._under_way = asyncio.get_running_loop().create_task(self._send())

    def close(self) -> None:
        """Cancel the transaction under way."""
        if self._under_way is not None:
            self._under_way.cancel()

    async def _send(self) -> None:
        number, message = next(self._messages)
        transaction_id, failure, is_prepared = self._client.new_id(), "cancelled", False
        try:
            await self._client.prepare([message], id=transaction_id)
            is_prepared = True
            await self._client.end(transaction_id, "commit")
            failure = ""
        except HalfwayError as error:
            failure = f"{type(error).__name__}: {error}"[:_SHOWN]
        finally:
            _record(self, (number, transaction_id.encode()), is_prepared, failure)
        self.desk.ready(self)


class ThreadCaller(Caller):
    """Prepares and commits one transaction at a time in a thread, through a `halfway.client` that all callers share."""

    def __init__(self, client: SyncHalfway, messages: Iterator[tuple[int, Message]], desk: Load) -> None:
        """Keep the shared parts, start the thread, and report to the desk as idle."""
        super().__init__(desk)
        self._client = client
        self._messages = messages
        self._loop = asyncio.get_running_loop()
        self._next: SimpleQueue[tuple[int, Message] | None] = SimpleQueue()
        Thread(target=self._work, daemon=True).start()
        desk.ready(self)

    def begin(self, now: float) -> None:
        """Begin a transaction; latency counts from `now`."""
        super().begin(now)
        self._next.put(next(self._messages))

    def close(self) -> None:
        """End the thread after its transaction."""
        self._next.put(None)

    def _work(self) -> None:
        while (given := self._next.get()) is not None:
            number, message = given
            transaction_id, failure, is_prepared = self._client.new_id(), "", False
            try:
                self._client.prepare([message], id=transaction_id)
                is_prepared = True
                self._client.end(transaction_id, "commit")
            except HalfwayError as error:
                failure = f"{type(error).__name__}: {error}"[:_SHOWN]
            self._loop.call_soon_threadsafe(self._done, (number, transaction_id.encode()), is_prepared, failure)

    def _done(self, transaction: SentTransaction, is_prepared: bool, failure: str) -> None:  # noqa: FBT001 - of one call
        _record(self, transaction, is_prepared, failure)
        self.desk.ready(self)


def _record(caller: Caller, transaction: SentTransaction, is_prepared: bool, failure: str) -> None:  # noqa: FBT001 - as above
    if not failure:
        caller.desk.confirmed(caller, (transaction,))
        return
    caller.desk.failed(failure)
    if is_prepared:
        caller.desk.unconfirmed((transaction,))
    else:
        caller.desk.unanswered((transaction[0],))
