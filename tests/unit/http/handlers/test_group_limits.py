"""The answers to a caller whose group is at a limit."""

from functools import partial

import pytest

from halfway.coordinator.requests import ServiceLimits
from halfway.http.requests.admission import ApiLimits
from halfway.protocol.policy import LimitOverrides
from tests.unit.http.conftest import NewWorld

ORDER = {"group": "shop", "messages": [{"topic": "orders", "value": "v" * 600}]}
LIMITS = {"pending": LimitOverrides(pending=1), "prepares_per_s": LimitOverrides(prepares_per_s=0.01)}


@pytest.mark.parametrize("limit", LIMITS)
async def test_a_refusal_names_the_limit_and_when_to_come_back(
    new_world: NewWorld, monkeypatch: pytest.MonkeyPatch, limit: str
) -> None:
    """In the header of a single call, and in the problem of a batch item."""
    monkeypatch.setattr("tests.support.rest.client.ServiceLimits", partial(ServiceLimits, default_limits=LIMITS[limit]))
    world = await new_world(ApiLimits(prepare_wait_s=0.01))
    await world.put_shop()
    assert (await world.call("POST", "/v1/transactions", ORDER)).status == 201
    alone = await world.call("POST", "/v1/transactions", ORDER)
    assert (alone.status, alone.error_code, alone.body["limit"]) == (429, "group_limited", limit)
    assert int(alone.headers["Retry-After"]) >= 1
    batch = await world.call("POST", "/v1/batch", {"prepare": [ORDER]})
    assert batch.status == 200
    problem = batch.body["prepare"][0]["problem"]
    assert (problem["status"], problem["error_code"], problem["limit"]) == (429, "group_limited", limit)
    assert problem["retry_after_s"] >= 1
