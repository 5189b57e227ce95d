"""Requests that no client should send, by hand: each is refused with a problem that names what is wrong."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import suppress
from typing import Any

import pytest
from yarl import URL

from tests.acceptance.by_hand import total
from tests.acceptance.coordinator_process import CoordinatorProcess, NewCoordinator
from tests.acceptance.rest_client import QUIET, Answer, Connect, Rest, message
from tests.acceptance.topics import Cluster
from tests.acceptance.waiting import eventually

MOST_GROWTH_BYTES = 192 * 1024 * 1024
MEGABYTE = 1_000_000
JSON = "application/json"


async def send(rest: Rest, method: str, path: str, body: bytes | None = None, **headers: str) -> Answer:
    """Send bytes as they are; the body as JSON unless `headers` say otherwise."""
    whole = {"Content-Type": JSON} | {name.replace("_", "-"): value for name, value in headers.items()}
    async with rest.session.request(
        method, URL(rest.url + path, encoded=True), data=body, headers=whole, allow_redirects=False
    ) as response:
        text = await response.text(errors="replace")
        return Answer(status=response.status, body=json.loads(text) if text else None, headers=response.headers.copy())


def refused(answer: Answer, status: int, code: str, field: str | None = None) -> dict[str, Any]:
    """Require a problem document, and that it names a field where one is wrong."""
    problem = answer.refused(status, code)
    assert problem["status"] == status
    assert problem["title"]
    assert problem["detail"]
    assert problem["instance"]
    if field is not None:
        assert field in [one["field"] for one in problem["errors"]], problem
        assert all(one["detail"] for one in problem["errors"])
    return problem


@pytest.fixture
async def ready(rest: Rest, group: str, topic: str) -> str:
    """Give a transaction that is pending, of a registered group."""
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
    "a NUL": b"\x00",
    "raw control characters": b'{"group": "a\nb"}',
}


@pytest.mark.parametrize("body", NOT_JSON.values(), ids=NOT_JSON)
async def test_what_is_no_json_is_400_at_every_call(rest: Rest, ready: str, group: str, body: bytes) -> None:
    """A megabyte of nested arrays included, and nothing is logged as an exception."""
    calls = {
        "POST": ["/v1/transactions", "/v1/batch", f"/v1/transactions/{ready}/end", f"/v1/transactions/{ready}/check"],
        "PUT": [f"/v1/groups/{group}"],
    }
    for method, paths in calls.items():
        for path in paths:
            answer = await send(rest, method, path, body)
            # A field of the wrong type may be met before the JSON goes wrong.
            assert answer.error_code in ("malformed_json", "invalid_request"), (path, answer)
            refused(answer, 400 if answer.error_code == "malformed_json" else 422, str(answer.error_code))
    assert (await rest.show(ready))["state"] == "prepared"


def prepare_with(group: str, topic: str, **fields: object) -> bytes:
    return json.dumps({"group": group, "messages": [{"topic": topic, "value": "v"}], **fields}).encode()


def message_with(group: str, topic: str, **fields: object) -> bytes:
    return json.dumps({"group": group, "messages": [{"topic": topic, "value": "v", **fields}]}).encode()


HUGE = 10**400
WRONG_PREPARES: dict[str, tuple[dict[str, object], str]] = {
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
WRONG_MESSAGES: dict[str, tuple[dict[str, object], str]] = {
    "topic internal": ({"topic": "INTERNAL"}, "topic"),
    "topic with a slash": ({"topic": "a/b"}, "topic"),
    "topic too long": ({"topic": "t" * 250}, "topic"),
    "topic empty": ({"topic": ""}, "topic"),
    "topic .": ({"topic": "."}, "topic"),
    "topic ..": ({"topic": ".."}, "topic"),
    "topic not ASCII": ({"topic": "tøpic"}, "topic"),
    "topic a number": ({"topic": 5}, "topic"),
    "value a number": ({"value": 5}, "value"),
    "value a list": ({"value": ["v"]}, "value"),
    "value of an unknown type": ({"value": {"type": "AVRO", "data": "x"}}, "value.type"),
    "value without data": ({"value": {"type": "STRING"}}, "value.data"),
    "value with more": ({"value": {"type": "STRING", "data": "x", "more": 1}}, "value.more"),
    "STRING of a number": ({"value": {"type": "STRING", "data": 5}}, "value.data"),
    "BINARY not base64": ({"value": {"type": "BINARY", "data": "%%%"}}, "value.data"),
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
    "a header without a name": ({"headers": [{"value": "x"}]}, "headers[0].name"),
    "a header of halfway's": ({"headers": [{"name": "halfway-transaction-id", "value": "x"}]}, "headers[0].name"),
    "a header's name of 10,000": ({"headers": [{"name": "x" * 10_000}]}, "headers[0].name"),
    "a header's value a number": ({"headers": [{"name": "x", "value": 5}]}, "headers[0].value"),
    "a lone surrogate": ({"value": "\ud800"}, "value"),
}


@pytest.mark.parametrize("fields, field", WRONG_PREPARES.values(), ids=WRONG_PREPARES)
async def test_a_wrong_field_of_a_prepare_is_named(
    rest: Rest, ready: str, group: str, topic: str, fields: dict[str, object], field: str
) -> None:
    """By itself and as an item of a batch."""
    body = prepare_with(group, topic, **fields)
    refused(await send(rest, "POST", "/v1/transactions", body), 422, "invalid_request", field)
    await refused_in_a_batch(rest, body, field)


@pytest.mark.parametrize("fields, field", WRONG_MESSAGES.values(), ids=WRONG_MESSAGES)
async def test_a_wrong_field_of_a_message_is_named(
    rest: Rest,
    ready: str,
    coordinator: CoordinatorProcess,
    group: str,
    topic: str,
    fields: dict[str, object],
    field: str,
) -> None:
    """With its place among the messages; a topic of halfway's own is refused also where the group would allow it."""
    if fields.get("topic") == "INTERNAL":
        fields = {"topic": coordinator.topic("half")}
    body = message_with(group, topic, **fields)
    refused(await send(rest, "POST", "/v1/transactions", body), 422, "invalid_request", f"messages[0].{field}")
    await refused_in_a_batch(rest, body, f"messages[0].{field}")


async def refused_in_a_batch(rest: Rest, item: bytes, field: str) -> None:
    answer = await send(rest, "POST", "/v1/batch", b'{"prepare": [' + item + b"]}")
    [only] = answer.expect(200)["prepare"]
    assert only["status"] == 422, only
    assert field in [one["field"] for one in only["problem"]["errors"]], only


WRONG_ENDS: dict[str, tuple[dict[str, object], str]] = {
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


@pytest.mark.parametrize("body, field", WRONG_ENDS.values(), ids=WRONG_ENDS)
async def test_a_wrong_end_is_refused_and_changes_nothing(
    rest: Rest, ready: str, body: dict[str, object], field: str
) -> None:
    """By itself and in a batch."""
    refused(
        await send(rest, "POST", f"/v1/transactions/{ready}/end", json.dumps(body).encode()),
        422,
        "invalid_request",
        field,
    )
    [item] = (await rest.batch(end=[{"id": ready, **body}])).expect(200)["end"]
    assert field in [one["field"] for one in item["problem"]["errors"]]
    assert (await rest.show(ready))["state"] == "prepared"


WRONG_GROUPS: dict[str, tuple[dict[str, object], str]] = {
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
    "an internal topic": ({"topics": ["INTERNAL"]}, "topics[0]"),
    "an illegal topic": ({"topics": ["ok", "a b"]}, "topics[1]"),
    "too many topics": ({"topics": [f"t{number}" for number in range(1001)]}, "topics"),
    "an unknown policy": ({"policy": {"max_retries": 1}}, "policy.max_retries"),
    "max_checks 0": ({"policy": {"max_checks": 0}}, "policy.max_checks"),
    "max_checks huge": ({"policy": {"max_checks": HUGE}}, "policy.max_checks"),
    "a negative interval": ({"policy": {"check_interval_s": -1}}, "policy.check_interval_s"),
    "a huge interval": ({"policy": {"max_interval_s": 1e12}}, "policy.max_interval_s"),
    "on_exhausted of another kind": ({"policy": {"on_exhausted": "commit"}}, "policy.on_exhausted"),
}


@pytest.mark.parametrize("fields, field", WRONG_GROUPS.values(), ids=WRONG_GROUPS)
async def test_a_wrong_group_is_refused(
    rest: Rest, coordinator: CoordinatorProcess, group: str, fields: dict[str, object], field: str
) -> None:
    """And is not registered."""
    if fields.get("topics") == ["INTERNAL"]:
        fields = {"topics": [coordinator.topic("half")]}
    body = json.dumps({"check": {"mode": "pull"}, "topics": ["orders"], **fields}).encode()
    refused(await send(rest, "PUT", f"/v1/groups/{group}", body), 422, "invalid_request", field)
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


@pytest.mark.parametrize("method, path, body", REPEATED)
async def test_a_name_that_is_given_twice_is_refused(
    rest: Rest, ready: str, group: str, topic: str, method: str, path: str, body: bytes
) -> None:
    """JSON leaves open which one counts: `rollback` and `commit` in one body must not be a guess."""
    path = "/v1" + path.replace("ID", ready).replace("G", group)
    for word, meant in ((b'"ID"', ready), (b'"G"', group), (b'"T"', topic)):
        body = body.replace(word, b'"%s"' % meant.encode())
    problem = refused(await send(rest, method, path, body), 422, "invalid_request")
    assert "twice" in problem["errors"][0]["detail"]
    assert problem["errors"][0]["field"]
    assert (await rest.show(ready))["state"] == "prepared"


async def test_a_name_that_is_given_twice_in_an_item_of_a_batch_is_refused(rest: Rest, ready: str) -> None:
    body = b'{"end": [{"id": "%s", "outcome": "commit", "outcome": "rollback"}]}' % ready.encode()
    [item] = (await send(rest, "POST", "/v1/batch", body)).expect(200)["end"]
    assert item["status"] == 422
    assert item["problem"]["errors"][0]["field"] == "outcome"
    assert (await rest.show(ready))["state"] == "prepared"


@pytest.mark.parametrize(
    "name",
    ["a%2Fb", "x" * 7_000, "%00", "%FF", "%20", "a%0Ab", "%C3%A4", "a,b", "%E2%80%AE", "'%20OR%201=1", "%252F", "{id}"],
)
async def test_an_illegal_id_in_the_path_is_422(rest: Rest, name: str) -> None:
    end = b'{"outcome": "commit"}'
    calls = {"": ("GET", None), "/end": ("POST", end), "/check": ("POST", None), "/resume": ("POST", None)}
    for suffix, (method, body) in calls.items():
        refused(await send(rest, method, f"/v1/transactions/{name}{suffix}", body), 422, "invalid_request", "id")
    refused(await send(rest, "GET", f"/v1/groups/{name}"), 422, "invalid_request", "group")
    refused(await send(rest, "DELETE", f"/v1/groups/{name}"), 422, "invalid_request", "group")


async def test_an_id_of_10_000_characters_or_with_slashes_in_the_path(rest: Rest) -> None:
    """The one is more than a request line may have, the other is no path that there is."""
    refused(await send(rest, "GET", "/v1/transactions/a/b"), 404, "unknown_path")
    refused(await send(rest, "GET", "/v1/transactions//"), 404, "unknown_path")
    refused(await send(rest, "GET", "/v1/transactions/../groups"), 404, "unknown_path")
    assert (await raw(rest, b"GET /v1/transactions/" + b"x" * 10_000 + b" HTTP/1.1\r\nHost: h\r\n\r\n"))[0] == 400


WRONG_QUERIES = {
    "limit=-1": "limit",
    "limit=0": "limit",
    "limit=1001": "limit",
    "limit=1" + "0" * 400: "limit",
    "limit=ten": "limit",
    "limit=1.5": "limit",
    "limit=NaN": "limit",
    "limit=": "limit",
    "state=done": "state",
    "state=": "state",
    "group=a%2Fb": "group",
    "topic=a%20b": "topic",
    "key=" + "k" * 4097: "key",
    "cursor=": "cursor",
    "cursor=%25%25": "cursor",
    "cursor=AAAA": "cursor",
    "cursor=W1tbW1tbW1s": "cursor",
    "cursor=WzEsMl0": "cursor",
    "cursor=" + "A" * 1025: "cursor",
    "offset=5": "offset",
    "limit=5&limit=6": "limit",
    "%FF=1": "\ufffd",
}


@pytest.mark.parametrize("query, field", WRONG_QUERIES.items(), ids=[query[:30] for query in WRONG_QUERIES])
async def test_a_wrong_parameter_of_the_list_is_named(rest: Rest, query: str, field: str) -> None:
    refused(await send(rest, "GET", f"/v1/transactions?{query}"), 422, "invalid_request", field)


@pytest.mark.parametrize(
    "query",
    ["wait_s=-1", "wait_s=61", "wait_s=NaN", "wait_s=inf", "wait_s=1e400", "max=0", "max=-5", "max=1001", "max=x"],
)
async def test_a_wrong_parameter_of_a_poll_is_named(rest: Rest, ready: str, group: str, query: str) -> None:
    field = query.partition("=")[0]
    refused(await send(rest, "GET", f"/v1/groups/{group}/checks?{query}"), 422, "invalid_request", field)


async def test_a_batch_has_from_one_to_a_thousand_items(rest: Rest, ready: str) -> None:
    """And lists of objects: anything else is refused as a whole, or item by item."""
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


@pytest.mark.parametrize(
    "headers",
    [
        {"Content-Type": "text/plain"},
        {"Content-Type": ""},
        {"Content-Type": "application/json-patch+json"},
        {"Content-Type": "application/x-www-form-urlencoded"},
        {"Content-Type": "multipart/form-data; boundary=x"},
        {"Content-Type": "\u00ff".encode().decode("latin-1")},
        {"Content-Encoding": "gzip"},
        {"Content-Encoding": "br, identity"},
    ],
    ids=str,
)
async def test_another_type_or_encoding_of_the_body_is_415(rest: Rest, ready: str, headers: dict[str, str]) -> None:
    for path in ("/v1/transactions", f"/v1/transactions/{ready}/end", "/v1/batch"):
        refused(await send(rest, "POST", path, b'{"outcome": "commit"}', **headers), 415, "unsupported_media_type")
    assert (await rest.show(ready))["state"] == "prepared"


async def raw(rest: Rest, sent: bytes, *, end: bool = False) -> tuple[int, dict[str, Any]]:
    """Send bytes over a connection of their own; give the first answer's status and its problem."""
    url = URL(rest.url)
    reader, writer = await asyncio.open_connection(url.host, url.port)
    try:
        writer.write(sent)
        if end:
            writer.write_eof()
        async with asyncio.timeout(60):
            head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
            headers = {name.lower(): value for name, _, value in (line.partition(": ") for line in head[1:])}
            body = await reader.readexactly(int(headers["content-length"]))
        assert headers["content-type"] == "application/problem+json", headers
        return int(head[0].split()[1]), json.loads(body)
    finally:
        writer.close()


LINE = b"POST /v1/transactions HTTP/1.1\r\nHost: h\r\nContent-Type: application/json\r\n"
BAD_HTTP = {
    "a long request line": b"GET /" + b"x" * 20_000 + b" HTTP/1.1\r\nHost: h\r\n\r\n",
    "a long header": b"GET /v1/groups HTTP/1.1\r\nHost: h\r\nX-Long: " + b"x" * 20_000 + b"\r\n\r\n",
    "no HTTP": b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\r\n\r\n",
    "a chunk without a size": LINE + b"Transfer-Encoding: chunked\r\n\r\nzz\r\n{}\r\n0\r\n\r\n",
    "a chunk with a negative size": LINE + b"Transfer-Encoding: chunked\r\n\r\n-5\r\n{}\r\n0\r\n\r\n",
    "two lengths": LINE + b"Content-Length: 2\r\nContent-Length: 3\r\n\r\n{}",
    "a length that is no number": LINE + b"Content-Length: two\r\n\r\n{}",
    "a negative length": LINE + b"Content-Length: -2\r\n\r\n{}",
    "a length and chunks": LINE + b"Content-Length: 2\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
    "a header without a colon": b"GET /v1/groups HTTP/1.1\r\nHost h\r\n\r\n",
    "a header with a NUL": b"GET /v1/groups HTTP/1.1\r\nHost: h\r\nX: a\x00b\r\n\r\n",
}


@pytest.mark.parametrize("sent", BAD_HTTP.values(), ids=BAD_HTTP)
async def test_what_is_no_http_is_400_and_says_nothing_of_what_was_sent(rest: Rest, sent: bytes) -> None:
    status, problem = await raw(rest, sent)
    assert status == 400, problem
    assert problem["error_code"] in ("bad_http", "malformed_json")


async def test_a_chunked_body_is_read_like_any_other(rest: Rest, ready: str, group: str, topic: str) -> None:
    """In many small chunks; too many bytes of them are 413 without an announcement."""

    async def chunks(body: bytes, size: int) -> AsyncIterator[bytes]:
        for at in range(0, len(body), size):
            yield body[at : at + size]

    async def post(body: bytes, size: int) -> Answer:
        async with rest.session.post(
            f"{rest.url}/v1/transactions", data=chunks(body, size), headers={"Content-Type": JSON}
        ) as response:
            return Answer(status=response.status, body=await response.json(content_type=None), headers=response.headers)

    good = prepare_with(group, topic)
    assert (await post(good, 3)).status == 201
    refused(await post(good[:-2], 3), 400, "malformed_json")
    refused(await post(b" " * (8 * 1024 * 1024 + 1), 65_536), 413, "body_too_large")


async def test_a_body_that_comes_too_slowly_is_408_and_holds_up_nobody(
    new_coordinator: NewCoordinator, connect: Connect, cluster: Cluster, topic: str, group: str
) -> None:
    """Fifty clients send a byte now and then; the others are served meanwhile, and what was held is let go."""
    coordinator = new_coordinator({"HALFWAY_REQUEST_TIMEOUT_S": "3"})
    coordinator.start()
    rest = connect(coordinator)
    (await rest.put_group(group, topics=[topic], policy=QUIET)).expect(201)

    async def slow() -> int:
        url = URL(rest.url)
        reader, writer = await asyncio.open_connection(url.host, url.port)
        try:
            writer.write(LINE + b"Content-Length: 100000\r\n\r\n")
            dripping = asyncio.create_task(drip(writer))
            try:
                async with asyncio.timeout(60):
                    return int((await reader.readline()).split()[1])
            finally:
                dripping.cancel()
        finally:
            writer.close()

    slow_ones = asyncio.gather(*(slow() for _ in range(50)))
    await rest.commit(await rest.prepared(group, [message(topic, "meanwhile")]))
    assert set(await slow_ones) == {408}
    await eventually(lambda: total(rest, "halfway_requests_in_flight"), lambda count: count == 0)


async def drip(writer: asyncio.StreamWriter) -> None:
    with suppress(ConnectionError):
        while True:
            writer.write(b" ")
            await asyncio.sleep(0.2)


async def test_memory_is_flat_under_malformed_bodies(rest: Rest, ready: str) -> None:
    """Two hundred megabytes of them, one after the other and side by side: only a leak would keep them."""
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
