"""The history of one transaction: its events, after which failures, and for which callers."""

import asyncio
from typing import Any

import pytest

from halfway.coordinator.ports import CheckAttempt, CheckReply, OpsRead
from halfway.protocol.transactions import Outcome
from tests.support.ids import named_id
from tests.support.rest.client import RestWorld
from tests.support.rest.guarded import guarded, own_id
from tests.support.rest.parked import SOON, scan_all
from tests.support.service.broker import Memory
from tests.support.surroundings import verdict
from tests.support.waiting import GENEROUS_S

HOSTILE = '<img src=x onerror="alert(1)">\u202e\x1b[31m'


def failed_check() -> CheckReply:
    attempt = CheckAttempt(
        host="http://shop:9000", sent=True, answered=False, status=502, detail="status 502, not 200", duration_s=0.25
    )
    return CheckReply(
        outcome=Outcome.UNKNOWN, sent=True, answered=False, reachable=True, detail="no", attempts=(attempt,)
    )


async def history(world: RestWorld, name: str) -> dict[str, Any]:
    answer = await world.call("GET", f"/v1/transactions/{name}/history")
    assert answer.status == 200, answer
    shown: dict[str, Any] = answer.body
    return shown


def event_fields(shown: dict[str, Any], *names: str) -> list[tuple[Any, ...]]:
    return [tuple(event[name] for name in ("event", *names)) for event in shown["events"]]


async def until_state(world: RestWorld, name: str, state: str, *worlds: RestWorld) -> None:
    while (await world.show(name)).body["state"] != state:
        await scan_all(world, *worlds)


async def test_the_whole_life_of_one_is_told_by_any_instance(instances: tuple[RestWorld, RestWorld]) -> None:
    """Prepared, checked, parked, resumed in a batch, checked, committed manually; then the places of its messages."""
    here, there = instances
    assert (await here.call("PUT", "/v1/groups/shop", SOON)).status == 201
    for world in instances:
        world.memory.caller.always(failed_check())
    for name in (named_id("t0"), named_id("t1"), named_id("t2")):
        await here.prepared({"topic": "orders", "key": name, "value": "v"}, {"topic": "coupons", "value": "v"}, id=name)
        await until_state(here, name, "parked", there)
    parked = await history(there, named_id("t1"))
    assert (parked["id"], parked["group"], parked["state"], parked["missing"]) == (named_id("t1"), "shop", "parked", [])
    assert event_fields(parked) == [("prepared",), ("check",), ("parked",)]
    assert (parked["events"][1]["attempt"], parked["complete"]) == (1, True)
    assert (parked["events"][2]["cause"], bool(parked["events"][2]["detail"])) == ("policy", True)
    assert parked["messages_detail"] is not None
    assert [(one["topic"], one["partition"], one["offset"]) for one in parked["messages"]] == [
        ("orders", None, None),
        ("coupons", None, None),
    ]

    here.memory.clock.advance(1)
    resumed = await here.call("POST", "/v1/batch", {"resume": [{"id": named_id("t1"), "remark": HOSTILE}]})
    assert resumed.body["resume"][0]["status"] == 200
    here.memory.clock.advance(1)
    end = {"outcome": "commit", "remark": "looked at by ann"}
    for world, name in ((here, named_id("t1")), (there, named_id("t0"))):
        path = f"/v1/transactions/{name}/end"
        assert (await world.call("POST", path, end, headers={"Halfway-Cause": "operator"})).status == 200
    for world in instances:
        shown = await history(world, named_id("t1"))
        assert [one for one in event_fields(shown, "cause", "remark") if one[0] != "check"] == [
            ("prepared", None, None),
            ("parked", "policy", None),
            ("resumed", "operator", HOSTILE),
            ("committed", "operator", "looked at by ann"),
        ]
        records = {
            (record.topic, record.partition, record.offset)
            for topic in ("orders", "coupons")
            for record in here.memory.records(topic)
            if dict(record.headers)["halfway-transaction-id"] == named_id("t1").encode()
        }
        assert {(one["topic"], one["partition"], one["offset"]) for one in shown["messages"]} == records
        assert (len(records), shown["messages_detail"]) == (2, None)


async def test_after_the_horizon_op_still_tells(world: RestWorld) -> None:
    """The transaction itself is then 404 or 410."""
    made = await world.prepared({"topic": "orders", "value": "v"})
    await world.prepared(id=named_id("mine"))
    for name in (made, named_id("mine")):
        assert (await world.end(name, "rollback", remark="stock was gone")).status == 200
    world.memory.clock.advance(2000)
    await scan_all(world)
    await scan_all(world)
    for name, status in ((made, 410), (named_id("mine"), 410)):
        assert (await world.show(name)).status == status
        shown = await history(world, name)
        assert shown["state"] == "rolled_back"
        assert event_fields(shown, "cause", "remark") == [
            ("prepared", None, None),
            ("rolled_back", "producer", "stock was gone"),
        ]
    assert (await world.call("GET", "/v1/transactions/never/history")).error_code == "unknown_transaction"


@pytest.mark.parametrize("outcome,state", [(Outcome.COMMIT, "committed"), (Outcome.ROLLBACK, "rolled_back")])
async def test_after_a_restart_the_check_that_decided_is_still_told(outcome: Outcome, state: str) -> None:
    """It has no record of its own, so it follows from the outcome. A restart changes no history."""
    memory = Memory(shards=2, topics={"orders": 3, "coupons": 1})
    async with RestWorld(memory=memory) as world:
        spec = {**SOON, "policy": {"first_check_after_s": 1}}
        assert (await world.call("PUT", "/v1/groups/shop", spec)).status == 201
        memory.caller.always(failed_check())
        await world.prepared(id=named_id("t1"))
        while not (await world.show(named_id("t1"))).body["checks"]:
            await scan_all(world)
        memory.caller.always(verdict(outcome))
        await until_state(world, named_id("t1"), state)
        before = await history(world, named_id("t1"))
        async with RestWorld(memory=memory.restarted()) as after:
            assert (shown := await history(after, named_id("t1"))) == before
            assert event_fields(shown, "attempt", "verdict") == [
                ("prepared", None, None),
                ("check", 1, None),
                ("check", 2, outcome.value),
                (state, None, None),
            ]


async def test_a_message_that_is_gone_from_its_topic_has_no_place(world: RestWorld) -> None:
    name = await world.prepared({"topic": "orders", "value": "v"}, {"topic": "coupons", "value": "v"})
    await world.end(name, "commit")
    world.memory.delete_topic("coupons")
    shown = await history(world, name)
    assert [one["offset"] is not None for one in shown["messages"]] == [True, False]
    assert shown["messages_detail"]


async def test_groups_leave_a_place_of_histories_to_operators(monkeypatch: pytest.MonkeyPatch) -> None:
    """However many they request, one of theirs is read at a time, and few may wait."""
    async with guarded() as both:
        name = own_id(0, "none")
        reading, go_on = asyncio.Semaphore(0), asyncio.Event()
        under_way = 0

        async def ops(*_: object, **__: object) -> OpsRead:
            nonlocal under_way
            under_way += 1
            reading.release()
            await go_on.wait()
            return OpsRead(ops=(), complete=True)

        monkeypatch.setattr(both.here.coordinator._histories._history, "ops", ops)
        asked = [asyncio.create_task(both.call("shop", "GET", f"/v1/transactions/{name}/history")) for _ in range(18)]
        done, _ = await asyncio.wait(asked, timeout=GENEROUS_S, return_when=asyncio.FIRST_COMPLETED)
        assert [(one.result().status, one.result().error_code) for one in done] == [(429, "overloaded")]
        asked.append(asyncio.create_task(both.call("operator", "GET", f"/v1/transactions/{name}/history")))
        async with asyncio.timeout(GENEROUS_S):
            await reading.acquire()
            await reading.acquire()
        assert under_way == 2
        go_on.set()
        answers = await asyncio.gather(*asked)
        assert sorted(answer.status for answer in answers) == [404] * 18 + [429]
