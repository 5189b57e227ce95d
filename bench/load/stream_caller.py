"""Callers that share one stream, as the tasks of a service do."""

from __future__ import annotations

from http import HTTPStatus
from itertools import cycle
from typing import Final

import msgspec

from bench.load.callers import Desk
from bench.load.stream_client import Answer, StreamClient
from bench.load.wire import id_in, payloads
from bench.plan import GROUP

_SHOWN: Final = 300


class Operations:
    """The operations of a load without their numbers: complete prepares, and ends that lack only the id."""

    def __init__(self, topic: str, *, confirm: bool) -> None:
        """Build them; `confirm`: an end is done once it is written, otherwise once it is accepted."""
        self._prepares = cycle(
            [
                (
                    number,
                    msgspec.json.encode({"group": GROUP, "messages": [{"topic": topic, "key": key, "value": value}]}),
                )
                for number, (key, value) in enumerate(payloads())
            ]
        )
        self._end_after = b'","outcome":"commit"}' if confirm else b'","outcome":"commit","confirm":false}'
        self.ended: Final = HTTPStatus.OK if confirm else HTTPStatus.ACCEPTED

    def next_prepare(self) -> tuple[int, bytes]:
        """Return a prepare, and the index of its message in `payloads()`."""
        return next(self._prepares)

    def end(self, transaction_id: bytes) -> bytes:
        """Return the commit of a transaction."""
        return b'{"id":"%b%b' % (transaction_id, self._end_after)


class StreamCaller:
    """Prepares and commits one transaction at a time."""

    def __init__(self, stream: StreamClient, operations: Operations, desk: Desk) -> None:
        """Keep the shared parts, and report to the desk as idle."""
        self._stream = stream
        self._operations = operations
        self._desk = desk
        self._started = 0.0
        self._content = 0
        self._id = b""
        desk.ready(self)

    def begin(self, now: float) -> None:
        """Begin a transaction; latency counts from `now`."""
        self._started = now
        self._content, prepare = self._operations.next_prepare()
        self._stream.send("prepare", prepare, self._prepared)

    def close(self) -> None:
        """Do nothing: the stream reports the operations under way when it is closed."""

    def _prepared(self, answer: Answer | None) -> None:
        if answer is None or answer.status != HTTPStatus.CREATED:
            self._desk.unanswered((self._content,))
            self._failed("prepare", answer)
            return
        self._id = id_in(bytes(answer.body))
        self._stream.send("end", self._operations.end(self._id), self._ended)

    def _ended(self, answer: Answer | None) -> None:
        transactions = ((self._content, self._id),)
        if answer is None or answer.status != self._operations.ended:
            self._desk.unconfirmed(transactions)
            self._failed("commit", answer)
            return
        # An accepted end must be committed too, because nothing fails here.
        self._desk.confirmed(self._started, transactions)
        self._desk.ready(self)

    def _failed(self, what: str, answer: Answer | None) -> None:
        shown = "not answered" if answer is None else f"answered {answer.status}: {bytes(answer.problem)[:_SHOWN]!r}"
        self._desk.failed(f"a {what} was {shown}")
        if answer is not None:
            self._desk.ready(self)
