"""Many prepares and ends in one request."""

import json

from halfway.http.requests.admission import ApiLimits
from tests.support.rest.client import RestWorld
from tests.unit.http.conftest import NewWorld

ITEM = {"group": "shop", "messages": [{"topic": "orders", "value": "v"}]}


async def test_ends_of_one_batch_share_a_kafka_transaction(world: RestWorld) -> None:
    made = [await world.prepared() for _ in range(50)]
    before = world.memory.observer.count("lane_committed")
    await world.call("POST", "/v1/batch", {"end": [{"id": name, "outcome": "commit"} for name in made]})
    assert world.memory.observer.count("lane_committed") == before + 1


async def test_its_items_are_bounded(new_world: NewWorld) -> None:
    world = await new_world(ApiLimits(max_batch_items=3))
    await world.put_shop()
    wrong: list[dict[str, object]] = [{"prepare": [ITEM] * 2, "end": [{}] * 2}, {}, {"prepare": [], "end": []}]
    for body in wrong:
        answer = await world.call("POST", "/v1/batch", body)
        assert (answer.status, answer.error_code) == (422, "invalid_request")
        assert "1 to 3" in answer.body["detail"]
    assert (await world.call("POST", "/v1/batch", {"prepare": [ITEM] * 3})).status == 200


async def test_operators_end_batches_too(world: RestWorld) -> None:
    name = await world.prepared()
    body = json.dumps({"end": [{"id": name, "outcome": "rollback"}]}).encode()
    await world.call("POST", "/v1/batch", raw=body, headers={"Halfway-Cause": "operator"})
    assert (await world.show(name)).body["cause"] == "operator"
