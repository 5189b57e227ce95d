"""The body of a check."""

import json

from halfway.checks import caller as question
from halfway.coordinator.ports import CheckRequest
from halfway.protocol.records import Message, rfc3339


def test_a_question_has_the_transaction_and_its_messages_as_a_prepare_takes_them() -> None:
    """Text is sent as text, other bytes as base64, missing fields as null; a fetched check is the same."""
    request = CheckRequest(
        check_id="order-1:3",
        id="order-1",
        group="orders",
        prepared_at=1_767_225_600_007,
        attempt=3,
        messages=(
            Message(
                topic="coupon",
                key="Gr\u00f6\u00dfe \U0001f381".encode(),
                value=b"\xff\x00",
                headers=(("trace", b"7"), ("empty", b""), ("none", None), ("raw", b"\xfe")),
                partition=0,
            ),
            Message(topic="cart", key=None, value=None),
            Message(topic="points", key=b"", value=b'{"points": 3}\x00'),
        ),
    )
    assert json.loads(question.encode(request, "Zk3vN0pQ")) == {
        "type": "transaction.check",
        "nonce": "Zk3vN0pQ",
        "id": "order-1",
        "group": "orders",
        "prepared_at": "2026-01-01T00:00:00.007Z",
        "attempt": 3,
        "messages": [
            {
                "topic": "coupon",
                "key": "Gr\u00f6\u00dfe \U0001f381",
                "value": {"type": "BINARY", "data": "/wA="},
                "headers": [
                    {"name": "trace", "value": "7"},
                    {"name": "empty", "value": ""},
                    {"name": "none", "value": None},
                    {"name": "raw", "value": {"type": "BINARY", "data": "/g=="}},
                ],
                "partition": 0,
            },
            {"topic": "cart", "key": None, "value": None, "headers": [], "partition": None},
            {
                "topic": "points",
                "key": "",
                "value": {"type": "BINARY", "data": "eyJwb2ludHMiOiAzfQA="},
                "headers": [],
                "partition": None,
            },
        ],
    }


def test_times_are_in_utc_with_milliseconds() -> None:
    """Every time has the same format, also on a full second."""
    assert rfc3339(0) == "1970-01-01T00:00:00.000Z"
    assert rfc3339(1_767_225_600_999) == "2026-01-01T00:00:00.999Z"
