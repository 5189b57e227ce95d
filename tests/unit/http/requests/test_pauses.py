"""How long one request may block the event loop, in CPU time, with the worst bodies within the limit."""

import asyncio
import gc
import json
import time

import pytest

from halfway.http.requests.validation import MAX_MEMBERS, demand_few_members
from tests.support.hostile.worst_bodies import LIMIT, PREPARE, SMALL, WORST, filled
from tests.support.rest.client import RestWorld

HELD = 7.0
"""In units of `unit_s`: about 0.05 s on a machine where a body blocks the loop for 0.05 s. Guards against 0.7 s."""

FIELDS = b"Host: h\r\nConnection: close\r\nContent-Type: application/json"


def unit_s() -> float:
    """Return the CPU time of a fixed piece of work on this machine now: it may be slow, or shared."""
    began = time.thread_time()
    sum(number * number % 7 for number in range(1_000_000))
    return time.thread_time() - began


class LongestStep:
    """The longest CPU time of one step of the event loop."""

    def __init__(self) -> None:
        self.seconds = 0.0


@pytest.fixture
def longest_step(monkeypatch: pytest.MonkeyPatch) -> LongestStep:
    """Measure the CPU time of every step of the event loop, so that a busy machine does not matter.

    Objects of other tests do not matter either: Python would search all of them for garbage within a step.
    """
    longest_step = LongestStep()
    run = asyncio.Handle._run

    def measure(handle: asyncio.Handle) -> None:
        began = time.thread_time()
        run(handle)
        longest_step.seconds = max(longest_step.seconds, time.thread_time() - began)

    monkeypatch.setattr(asyncio.Handle, "_run", measure)
    gc.freeze()
    return longest_step


@pytest.mark.parametrize("path, body", WORST.values(), ids=WORST.keys())
async def test_no_body_holds_the_event_loop(
    world: RestWorld, longest_step: LongestStep, path: str, body: bytes
) -> None:
    """Whatever the answer is; other requests are served afterwards."""
    assert len(body) <= LIMIT
    method = b"PUT" if "groups" in path else b"POST"
    head = b"%s %s HTTP/1.1\r\n%s\r\nContent-Length: %d\r\n\r\n" % (method, path.encode(), FIELDS, len(body))
    before_s = unit_s()
    longest_step.seconds = 0.0
    answer = await world.send(head + body)
    assert answer.startswith(b"HTTP/1.1 "), answer[:100]
    assert answer.split()[1] in {b"200", b"201", b"400", b"413", b"422"}, answer[:300]
    assert longest_step.seconds < HELD * before_s or longest_step.seconds < HELD * unit_s()
    assert (await world.prepare()).status == 201


async def test_a_body_has_no_more_fields_and_items_than_may_be(world: RestWorld) -> None:
    """JSON data of the caller is not counted."""
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
