"""Each call by each principal on another's group: at the owner of the shard, through another instance, in batches.

`MATRIX` lists what each caller gets. It is written manually, and not derived from the rules under test.
"""

from collections.abc import AsyncIterator
from itertools import count
from typing import Any

import pytest
import pytest_asyncio

from halfway.http.handlers.handlers import Operation
from halfway.http.handlers.routes import OPERATIONS
from halfway.http.server.api import Routes
from halfway.protocol.principal import RULES, Permission, PrincipalKind
from tests.support.rest.client import SHOP, Answer, RestWorld
from tests.support.rest.guarded import Guarded, guarded, own_id

ORDER = {"topic": "orders", "key": "k", "value": "a payload that is nobody else's"}
PULL = {"check": {"mode": "pull"}, "topics": ["orders"]}
TURNS = count()
BY_HAND = {"Halfway-Cause": "operator"}

#                    operator shop other board (a reader)
MATRIX: dict[str, tuple[int, int, int, int]] = {
    "putGroup": (200, 200, 403, 403),
    "patchGroup": (200, 200, 403, 403),
    "listGroups": (200, 200, 200, 200),
    "getGroup": (200, 200, 403, 200),
    "getCheckSecrets": (403, 200, 403, 403),
    "deleteGroup": (204, 403, 403, 403),
    "fetchChecks": (200, 200, 403, 403),
    "prepare": (201, 201, 403, 403),
    "end": (200, 200, 404, 403),
    "batch": (200, 200, 200, 403),
    "stream": (426, 426, 426, 403),  # a caller that may open a stream is asked for a handshake
    "getTransaction": (200, 200, 404, 200),
    "getHistory": (200, 200, 404, 200),
    "listTransactions": (200, 200, 403, 200),
    "check": (202, 202, 404, 403),
    "resume": (200, 403, 403, 403),
    "getStatistics": (200, 200, 200, 200),
    "createKey": (201, 403, 403, 403),
    "listKeys": (200, 403, 403, 403),
    "rotateKey": (201, 403, 403, 403),
    "revokeKey": (204, 403, 403, 403),
    "getOpenApi": (200, 200, 200, 200),
}
CALLERS = ("operator", "shop", "other", "board")
STRANGERS = ("nobody", "mistyped", "never made", "expired", "revoked", "peer")
BY_ID = {operation.id: operation for operation in OPERATIONS}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def shared_instances() -> AsyncIterator[Guarded]:
    """Provide two instances for all cells, which do not disturb each other."""
    async with guarded() as world:
        yield world


def test_every_call_has_a_row() -> None:
    assert set(MATRIX) == set(BY_ID)


def test_every_permission_has_a_rule() -> None:
    assert set(RULES) == set(Permission)


def test_a_route_without_a_rule_does_not_start() -> None:
    """An operation cannot be created without a permission, and the server refuses a permission without a rule."""
    fields = {name: getattr(OPERATIONS[0], name) for name in ("method", "path", "summary", "handler", "responses")}
    with pytest.raises(TypeError, match="access"):
        Operation(**fields)
    with pytest.raises(KeyError):
        Routes([Operation(**fields, access="whatever")])  # type: ignore[arg-type]


async def call(both: Guarded, at: RestWorld, shard: int, caller: str, operation: Operation) -> Answer:
    """Make one call about the group `shop`, or about a new transaction of it in a shard."""
    path = operation.path
    name = own_id(shard, f"t{next(TURNS)}")
    if "{group}" in path:
        group = "shop"
        if operation.id in ("deleteGroup", "fetchChecks"):
            group = "pulls" if caller != "shop" else "shop"
            spec = PULL
            assert (await both.call("operator", "PUT", f"/v1/groups/{group}", spec)).status in (200, 201)
        path = path.replace("{group}", group)
    if path.startswith("/v1/transactions/{id}"):
        made = {"group": "shop", "id": name, "messages": [ORDER]}
        assert (await both.call("operator", "POST", "/v1/transactions", made)).status == 201
        path = path.replace("{id}", name)
    if path.startswith("/v1/keys/{id}"):
        spare = await both.new_key(PrincipalKind.READER, f"spare{next(TURNS)}")
        path = path.replace("{id}", spare[5:17])
    bodies: dict[str, Any] = {
        "putGroup": SHOP,
        "patchGroup": SHOP,
        "prepare": {"group": "shop", "id": name, "messages": [ORDER]},
        "end": {"outcome": "commit"},
        "batch": {"prepare": [{"group": "shop", "id": name, "messages": [ORDER]}], "end": []},
        "createKey": {"kind": "group", "name": f"new{next(TURNS)}"},
    }
    body = bodies.get(operation.id)
    if operation.id == "listTransactions":
        path += "?group=shop"
    return await both.call_at(at, caller, operation.method, path, body)


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize("operation", OPERATIONS, ids=[operation.id for operation in OPERATIONS])
async def test_each_principal_gets_what_the_matrix_says(shared_instances: Guarded, operation: Operation) -> None:
    """At the owner of the shard (shard 0 is `here`) and through the other instance."""
    for at, shard in ((shared_instances.here, 0), (shared_instances.here, 1), (shared_instances.there, 0)):
        for caller, status in zip(CALLERS, MATRIX[operation.id], strict=True):
            answer = await call(shared_instances, at, shard, caller, operation)
            assert answer.status == status, (operation.id, caller, shard, answer)
            if status == 403:
                assert answer.error_code == "forbidden"
                assert caller in answer.body["detail"]
            if status >= 400 or caller == "board":
                assert "payload that is nobody" not in str(answer.body)


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize("operation", OPERATIONS, ids=[operation.id for operation in OPERATIONS])
async def test_strangers_are_refused_everything_but_the_description(
    shared_instances: Guarded, operation: Operation
) -> None:
    """Callers without a key, or with one that is mistyped, unknown, expired, revoked, or the instances' credential."""
    expired = await shared_instances.new_key(PrincipalKind.OPERATOR, f"late{next(TURNS)}", expires_in_ms=1_000)
    revoked = await shared_instances.new_key(PrincipalKind.OPERATOR, f"gone{next(TURNS)}")
    await shared_instances.call("operator", "DELETE", f"/v1/keys/{revoked[5:17]}")
    shared_instances.here.memory.clock.advance(2)
    first = shared_instances.tokens["operator"]
    assert first is not None
    shared_instances.tokens |= {
        "mistyped": first[:-1] + ("a" if first[-1] != "a" else "b"),
        "never made": "hw_o_AAAAAAAAAAAA_" + "B" * 43 + "_000000",
        "expired": expired,
        "revoked": revoked,
        "peer": "the credential of peers",
    }
    for at in (shared_instances.here, shared_instances.there):
        for caller in STRANGERS:
            answer = await call(shared_instances, at, 1, caller, operation)
            if operation.id == "getOpenApi":
                assert answer.status == 200
                continue
            assert (answer.status, answer.error_code) == (401, "unauthenticated"), (operation.id, caller, answer)
            assert answer.headers["WWW-Authenticate"] == 'Bearer realm="halfway"'
            token = shared_instances.tokens[caller]
            assert token is None or token not in str(answer.body)
