"""Producer services on 127.0.0.1, well-behaved and otherwise, that record what they were asked."""

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

Serve = Callable[[asyncio.StreamWriter, "Asked"], Awaitable[None]]


@dataclass
class Asked:
    """One request as it came in."""

    line: str
    headers: dict[str, str]
    body: bytes

    @property
    def nonce(self) -> str:
        """What a conforming service echoes."""
        nonce: str = json.loads(self.body)["nonce"]
        return nonce


@dataclass
class Endpoint:
    """A server that answers every request with what `serve` writes, and then closes or waits for the next."""

    port: int = 0
    connections: int = 0
    asked: list[Asked] = field(default_factory=list)
    written: int = 0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}/check"


async def _request(reader: asyncio.StreamReader) -> Asked:
    head = (await reader.readuntil(b"\r\n\r\n")).decode("ascii").split("\r\n")
    headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in head[1:] if line)}
    return Asked(head[0], headers, await reader.readexactly(int(headers["content-length"])))


@asynccontextmanager
async def endpoint(serve: Serve, *, keep: bool = False) -> AsyncIterator[Endpoint]:
    """Run a server; `keep` keeps the connection for further requests. All connections end with it."""
    made = Endpoint()
    tasks: set[asyncio.Task[None]] = set()

    async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        made.connections += 1
        task = asyncio.current_task()
        assert task is not None
        tasks.add(task)
        try:
            with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError, asyncio.CancelledError):
                while True:
                    made.asked.append(await _request(reader))
                    await serve(writer, made.asked[-1])
                    await writer.drain()
                    if not keep:
                        break
        finally:
            tasks.discard(task)
            writer.close()
            with contextlib.suppress(ConnectionError, asyncio.CancelledError):
                await writer.wait_closed()

    server = await asyncio.start_server(connected, "127.0.0.1", 0)
    made.port = server.sockets[0].getsockname()[1]
    try:
        yield made
    finally:
        server.close()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks)


def response(
    body: bytes, *, status: str = "200 OK", content_type: str = "application/json", extra: tuple[str, ...] = ()
) -> bytes:
    """Return the bytes of an HTTP response."""
    lines = [f"HTTP/1.1 {status}", f"Content-Type: {content_type}", f"Content-Length: {len(body)}", *extra]
    return "\r\n".join(lines).encode() + b"\r\n\r\n" + body


def sends(data: bytes) -> Serve:
    """Write bytes and nothing more."""

    async def serve(writer: asyncio.StreamWriter, _: Asked) -> None:
        writer.write(data)

    return serve


def echoes(outcome: str, *, after: bytes = b"") -> Serve:
    """Answer as a conforming service does, and write `after` behind it."""

    async def serve(writer: asyncio.StreamWriter, asked: Asked) -> None:
        writer.write(response(json.dumps({"outcome": outcome, "nonce": asked.nonce}).encode()) + after)

    return serve


def hangs(before: bytes = b"") -> Serve:
    """Write `before` and then nothing, with the connection open."""

    async def serve(writer: asyncio.StreamWriter, _: Asked) -> None:
        writer.write(before)
        await writer.drain()
        await asyncio.Event().wait()

    return serve


def repeats(head: bytes, chunk: bytes, *, pause_s: float = 0.0, written: Callable[[int], None] | None = None) -> Serve:
    """Write `chunk` again and again for as long as the client takes it."""

    async def serve(writer: asyncio.StreamWriter, _: Asked) -> None:
        writer.write(head)
        while True:
            writer.write(chunk)
            await writer.drain()
            if written is not None:
                written(len(chunk))
            await asyncio.sleep(pause_s)

    return serve
