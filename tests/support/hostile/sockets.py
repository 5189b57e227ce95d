"""Clients that send what they like, byte by byte, and read when they like; and what they cost a coordinator."""

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from tests.support.coordinator.by_hand import total
from tests.support.coordinator.process import CoordinatorProcess
from tests.support.coordinator.rest_client import Rest

HOST = "127.0.0.1"
MIB = 1024 * 1024
LONGEST_PAUSE_S = 3.0
"""By a wall clock, on a machine that does other things: far above what is aimed at (100 ms)."""


def opened(port: int, *, receive_buffer: int | None = None) -> socket.socket:
    """Give a connection; with a small receive buffer the sender soon notices a peer that does not read."""
    made = socket.socket()
    made.settimeout(60)
    if receive_buffer is not None:
        made.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
    made.connect((HOST, port))
    return made


def head(method: str, path: str, *fields: str) -> bytes:
    """Give the head of a request."""
    lines = [f"{method} {path} HTTP/1.1", "Host: localhost", "Content-Type: application/json", *fields]
    return "\r\n".join([*lines, "", ""]).encode()


def post(path: str, body: bytes, method: str = "POST") -> bytes:
    """Give a whole request, after which the connection is closed."""
    return head(method, path, "Connection: close", f"Content-Length: {len(body)}") + body


async def exchanged(port: int, sent: bytes) -> bytes:
    """Send bytes on a connection of their own, and give all that comes back until it is closed."""
    reader, writer = await asyncio.open_connection(HOST, port)
    try:
        writer.write(sent)
        async with asyncio.timeout(60):
            return await reader.read()
    finally:
        writer.close()


@dataclass(frozen=True)
class Cost:
    """What a coordinator holds, read from its process and its metrics."""

    resident: int
    descriptors: int
    pause_s: float


async def cost(coordinator: CoordinatorProcess, rest: Rest) -> Cost:
    resident, descriptors = _held(Path("/proc") / str(coordinator.pid))
    return Cost(resident, descriptors, await total(rest, "halfway_loop_pause_seconds"))


def _held(process: Path) -> tuple[int, int]:
    status = (process / "status").read_text()
    resident = next(int(line.split()[1]) * 1024 for line in status.splitlines() if line.startswith("VmRSS"))
    return resident, len(list((process / "fd").iterdir()))


@asynccontextmanager
async def bounded(
    coordinator: CoordinatorProcess, rest: Rest, kind: str, *, memory: int = 64 * MIB, descriptors: int = 16
) -> AsyncIterator[None]:
    """Require that what happens within costs no more than that, and that the event loop never pauses for long."""
    before = await cost(coordinator, rest)
    yield
    after = await cost(coordinator, rest)
    grown = (after.resident - before.resident) // MIB
    held = after.descriptors - before.descriptors
    told = f"pause {after.pause_s * 1000:.0f} ms, memory {grown:+d} MiB, descriptors {held:+d}"
    print(f"{kind}: {told}")  # noqa: T201 - figures to read
    assert after.pause_s < LONGEST_PAUSE_S
    assert grown <= memory // MIB
    assert held <= descriptors
