"""A TCP proxy in front of one Kafka listener: it reads the relevant requests and decides the fate of each.

The listener must advertise the proxy's port (`tests.support.brokers.proxied`), or clients bypass it. Only PLAINTEXT.
It runs on its own thread, so that it continues while a test blocks.
"""

import asyncio
import contextlib
import threading
from collections.abc import Callable, Coroutine, Iterator
from dataclasses import dataclass, field
from enum import Enum, IntEnum
from math import inf
from types import TracebackType
from typing import Any, Self

from halfway.embedded.broker import HOST

_LENGTH = 4
_STOP_WITHIN_S = 60.0


class Api(IntEnum):
    """The requests that are read: their keys in Kafka's protocol."""

    INIT_PRODUCER_ID = 22
    END_TXN = 26

    @property
    def first_flexible(self) -> int:
        """The first version with compact strings and tagged fields."""
        return 2 if self is Api.INIT_PRODUCER_ID else 3


_READ = frozenset(Api)


class Fate(Enum):
    """The fate of a matching request."""

    HOLD_ANSWER = "the broker does it; the answer waits until it is released"
    HOLD_REQUEST = "the broker hears of it only when it is released"
    LOSE_ANSWER = "the broker does it; the connection is cut in place of the answer"
    LOSE_REQUEST = "the connection is cut and the broker never hears of it"
    STRAY_REQUEST = "the connection is cut at once, and the broker hears of it only when it is released"

    @property
    def of_the_answer(self) -> bool:
        return self in (Fate.HOLD_ANSWER, Fate.LOSE_ANSWER)


@dataclass(frozen=True, kw_only=True)
class Request:
    """One request as the client sent it; `commits` applies to END_TXN only."""

    api: Api
    version: int
    correlation_id: int
    client_id: str
    transactional_id: str
    """Empty if there is none."""
    commits: bool | None = None


@dataclass(kw_only=True)
class Exchange:
    """A request and the error code that the broker answered (0: none), None if it has not (yet)."""

    request: Request
    connection: int
    error: int | None = None


@dataclass(kw_only=True)
class Intervention:
    """A fate for the next matching requests; `met` is set when one has arrived."""

    fate: Fate
    when: Callable[[Request], bool]
    times: int = 1
    met: threading.Event = field(default_factory=threading.Event)
    exchanges: list[Exchange] = field(default_factory=list)
    _released: bool = False
    _gates: list[Callable[[], None]] = field(default_factory=list)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def release(self) -> None:
        """Release held requests, and match no more."""
        with self._lock:
            self._released, self.times = True, 0
            gates, self._gates = self._gates, []
        for gate in gates:
            gate()

    def gate(self) -> asyncio.Event:
        """Return an event of the proxy's loop that is set with the release."""
        event, loop = asyncio.Event(), asyncio.get_running_loop()
        with self._lock:
            if self._released:
                event.set()
            else:
                self._gates.append(lambda: _call(loop, event.set))
        return event

    def take(self, exchange: Exchange) -> bool:
        """Return whether a request matches."""
        if self.times <= 0 or not self.when(exchange.request):
            return False
        self.times -= 1
        self.exchanges.append(exchange)
        return True


class KafkaProxy:
    """`with KafkaProxy(port, upstream)`: listens on `port` and forwards to the broker's listener on `upstream`.

    `journal` contains every INIT_PRODUCER_ID and END_TXN in order of arrival.
    """

    def __init__(self, port: int, upstream: int) -> None:
        self.port = port
        self.upstream = upstream
        self.idle_s = inf
        """A connection that was idle for longer is dropped silently, as a firewall does: no bytes pass."""
        self.dropped = 0
        """Connections that were dropped silently and used after that."""
        self.journal: list[Exchange] = []
        self._interventions: list[Intervention] = []
        self._links: set[_Link] = set()
        self._count = 0
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name=f"proxy-{port}", daemon=True)
        self._server: asyncio.Server | None = None

    def __enter__(self) -> Self:
        self._thread.start()
        self._run(self._listen())
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.clear()
        self._run(self._close())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(_STOP_WITHIN_S)
        self._loop.close()

    # --- for tests, on any thread

    def intervene(self, fate: Fate, when: Callable[[Request], bool], *, times: int = 1) -> Intervention:
        """Apply this fate to the next requests for which `when` is true."""
        intervention = Intervention(fate=fate, when=when, times=times)
        self._interventions.append(intervention)
        return intervention

    def clear(self) -> None:
        """Release everything that is held, and let everything pass from now on."""
        interventions, self._interventions = self._interventions, []
        for intervention in interventions:
            intervention.release()
        self.idle_s = inf

    def silence(self) -> None:
        """Drop every present connection silently; new ones pass."""
        self._run(self._silence())

    # --- on the proxy's loop

    def _run(self, work: Coroutine[Any, Any, None]) -> None:
        asyncio.run_coroutine_threadsafe(work, self._loop).result(_STOP_WITHIN_S)

    async def _listen(self) -> None:
        self._server = await asyncio.start_server(self._connected, HOST, self.port)

    async def _silence(self) -> None:
        for link in self._links:
            link.silent = True

    async def _close(self) -> None:
        assert self._server is not None
        self._server.close()
        links = list(self._links)
        for link in links:
            link.cut()
        await asyncio.gather(*(link.ended.wait() for link in links))

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            upstream = await asyncio.open_connection(HOST, self.upstream)
        except OSError:  # the broker is down: so is its port
            writer.transport.abort()
            return
        self._count += 1
        link = _Link(self, self._count, (reader, writer), upstream)
        self._links.add(link)
        try:
            await link.run()
        finally:
            self._links.discard(link)

    def fate_of(self, exchange: Exchange) -> Intervention | None:
        """Record a request, and return its fate."""
        self.journal.append(exchange)
        return next((one for one in self._interventions if one.take(exchange)), None)


Stream = tuple[asyncio.StreamReader, asyncio.StreamWriter]


class _Link:
    """A client's connection and its connection to the broker."""

    def __init__(self, proxy: KafkaProxy, number: int, client: Stream, broker: Stream) -> None:
        self._proxy = proxy
        self._number = number
        self._from_client, self._to_client = client
        self._from_broker, self._to_broker = broker
        self._expected: dict[int, tuple[Exchange, Intervention | None]] = {}
        self._tasks: list[asyncio.Task[None]] = []
        self._used_at = asyncio.get_running_loop().time()
        self._met = False
        self.silent = False
        self.ended = asyncio.Event()

    async def run(self) -> None:
        self._tasks = [asyncio.create_task(self._requests()), asyncio.create_task(self._answers())]
        try:
            await asyncio.wait(self._tasks, return_when=asyncio.FIRST_COMPLETED)
        finally:
            self.cut()
            for outcome in await asyncio.gather(*self._tasks, return_exceptions=True):
                if isinstance(outcome, Exception) and not isinstance(outcome, OSError | EOFError):
                    raise outcome
            self.ended.set()

    def cut(self) -> None:
        for writer in (self._to_client, self._to_broker):
            writer.transport.abort()
        for task in self._tasks:
            task.cancel()

    async def _requests(self) -> None:
        while True:
            frame = await _frame(self._from_client)
            if self._drops():
                continue
            request = read_request(frame)
            if request is None:
                await _send(self._to_broker, frame)
                continue
            exchange = Exchange(request=request, connection=self._number)
            intervention = self._proxy.fate_of(exchange)
            self._expected[request.correlation_id] = (exchange, intervention)
            if intervention is None or intervention.fate.of_the_answer:
                await _send(self._to_broker, frame)
                continue
            intervention.met.set()
            if intervention.fate is Fate.LOSE_REQUEST:
                return
            if intervention.fate is Fate.STRAY_REQUEST:
                self._to_client.transport.abort()
            await intervention.gate().wait()
            await _send(self._to_broker, frame)
            if intervention.fate is Fate.STRAY_REQUEST:
                # The client is gone: the link ends with the broker's answer.
                await asyncio.Event().wait()

    async def _answers(self) -> None:
        while True:
            frame = await _frame(self._from_broker)
            if self._drops():
                continue
            exchange, intervention = self._expected.pop(int.from_bytes(frame[:4], signed=True), (None, None))
            if exchange is not None:
                exchange.error = _error_code(exchange.request, frame)
            if intervention is not None:
                intervention.met.set()
                if intervention.fate in (Fate.LOSE_ANSWER, Fate.STRAY_REQUEST):
                    return
                if intervention.fate is Fate.HOLD_ANSWER:
                    await intervention.gate().wait()
            await _send(self._to_client, frame)

    def _drops(self) -> bool:
        """Return whether what has just arrived is dropped."""
        now = asyncio.get_running_loop().time()
        self.silent = self.silent or now - self._used_at > self._proxy.idle_s
        self._used_at = now
        if self.silent and not self._met:
            self._met = True
            self._proxy.dropped += 1
        return self.silent


async def _frame(reader: asyncio.StreamReader) -> bytes:
    return await reader.readexactly(int.from_bytes(await reader.readexactly(_LENGTH)))


async def _send(writer: asyncio.StreamWriter, frame: bytes) -> None:
    writer.write(len(frame).to_bytes(_LENGTH) + frame)
    await writer.drain()


def _call(loop: asyncio.AbstractEventLoop, callback: Callable[[], None]) -> None:
    with contextlib.suppress(RuntimeError):  # the loop has been closed
        loop.call_soon_threadsafe(callback)


# --- the needed part of Kafka's protocol


def read_request(frame: bytes) -> Request | None:
    """Parse a request; None if its kind is not relevant."""
    fields = _Fields(frame)
    key, version, correlation_id = fields.number(2), fields.number(2), fields.number(4)
    if key not in _READ:
        return None
    api = Api(key)
    flexible = version >= api.first_flexible
    client_id = fields.text() or ""
    if flexible:
        fields.skip_tags()
    transactional_id = fields.compact_text() if flexible else fields.text()
    commits = None
    if api is Api.END_TXN:
        fields.number(8)  # producer id
        fields.number(2)  # its epoch
        commits = fields.number(1) != 0
    return Request(
        api=api,
        version=version,
        correlation_id=correlation_id,
        client_id=client_id,
        transactional_id=transactional_id or "",
        commits=commits,
    )


def _error_code(request: Request, frame: bytes) -> int:
    """Read the error code of an answer: it is after the throttle time in both kinds."""
    fields = _Fields(frame)
    fields.number(4)  # correlation id
    if request.version >= request.api.first_flexible:
        fields.skip_tags()
    fields.number(4)  # throttle time
    return fields.number(2)


class _Fields:
    """The fields of a frame, one after the other."""

    def __init__(self, frame: bytes) -> None:
        self._bytes: Iterator[int] = iter(frame)

    def _take(self, size: int) -> bytes:
        return bytes(next(self._bytes) for _ in range(size))

    def number(self, size: int) -> int:
        return int.from_bytes(self._take(size), signed=True)

    def varint(self) -> int:
        value = shift = 0
        while True:
            byte = next(self._bytes)
            value |= (byte & 0x7F) << shift
            if byte < 0x80:
                return value
            shift += 7

    def text(self) -> str | None:
        size = self.number(2)
        return None if size < 0 else self._take(size).decode()

    def compact_text(self) -> str | None:
        size = self.varint()
        return None if size == 0 else self._take(size - 1).decode()

    def skip_tags(self) -> None:
        for _ in range(self.varint()):
            self.varint()
            self._take(self.varint())
