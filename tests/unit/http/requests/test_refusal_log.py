"""Refused requests in the log: the first of each kind with its ids, the number of the others, and no content."""

import json
from typing import Any

import pytest
from structlog.testing import capture_logs

from halfway.coordinator.logging import flush_all
from tests.support.canary import Canaries
from tests.support.ids import named_id
from tests.support.rest.client import RestWorld

MESSAGE = {"topic": "orders", "value": "v"}


@pytest.fixture(autouse=True)
def _nothing_counted_before() -> None:
    flush_all()


def refused(logs: list[Any]) -> list[dict[str, Any]]:
    return [line for line in logs if line["event"] == "request_refused"]


async def test_hundreds_of_refused_requests_are_two_lines_with_a_request_a_group_an_id_and_a_code(
    world: RestWorld,
) -> None:
    with capture_logs() as logs:
        for number in range(300):
            body = {"group": "bank", "id": named_id(f"b-{number}"), "messages": [MESSAGE]}
            answer = await world.call("POST", "/v1/transactions", body, headers={"X-Request-Id": f"r-{number}"})
            assert answer.status == 404
        flush_all()
    first, others = refused(logs)
    assert first == {
        "event": "request_refused",
        "log_level": "info",
        "operation": "prepare",
        "status": 404,
        "error": "unknown_group",
        "group": "bank",
        "id": named_id("b-0"),
        "request_id": "r-0",
    }
    assert (others["more"], others["id"], others["request_id"]) == (299, named_id("b-299"), "r-299")


async def test_what_the_caller_cannot_change_is_a_warning_and_an_end_has_the_group_of_its_transaction(
    world: RestWorld,
) -> None:
    name = await world.prepared(id=named_id("o-1"))
    with capture_logs() as logs:
        await world.end(name, "rollback")
        assert (await world.end(name, "commit")).status == 409
        assert (await world.call("GET", "/v1/nothing")).status == 404
        assert (await world.call("PUT", "/v1/groups/shop", {})).status == 422
    conflict, unknown, invalid = refused(logs)
    assert (conflict["operation"], conflict["error"], conflict["group"], conflict["id"]) == (
        "end",
        "already_ended",
        "shop",
        named_id("o-1"),
    )
    assert (unknown["operation"], unknown["group"], unknown["id"]) == ("none", None, None)
    assert (invalid["operation"], invalid["group"]) == ("putGroup", "shop")


async def test_items_of_a_batch_are_told_apart(world: RestWorld) -> None:
    await world.put_shop()
    prepares = [{"group": group, "messages": [MESSAGE]} for group in ("bank", "shop", "bank")]
    with capture_logs() as logs:
        answer = await world.call(
            "POST", "/v1/batch", {"prepare": prepares, "end": [{"id": named_id("o-9"), "outcome": "commit"}]}
        )
        assert answer.status == 200
        flush_all()
    found = {(one["operation"], one["group"], one["error"], one.get("more")) for one in refused(logs)}
    assert found == {
        ("batch_end", None, "unknown_transaction", None),
        ("batch_prepare", "bank", "unknown_group", None),
        ("batch_prepare", "bank", "unknown_group", 1),
    }
    assert all(one["request_id"] for one in refused(logs))


@pytest.mark.parametrize("path", ["/v1/groups/" + "x" * 5000, "/v1/transactions/" + "y" * 5000])
async def test_a_made_up_name_is_shown_in_part(world: RestWorld, path: str) -> None:
    with capture_logs() as logs:
        assert (await world.call("GET", path)).status in {404, 422}
    (one,) = refused(logs)
    assert max(len(str(value)) for value in one.values()) <= 128


VALUE = "canary-payload"
WRONG: dict[str, dict[str, object]] = {
    "a value that is no string": {"value": [VALUE]},
    "an unknown type": {"value": {"type": VALUE, "data": "x"}},
    "data that is no string": {"value": {"type": "STRING", "data": {"a": VALUE}}},
    "data that is no base64": {"value": {"type": "BINARY", "data": VALUE}},
    "a key that is no string": {"value": "x", "key": {"a": VALUE}},
    "a header's name": {"value": "x", "headers": [{"name": f"{VALUE}\n", "value": VALUE}]},
    "a header's value": {"value": "x", "headers": [{"name": "trace", "value": [VALUE]}]},
}
BODIES: dict[str, object] = {
    name: {"group": "shop", "messages": [{"topic": "orders"} | fields]} for name, fields in WRONG.items()
} | {
    "messages that are no list": {"group": "shop", "messages": VALUE},
    "a message that is no object": {"group": "shop", "messages": [VALUE]},
    "a body that is no object": VALUE,
}


@pytest.mark.parametrize("body", BODIES.values(), ids=BODIES.keys())
async def test_an_error_names_the_field_and_no_payload(world: RestWorld, body: object) -> None:
    """In a single call and in a batch; the values of fields without payload are shown."""
    for path, sent in (("/v1/transactions", body), ("/v1/batch", {"prepare": [body], "end": []})):
        answer = await world.call("POST", path, sent)
        assert answer.status in (200, 422)
        assert Canaries({"payload": VALUE}).found_in(json.dumps(answer.body)) == []
        assert "field" in json.dumps(answer.body)
    shown = await world.call("POST", "/v1/transactions", {"check_after_s": "soon", "group": "shop", "messages": []})
    assert '"soon"' in str(shown.body)
