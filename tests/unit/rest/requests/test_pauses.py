"""How long one request may hold the event loop, in CPU time: with the worst bodies that fit into the limit."""

import asyncio
import gc
import json
import time

import pytest

from halfway.rest.requests.structure import MAX_MEMBERS, demand_few_members
from tests.support.hostile.worst_bodies import LIMIT, PREPARE, SMALL, WORST, filled
from tests.support.rest.client import RestWorld

HELD = 7.0
"""In units of `unit_s`, which is 0.05 s where a body holds the loop for 0.05 s; this guards against 0.7 s and more."""

FIELDS = b"Host: h\r\nConnection: close\r\nContent-Type: application/json"


def unit_s() -> float:
    """Return the CPU time that a fixed piece of work takes here and now: the machine may be slow, or shared."""
    began = time.thread_time()
    sum(number * number % 7 for number in range(1_000_000))
    return time.thread_time() - began


class Held:
    """The longest time for which one step of the event loop used the CPU."""

    def __init__(self) -> None:
        self.longest_s = 0.0


@pytest.fixture
def held(monkeypatch: pytest.MonkeyPatch) -> Held:
    """Measure every step of the event loop by its CPU time: a busy machine counts for nothing.

    Nor does what other tests have left: Python would look through all of it for garbage within a step.
    """
    held = Held()
    run = asyncio.Handle._run

    def measured(handle: asyncio.Handle) -> None:
        began = time.thread_time()
        run(handle)
        held.longest_s = max(held.longest_s, time.thread_time() - began)

    monkeypatch.setattr(asyncio.Handle, "_run", measured)
    gc.freeze()
    return held


@pytest.mark.parametrize("path, body", WORST.values(), ids=WORST.keys())
async def test_no_body_holds_the_event_loop(world: RestWorld, held: Held, path: str, body: bytes) -> None:
    """Whatever it is answered, and others are served afterwards."""
    assert len(body) <= LIMIT
    method = b"PUT" if "groups" in path else b"POST"
    head = b"%s %s HTTP/1.1\r\n%s\r\nContent-Length: %d\r\n\r\n" % (method, path.encode(), FIELDS, len(body))
    before_s = unit_s()
    held.longest_s = 0.0
    answer = await world.send(head + body)
    assert answer.startswith(b"HTTP/1.1 "), answer[:100]
    assert answer.split()[1] in {b"200", b"201", b"400", b"413", b"422"}, answer[:300]
    assert held.longest_s < HELD * before_s or held.longest_s < HELD * unit_s()
    assert (await world.prepare()).status == 201


async def test_a_body_has_no_more_fields_and_items_than_may_be(world: RestWorld) -> None:
    """What a caller sends as JSON data is not counted among them."""
    answer = await world.call("POST", "/v1/transactions", raw=filled(PREPARE, SMALL, b"]}", 900_000))
    assert (answer.status, answer.error_code) == (422, "invalid_request")
    assert str(MAX_MEMBERS) in answer.body["detail"]
    data = [{"a": [1, 2, {"data": 'b,\\"'}], "data": [[1], {"c": ""}]}] * (MAX_MEMBERS // 8)
    value = {"type": "JSON", "data": data}
    stored = await world.prepare({"topic": "orders", "key": value, "value": value, "headers": [{"name": "a"}]})
    assert stored.status == 201, stored.body


@pytest.mark.parametrize("said", ["a,", '"', "\\", '\\"', '",', "[{", '"data":['])
async def test_what_strings_hold_is_no_field(said: str) -> None:
    values: list[dict[str, object]] = [{"topic": "t", "value": said * 10, "key": ""}] * 8000
    values.append({"value": {"type": "JSON", "data": [[said]] * 3000}})
    await demand_few_members(json.dumps({"group": "g", "messages": values}).encode())


async def test_a_batch_shares_what_may_be_explained(world: RestWorld) -> None:
    """Items that are wrong at their end are named by their first wrong field once it is used up."""
    item = {"group": "shop", "messages": [{"topic": "orders", "value": "v"}] * 30 + [{"topic": 1}]}
    answer = await world.call("POST", "/v1/batch", {"prepare": [item] * 20})
    told = [len(one["problem"]["errors"]) for one in answer.body["prepare"]]
    assert told[0] == 2
    assert told[-1] == 1
    assert all(one["problem"]["errors"][0]["field"] == "messages[30].topic" for one in answer.body["prepare"])
