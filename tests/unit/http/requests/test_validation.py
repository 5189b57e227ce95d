"""The first error in a body, and every one in parameters, is named with its value and a remedy; none is a 500."""

import json
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from halfway.http.requests import models
from halfway.http.requests.validation import Validation
from halfway.http.responses import encoded, problem
from halfway.protocol.errors import HalfwayError
from tests.support.ids import named_id
from tests.support.rest.client import SHOP, RestWorld

MESSAGE = {"topic": "orders", "value": "v"}


def prepare(**changes: object) -> dict[str, object]:
    return {"group": "shop", "messages": [MESSAGE], **changes}


def message(**changes: object) -> dict[str, object]:
    return prepare(messages=[{**MESSAGE, **changes}])


WRONG_PREPARES: dict[str, tuple[object, str]] = {
    "no object": ([], ""),
    "nothing": ({}, "group"),
    "no messages": (prepare(messages=[]), "messages"),
    "messages is no list": (prepare(messages={}), "messages"),
    "a message is no object": (prepare(messages=["x"]), "messages[0]"),
    "no topic, no value": (prepare(messages=[MESSAGE, {}]), "messages[1].topic"),
    "topic with spaces": (message(topic="a b"), "messages[0].topic"),
    "topic with a line feed": (message(topic="orders\n"), "messages[0].topic"),
    "empty topic": (message(topic=""), "messages[0].topic"),
    "long topic": (message(topic="x" * 250), "messages[0].topic"),
    "topic .": (message(topic="."), "messages[0].topic"),
    "topic ..": (message(topic=".."), "messages[0].topic"),
    "internal topic": (message(topic="_halfway.half"), "messages[0].topic"),
    "value is a number": (message(value=1), "messages[0].value"),
    "value is a list": (message(value=[]), "messages[0].value"),
    "value of another type": (message(value={"type": "AVRO", "data": 1}), "messages[0].value.type"),
    "value without data": (message(value={"type": "JSON"}), "messages[0].value.data"),
    "value with more": (message(value={"type": "JSON", "data": 1, "x": 1}), "messages[0].value.x"),
    "string that is none": (message(value={"type": "STRING", "data": 1}), "messages[0].value.data"),
    "binary that is none": (message(value={"type": "BINARY", "data": 1}), "messages[0].value.data"),
    "base64 without padding": (message(value={"type": "BINARY", "data": "YQ"}), "messages[0].value.data"),
    "base64 of URLs": (message(value={"type": "BINARY", "data": "_-8="}), "messages[0].value.data"),
    "base64 with a line feed": (message(value={"type": "BINARY", "data": "YQ==\n"}), "messages[0].value.data"),
    "base64 with accents": (message(value={"type": "BINARY", "data": "é"}), "messages[0].value.data"),
    "key of the wrong type": (message(key={"type": "BINARY", "data": "%"}), "messages[0].key.data"),
    "header without name": (message(headers=[{"value": "v"}]), "messages[0].headers[0].name"),
    "header with an empty name": (message(headers=[{"name": ""}]), "messages[0].headers[0].name"),
    "header of halfway's": (message(headers=[{"name": "halfway-x"}]), "messages[0].headers[0].name"),
    "header with a null byte": (message(headers=[{"name": "a\0"}]), "messages[0].headers[0].name"),
    "header value": (
        message(headers=[{"name": "a"}, {"name": "b", "value": {"type": "BINARY", "data": "!"}}]),
        "messages[0].headers[1].value.data",
    ),
    "headers as an object": (message(headers={"a": "b"}), "messages[0].headers"),
    "negative partition": (message(partition=-1), "messages[0].partition"),
    "huge partition": (message(partition=2**31), "messages[0].partition"),
    "broken partition": (message(partition=1.5), "messages[0].partition"),
    "unknown fields": (prepare(colour="red", messages=[{**MESSAGE, "size": 1}]), "messages[0].size"),
    "empty group": (prepare(group=""), "group"),
    "group with a slash": (prepare(group="a/b"), "group"),
    "group with a line feed": (prepare(group="shop\n"), "group"),
    "id with a space": (prepare(id="a b"), "id"),
    "long id": (prepare(id="x" * 129), "id"),
    "id of the form of a release before": (prepare(id="0-01890a5d-ac96-774b-bcce-b302099a8057"), "id"),
    "id that is no UUIDv7": (prepare(id="01890a5d-ac96-474b-bcce-b302099a8057"), "id"),
    "check_after_s of 0": (prepare(check_after_s=0), "check_after_s"),
    "check_after_s of years": (prepare(check_after_s=1e9), "check_after_s"),
    "check_after_s as text": (prepare(check_after_s="5"), "check_after_s"),
    "all at once": ({"messages": [{"topic": "..", "value": 1}], "group": 1, "id": ""}, "messages[0].value"),
}


@pytest.mark.parametrize("body,field", WRONG_PREPARES.values(), ids=WRONG_PREPARES.keys())
async def test_a_wrong_prepare_is_422_and_names_the_first_wrong_field(
    world: RestWorld, body: object, field: str
) -> None:
    answer = await world.call("POST", "/v1/transactions", raw=json.dumps(body).encode())
    assert (answer.status, answer.error_code) == (422, "invalid_request"), answer
    assert list(answer.fields) == [field]
    assert all(answer.fields.values())


WRONG_ENDS: dict[str, tuple[object, str]] = {
    "nothing": ({}, "outcome"),
    "a state for an outcome": ({"outcome": "COMMITTED"}, "outcome"),
    "null": ({"outcome": None}, "outcome"),
    "long remark": ({"outcome": "commit", "remark": "x" * 1025}, "remark"),
    "remark of many bytes": ({"outcome": "commit", "remark": "é" * 513}, "remark"),
    "empty check_id": ({"outcome": "commit", "check_id": ""}, "check_id"),
    "id in the body": ({"outcome": "commit", "id": "x"}, "id"),
}


@pytest.mark.parametrize("body,field", WRONG_ENDS.values(), ids=WRONG_ENDS.keys())
async def test_a_wrong_end_is_422_and_changes_nothing(world: RestWorld, body: object, field: str) -> None:
    transaction = await world.prepared()
    answer = await world.call("POST", f"/v1/transactions/{transaction}/end", body)
    assert (answer.status, list(answer.fields)) == (422, [field])
    assert (await world.show(transaction)).body["state"] == "prepared"


def group(**changes: object) -> dict[str, object]:
    return {**SHOP, **changes}


WRONG_GROUPS: dict[str, tuple[object, str]] = {
    "nothing": ({}, "check"),
    "neither urls nor pull": (group(check={}), "check"),
    "both": (group(check={"urls": ["http://a/"], "mode": "pull"}), "check"),
    "no urls": (group(check={"urls": []}), "check.urls"),
    "eleven urls": (group(check={"urls": [f"http://a/{n}" for n in range(11)]}), "check.urls"),
    "ftp": (group(check={"urls": ["http://a/", "ftp://a/"]}), "check.urls[1]"),
    "no host": (group(check={"urls": ["http:///check"]}), "check.urls[0]"),
    "no url": (group(check={"urls": ["shop:9000/check"]}), "check.urls[0]"),
    "user info": (group(check={"urls": ["http://user:secret@a/"]}), "check.urls[0]"),
    "port too large": (group(check={"urls": ["http://a:99999/"]}), "check.urls[0]"),
    "broken IPv6": (group(check={"urls": ["http://[::1/"]}), "check.urls[0]"),
    "space in a url": (group(check={"urls": ["http://a/ b"]}), "check.urls[0]"),
    "no topics": (group(topics=[]), "topics"),
    "internal topic": (group(topics=["orders", "_halfway.op"]), "topics[1]"),
    "policy": (
        group(policy={"first_check_after_s": -1, "max_checks": 0, "on_exhausted": "forget", "color": 1}),
        "policy.first_check_after_s",
    ),
    "infinite": (group(policy={"max_age_s": 1e400}), "policy.max_age_s"),
    "outlives op": (group(policy={"max_age_s": 600_000}), "policy.max_age_s"),
}


@pytest.mark.parametrize("body,field", WRONG_GROUPS.values(), ids=WRONG_GROUPS.keys())
async def test_a_wrong_group_is_422_and_names_the_first_wrong_field(world: RestWorld, body: object, field: str) -> None:
    raw = json.dumps(body).replace("Infinity", "1e400").encode()
    answer = await world.call("PUT", "/v1/groups/other", raw=raw)
    assert (answer.status, list(answer.fields)) == (422, [field])
    assert "secret" not in answer.body["detail"] or "user" in answer.body["detail"]
    assert (await world.call("GET", "/v1/groups/other")).status == 404


WRONG_PATHS: dict[str, tuple[str, str, set[str]]] = {
    "limit": ("GET", "/v1/transactions?limit=0", {"limit"}),
    "limit is no number": ("GET", "/v1/transactions?limit=ten", {"limit"}),
    "several": ("GET", "/v1/transactions?state=open&limit=1001&colour=red", {"state", "limit", "colour"}),
    "twice": ("GET", "/v1/transactions?group=a&group=b", {"group"}),
    "cursor": ("GET", "/v1/transactions?cursor=nonsense", {"cursor"}),
    "wait": ("GET", "/v1/groups/shop/checks?wait_s=61&max=0", {"wait_s", "max"}),
    "wait is not a number": ("GET", "/v1/groups/shop/checks?wait_s=nan", {"wait_s"}),
    "id": ("GET", "/v1/transactions/a%20b", {"id"}),
    "id with a slash": ("POST", "/v1/transactions/a%2Fb/check", {"id"}),
    "group": ("GET", "/v1/groups/" + "x" * 101, {"group"}),
    "unknown field of an optional body": ("POST", "/v1/transactions/x/check", {"x"}),
}


@pytest.mark.parametrize("method,path,fields", WRONG_PATHS.values(), ids=WRONG_PATHS.keys())
async def test_a_wrong_parameter_is_422_and_named(world: RestWorld, method: str, path: str, fields: set[str]) -> None:
    answer = await world.call(method, path, {"x": 1} if fields == {"x"} else None)
    assert (answer.status, answer.error_code) == (422, "invalid_request"), answer
    assert set(answer.fields) == fields


PREPARE = ("POST", "/v1/transactions")
INTERNAL = "topics that start with _halfway. are halfway's own"
WORDING: dict[str, tuple[str, str, object, str]] = {
    "no list item": (*PREPARE, prepare(messages=[]), "this list is not valid: expected a list of at least"),
    "another type": (*PREPARE, message(key=1), "key: this number is not valid: expected a string, an object with type"),
    "missing": (*PREPARE, {"messages": [MESSAGE]}, "group: missing: expected 1 to 100 letters, digits and . _ -"),
    "no check": ("PUT", "/v1/groups/a", {"topics": ["orders"]}, "check: missing: expected an object with urls and m"),
    "no list": ("PUT", "/v1/groups/a", group(topics="orders"), '"orders" is not valid: expected a list of 1 to 1000'),
    "no such id": (*PREPARE, prepare(id="hello"), '"hello" is not valid: expected a UUIDv7 of the coordinator\'s time'),
    "no such partition": (*PREPARE, message(partition=99), "messages[0].partition: 99 is not valid: topic 'orders' h"),
    "unknown": (*PREPARE, prepare(colour="red"), "colour: not a known field; known fields: group, messages, id, check"),
    "choice": ("PUT", "/v1/groups/a", group(policy={"on_exhausted": "x"}), '"x" is not valid: expected one of park, r'),
    "internal topic": (*PREPARE, message(topic="_halfway.op"),
                       f'messages[0].topic: "_halfway.op" is not valid: {INTERNAL}'),
    "base64": (*PREPARE, message(headers=[{"name": "a", "value": {"type": "BINARY", "data": "!"}}]),
               "messages[0].headers[0].value.data: this data is not valid: expected standard base64 with padding"),
    "a list as the body": (*PREPARE, [1], "the body: this list is not valid: expected an object"),
    "seconds": ("PUT", "/v1/groups/shop", group(policy={"max_age_s": -1}),
                "policy.max_age_s: -1 is not valid: expected a number of seconds above 0 and at most"),
    "state": ("GET", "/v1/transactions?state=no", None, '"no" is not valid: expected one of committed, parked'),
    "limit": ("GET", "/v1/groups?limit=0", None, 'limit: "0" is not valid: expected a whole number from 1 to 1000'),
    "cursor": ("GET", "/v1/groups?cursor=a%20b", None, "`next` of the previous page"),
    "id": ("GET", "/v1/transactions/a%20b", None, 'id: "a b" is not valid: expected 1 to 128 letters, digits and'),
}  # fmt: skip


@pytest.mark.parametrize("method,path,body,text", WORDING.values(), ids=WORDING.keys())
async def test_an_error_shows_the_value_and_describes_valid_ones(
    world: RestWorld, method: str, path: str, body: object, text: str
) -> None:
    """In the words of this API, without the names of models or of Python's types."""
    answer = await world.call(method, path, body)
    assert answer.status == 422
    assert text in answer.body["detail"]


NOT_JSON = {
    "cut short": b'{"group":',
    "two documents": b"{} {}",
    "trailing comma": b'{"group": "shop",}',
    "not a number": b'{"group": NaN}',
    "bad UTF-8": b'{"group": "\xff"}',
    "bad UTF-8 in JSON data": b'{"group":"shop","messages":[{"topic":"orders","value":{"type":"JSON","data":"\xff"}}]}',
    "half a surrogate": b'{"group": "\\ud800"}',
    "deep": b"[" * 100_000,
    "deep data": b'{"group":"shop","messages":[{"topic":"orders","value":{"type":"JSON","data":' + b"[" * 100_000,
    "UTF-16": '{"group": "shop"}'.encode("utf-16"),
    "a byte order mark": b"\xef\xbb\xbf{}",
    "spaces": b"  ",
}


@pytest.mark.parametrize("body", NOT_JSON.values(), ids=NOT_JSON.keys())
async def test_what_is_not_json_is_400(world: RestWorld, body: bytes) -> None:
    answer = await world.call("POST", "/v1/transactions", raw=body)
    assert answer.status == 400, answer
    assert answer.error_code in {"malformed_json", "empty_body"}


async def test_a_number_longer_than_python_reads_is_judged_as_any_other(world: RestWorld) -> None:
    """It is accepted in the caller's own data, and named as wrong elsewhere."""
    long = "1" * 5000
    data = (
        f'{{"group": "shop", "messages": [{{"topic": "orders", "value": {{"type": "JSON", "data": {{"id": {long}}}}}}}]'
    )
    taken = await world.call("POST", "/v1/transactions", raw=f'{data}, "id": "{named_id("id")}"}}'.encode())
    assert taken.status == 201
    wrong = await world.call("POST", "/v1/transactions", raw=f'{data}, "check_after_s": {long}}}'.encode())
    assert (wrong.status, set(wrong.fields)) == (422, {"check_after_s"})


async def test_an_empty_body_is_400(world: RestWorld) -> None:
    answer = await world.call("POST", "/v1/transactions", raw=b"")
    assert (answer.status, answer.error_code) == (400, "empty_body")


async def test_what_is_named_is_cut_short(world: RestWorld) -> None:
    answer = await world.call("POST", "/v1/transactions", prepare(group="g" * 100_000, **{"f" * 100_000: 1}))
    assert answer.status == 422
    assert len(json.dumps(answer.body)) < 3000


JSON: st.SearchStrategy[Any] = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=8,
)
DATA = JSON | st.fixed_dictionaries({"type": st.sampled_from(["STRING", "JSON", "BINARY", "X"]), "data": JSON})
MESSAGES = st.fixed_dictionaries(
    {},
    optional={
        "topic": st.sampled_from(["orders", ".", "_halfway.x", ""]) | JSON,
        "key": DATA,
        "value": DATA,
        "headers": st.lists(st.fixed_dictionaries({"name": st.text()}, optional={"value": DATA}), max_size=2) | JSON,
        "partition": st.integers(-2, 3) | JSON,
        "more": JSON,
    },
)
PREPARES = JSON | st.fixed_dictionaries(
    {},
    optional={
        "group": st.just("shop") | JSON,
        "messages": st.lists(MESSAGES, max_size=3) | JSON,
        "id": st.text(max_size=4) | JSON,
        "check_after_s": st.floats(allow_nan=False) | JSON,
    },
)


@settings(max_examples=400, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(body=PREPARES | PREPARES.map(lambda value: [value]))
def test_whatever_comes_is_accepted_or_told_what_is_wrong(body: object) -> None:
    """What msgspec refuses is put into words, and the answer is JSON."""
    validation = Validation(internal_prefix="_halfway.")
    raw = json.dumps(body).encode()
    told: dict[str, Any] = {}
    try:
        validation.read(models.PrepareRequest, raw, validation.to_prepare)
    except HalfwayError as error:
        told = json.loads(encoded(problem(error)))
    assert told.get("status", 400) in {400, 422}
    if told.get("status") == 422:
        assert told["errors"]
        assert all(item["detail"] for item in told["errors"])


@pytest.mark.parametrize("name", ["colour\ud800", '"\ud83d' * 50_000, '"' * 100_000])
async def test_a_long_or_broken_name_is_cut_short_too(world: RestWorld, name: str) -> None:
    answer = await world.call("POST", "/v1/transactions", prepare(**{name: 1}))
    assert answer.status in {400, 422}
    assert len(json.dumps(answer.body)) < 5000
