"""Threads: one that belongs to one object, how they post calls to the event loop, and how lost producers are closed.

A producer that was given up is closed without a wait for the thread that gave it up.
"""

from __future__ import annotations

import asyncio
import queue
import threading
import time
import warnings
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import Any, Final, TypeVarTuple, Unpack

import structlog
from confluent_kafka import KafkaException

from halfway.kafka.clients.seam import Admin, Producer


class OwnedThread:
    """An object with a thread of its own, which runs from `start` until its owner ends it or it fails."""

    def __init__(self, run: Callable[[], None], name: str) -> None:
        self._thread = threading.Thread(target=run, name=name, daemon=True)

    def start(self) -> None:
        self._thread.start()

    def join(self, timeout: float) -> bool:
        """Wait for the thread to end; return whether it has ended."""
        self._thread.join(timeout)
        return not self._thread.is_alive()


Ts = TypeVarTuple("Ts")


class Loop:
    """The event loop, for use by the owned threads."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.asyncio = loop
        self._offset = time.monotonic() - loop.time()

    def monotonic(self, loop_time: float) -> float:
        """Convert a time on the loop's clock to `time.monotonic()`."""
        return loop_time + self._offset

    def time(self) -> float:
        """Return the time on the loop's clock; on any thread."""
        return time.monotonic() - self._offset

    def post(self, call: Callable[[Unpack[Ts]], object], *args: *Ts) -> None:
        """Call a function on the loop's thread; do nothing if the loop is closed."""
        with suppress(RuntimeError):
            self.asyncio.call_soon_threadsafe(call, *args)


log = structlog.get_logger()

_PURGE_S: Final = 5.0
_HELD_S: Final = 10.0
"""After this time with one client a closer is held up: the abort of an open transaction waits until Kafka answers."""
_REMEMBERED: Final = 10_000
"""Ids of former incarnations of this process that it knows to be closed."""


class ClientCloser:
    """Ends abandoned clients on a thread of its own, which lives while there are any.

    If it is held up by one of them another thread takes over. Otherwise each incarnation that cannot begin would leave
    its clients behind for as long as Kafka hangs, each with several threads.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._waiting: queue.SimpleQueue[tuple[Producer, str | None]] = queue.SimpleQueue()
        self._turn: object | None = None
        """Of the thread that ends the next client; None if there is no thread."""
        self._since = 0.0
        """When that thread has begun with a client, on `time.monotonic()`."""
        self._closed: dict[str, None] = {}

    def has_closed(self, transactional_id: str) -> bool:
        """Return whether the only producer with this id was of this process and sends nothing any more."""
        return transactional_id in self._closed

    def take(self, producer: Producer, transactional_id: str | None) -> None:
        """End a client; pass the id only if nobody else has written with it."""
        self._waiting.put((producer, transactional_id))
        with self._lock:
            if self._turn is not None and time.monotonic() - self._since < _HELD_S:
                return
            self._turn = turn = object()
            self._since = time.monotonic()
        threading.Thread(target=self._run, args=(turn,), name="halfway-closer", daemon=True).start()

    def _run(self, turn: object) -> None:
        while self._turn is turn:
            try:
                producer, transactional_id = self._waiting.get_nowait()
            except queue.Empty:
                with self._lock:
                    if self._turn is turn and self._waiting.empty():
                        self._turn = None
                continue
            self._since = time.monotonic()
            try:
                ended = self._end(producer, known=transactional_id is not None)
            except Exception:
                log.exception("abandoned_producer_not_ended")
                ended = False
            del producer  # if it was not ended, librdkafka ends its threads with the last reference
            if ended and transactional_id is not None:
                while len(self._closed) >= _REMEMBERED:
                    self._closed.pop(next(iter(self._closed)), None)
                self._closed[transactional_id] = None

    def _end(self, producer: Producer, *, known: bool) -> bool:
        """Purge the client's queues; if `known`, end its threads and connections and return whether they have ended.

        `close` tries to abort first, and warns if that is not possible any more, as after a commit was requested. If
        the abort fails for good it raises, and whether the client has ended is not known.
        """
        try:
            producer.purge()
            producer.poll(0)
        except KafkaException as error:  # a client that has failed says so once more
            log.debug("abandoned_producer_not_purged", error=error.args[0].str())
        if not known:
            return False
        if producer.flush(_PURGE_S):
            log.warning("abandoned_producer_not_purged", left=len(producer))
            return False
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", RuntimeWarning)
                return producer.close()
        except KafkaException as error:
            log.warning("abandoned_producer_not_closed", error=error.args[0].str())
            return False


CLOSER: Final = ClientCloser()


def drop_last(held: list[Admin]) -> None:
    """Drop admin clients on a thread: librdkafka waits there for its own threads to end.

    `held` must contain the last references, and the caller must not be a thread of librdkafka: if one of those drops
    the last reference, librdkafka ends the process.
    """
    threading.Thread(target=held.clear, name="halfway-drop-admin", daemon=True).start()


def answer_all(answers: Iterable[tuple[asyncio.Future[Any], Any]]) -> None:
    """Give futures their results or errors, on the loop's thread; those that are done or cancelled are skipped."""
    for future, result in answers:
        if future.done():
            continue
        if isinstance(result, BaseException):
            future.set_exception(result)
        else:
            future.set_result(result)
