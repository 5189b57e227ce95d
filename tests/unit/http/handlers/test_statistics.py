"""Statistics: their content, for which callers, and unavailable shards."""

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest

from halfway.coordinator.ports import CheckAttempt, CheckReply, LaneWrite
from halfway.coordinator.records import Quarantined, Totals
from halfway.coordinator.requests import Moment
from halfway.protocol.errors import TopicUnavailableError
from halfway.protocol.transactions import Outcome
from tests.support.ids import named_id
from tests.support.rest.client import RestWorld
from tests.support.rest.guarded import guarded
from tests.support.rest.parked import park
from tests.support.waiting import GENEROUS_S

HOSTILE = "<script>alert(1)</script>"


async def statistics(world: RestWorld, condition: Any = lambda _: True) -> dict[str, Any]:
    """Return statistics once they match: for half a second they may be older."""
    async with asyncio.timeout(GENEROUS_S):
        while True:
            answer = await world.call("GET", "/v1/statistics")
            assert answer.status == 200, answer
            shown: dict[str, Any] = answer.body
            if condition(shown):
                return shown
            await asyncio.sleep(0.05)


async def test_figures_are_those_of_all_shards(instances: tuple[RestWorld, RestWorld]) -> None:
    """Through any instance."""
    here, there = instances
    ids = await park(6, here, there)
    await here.prepared(id=named_id("open"))
    await here.end(ids[0], "rollback")
    for world in instances:
        shown = await statistics(world, lambda one: one["totals"]["remembered"] == 1)
        assert (shown["complete"], shown["away"]) == (True, [])
        totals = shown["totals"]
        assert (totals["pending"], totals["parked"], totals["remembered"]) == (1, 5, 1)
        assert [one["shard"] for one in shown["shards"]] == [0, 1]
        assert sum(one["parked"] for one in shown["shards"]) == 5
        assert {one["instance"] for one in shown["shards"]} == {one["url"] for one in shown["instances"]}
        assert [one["shards"] for one in shown["instances"] if one["asked"]] == [world.coordinator.shards.served]
        (group,) = shown["groups"]
        assert (group["group"], group["pending"], group["parked"]) == ("shop", 1, 5)


async def test_totals_are_those_of_all_instances_and_samples_show_how_they_grew(
    instances: tuple[RestWorld, RestWorld], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A sample counts only if every instance that had started has one of that moment. A group gets none."""
    here, there = instances
    for number, world in enumerate(instances):
        desk = world.coordinator.statistics
        monkeypatch.setattr(desk, "totals", lambda group: Totals(commits=5 if group is None else 2, lane_s=0.5))
        monkeypatch.setattr(world.coordinator.statistics._activity, "since", Moment(10_000 * number))
        moments = (5_000, 10_000, 15_000) if number == 0 else (10_000, 20_000)
        desk._samples.extend(Totals(at=Moment(at), commits=at // 5_000) for at in moments)
    for world in instances:
        shown = (await world.call("GET", "/v1/statistics?samples=true")).body
        assert (shown["counted"]["commits"], shown["counted"]["lane_s"]) == (10, 1.0)
        assert [one["counted"]["commits"] for one in shown["instances"]] == [5, 5]
        assert [(one["at"], one["commits"]) for one in shown["samples"]] == [
            ("1970-01-01T00:00:05.000Z", 1),
            ("1970-01-01T00:00:10.000Z", 4),
        ]
        assert (await world.call("GET", "/v1/statistics")).body["samples"] == []
        assert (await world.call("GET", "/v1/statistics?samples=perhaps")).status == 422
        of_group = (await world.call("GET", "/v1/statistics?group=shop&samples=true")).body
        assert (of_group["counted"]["commits"], of_group["samples"]) == (4, [])
    before = (await here.call("GET", "/v1/statistics?group=shop")).body["counted_by"]
    here.memory.kafka.handlers.pop(there.memory.url)
    shown = await statistics(here, lambda one: not one["complete"])
    assert shown["counted_by"] != before


async def test_what_is_away_is_named(instances: tuple[RestWorld, RestWorld]) -> None:
    """Its owner does not answer: the figures are marked as incomplete."""
    here, there = instances
    await park(6, here, there)
    url = there.memory.url
    here.memory.kafka.handlers.pop(url)
    shown = await statistics(here, lambda one: not one["complete"])
    (away,) = shown["away"]
    assert (away["shard"], away["instance"]) == (1, url)
    assert away["detail"]
    assert [one["parked"] is None for one in shown["shards"]] == [False, True]
    assert shown["totals"]["parked"] < 6
    of_group = await here.call("GET", "/v1/statistics?group=shop")
    assert [(one["shard"], one["instance"], url in one["detail"]) for one in of_group.body["away"]] == [
        (1, None, False)
    ]


async def test_what_could_not_be_written_is_shown_until_it_is(world: RestWorld) -> None:
    await world.prepared({"topic": "coupons", "value": "v"}, id=named_id("bad"))
    world.memory.delete_topic("coupons")
    assert (await world.end(named_id("bad"), "commit")).error_code == "topic_unavailable"
    shown = await statistics(world, lambda one: one["failures"]["topics"])
    (topic,) = shown["failures"]["topics"]
    assert (topic["topic"], topic["error_code"], topic["refused"]) == ("coupons", "topic_unavailable", 1)
    assert [one["id"] for one in shown["failures"]["refused"]] == [named_id("bad")]
    world.memory.create_topic("coupons", 1)
    assert (await world.end(named_id("bad"), "commit")).status == 200
    shown = await statistics(world, lambda one: not one["failures"]["topics"])
    assert shown["failures"]["refused"] == []


async def test_a_refusal_that_names_no_topic_is_shown_with_its_transaction(
    world: RestWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    await world.prepared(id=named_id("held"))
    submit = world.memory.lane.submit

    def refuse(writes: Sequence[LaneWrite]) -> None:
        """Refuse what has messages; a record that commit was said has none."""
        error = "Kafka did not describe the topics in time"
        world.memory.lane._answered([(write, TopicUnavailableError(error)) for write in writes if write.messages])
        submit([write for write in writes if not write.messages])

    with monkeypatch.context() as patched:
        patched.setattr(world.memory.lane, "submit", refuse)
        assert (await world.end(named_id("held"), "commit")).error_code == "topic_unavailable"
    shown = await statistics(world, lambda one: one["failures"]["refused"])
    (write,) = shown["failures"]["refused"]
    assert (write["id"], write["topic"], write["error_code"]) == (named_id("held"), None, "topic_unavailable")
    assert shown["failures"]["topics"] == []
    assert (await world.end(named_id("held"), "commit")).status == 200
    assert (await statistics(world, lambda one: not one["failures"]["refused"]))["failures"]["refused"] == []


async def test_a_topic_keeps_the_reason_for_which_it_was_refused_first(world: RestWorld) -> None:
    activity = world.coordinator.statistics._activity
    activity.note_refused_write(named_id("t1"), "coupons", "message_too_large", "the clear reason", 1)
    activity.note_refused_write(named_id("t1"), "coupons", "topic_unavailable", "vague", 1)
    shown = await statistics(world, lambda one: one["failures"]["topics"])
    (topic,) = shown["failures"]["topics"]
    assert (topic["error_code"], topic["detail"], topic["refused"]) == ("topic_unavailable", "vague", 2)
    assert (topic["first_error_code"], topic["first_detail"]) == ("message_too_large", "the clear reason")


async def test_what_the_lanes_of_all_instances_keep_apart_is_shown(
    instances: tuple[RestWorld, RestWorld], monkeypatch: pytest.MonkeyPatch
) -> None:
    here, there = instances
    kept = Quarantined(
        topic="orders", id=named_id("q1"), state="refused", since=Moment(1000), error_code="c", detail=HOSTILE
    )
    monkeypatch.setattr(there.memory.lane, "quarantined", lambda most: [kept][:most])
    shown = await statistics(here, lambda one: one["failures"]["quarantined"])
    assert shown["failures"]["quarantined"] == [
        {
            "instance": there.memory.url,
            "topic": "orders",
            "id": named_id("q1"),
            "state": "refused",
            "since": "1970-01-01T00:00:01.000Z",
            "until": None,
            "min_bytes": None,
            "error_code": "c",
            "detail": HOSTILE,
        }
    ]


async def test_an_endpoint_is_shown_as_it_answered_last(world: RestWorld) -> None:
    """Its answer is data; the rest of its URL, which may contain a secret, is not shown."""
    attempt = CheckAttempt(
        host="http://shop:9000", sent=True, answered=False, status=502, detail=HOSTILE, duration_s=0.25
    )
    reply = CheckReply(
        outcome=Outcome.UNKNOWN, sent=True, answered=False, reachable=True, detail=HOSTILE, attempts=(attempt,)
    )
    world.memory.caller.always(reply)
    await world.prepared(id=named_id("t1"))
    await world.call("POST", f"/v1/transactions/{named_id('t1')}/check")
    shown = await statistics(world, lambda one: one["groups"][0]["endpoints"])
    (endpoint,) = shown["groups"][0]["endpoints"]
    assert (endpoint["host"], endpoint["well"], endpoint["status"]) == ("http://shop:9000", False, 502)
    assert (endpoint["detail"], endpoint["duration_s"]) == (HOSTILE, 0.25)


async def test_a_group_sees_its_own_figures_alone() -> None:
    async with guarded() as both:
        for world in (both.here, both.there):
            world.coordinator.statistics.totals = lambda group: Totals(commits={"shop": 2, "other": 1, None: 7}[group])
            world.coordinator.statistics._samples.append(Totals(commits=7))
        order = {"messages": [{"topic": "orders", "value": "v"}]}
        for group in ("shop", "shop", "other"):
            assert (await both.call(group, "POST", "/v1/transactions", {"group": group, **order})).status == 201
        for caller, pending in (("shop", 2), ("other", 1), ("operator", 3), ("board", 3)):
            answer = await both.call(caller, "GET", "/v1/statistics?samples=true")
            assert answer.body["totals"]["pending"] == pending
            assert answer.body["counted"]["commits"] == {"shop": 4, "other": 2}.get(caller, 14)
            assert bool(answer.body["samples"]) == (caller in {"operator", "board"})
            assert (both.there.memory.url in str(answer.body)) == (caller in {"operator", "board"})
            names = {one["group"] for one in answer.body["groups"]}
            assert names == ({caller} if caller in {"shop", "other"} else {"shop", "other"})
            assert bool(answer.body["instances"]) == (caller in {"operator", "board"})
            answer = await both.call(caller, "GET", "/v1/statistics?group=other")
            if caller == "shop":
                assert (answer.status, answer.error_code) == (403, "forbidden")
            else:
                assert [(one["group"], one["pending"]) for one in answer.body["groups"]] == [("other", 1)]
                assert (answer.body["totals"]["pending"], answer.body["instances"]) == (1, [])
