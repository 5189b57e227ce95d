"""Callers that share one `halfway.client`, as the tasks of a service do."""

from __future__ import annotations

import asyncio
from itertools import cycle
from typing import Final
from uuid import uuid4

from bench.load.callers import Desk
from bench.load.wire import payloads
from halfway.client import Halfway, HalfwayError, Message

_SHOWN: Final = 300


class Messages:
    """The messages of a load in turn, each with its index in `payloads()`."""

    def __init__(self, topic: str) -> None:
        """Build the messages once."""
        self._ready = cycle(
            [(number, Message(topic=topic, key=key, value=value)) for number, (key, value) in enumerate(payloads())]
        )

    def next(self) -> tuple[int, Message]:
        """Return the next message."""
        return next(self._ready)


class ClientCaller:
    """Prepares and commits one transaction at a time."""

    def __init__(self, client: Halfway, messages: Messages, desk: Desk) -> None:
        """Keep the shared parts, and report to the desk as idle."""
        self._client = client
        self._messages = messages
        self._desk = desk
        self._under_way: asyncio.Task[None] | None = None
        desk.ready(self)

    def begin(self, now: float) -> None:
        """Begin a transaction; latency counts from `now`."""
        self._under_way = asyncio.get_running_loop().create_task(self._send(now))

    def close(self) -> None:
        """Cancel the transaction under way."""
        if self._under_way is not None:
            self._under_way.cancel()

    async def _send(self, started: float) -> None:
        number, message = self._messages.next()
        transaction_id = uuid4().hex
        transactions = ((number, transaction_id.encode()),)
        prepared = committed = False
        try:
            await self._client.prepare([message], id=transaction_id)
            prepared = True
            await self._client.end(transaction_id, "commit")
            committed = True
        except HalfwayError as error:
            self._desk.failed(f"{type(error).__name__}: {error}"[:_SHOWN])
        finally:
            if committed:
                self._desk.confirmed(started, transactions)
            elif prepared:
                self._desk.unconfirmed(transactions)
            else:
                self._desk.unanswered((number,))
        self._desk.ready(self)
