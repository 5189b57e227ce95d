"""Large answers: made in slices, so that the event loop does other work, and ended if the client stops reading."""

from __future__ import annotations

import asyncio
import codecs
from base64 import b64encode
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import Any, Final

import structlog

from halfway.coordinator.fairness import Shares
from halfway.coordinator.logging import LogSummary
from halfway.http.responses.problems import ENCODER
from halfway.protocol.records import Message, ShownMessage, is_plain, shown_data, shown_message

log = structlog.get_logger(__name__)

GiveWay = Callable[[], Awaitable[None]]
"""Returns when the next slice may be made."""

SLICE_BYTES: Final = 3 * 64 * 1024
"""The payload that is encoded at once. A multiple of 3, so that slices of base64 can be joined."""
_PART_BYTES: Final = 100
"""What a message and each of its headers count in addition to their bytes: many small ones take long, too."""
_NO_MESSAGES: Final = b'"messages":[]'


def is_large(messages: Sequence[Message] | None) -> bool:
    """Return whether a payload is encoded in slices."""
    return messages is not None and sum(map(_cost, messages)) > SLICE_BYTES


def _cost(message: Message) -> int:
    return message.size + _PART_BYTES * (1 + len(message.headers))


async def with_messages(model: Any, messages: Sequence[Message], give_way: GiveWay) -> list[bytes]:
    """Return the JSON of a model in pieces, with these messages in place of its empty list `messages`."""
    head, _, tail = ENCODER.encode(model).partition(_NO_MESSAGES)  # no string can hold it: its quotes are escaped
    pieces = [head + _NO_MESSAGES[:-1]]
    waiting: list[ShownMessage] = []
    """Small messages that are encoded together."""
    size = 0
    for message in messages:
        own = _cost(message)
        if waiting and size + own > SLICE_BYTES:
            await give_way()
            pieces.append(_joined(waiting))
            waiting, size = [], 0
        if own <= SLICE_BYTES:
            waiting.append(shown_message(message))
            size += own
            continue
        pieces.extend([piece async for piece in _large(message, give_way)])
        pieces.append(b",")
    if waiting:
        await give_way()
        pieces.append(_joined(waiting))
    if messages:
        pieces[-1] = pieces[-1][:-1]  # no comma after the last one
    pieces.append(b"]" + tail)
    return pieces


def _joined(messages: Sequence[ShownMessage]) -> bytes:
    """Return the JSON of messages, each with a comma behind it."""
    return ENCODER.encode(messages)[1:-1] + b","


async def _large(message: Message, give_way: GiveWay) -> AsyncIterator[bytes]:
    """Yield the JSON of one message, in the order of `ShownMessage`."""
    yield b'{"topic":' + ENCODER.encode(message.topic) + b',"key":'
    async for piece in _data(message.key, give_way):
        yield piece
    yield b',"value":'
    async for piece in _data(message.value, give_way):
        yield piece
    yield b',"headers":['
    for number, (name, value) in enumerate(message.headers):
        yield (b"," if number else b"") + b'{"name":' + ENCODER.encode(name) + b',"value":'
        async for piece in _data(value, give_way):
            yield piece
        yield b"}"
    yield b'],"partition":' + ENCODER.encode(message.partition) + b"}"


async def _data(data: bytes | None, give_way: GiveWay) -> AsyncIterator[bytes]:
    """Yield the JSON of a key or a value, as `shown_data` makes it."""
    if data is None or len(data) <= SLICE_BYTES:
        yield ENCODER.encode(shown_data(data))
        return
    texts = await _texts(data, give_way)
    if texts is not None:
        yield b'"'
        for text in texts:
            await give_way()
            yield ENCODER.encode(text)[1:-1]
        yield b'"'
        return
    yield b'{"data":"'
    for at in range(0, len(data), SLICE_BYTES):
        await give_way()
        yield b64encode(data[at : at + SLICE_BYTES])
    yield b'","type":"BINARY"}'


async def _texts(data: bytes, give_way: GiveWay) -> list[str] | None:
    """Return data as text in pieces, None if it is not text (`as_text`)."""
    decoder = codecs.getincrementaldecoder("utf-8")()
    texts = []
    for at in range(0, len(data), SLICE_BYTES):
        await give_way()
        part = data[at : at + SLICE_BYTES]
        if not is_plain(part):
            return None
        try:
            texts.append(decoder.decode(part, final=at + SLICE_BYTES >= len(data)))
        except UnicodeDecodeError:
            return None
    return texts


MAX_BYTES: Final = 256 * 1024 * 1024
LOOK_EVERY_S: Final = 1.0
SLOW_LOOKS: Final = 5
"""A client that reads less than `MIN_BYTES` in this many looks is taken for one that does not read."""
MIN_BYTES: Final = 80 * 1024


class _Waiting:
    """What one connection has not sent yet."""

    def __init__(self, transport: asyncio.Transport, caller: str | None) -> None:
        self.transport = transport
        self.caller = caller
        self.size = transport.get_write_buffer_size()
        self.looks = 0
        self.size_before = self.size


class Unsent:
    """The answers held for clients that read too slowly.

    A connection is watched from the moment its buffer is full until everything is sent. A group that reads its answers
    is not refused because of others that do not (`Shares`).
    """

    def __init__(self, *, max_bytes: int = MAX_BYTES, look_every_s: float = LOOK_EVERY_S) -> None:
        self._held = Shares(max_bytes)
        self._look_every_s = look_every_s
        self._waiting: dict[object, _Waiting] = {}
        self._timer: asyncio.TimerHandle | None = None
        self._not_read = LogSummary(log, "info", "answer_not_read")

    @property
    def bytes(self) -> int:
        """What all connections have not sent yet."""
        return self._held.total

    def has_room(self, caller: str | None, size: int = 1) -> bool:
        """Return whether an answer of this size may be held for a caller."""
        return size <= self._held.room(caller)

    def begin(self, connection: object, transport: asyncio.Transport, caller: str | None = None) -> None:
        """Count the bytes that the connection of a caller could not send."""
        self._waiting[connection] = waiting = _Waiting(transport, caller)
        self._held.take(caller, waiting.size)
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(self._look_every_s, self._look)

    def end(self, connection: object) -> None:
        """Stop counting a connection, which has sent everything or is lost."""
        waiting = self._waiting.pop(connection, None)
        if waiting is not None:
            self._held.leave(waiting.caller, waiting.size)
        if not self._waiting and self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _look(self) -> None:
        for connection, waiting in list(self._waiting.items()):
            size = waiting.transport.get_write_buffer_size()
            self._held.leave(waiting.caller, waiting.size)
            self._held.take(waiting.caller, size)
            waiting.size = size
            waiting.size_before = max(waiting.size_before, size)  # more was written in the meantime
            waiting.looks += 1
            if waiting.size_before - size >= MIN_BYTES:
                waiting.looks, waiting.size_before = 0, size
            elif waiting.looks >= SLOW_LOOKS:
                self._not_read.note({"group": waiting.caller}, unsent_bytes=size)
                self.end(connection)
                waiting.transport.abort()
        if self._waiting:
            self._timer = asyncio.get_running_loop().call_later(self._look_every_s, self._look)
