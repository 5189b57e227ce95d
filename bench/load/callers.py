"""Callers of the coordinator, each with its own connection and one transaction or batch at a time."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from http import HTTPStatus
from typing import Protocol, cast

from bench.audit.journal import SentTransaction
from bench.load.wire import Contents, Requests, WireError, id_in, items_in, split

_SHOWN = 300


class BenchCaller(Protocol):
    """The part of a caller that its desk uses."""

    def begin(self, now: float) -> None:
        """Begin a transaction, or a batch; latency counts from `now`."""

    def close(self) -> None:
        """Close; transactions under way are recorded as unconfirmed."""


class Desk(Protocol):
    """Starts the callers, and receives their results."""

    def ready(self, caller: BenchCaller) -> None:
        """Record that a caller is idle."""

    def confirmed(self, started: float, transactions: Sequence[SentTransaction]) -> None:
        """Record transactions whose commit was confirmed; `started` is the time that was passed to `begin`."""

    def unconfirmed(self, transactions: Sequence[SentTransaction]) -> None:
        """Record transactions whose commit was sent and not confirmed: they may be committed or not."""

    def unanswered(self, contents: Contents) -> None:
        """Record prepares that were sent and not answered as expected: they may be stored or not."""

    def failed(self, what: str) -> None:
        """Record an unexpected answer."""


class Caller(asyncio.Protocol):
    """Prepares and commits transactions, in as few steps as possible, because its own cost must not be measured."""

    def __init__(self, requests: Requests, desk: Desk, *, batch: bool) -> None:
        """Keep the requests; `batch`: each request contains many transactions."""
        self._requests = requests
        self._desk = desk
        self._on_answer: Callable[[int, bytes], None] = self._batch_prepared if batch else self._prepared
        self._first = self._on_answer
        self._committed = self._batch_committed if batch else self._one_committed
        self._received = b""
        self._started = 0.0
        self._busy = False
        self._unanswered: Contents = ()
        self._transactions: Sequence[SentTransaction] = ()
        self._transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)
        self._desk.ready(self)

    def connection_lost(self, exc: Exception | None) -> None:
        if self._transport is not None:
            self._transport, self._busy = None, False
            self._record_unknown()
            self._desk.failed(f"a connection was lost: {exc!r}")

    def close(self) -> None:
        """Close the connection; transactions under way are recorded as unconfirmed."""
        transport, self._transport = self._transport, None
        if transport is not None:
            transport.close()
        if self._busy:
            self._record_unknown()
            self._desk.failed("no answer came in time")

    def begin(self, now: float) -> None:
        """Begin a transaction, or a batch; latency counts from `now`."""
        self._started = now
        self._busy = True
        self._transactions = ()
        self._on_answer = self._first
        self._unanswered, request = self._requests.next_prepare()
        self._send(request)

    def data_received(self, data: bytes) -> None:
        if self._received:
            data = self._received + data
        answer = split(data)
        if answer is None:
            self._received = data
            return
        status, body, self._received = answer
        try:
            self._on_answer(status, body)
        except WireError as error:
            self._fail(str(error))

    def _become_idle(self) -> None:
        self._busy = False
        self._desk.ready(self)

    def _send(self, request: bytes) -> None:
        if self._transport is not None:
            self._transport.write(request)

    def _prepared(self, status: int, body: bytes) -> None:
        if status != HTTPStatus.CREATED:
            self._fail(f"a prepare was answered {status}: {body[:_SHOWN]!r}")
            return
        transaction_id = id_in(body)
        self._transactions, self._unanswered = ((self._unanswered[0], transaction_id),), ()
        self._on_answer = self._committed
        self._send(self._requests.end(transaction_id))

    def _one_committed(self, status: int, body: bytes) -> None:
        if status == HTTPStatus.OK and b'"committed"' in body:
            self._confirmed()
        else:
            self._fail(f"a commit was answered {status}: {body[:_SHOWN]!r}")

    def _batch_prepared(self, status: int, body: bytes) -> None:
        if status != HTTPStatus.OK:
            self._fail(f"a batch of prepares was answered {status}: {body[:_SHOWN]!r}")
            return
        answers = list(zip(self._unanswered, items_in(body)[0], strict=True))
        self._transactions = [(content, name) for content, (code, name) in answers if code == HTTPStatus.CREATED]
        self._unanswered = [content for content, (code, _) in answers if code != HTTPStatus.CREATED]
        if self._unanswered:
            self._desk.unanswered(self._unanswered)
            self._desk.failed(f"of a batch of prepares {len(self._unanswered)} failed: {body[:_SHOWN]!r}")
            self._unanswered = ()
        if not self._transactions:
            self._become_idle()
            return
        self._on_answer = self._committed
        self._send(self._requests.ends([name for _, name in self._transactions]))

    def _batch_committed(self, status: int, body: bytes) -> None:
        ends = items_in(body)[1] if status == HTTPStatus.OK else []
        if [name for code, name in ends if code == HTTPStatus.OK] == [name for _, name in self._transactions]:
            self._confirmed()
        else:
            self._fail(f"a batch of commits was answered {status}: {body[:_SHOWN]!r}")

    def _confirmed(self) -> None:
        self._desk.confirmed(self._started, self._transactions)
        self._become_idle()

    def _fail(self, what: str) -> None:
        self._record_unknown()
        self._desk.failed(what)
        self._become_idle()

    def _record_unknown(self) -> None:
        """Record the transactions whose result is unknown."""
        self._desk.unanswered(self._unanswered)
        self._desk.unconfirmed(self._transactions)
        self._unanswered, self._transactions = (), ()
