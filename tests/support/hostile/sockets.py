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
from tests.support.waiting import eventually

HOST = "127.0.0.1"
MIB = 1024 * 1024
LONGEST_PAUSE_S = 3.0
"""Far above what is aimed at (100 ms). Time in which it uses no CPU, as the machine runs others, is no pause."""


def opened(port: int, *, receive_buffer: int | None = None) -> socket.socket:
    """Give a connection; with a small receive buffer the sender soon notices a peer that does not read."""
    made = socket.socket()
    made.settimeout(180)
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
        async with asyncio.timeout(180):
            return await reader.read()
    finally:
        writer.close()


@dataclass(frozen=True)
class Cost:
    """What a coordinator holds, read from its process and its metrics."""

    resident: int
    descriptors: int
    pause_s: float
    cpu_s: float


async def cost(coordinator: CoordinatorProcess, rest: Rest) -> Cost:
    resident, descriptors = _held(Path("/proc") / str(coordinator.pid))
    pause_s = await total(rest, "halfway_loop_pause_seconds")
    return Cost(resident, descriptors, pause_s, await total(rest, "process_cpu_seconds_total"))


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
    # What its clients have let go a moment ago it lets go a moment later.
    after = await eventually(
        lambda: cost(coordinator, rest), lambda found: found.descriptors - before.descriptors <= descriptors
    )
    pause_s = min(after.pause_s, after.cpu_s - before.cpu_s)
    grown = (after.resident - before.resident) // MIB
    held = after.descriptors - before.descriptors
    told = f"pause {pause_s * 1000:.0f} ms, memory {grown:+d} MiB, descriptors {held:+d}"
    print(f"{kind}: {told}")  # noqa: T201 - figures to read
    assert pause_s < LONGEST_PAUSE_S
    assert grown <= memory // MIB
