"""The OpenAPI document is generated from the models, valid, complete and correct."""

import json
import re
from collections.abc import Iterator
from typing import Any

import jsonschema
import pytest
from openapi_spec_validator import OpenAPIV31SpecValidator

from halfway.checks.caller import encode
from halfway.client import answer_check_sync
from halfway.coordinator.ports import CheckRequest
from halfway.http.handlers.openapi import document
from halfway.http.responses import STATUS
from halfway.protocol.errors import HalfwayError
from halfway.protocol.records import Message
from tests.support.ids import named_id
from tests.support.rest.client import RestWorld

DOCUMENT = document()
CALLS = [(path, method, call) for path, item in DOCUMENT["paths"].items() for method, call in item.items()]


def names_of(pairs: list[tuple[str, str, dict[str, Any]]]) -> list[str]:
    return [call["operationId"] for _, _, call in pairs]


def subclasses(kind: type[HalfwayError]) -> set[type[HalfwayError]]:
    return {kind} | {below for child in kind.__subclasses__() for below in subclasses(child)}


def test_it_is_valid_openapi_3_1() -> None:
    OpenAPIV31SpecValidator(DOCUMENT).validate()


async def test_it_is_served(world: RestWorld) -> None:
    answer = await world.call("GET", "/openapi.json")
    assert answer.status == 200
    assert answer.body == DOCUMENT


@pytest.mark.parametrize("path,method,call", CALLS, ids=names_of(CALLS))
def test_every_operation_lists_its_answers_and_its_problems(path: str, method: str, call: dict[str, Any]) -> None:
    assert call["summary"]
    statuses = set(call["responses"])
    assert any(status < "300" for status in statuses)
    assert {"400", "403", "429", "500", "503"} <= statuses
    if "requestBody" in call:
        assert {"413", "415", "422", "408"} <= statuses
    for status, response in call["responses"].items():
        assert response["description"]
        if status >= "400":
            assert set(response["content"]) == {"application/problem+json"}
    assert ("429" in statuses) == ("Retry-After" in call["responses"]["429"]["headers"])
    named = {parameter["name"] for parameter in call["parameters"] if parameter["in"] == "path"}
    assert named == set(re.findall(r"\{(\w+)\}", path))
    assert method in {"get", "put", "patch", "post", "delete"}


def test_every_error_that_can_be_answered_stands_in_the_table_once_and_in_openapi() -> None:
    """Codes are unique; only internal errors are 500."""
    internal = {"internal", "configuration", "lane_lost", "not_written", "overtaken", "peer_lost"}
    kinds = {kind for kind in subclasses(HalfwayError) if kind.__module__.startswith("halfway.")}
    codes = {kind.code for kind in kinds} - internal
    assert codes == {kind.code for kind in STATUS} - internal
    assert len({kind.code for kind in STATUS}) == len(STATUS)
    listed = set(re.findall(r"^- `(\w+)`:", "\n".join(_descriptions()), re.MULTILINE))
    of_no_operation = {"unknown_path", "method_not_allowed"}
    assert codes - of_no_operation | {"internal"} == listed


def _descriptions() -> list[str]:
    return [response["description"] for _, _, call in CALLS for response in call["responses"].values()]


def parts(part: Any = DOCUMENT) -> Iterator[dict[str, Any]]:
    """Yield every object of the document."""
    if isinstance(part, dict):
        yield part
    for one in part.values() if isinstance(part, dict) else part if isinstance(part, list) else ():
        yield from parts(one)


def test_generators_get_types_names_and_optional_fields() -> None:
    """Each enum has a type and one schema; no null default and none in a request makes a field a mandatory one."""
    assert [one for one in parts() if "enum" in one and one.get("type") != "string"] == []
    assert [one for one in parts() if one.get("default", 0) is None] == []
    schemas = DOCUMENT["components"]["schemas"]
    requests = [schema for schema in schemas.values() if schema.get("additionalProperties") is False]
    assert [one for schema in requests for one in schema["properties"].values() if "default" in one] == []
    enums = [str(one["enum"]) for one in parts(schemas) if len(one.get("enum", ())) > 1]
    assert len(enums) == len(set(enums))
    assert schemas.keys().isdisjoint({f"{name[0].upper()}{name[1:]}Response" for name in names_of(CALLS)})


def test_every_body_has_an_example_that_is_valid() -> None:
    calls = [*(call for _, _, call in CALLS), DOCUMENT["webhooks"]["check"]["post"]]
    bodies = [call["requestBody"]["content"]["application/json"]["schema"] for call in calls if "requestBody" in call]
    answer = DOCUMENT["webhooks"]["check"]["post"]["responses"]["200"]["content"]["application/json"]["schema"]
    for schema in (*bodies, answer):
        (example,) = DOCUMENT["components"]["schemas"][schema["$ref"].rpartition("/")[2]]["examples"]
        validate(example, schema)


def test_a_check_and_its_answer_are_what_the_webhook_says() -> None:
    """As halfway sends one, and as its Python client answers."""
    message, name = Message(topic="orders", value=b"\xff"), named_id("asked")
    request = CheckRequest(check_id="c", id=name, group="shop", prepared_at=0, attempt=1, messages=(message,))
    question = encode(request, "qL4c")
    webhook = DOCUMENT["webhooks"]["check"]["post"]
    validate(json.loads(question), webhook["requestBody"]["content"]["application/json"]["schema"])
    _, answer = answer_check_sync(question, lambda _: "commit")
    validate(json.loads(answer), webhook["responses"]["200"]["content"]["application/json"]["schema"])


def validate(body: object, schema: dict[str, Any]) -> None:
    jsonschema.Draft202012Validator({**schema, "components": DOCUMENT["components"]}).validate(body)


async def test_real_answers_are_what_it_says(world: RestWorld) -> None:
    """Each answer validates against the schema of its operation and status."""
    name = await world.prepared(id=named_id("mine"))
    await world.prepared({"topic": "orders", "value": {"type": "BINARY", "data": "/w=="}}, id=named_id("other"))
    message = [{"topic": "orders", "value": "v"}]
    batch = {
        "prepare": [{"group": "shop", "messages": message}, {}],
        "end": [{"id": named_id("other"), "outcome": "rollback"}],
    }
    batch |= {"check": [{"id": named_id("mine"), "remark": "r"}], "resume": [{"id": "never"}]}
    for operation, method, path, body in (
        ("putGroup", "PUT", "/v1/groups/shop", {"check": {"mode": "pull"}, "topics": ["orders"]}),
        ("putGroup", "PUT", "/v1/groups/shop", {}),
        ("patchGroup", "PATCH", "/v1/groups/shop", {"topics": ["orders"]}),
        ("patchGroup", "PATCH", "/v1/groups/shop", {}),
        ("listGroups", "GET", "/v1/groups", None),
        ("getGroup", "GET", "/v1/groups/shop", None),
        ("getGroup", "GET", "/v1/groups/nobody", None),
        ("fetchChecks", "GET", "/v1/groups/shop/checks", None),
        ("prepare", "POST", "/v1/transactions", {"group": "shop", "messages": message}),
        ("prepare", "POST", "/v1/transactions", {"group": "shop", "messages": message, "id": named_id("mine")}),
        ("getTransaction", "GET", "/v1/transactions/other", None),
        ("listTransactions", "GET", "/v1/transactions?limit=1", None),
        ("listTransactions", "GET", "/v1/transactions?group=nobody", None),
        ("check", "POST", f"/v1/transactions/{name}/check", None),
        ("batch", "POST", "/v1/batch", batch),
        ("end", "POST", f"/v1/transactions/{name}/end", {"outcome": "commit"}),
        ("end", "POST", f"/v1/transactions/{name}/end", {"outcome": "rollback"}),
        ("resume", "POST", f"/v1/transactions/{name}/resume", None),
        ("getTransaction", "GET", f"/v1/transactions/{name}", None),
        ("deleteGroup", "DELETE", "/v1/groups/shop", None),
    ):
        answer = await world.call(method, path, body)
        (call,) = [call for _, _, call in CALLS if call["operationId"] == operation]
        content = call["responses"][str(answer.status)].get("content", {})
        assert (answer.body is None) == (not content)
        for media_type, described in content.items():
            assert answer.headers["Content-Type"].startswith(media_type)
            validate(answer.body, described["schema"])
