"""A prepare as raw HTTP, and the problem in a raw response."""

import json

POST = b"POST /v1/transactions HTTP/1.1\r\nHost: h\r\nContent-Type: application/json\r\n"


BODY = b'{"group":"shop","messages":[{"topic":"orders","value":"v"}]}'


def problem_of(response: bytes) -> tuple[int, dict[str, object]]:
    """Return the status and the problem document of a raw response."""
    head, _, body = response.partition(b"\r\n\r\n")
    assert b"application/problem+json" in head, response
    document: dict[str, object] = json.loads(body)
    return int(head.split()[1]), document
