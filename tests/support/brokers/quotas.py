"""Client quotas, which confluent-kafka cannot set: one request of Kafka's protocol on a plain connection."""

import socket
import struct

_ALTER_CLIENT_QUOTAS = 49
_WITHIN_S = 60.0


def set_quota(bootstrap_servers: str, entity: str, name: str, quota: str, value: float | None) -> None:
    """Set a quota of an entity (`user` or `client-id`) by its name; None removes it."""
    host, port = bootstrap_servers.split(",", maxsplit=1)[0].rsplit(":", maxsplit=1)
    body = struct.pack(">hhi", _ALTER_CLIENT_QUOTAS, 0, 1) + _text("halfway-tests")
    body += struct.pack(">ii", 1, 1) + _text(entity) + _text(name)
    body += struct.pack(">i", 1) + _text(quota) + struct.pack(">d??", value or 0.0, value is None, False)
    with socket.create_connection((host, int(port)), timeout=_WITHIN_S) as connection:
        connection.sendall(struct.pack(">i", len(body)) + body)
        answer = _read(connection, struct.unpack(">i", _read(connection, 4))[0])
    correlation, _throttled, entries, error = struct.unpack(">iiih", answer[:14])
    assert (correlation, entries, error) == (1, 1, 0), answer


def _text(text: str) -> bytes:
    return struct.pack(">h", len(text)) + text.encode()


def _read(connection: socket.socket, size: int) -> bytes:
    parts = b""
    while len(parts) < size:
        part = connection.recv(size - len(parts))
        assert part, "the broker has closed the connection"
        parts += part
    return parts
