"""Ports on the loopback interface."""

import random
import re
import socket
import time
from collections.abc import Collection, Iterator
from pathlib import Path

from halfway.embedded.errors import PortTakenError

HOST = "127.0.0.1"
TRIES = 200
LOWEST = 15_000
_RETRY_S = 0.05
# If the system's range is unknown, use the lowest first port of the known systems (Linux: 32768, macOS: 49152).
_EPHEMERAL_DEFAULT = 32_768


def is_free(port: int, host: str = HOST) -> bool:
    """Return whether a server could listen on the port now."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        # As Java does: closing connections of an earlier server do not matter, a listening socket does.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
            probe.listen(1)
        except OSError:
            return False
    return True


def require_free(port: int, host: str = HOST, *, patience_s: float = 1) -> None:
    """Raise PortTakenError if the port is still taken after `patience_s`: a killed broker may still hold it."""
    deadline = time.monotonic() + patience_s
    while not is_free(port, host):
        if time.monotonic() > deadline:
            raise PortTakenError(port, host)
        time.sleep(_RETRY_S)


def pick_port(taken: Collection[int] = (), host: str = HOST) -> int:
    """Return a port that is free now and not in `taken`.

    It is below the ephemeral ports. While a broker is down, a client that keeps connecting to an ephemeral port
    eventually gets this port as its own source port, connects to itself, and so keeps the broker from starting again.
    """
    for port in candidates():
        if port not in taken and is_free(port, host):
            return port
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.bind((host, 0))
        return int(probe.getsockname()[1])


def candidates() -> Iterator[int]:
    """Yield ports in the order in which to try them."""
    end = _first_ephemeral_port()
    for _ in range(TRIES if end - LOWEST > TRIES else 0):
        yield random.randrange(LOWEST, end)  # noqa: S311  protects nothing


def bind_failure(log: str) -> int | None:
    """Return the port that the broker could not bind: 0 if its log does not name it, None if there was no failure."""
    match = re.search(r"failed to bind to \S*?:(\d+)", log, re.IGNORECASE)
    if match:
        return int(match[1])
    return 0 if "Address already in use" in log else None


def _first_ephemeral_port() -> int:
    try:
        return int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text(encoding="ascii").split()[0])
    except (OSError, ValueError, IndexError):
        return _EPHEMERAL_DEFAULT
