"""Errors never repeat the content of a message, because clients log them."""

import json

import pytest

from tests.support.canary import Canaries
from tests.support.rest.client import RestWorld

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
