"""Client quotas and replica assignments, which confluent-kafka cannot set: requests of Kafka's protocol by hand."""

import socket
import struct
from collections.abc import Mapping, Sequence

_ALTER_CLIENT_QUOTAS, _ALTER_PARTITION_REASSIGNMENTS = 49, 45
_WITHIN_S = 60.0
_NO_TAGS = b"\0"


def set_quota(bootstrap_servers: str, entity: str, name: str, quota: str, value: float | None) -> None:
    """Set a quota of an entity (`user` or `client-id`) by its name; None removes it."""
    body = struct.pack(">ii", 1, 1) + _text(entity) + _text(name)
    body += struct.pack(">i", 1) + _text(quota) + struct.pack(">d??", value or 0.0, value is None, False)
    answer = _call(bootstrap_servers, _ALTER_CLIENT_QUOTAS, body)
    assert struct.unpack(">iih", answer[4:14])[1:] == (1, 0), answer


def reassign(bootstrap_servers: str, replicas: Mapping[tuple[str, int], Sequence[int]]) -> None:
    """Begin to move partitions to other brokers; the first one of each is to lead it."""
    body = struct.pack(">iB", round(_WITHIN_S * 1000), len(replicas) + 1)
    for (topic, partition), brokers in replicas.items():
        body += struct.pack("B", len(topic) + 1) + topic.encode()
        body += struct.pack(f">BiB{len(brokers)}i", 2, partition, len(brokers) + 1, *brokers) + 2 * _NO_TAGS
    answer = _call(bootstrap_servers, _ALTER_PARTITION_REASSIGNMENTS, body + _NO_TAGS, _NO_TAGS)
    assert struct.unpack(">xih", answer[4:11])[1] == 0, answer


def _call(bootstrap_servers: str, kind: int, body: bytes, tags: bytes = b"") -> bytes:
    """Send a request of version 0 to the first server; return the answer with its correlation id."""
    host, port = bootstrap_servers.split(",", maxsplit=1)[0].rsplit(":", maxsplit=1)
    request = struct.pack(">hhi", kind, 0, 1) + _text("halfway-tests") + tags + body
    with socket.create_connection((host, int(port)), timeout=_WITHIN_S) as connection:
        connection.sendall(struct.pack(">i", len(request)) + request)
        return _read(connection, struct.unpack(">i", _read(connection, 4))[0])


def _text(text: str) -> bytes:
    return struct.pack(">h", len(text)) + text.encode()


def _read(connection: socket.socket, size: int) -> bytes:
    parts = b""
    while len(parts) < size:
        part = connection.recv(size - len(parts))
        assert part, "the broker has closed the connection"
        parts += part
    return parts
