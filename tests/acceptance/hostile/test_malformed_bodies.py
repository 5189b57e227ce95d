"""Bodies and parameters that no client should send: each is refused with a problem that names the cause."""

import asyncio

import pytest

from tests.support.coordinator.by_hand import total
from tests.support.coordinator.rest_client import QUIET, Rest, message
from tests.support.hostile.malformed import refused, send

MOST_GROWTH_BYTES = 192 * 1024 * 1024
MEGABYTE = 1_000_000


@pytest.fixture
async def ready(rest: Rest, group: str, topic: str) -> str:
    """Prepare a transaction of a registered group."""
    (await rest.put_group(group, topics=[topic], policy=QUIET)).expect(201)
    return await rest.prepared(group, [message(topic)])


NESTED = b"[" * (MEGABYTE // 2) + b"]" * (MEGABYTE // 2)
NESTED_OBJECTS = b'{"a":' * (MEGABYTE // 5) + b"1" + b"}" * (MEGABYTE // 5)
NOT_JSON = {
    "nested arrays": NESTED,
    "nested objects": NESTED_OBJECTS,
    "never closed": b"[" * MEGABYTE,
    "nested in a field": b'{"group":' + NESTED + b"}",
    "not UTF-8": b'{"group": "\xff\xfe"}',
    "not UTF-8 in a key": b'{"\xff": 1}',
    "UTF-16": '{"group": "g"}'.encode("utf-16"),
    "NaN": b'{"group": NaN}',
    "Infinity": b'{"check_after_s": Infinity}',
    "two documents": b"{} {}",
    "trailing comma": b'{"group": "g",}',
    "a comment": b'{} // "group"',
    "single quotes": b"{'group': 'g'}",
    "nothing but spaces": b"   ",
    "cut off": b'{"group": "g", "messages": [{"topic"',
    "a byte order mark": b"\xef\xbb\xbf{}",
    "a lone surrogate": b'{"group": "\\ud800"}',
    "a NUL": b"\x00",
    "raw control characters": b'{"group": "a\nb"}',
}


async def test_what_is_no_json_is_400_at_every_call(rest: Rest, ready: str, group: str) -> None:
    """Including a megabyte of nested arrays; none has an effect."""
    calls = [
        ("PUT", f"/v1/groups/{group}"),
        ("POST", "/v1/transactions"),
        ("POST", "/v1/batch"),
        ("POST", f"/v1/transactions/{ready}/end"),
        ("POST", f"/v1/transactions/{ready}/check"),
        ("POST", f"/v1/transactions/{ready}/resume"),
    ]
    for name, body in NOT_JSON.items():
        for method, path in calls:
            answer = await send(rest, method, path, body)
            # A field of the wrong type may come before the malformed JSON.
            assert answer.error_code in ("malformed_json", "invalid_request"), (name, path, answer)
            refused(answer, 400 if answer.error_code == "malformed_json" else 422, str(answer.error_code))
    assert (await rest.show(ready))["state"] == "prepared"


async def test_memory_is_flat_under_malformed_bodies(rest: Rest, ready: str) -> None:
    """Two hundred megabytes of them, sequentially and concurrently: only a leak would keep them."""
    path = f"/v1/transactions/{ready}/end"
    bodies = [
        NESTED,
        NESTED_OBJECTS,
        b'{"outcome": "' + b"x" * MEGABYTE + b'"}',
        b'{"remark": ' + b"9" * MEGABYTE + b"}",
    ]

    async def round_of_them() -> None:
        for answer in await asyncio.gather(*(send(rest, "POST", path, body) for body in bodies * 5)):
            assert answer.status in (400, 422), answer

    await round_of_them()
    before = await total(rest, "process_resident_memory_bytes")
    for _ in range(9):
        await round_of_them()
    assert await total(rest, "process_resident_memory_bytes") - before < MOST_GROWTH_BYTES
    assert (await rest.show(ready))["state"] == "prepared"
