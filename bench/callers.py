"""Callers of the coordinator, each with a connection of its own and one transaction, or one batch, at a time."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from http import HTTPStatus
from typing import Protocol, cast

from bench.wire import Requests, WireError, id_in, items_in, split

_SHOWN = 300


class Desk(Protocol):
    """Where callers report, and which tells them to begin."""

    def ready(self, caller: Caller) -> None:
        """Hear that a caller has nothing to do."""

    def confirmed(self, began: float, ids: Sequence[bytes]) -> None:
        """Note transactions whose commit is confirmed; `began` is what `begin` was given."""

    def unconfirmed(self, ids: Sequence[bytes]) -> None:
        """Note transactions whose commit was sent and not confirmed: they may stand or not."""

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
        self._ids: Sequence[bytes] = ()
        self._transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)
        self._desk.ready(self)

    def connection_lost(self, exc: Exception | None) -> None:
        if self._transport is not None:
            self._transport, self._busy = None, False
            self._desk.unconfirmed(self._ids)
            self._desk.failed(f"a connection was lost: {exc!r}")

    def close(self) -> None:
        """Close the connection; what is still under way is not confirmed."""
        transport, self._transport = self._transport, None
        if transport is not None:
            transport.close()
        if self._busy:
            self._desk.unconfirmed(self._ids)
            self._desk.failed("no answer came in time")

    def begin(self, now: float) -> None:
        """Begin a transaction, or a batch; latency counts from `now`."""
        self._began = now
        self._busy = True
        self._ids = ()
        self._answered = self._first
        self._send(self._requests.next_prepare())

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
        self._ids = (transaction_id,)
        self._answered = self._committed
        self._send(self._requests.end(transaction_id))

    def _one_committed(self, status: int, body: bytes) -> None:
        if status == HTTPStatus.OK and b'"committed"' in body:
            self._desk.confirmed(self._began, self._ids)
            self._rest()
        else:
            self._give_up(f"a commit was answered {status}: {body[:_SHOWN]!r}")

    def _batch_prepared(self, status: int, body: bytes) -> None:
        prepares = items_in(body)[0] if status == HTTPStatus.OK else []
        self._ids = [found for one, found in prepares if one == HTTPStatus.CREATED]
        if len(self._ids) < len(prepares) or not prepares:
            self._desk.failed(f"a batch of prepares was answered {status}: {body[:_SHOWN]!r}")
        if not self._ids:
            self._rest()
            return
        self._answered = self._committed
        self._send(self._requests.ends(self._ids))

    def _batch_committed(self, status: int, body: bytes) -> None:
        ends = items_in(body)[1] if status == HTTPStatus.OK else []
        if [found for one, found in ends if one == HTTPStatus.OK] == self._ids:
            self._desk.confirmed(self._began, self._ids)
            self._rest()
        else:
            self._give_up(f"a batch of commits was answered {status}: {body[:_SHOWN]!r}")

    def _give_up(self, what: str) -> None:
        self._desk.unconfirmed(self._ids)
        self._desk.failed(what)
        self._rest()
