"""Removes the members of a consumer group, on behalf of killed processes.

Kafka waits for the end of a session before it gives a dead member's partitions to another one. A test that kills its
only coordinator and starts it again would mostly wait for that. With shorter sessions a slow machine would end those of
live coordinators.
"""

import socket
import struct

from confluent_kafka.admin import AdminClient

_LEAVE_GROUP, _VERSION = 13, 0
_ANSWER_WITHIN_S = 60.0


def remove_members(bootstrap_servers: str, group: str) -> None:
    """Remove every member of a group if the only broker needs no password; otherwise do nothing.

    Raises:
        OSError: the broker hung up or did not answer.
    """
    admin = AdminClient({"bootstrap.servers": bootstrap_servers, "log_level": 0})
    host, _, port = bootstrap_servers.rpartition(":")
    for description in admin.describe_consumer_groups([group], request_timeout=_ANSWER_WITHIN_S).values():
        members = [member.member_id for member in description.result(_ANSWER_WITHIN_S).members]
        for member in members:
            with socket.create_connection((host, int(port)), _ANSWER_WITHIN_S) as connection:
                connection.sendall(_leave_group(group, member))
                (size,) = struct.unpack(">i", _exactly(connection, 4))
                _exactly(connection, size)


def _leave_group(group: str, member: str) -> bytes:
    """Return the request LeaveGroup in its first version: a header without tags, the group and the member."""
    header = struct.pack(">hhi", _LEAVE_GROUP, _VERSION, 0) + _text("halfway-tests")
    body = header + _text(group) + _text(member)
    return struct.pack(">i", len(body)) + body


def _text(text: str) -> bytes:
    data = text.encode()
    return struct.pack(">h", len(data)) + data


def _exactly(connection: socket.socket, size: int) -> bytes:
    data = b""
    while len(data) < size:
        if not (more := connection.recv(size - len(data))):
            raise ConnectionError("the broker hung up on a request to leave a group")
        data += more
    return data
