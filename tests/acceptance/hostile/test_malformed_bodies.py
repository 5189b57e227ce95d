"""Bodies and parameters that no client should send: each is refused with a problem that names the cause."""

import asyncio
import json

import pytest

from tests.support.canary import PAYLOAD
from tests.support.coordinator.by_hand import total
from tests.support.coordinator.process import CoordinatorProcess
from tests.support.coordinator.rest_client import QUIET, Rest, message
from tests.support.hostile.malformed import refused, send

MOST_GROWTH_BYTES = 192 * 1024 * 1024
MEGABYTE = 1_000_000
Fields = dict[str, object]


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


def prepare_with(group: str, topic: str, /, **fields: object) -> bytes:
    return json.dumps({"group": group, "messages": [{"topic": topic, "value": PAYLOAD}], **fields}).encode()


def message_with(group: str, topic: str, /, **fields: object) -> bytes:
    return json.dumps({"group": group, "messages": [{"topic": topic, "value": PAYLOAD, **fields}]}).encode()


HUGE = 10**400
WRONG_PREPARES: dict[str, tuple[Fields, str]] = {
    "group a number": ({"group": 1}, "group"),
    "group null": ({"group": None}, "group"),
    "group too long": ({"group": "g" * 10_000}, "group"),
    "group with a slash": ({"group": "a/b"}, "group"),
    "messages an object": ({"messages": {}}, "messages"),
    "no messages": ({"messages": []}, "messages"),
    "a message null": ({"messages": [None]}, "messages[0]"),
    "a message a list": ({"messages": [[]]}, "messages[0]"),
    "an unknown field": ({"commit": True}, "commit"),
    "id with a slash": ({"id": "a/b"}, "id"),
    "id of 10,000": ({"id": "x" * 10_000}, "id"),
    "id empty": ({"id": ""}, "id"),
    "id with a line feed": ({"id": "a\n"}, "id"),
    "id a list": ({"id": ["a"]}, "id"),
    "id not ASCII": ({"id": "ä"}, "id"),
    "id as the server makes": ({"id": "0-01900000-0000-7000-8000-000000000000"}, "id"),
    "check_after_s negative": ({"check_after_s": -1}, "check_after_s"),
    "check_after_s 0": ({"check_after_s": 0}, "check_after_s"),
    "check_after_s huge": ({"check_after_s": 1e300}, "check_after_s"),
    "check_after_s a huge integer": ({"check_after_s": HUGE}, "check_after_s"),
    "check_after_s text": ({"check_after_s": "1"}, "check_after_s"),
    "check_after_s true": ({"check_after_s": True}, "check_after_s"),
}
WRONG_MESSAGES: dict[str, tuple[Fields, str]] = {
    "topic with a slash": ({"topic": "a/b"}, "topic"),
    "topic too long": ({"topic": "t" * 250}, "topic"),
    "topic empty": ({"topic": ""}, "topic"),
    "topic .": ({"topic": "."}, "topic"),
    "topic ..": ({"topic": ".."}, "topic"),
    "topic not ASCII": ({"topic": "tøpic"}, "topic"),
    "topic a number": ({"topic": 5}, "topic"),
    "value a number": ({"value": 5}, "value"),
    "value a list": ({"value": [PAYLOAD]}, "value"),
    "value of an unknown type": ({"value": {"type": "AVRO", "data": PAYLOAD}}, "value.type"),
    "value without data": ({"value": {"type": "STRING"}}, "value.data"),
    "value with more": ({"value": {"type": "STRING", "data": PAYLOAD, "more": 1}}, "value.more"),
    "STRING of a number": ({"value": {"type": "STRING", "data": 5}}, "value.data"),
    "BINARY not base64": ({"value": {"type": "BINARY", "data": f"{PAYLOAD}%%%"}}, "value.data"),
    "BINARY without padding": ({"value": {"type": "BINARY", "data": "QQ"}}, "value.data"),
    "BINARY with too much": ({"value": {"type": "BINARY", "data": "QQ==QQ=="}}, "value.data"),
    "BINARY with a line feed": ({"value": {"type": "BINARY", "data": "QUJD\n"}}, "value.data"),
    "BINARY of the URL alphabet": ({"value": {"type": "BINARY", "data": "_-_-"}}, "value.data"),
    "BINARY not ASCII": ({"key": {"type": "BINARY", "data": "ÄÖ"}}, "key.data"),
    "BINARY a number": ({"key": {"type": "BINARY", "data": 1}}, "key.data"),
    "key an object": ({"key": {}}, "key.type"),
    "partition negative": ({"partition": -1}, "partition"),
    "partition huge": ({"partition": HUGE}, "partition"),
    "partition that is not there": ({"partition": 2_000_000_000}, "partition"),
    "partition a fraction": ({"partition": 0.5}, "partition"),
    "headers an object": ({"headers": {"a": "b"}}, "headers"),
    "a header without a name": ({"headers": [{"value": PAYLOAD}]}, "headers[0].name"),
    "a header of halfway's": ({"headers": [{"name": "halfway-transaction-id", "value": PAYLOAD}]}, "headers[0].name"),
    "a header's name of 10,000": ({"headers": [{"name": "x" * 10_000}]}, "headers[0].name"),
    "a header's value a number": ({"headers": [{"name": "x", "value": 5}]}, "headers[0].value"),
}


async def test_each_wrong_field_of_a_prepare_is_named(
    rest: Rest, ready: str, coordinator: CoordinatorProcess, group: str, topic: str
) -> None:
    """With its index among the messages; alone and as an item of a batch."""
    wrong = {name: (prepare_with(group, topic, **fields), field) for name, (fields, field) in WRONG_PREPARES.items()}
    for name, (fields, field) in WRONG_MESSAGES.items():
        wrong[name] = message_with(group, topic, **fields), f"messages[0].{field}"
    wrong["topic of halfway's own"] = message_with(group, coordinator.topic("half")), "messages[0].topic"
    for name, (body, field) in wrong.items():
        answer = await send(rest, "POST", "/v1/transactions", body)
        assert answer.status == 422, (name, answer)
        refused(answer, 422, "invalid_request", field)
        [item] = (await send(rest, "POST", "/v1/batch", b'{"prepare": [' + body + b"]}")).expect(200)["prepare"]
        assert field in [one["field"] for one in item["problem"]["errors"]], (name, item)


WRONG_ENDS: dict[str, tuple[Fields, str]] = {
    "no outcome": ({}, "outcome"),
    "outcome of another kind": ({"outcome": "committed"}, "outcome"),
    "outcome in capitals": ({"outcome": "COMMIT"}, "outcome"),
    "outcome null": ({"outcome": None}, "outcome"),
    "outcome a list": ({"outcome": ["commit"]}, "outcome"),
    "outcome true": ({"outcome": True}, "outcome"),
    "remark too long": ({"outcome": "commit", "remark": "x" * 1025}, "remark"),
    "remark too long in UTF-8": ({"outcome": "commit", "remark": "€" * 342}, "remark"),
    "remark a number": ({"outcome": "commit", "remark": 5}, "remark"),
    "check_id empty": ({"outcome": "commit", "check_id": ""}, "check_id"),
    "check_id too long": ({"outcome": "commit", "check_id": "c" * 257}, "check_id"),
    "an unknown field": ({"outcome": "commit", "force": True}, "force"),
}


async def test_each_wrong_field_of_an_end_is_named_and_nothing_ends(rest: Rest, ready: str) -> None:
    """Alone and in a batch."""
    for name, (body, field) in WRONG_ENDS.items():
        answer = await send(rest, "POST", f"/v1/transactions/{ready}/end", json.dumps(body).encode())
        assert answer.status == 422, (name, answer)
        refused(answer, 422, "invalid_request", field)
        [item] = (await rest.batch(end=[{"id": ready, **body}])).expect(200)["end"]
        assert field in [one["field"] for one in item["problem"]["errors"]], (name, item)
    assert (await rest.show(ready))["state"] == "prepared"


WRONG_GROUPS: dict[str, tuple[Fields, str]] = {
    "no check": ({"check": None}, "check"),
    "check without anything": ({"check": {}}, "check"),
    "both ways": ({"check": {"mode": "pull", "urls": ["http://a/"]}}, "check"),
    "a URL of another scheme": ({"check": {"urls": ["ftp://a/"]}}, "check.urls[0]"),
    "a URL without a host": ({"check": {"urls": ["http:///x"]}}, "check.urls[0]"),
    "a URL with a password": ({"check": {"urls": ["http://u:p@a/"]}}, "check.urls[0]"),
    "a URL of 3,000": ({"check": {"urls": ["http://a/" + "x" * 3_000]}}, "check.urls[0]"),
    "a URL with a line feed": ({"check": {"urls": ["http://a/\nx"]}}, "check.urls[0]"),
    "a URL with a wrong port": ({"check": {"urls": ["http://a:99999/"]}}, "check.urls[0]"),
    "a URL a number": ({"check": {"urls": [5]}}, "check.urls[0]"),
    "no topics": ({"topics": []}, "topics"),
    "an illegal topic": ({"topics": ["ok", "a b"]}, "topics[1]"),
    "too many topics": ({"topics": [f"t{number}" for number in range(1001)]}, "topics"),
    "an unknown policy": ({"policy": {"max_retries": 1}}, "policy.max_retries"),
    "max_checks 0": ({"policy": {"max_checks": 0}}, "policy.max_checks"),
    "max_checks huge": ({"policy": {"max_checks": HUGE}}, "policy.max_checks"),
    "a negative interval": ({"policy": {"check_interval_s": -1}}, "policy.check_interval_s"),
    "a huge interval": ({"policy": {"max_interval_s": 1e12}}, "policy.max_interval_s"),
    "on_exhausted of another kind": ({"policy": {"on_exhausted": "commit"}}, "policy.on_exhausted"),
}


async def test_each_wrong_field_of_a_group_is_named_and_nothing_is_registered(
    rest: Rest, coordinator: CoordinatorProcess, group: str
) -> None:
    """A group may not have a topic of halfway's own."""
    wrong: dict[str, tuple[Fields, str]] = {
        **WRONG_GROUPS,
        "halfway's own": ({"topics": [coordinator.topic("half")]}, "topics[0]"),
    }
    for name, (fields, field) in wrong.items():
        body = json.dumps({"check": {"mode": "pull"}, "topics": ["orders"], **fields}).encode()
        answer = await send(rest, "PUT", f"/v1/groups/{group}", body)
        assert answer.status == 422, (name, answer)
        refused(answer, 422, "invalid_request", field)
    refused(await send(rest, "GET", f"/v1/groups/{group}"), 404, "unknown_group")


REPEATED = [
    ("POST", "/transactions", b'{"group": "G", "group": "G", "messages": [{"topic": "T", "value": "v"}]}'),
    ("POST", "/transactions", b'{"group": "G", "messages": [{"topic": "T", "value": "v", "value": "w"}]}'),
    ("POST", "/transactions", b'{"group": "G", "messages": [{"topic": "T", "value": "v", "v\\u0061lue": "w"}]}'),
    ("POST", "/transactions/ID/end", b'{"outcome": "rollback", "outcome": "commit"}'),
    ("POST", "/transactions/ID/end", b'{"outcome": "rollback", "\\u006futcome": "commit"}'),
    ("PUT", "/groups/G", b'{"topics": ["a"], "topics": ["T"], "check": {"mode": "pull"}}'),
    ("POST", "/batch", b'{"end": [], "end": [{"id": "ID", "outcome": "commit"}]}'),
]


async def test_a_name_that_is_given_twice_is_refused(rest: Rest, ready: str, group: str, topic: str) -> None:
    """JSON does not define which one counts: `rollback` and `commit` in one body must not lead to a guess."""
    for method, path, template in REPEATED:
        body = template
        for word, meant in ((b'"ID"', ready), (b'"G"', group), (b'"T"', topic)):
            body = body.replace(word, b'"%s"' % meant.encode())
        answer = await send(rest, method, "/v1" + path.replace("ID", ready).replace("G", group), body)
        problem = refused(answer, 422, "invalid_request")
        assert "twice" in problem["errors"][0]["detail"]
        assert problem["errors"][0]["field"]
    body = b'{"end": [{"id": "%s", "outcome": "commit", "outcome": "rollback"}]}' % ready.encode()
    [item] = (await send(rest, "POST", "/v1/batch", body)).expect(200)["end"]
    assert item["problem"]["errors"][0]["field"] == "outcome"
    assert (await rest.show(ready))["state"] == "prepared"
    free = b'{"group": "%s", "messages": [{"topic": "%s", "value": {"type": "JSON", "data": {"a": 1, "a": 2}}}]}'
    body = free % (group.encode(), topic.encode())
    assert (await send(rest, "POST", "/v1/transactions", body)).status == 201, "the data is the caller's own"


async def test_a_batch_has_from_one_to_a_thousand_items(rest: Rest, ready: str) -> None:
    """Or lists of objects: anything else is refused as a whole, or item by item."""
    too_many = json.dumps({"end": [{"id": ready, "outcome": "commit"}] * 1001}).encode()
    for body in (b"{}", b'{"prepare": [], "end": []}', too_many):
        problem = refused(await send(rest, "POST", "/v1/batch", body), 422, "invalid_request", "")
        assert "from 1 to 1000" in problem["detail"]
    for body, field in (
        (b'{"prepare": {}}', "prepare"),
        (b'{"end": null}', "end"),
        (b'{"end": [], "abort": []}', "abort"),
        (b"[]", ""),
        (b"null", ""),
        (b"5", ""),
    ):
        refused(await send(rest, "POST", "/v1/batch", body), 422, "invalid_request", field)
    items = (await send(rest, "POST", "/v1/batch", b'{"end": [null, 5, "x", [], {}, {"id": 5}]}')).expect(200)["end"]
    assert [item["status"] for item in items] == [422] * 6
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
