"""For every request that the OpenAPI description allows or forbids, the answer is one that it describes."""

import asyncio
from collections import Counter
from collections.abc import Sequence
from typing import Any
from uuid import uuid4

import pytest
import requests
import schemathesis
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st
from schemathesis import APIOperation, Case, GenerationMode
from schemathesis.checks import load_all_checks, not_a_server_error
from schemathesis.core.result import Ok
from schemathesis.specs.openapi import checks as openapi

from halfway.http.handlers.routes import OPERATIONS
from halfway.protocol.keys import RANDOM_BYTES, key_text
from halfway.protocol.principal import PrincipalKind
from tests.support.coordinator.by_hand import total
from tests.support.coordinator.process import NewCoordinator
from tests.support.coordinator.rest_client import NEVER_S, QUIET, Connect, message

AnyCase = Case[Any]
AnyOperation = APIOperation[Any, Any, Any, Any]

SEED = 20_261_121
EXAMPLES = 12
"""For each operation and each kind of generated request."""
MOST_GROWTH_BYTES = 128 * 1024 * 1024
"""The growth of the coordinator's memory over more than a thousand requests: only a leak needs this much."""
CHECKS = [
    not_a_server_error,
    openapi.status_code_conformance,
    openapi.content_type_conformance,
    openapi.response_headers_conformance,
    openapi.response_schema_conformance,
]
OF_NEGATIVE = [*CHECKS, openapi.negative_data_rejection]


OPERATOR = key_text(PrincipalKind.OPERATOR, bytes(range(RANDOM_BYTES)))
KEYED = {"HALFWAY_OPEN_ACCESS": "false", "HALFWAY_MASTER_SECRET": "m" * 32, "HALFWAY_OPERATOR_KEY": OPERATOR}
SHOWN = {"Authorization": f"Bearer {OPERATOR}"}
WITHOUT_SUCCESS = ["GET /v1/groups/{group}/check-secrets", "GET /v1/stream"]
"""Secrets are for the group's own key only, and the stream is a WebSocket: a plain request is refused."""


class Seeds:
    """What there is, so that requests can also succeed; generated values are replaced by it now and then."""

    def __init__(self, url: str, group: str, topic: str, ids: Sequence[str]) -> None:
        self._url = url
        self._group = group
        self._topic = topic
        self._pending, self._ended = ids

    def into(self, case: AnyCase) -> None:
        """Put what there is in place of what was generated, as far as it is of the right type."""
        if case.path.startswith("/v1/keys/"):
            wanted = {"kind": "reader", "name": uuid4().hex}
            made = requests.post(f"{self._url}/v1/keys", json=wanted, headers=SHOWN, timeout=120)
            case.path_parameters["id"] = made.json()["id"]
        elif "id" in (case.path_parameters or {}):
            case.path_parameters["id"] = self._ended if case.path.endswith("/end") else self._pending
        if "group" in (case.path_parameters or {}):
            case.path_parameters["group"] = self._group
        if case.operation.label == "DELETE /v1/groups/{group}":
            case.path_parameters["group"] = "spare"
            spare: dict[str, Any] = {"check": {"mode": "pull"}, "topics": [self._topic]}
            put = requests.put(f"{self._url}/v1/groups/spare", json=spare, headers=SHOWN, timeout=120)
            assert put.status_code in (200, 201)
        if case.operation.label.startswith(("PUT", "PATCH")) and isinstance(case.body, dict):
            # The group is changed, not spoilt.
            case.body = {"check": {"mode": "pull"}, "topics": [self._topic], "policy": {"first_check_after_s": NEVER_S}}
        if case.operation.label == "POST /v1/transactions":
            case.body = {"group": self._group, "messages": [{"topic": self._topic, "value": "v"}]}
        if case.operation.label == "GET /v1/transactions":
            case.query.pop("cursor", None)
            if "group" in case.query:
                case.query["group"] = self._group
        self._into_body(case.body)

    def _into_body(self, body: object) -> None:
        if isinstance(body, list):
            for one in body:
                self._into_body(one)
        elif isinstance(body, dict):
            known = {"group": self._group, "topic": self._topic, "outcome": "commit", "id": None, "partition": None}
            for name, value in body.items():
                if name in known:
                    body[name] = known[name]
                else:
                    self._into_body(value)
            body.pop("check_after_s", None)
            if body.get("outcome") == "commit":
                body.pop("check_id", None)
                body.pop("id", None)


def fuzz(operation: AnyOperation, mode: GenerationMode, seeds: Seeds, statuses: Counter[int]) -> None:
    """Send generated requests, every second one (at random) with what there is, and judge each answer."""

    @seed(SEED)
    @settings(
        max_examples=EXAMPLES,
        database=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
        deadline=None,
    )
    @given(case=operation.as_strategy(generation_mode=mode), lucky=st.booleans())
    def judge(case: AnyCase, *, lucky: bool) -> None:
        lucky = lucky and mode is GenerationMode.POSITIVE
        if lucky:
            seeds.into(case)
        if "wait_s" in (case.query or {}):
            case.query["wait_s"] = 0  # it would wait for so long
        response = case.call(timeout=120, headers=SHOWN)
        statuses[response.status_code] += 1
        # A batch answers for each item by itself, and the path of streams gives plain requests one answer.
        rejects = mode is GenerationMode.NEGATIVE and operation.path not in ("/v1/batch", "/v1/stream")
        case.validate_response(response, checks=OF_NEGATIVE if rejects else CHECKS)

    judge()


@pytest.mark.timeout(1800)
async def test_generated_requests_get_answers_that_are_described(
    new_coordinator: NewCoordinator, connect: Connect, topic: str, group: str
) -> None:
    """Legal and illegal ones, to every operation: never a 5xx, each operation that can succeeds, memory is flat."""
    coordinator = new_coordinator(KEYED).start()
    rest = connect(coordinator)
    rest.session.headers.update(SHOWN)
    (await rest.put_group(group, topics=[topic], policy=QUIET)).expect(201)
    ids = [await rest.prepared(group, [message(topic, "seed")]) for _ in range(2)]
    seeds = Seeds(coordinator.url, group, topic, ids)
    load_all_checks()
    # If loaded from its URL, schemathesis would skip the call that serves the description.
    served = await rest.session.get(f"{coordinator.url}/openapi.json")
    schema = schemathesis.openapi.from_dict(await served.json())
    schema.config.update(base_url=coordinator.url)
    before = await total(rest, "process_resident_memory_bytes")
    statuses: dict[str, Counter[int]] = {}
    print(f"seed {SEED}")  # noqa: T201  shown with a failure
    for result in schema.get_all_operations():
        assert isinstance(result, Ok), result
        operation = result.ok()
        statuses[operation.label] = Counter()
        takes_something = operation.definition.raw.keys() & {"requestBody"} or operation.definition.raw["parameters"]
        for mode in GenerationMode if takes_something else [GenerationMode.POSITIVE]:
            await asyncio.to_thread(fuzz, operation, mode, seeds, statuses[operation.label])

    never = [label for label, counted in statuses.items() if not any(200 <= status < 300 for status in counted)]
    assert sorted(never) == WITHOUT_SUCCESS, statuses
    assert sorted(statuses) == sorted(f"{one.method} {one.path}" for one in OPERATIONS)
    grown = await total(rest, "process_resident_memory_bytes") - before
    assert grown < MOST_GROWTH_BYTES
    assert (await rest.commit(await rest.prepared(group, [message(topic, "after all that")])))["changed"]
