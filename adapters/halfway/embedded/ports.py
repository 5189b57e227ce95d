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
_LOOK_AGAIN_S = 0.05
# If the system does not tell, take the lowest first port of the systems we know (Linux: 32768, macOS: 49152).
_EPHEMERAL_DEFAULT = 32_768


def is_free(port: int, host: str = HOST) -> bool:
    """Return whether a server could listen on the port now."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        # As Java does: connections of an earlier server that still fade away do not matter, a listening one does.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
            probe.listen(1)
        except OSError:
            return False
    return True


def demand_free(port: int, host: str = HOST, *, patience_s: float = 1) -> None:
    """Raise PortTakenError when the port is taken and stays so (it may be a broker's that is just being killed)."""
    deadline = time.monotonic() + patience_s
    while not is_free(port, host):
        if time.monotonic() > deadline:
            raise PortTakenError(port, host)
        time.sleep(_LOOK_AGAIN_S)


def pick_port(taken: Collection[int] = (), host: str = HOST) -> int:
    """Give a port that is free now and not in `taken`.

    It lies below the ephemeral ports: while a broker is down, a client that keeps connecting to an ephemeral port
    sooner or later gets that very port as its own source port, connects to itself and keeps the broker from coming
    back.
    """
    for port in candidates():
        if port not in taken and is_free(port, host):
            return port
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.bind((host, 0))
        return int(probe.getsockname()[1])


def candidates() -> Iterator[int]:
    """Give ports in the order in which they are to be tried."""
    end = _first_ephemeral_port()
    for _ in range(TRIES if end - LOWEST > TRIES else 0):
        yield random.randrange(LOWEST, end)  # noqa: S311  protects nothing


def bind_failure(log: str) -> int | None:
    """Give the port that the broker could not bind, when its log says so."""
    match = re.search(r"failed to bind to \S*?:(\d+)", log, re.IGNORECASE)
    if match:
        return int(match[1])
    return 0 if "Address already in use" in log else None


def _first_ephemeral_port() -> int:
    try:
        return int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text(encoding="ascii").split()[0])
    except (OSError, ValueError, IndexError):
        return _EPHEMERAL_DEFAULT
