"""Callers of the coordinator, each with a connection of its own and one transaction, or one batch, at a time."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from http import HTTPStatus
from typing import Protocol, cast

from bench.journal import Made
from bench.wire import Contents, Requests, WireError, id_in, items_in, split

_SHOWN = 300


class BeginsAndCloses(Protocol):
    """A caller, as its desk knows it."""

    def begin(self, now: float) -> None:
        """Begin a transaction, or a batch; latency counts from `now`."""

    def close(self) -> None:
        """End; what is still under way is not confirmed."""


class Desk(Protocol):
    """Where callers report, and which tells them to begin."""

    def ready(self, caller: BeginsAndCloses) -> None:
        """Hear that a caller has nothing to do."""

    def confirmed(self, began: float, made: Sequence[Made]) -> None:
        """Note transactions whose commit is confirmed; `began` is what `begin` was given."""

    def unconfirmed(self, made: Sequence[Made]) -> None:
        """Note transactions whose commit was sent and not confirmed: they may stand or not."""

    def unanswered(self, contents: Contents) -> None:
        """Note prepares that were sent and not answered as they must be: they may be stored or not."""

    def failed(self, what: str) -> None:
        """Note an answer that is not what it must be."""


class Caller(asyncio.Protocol):
    """Prepares, and commits what was prepared; as few steps as there can be, since it must not be what is measured."""

    def __init__(self, requests: Requests, desk: Desk, *, batch: bool) -> None:
        """Take the requests; `batch` tells whether each is for many transactions."""
        self._requests = requests
        self._desk = desk
        self._answered: Callable[[int, bytes], None] = self._batch_prepared if batch else self._prepared
        self._first = self._answered
        self._committed = self._batch_committed if batch else self._one_committed
        self._received = b""
        self._began = 0.0
        self._busy = False
        self._asked: Contents = ()
        self._made: Sequence[Made] = ()
        self._transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)
        self._desk.ready(self)

    def connection_lost(self, exc: Exception | None) -> None:
        if self._transport is not None:
            self._transport, self._busy = None, False
            self._note()
            self._desk.failed(f"a connection was lost: {exc!r}")

    def close(self) -> None:
        """Close the connection; what is still under way is not confirmed."""
        transport, self._transport = self._transport, None
        if transport is not None:
            transport.close()
        if self._busy:
            self._note()
            self._desk.failed("no answer came in time")

    def begin(self, now: float) -> None:
        """Begin a transaction, or a batch; latency counts from `now`."""
        self._began = now
        self._busy = True
        self._made = ()
        self._answered = self._first
        self._asked, request = self._requests.next_prepare()
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
            self._answered(status, body)
        except WireError as error:
            self._give_up(str(error))

    def _rest(self) -> None:
        self._busy = False
        self._desk.ready(self)

    def _send(self, request: bytes) -> None:
        if self._transport is not None:
            self._transport.write(request)

    def _prepared(self, status: int, body: bytes) -> None:
        if status != HTTPStatus.CREATED:
            self._give_up(f"a prepare was answered {status}: {body[:_SHOWN]!r}")
            return
        transaction_id = id_in(body)
        self._made, self._asked = ((self._asked[0], transaction_id),), ()
        self._answered = self._committed
        self._send(self._requests.end(transaction_id))

    def _one_committed(self, status: int, body: bytes) -> None:
        if status == HTTPStatus.OK and b'"committed"' in body:
            self._confirmed()
        else:
            self._give_up(f"a commit was answered {status}: {body[:_SHOWN]!r}")

    def _batch_prepared(self, status: int, body: bytes) -> None:
        if status != HTTPStatus.OK:
            self._give_up(f"a batch of prepares was answered {status}: {body[:_SHOWN]!r}")
            return
        answers = list(zip(self._asked, items_in(body)[0], strict=True))
        self._made = [(content, found) for content, (one, found) in answers if one == HTTPStatus.CREATED]
        self._asked = [content for content, (one, _) in answers if one != HTTPStatus.CREATED]
        if self._asked:
            self._desk.unanswered(self._asked)
            self._desk.failed(f"of a batch of prepares {len(self._asked)} failed: {body[:_SHOWN]!r}")
            self._asked = ()
        if not self._made:
            self._rest()
            return
        self._answered = self._committed
        self._send(self._requests.ends([one for _, one in self._made]))

    def _batch_committed(self, status: int, body: bytes) -> None:
        ends = items_in(body)[1] if status == HTTPStatus.OK else []
        if [found for one, found in ends if one == HTTPStatus.OK] == [one for _, one in self._made]:
            self._confirmed()
        else:
            self._give_up(f"a batch of commits was answered {status}: {body[:_SHOWN]!r}")

    def _confirmed(self) -> None:
        self._desk.confirmed(self._began, self._made)
        self._rest()

    def _give_up(self, what: str) -> None:
        self._note()
        self._desk.failed(what)
        self._rest()

    def _note(self) -> None:
        """Note what was asked and is not known to be done."""
        self._desk.unanswered(self._asked)
        self._desk.unconfirmed(self._made)
        self._asked, self._made = (), ()
