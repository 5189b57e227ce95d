"""Many prepares, ends, checks and resumes in one request."""

import json

from structlog.testing import capture_logs

from halfway.coordinator.logging import flush_all
from halfway.http.requests.admission import ApiLimits
from tests.support.rest.client import RestWorld
from tests.support.rest.parked import HOSTILE, ids_in_state, park
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


async def test_parked_ones_are_resumed_then_checked_by_batches_to_any_instance(
    instances: tuple[RestWorld, RestWorld],
) -> None:
    """Each with a remark, and with one event of the audit trail that has it, like the single call."""
    here, there = instances
    ids = await park(12, here, there)
    before = len(here.memory.audit_trail.events)
    answer = await here.call("POST", "/v1/batch", {"resume": [{"id": name, "remark": HOSTILE} for name in ids]})
    assert answer.status == 200
    assert [(item["status"], item["body"]["state"]) for item in answer.body["resume"]] == [(200, "prepared")] * 12
    assert await ids_in_state(there, "parked") == []
    history = (await there.call("GET", f"/v1/transactions/{ids[5]}/history")).body["events"]
    assert [one["remark"] for one in history if one["event"] == "resumed"] == [HOSTILE]
    answer = await here.call("POST", "/v1/batch", {"check": [{"id": name, "remark": "well?"} for name in ids]})
    assert [(item["status"], item["body"]["id"]) for item in answer.body["check"]] == [(202, name) for name in ids]
    events = here.memory.audit_trail.events[before:]
    assert sorted((one.action, one.subject, one.group, one.remark, one.result) for one in events) == sorted(
        (action, name, "shop", remark, "done")
        for name in ids
        for action, remark in (("resume", HOSTILE), ("check_now", "well?"))
    )


async def test_a_check_or_a_resume_that_fails_disturbs_no_other(world: RestWorld) -> None:
    """One that has come to where it should be is no failure of its batch."""
    first, ended = await world.prepared(), await world.prepared()
    await world.end(ended, "commit")
    items = [{"id": ended}, {"id": "never"}, {"id": first}, {"id": "a b"}, {"id": first, "remark": "é" * 600}, {}]
    answer = await world.call("POST", "/v1/batch", {"check": items, "resume": items})
    assert answer.status == 200
    for name, status in (("check", 202), ("resume", 200)):
        assert [item["status"] for item in answer.body[name]] == [409, 404, status, 422, 422, 422]
        assert answer.body[name][0]["problem"]["error_code"] == "already_ended"
        assert answer.body[name][0]["problem"]["state"] == "committed"
    assert answer.body["prepare"] == answer.body["end"] == []


async def test_many_actions_on_transactions_are_a_few_lines_of_the_log() -> None:
    """Parking and resuming are told by group with a sample; the audit trail has an event for each."""
    flush_all()
    with capture_logs() as logs:
        async with RestWorld() as world:
            ids = await park(100, world)
            await world.call("POST", "/v1/batch", {"resume": [{"id": name, "remark": "mended"} for name in ids]})
            events = [event for event in world.memory.audit_trail.events if event.action == "resume"]
        flush_all()
    assert len(events) == 100
    parked, more_parked = (line for line in logs if line["event"] == "gave_up")
    assert (parked["group"], parked["action"], more_parked["more"]) == ("shop", "park", 99)
    assert parked["reason"]
    resumed, more_resumed = (line for line in logs if line["event"] == "audit_of_transactions")
    assert (resumed["group"], resumed["remark"], more_resumed["more"]) == ("shop", "mended", 99)
    assert resumed["subject"] in {event.subject for event in events}
    assert [line for line in logs if line["event"] == "audit" and line["action"] == "resume"] == []


async def test_a_single_check_or_resume_takes_a_remark_like_a_batch(world: RestWorld) -> None:
    """It is optional, as is the body."""
    for name, body in zip(await park(2, world), ({"remark": HOSTILE}, None), strict=True):
        for action, path in (("resume", "resume"), ("check_now", "check")):
            assert (await world.call("POST", f"/v1/transactions/{name}/{path}", body)).status in {200, 202}
            event = world.memory.audit_trail.events[-1]
            assert (event.action, event.subject, event.remark) == (action, name, (body or {}).get("remark"))
        too_long = await world.call("POST", f"/v1/transactions/{name}/check", {"remark": "é" * 600})
        assert (too_long.status, set(too_long.fields)) == (422, {"remark"})
