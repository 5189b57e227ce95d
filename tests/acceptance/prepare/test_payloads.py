"""Messages arrive as they were sent; what could not be sent is refused beforehand."""

import base64
from typing import Any

import pytest

from halfway.coordinator.prepare_rules import HEADER_OVERHEAD_BYTES, RECORD_OVERHEAD_BYTES
from tests.support.coordinator.rest_client import QUIET, Rest, message
from tests.support.coordinator.topics import Cluster, Record

OURS = ("halfway-transaction-id", "halfway-message", "halfway-prepared-at", "halfway-prefix")
EVERY_BYTE = bytes(range(256))


def binary(data: bytes) -> dict[str, str]:
    return {"type": "BINARY", "data": base64.b64encode(data).decode()}


def theirs(record: Record) -> list[tuple[str, bytes | None]]:
    """Return the headers that the producer sent."""
    return [(name, value) for name, value in record.headers if name not in OURS]


@pytest.fixture
async def deliver(rest: Rest, cluster: Cluster, group: str, topic: str) -> Any:
    """Return a function that prepares and commits messages without a topic, and returns what consumers get."""
    (await rest.put_group(group, topics=[topic], policy=QUIET)).expect(201)

    async def through(*messages: dict[str, object]) -> list[Record]:
        transaction = await rest.prepared(group, [{"topic": topic, **fields} for fields in messages])
        await rest.commit(transaction)
        return sorted(await cluster.read(topic), key=lambda record: record.header("halfway-message") or b"")

    return through


VALUES: dict[str, tuple[object, bytes | None]] = {
    "plain string": ("Grüße 🚀", "Grüße 🚀".encode()),
    "empty string": ("", b""),
    "tombstone": (None, None),
    "STRING": ({"type": "STRING", "data": "text"}, b"text"),
    "empty STRING": ({"type": "STRING", "data": ""}, b""),
    "BINARY": (binary(EVERY_BYTE), EVERY_BYTE),
    "empty BINARY": (binary(b""), b""),
    "string that looks like JSON": ('{"type": "JSON"}', b'{"type": "JSON"}'),
    "NUL in a string": ("a\0b", b"a\0b"),
    "JSON null": ({"type": "JSON", "data": None}, b"null"),
    "empty JSON string": ({"type": "JSON", "data": ""}, b'""'),
    "JSON list": ({"type": "JSON", "data": []}, b"[]"),
}


async def test_values_and_keys_arrive_as_sent(deliver: Any) -> None:
    """Text, binary, empty and null, as keys and as values; null is a tombstone and not the empty value."""
    records = await deliver(
        *({"key": form, "value": "for the key"} for form, _ in VALUES.values()),
        *({"key": "k", "value": form} for form, _ in VALUES.values()),
    )
    by_index = {record.header("halfway-message"): record for record in records}
    total = 2 * len(VALUES)
    ordered = [by_index[f"{index}/{total}".encode()] for index in range(1, total + 1)]

    for (name, (_, expected)), record in zip(VALUES.items(), ordered[: len(VALUES)], strict=True):
        assert record.key == expected, name
        assert record.value == b"for the key", name
    for (name, (_, expected)), record in zip(VALUES.items(), ordered[len(VALUES) :], strict=True):
        assert record.value == expected, name
        assert record.key == b"k", name


async def test_a_json_payload_is_kept_byte_for_byte(rest: Rest, cluster: Cluster, group: str, topic: str) -> None:
    """Order of fields, numbers beyond 64 bits, 1.0 and 1, repeated fields, spaces and escapes are unchanged."""
    (await rest.put_group(group, topics=[topic], policy=QUIET)).expect(201)
    payload = r'{"z": 1, "a":1.0,  "big": 123456789012345678901234567890.5e-3, "a": [ ], "u": "é\u00e9\/", "n":null }'
    body = (
        f'{{"group": "{group}", "messages": [{{"topic": "{topic}", '
        f'"key": {{"type": "JSON", "data": {payload}}}, "value": {{"type": "JSON", "data": {payload}}}}}]}}'
    )
    async with rest.session.post(
        f"{rest.url}/v1/transactions", data=body.encode(), headers={"Content-Type": "application/json"}
    ) as response:
        assert response.status == 201, await response.text()
        transaction = (await response.json())["id"]

    await rest.commit(transaction)

    (record,) = await cluster.read(topic)
    assert record.value == payload.encode()
    assert record.key == payload.encode()


async def test_headers_arrive_in_order_with_repeats_empty_null_and_binary(deliver: Any) -> None:
    sent = [
        {"name": "trace", "value": "1"},
        {"name": "trace", "value": "2"},
        {"name": "empty", "value": ""},
        {"name": "none", "value": None},
        {"name": "bytes", "value": binary(EVERY_BYTE)},
        {"name": "ünicode", "value": "ß"},
        {"name": "trace", "value": "1"},
    ]

    (record,) = await deliver({"value": "v", "headers": sent})

    assert theirs(record) == [
        ("trace", b"1"),
        ("trace", b"2"),
        ("empty", b""),
        ("none", None),
        ("bytes", EVERY_BYTE),
        ("ünicode", "ß".encode()),
        ("trace", b"1"),
    ]


class TestRefusedBeforehand:
    """A prepare that would fail at the commit is refused, and nothing is stored."""

    async def test_a_topic_that_does_not_exist(self, rest: Rest, group: str, topic: str) -> None:
        (await rest.put_group(group, topics=[topic, "no-such-topic"], policy=QUIET)).expect(201)
        problem = (await rest.prepare(group, [message(topic), message("no-such-topic")])).expect(422)
        assert problem["error_code"] == "unknown_topic"
        assert problem["errors"][0]["field"] == "messages[1].topic"
        assert (await rest.page(group=group))["transactions"] == []

    async def test_a_partition_that_the_topic_lacks(self, rest: Rest, group: str, topic: str) -> None:
        (await rest.put_group(group, topics=[topic], policy=QUIET)).expect(201)
        for partition in (3, -1, 2**31):
            answer = await rest.prepare(group, [message(topic, partition=partition)])
            assert answer.expect(422)["errors"][0]["field"] == "messages[0].partition", partition

    async def test_no_key_for_a_compacted_topic(self, rest: Rest, cluster: Cluster, group: str) -> None:
        compacted = await cluster.make_topic("compacted", config={"cleanup.policy": "compact"})
        (await rest.put_group(group, topics=[compacted], policy=QUIET)).expect(201)
        answer = await rest.prepare(group, [message(compacted)])
        assert answer.expect(422)["errors"][0]["field"] == "messages[0].key"
        await rest.commit(await rest.prepared(group, [message(compacted, None, key="k")]))
        (record,) = await cluster.read(compacted)
        assert (record.key, record.value) == (b"k", None)

    async def test_header_names_count_in_bytes(self, rest: Rest, cluster: Cluster, group: str) -> None:
        """The largest message that is accepted is delivered, whatever its size consists of."""
        low = await cluster.make_topic("low", config={"max.message.bytes": "70000"})
        (await rest.put_group(group, topics=[low], policy=QUIET)).expect(201)
        headers = [{"name": "\U0001f600" * 255, "value": None}] * 60
        value = "x" * (70_000 - RECORD_OVERHEAD_BYTES - 60 * (HEADER_OVERHEAD_BYTES + 4 * 255))
        larger = [message(low, value + "x", headers=headers)]
        (await rest.prepare(group, larger)).refused(413, "message_too_large")
        await rest.commit(await rest.prepared(group, [message(low, value, headers=headers)]))
        (record,) = await cluster.read(low)
        assert record.value == value.encode()
