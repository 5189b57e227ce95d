"""Jobs over REST: preview, start, progress, stop and repeat, through either of two instances."""

import asyncio
from typing import Any

import pytest

from halfway.coordinator.cluster import jobs
from halfway.coordinator.records import FindResult
from tests.support.rest.client import Answer, RestWorld
from tests.support.rest.guarded import guarded, own_id
from tests.support.rest.parked import SOON, ids_in_state, park
from tests.support.waiting import GENEROUS_S, eventually


async def until_ended(world: RestWorld, job_id: str) -> dict[str, Any]:
    """Return a job once it has ended."""
    async with asyncio.timeout(GENEROUS_S):
        while True:
            answer = await world.call("GET", f"/v1/jobs/{job_id}?limit=1000")
            assert answer.status == 200, answer
            if answer.body["state"] in {"done", "stopped", "failed"}:
                shown: dict[str, Any] = answer.body
                return shown
            await asyncio.sleep(0.005)


def job_request(**over: Any) -> dict[str, Any]:
    return {"action": "resume", "filter": {"group": "shop"}, "reason": "mended", "rate": 200, **over}


async def test_a_job_on_ids_is_audited_with_the_group_of_each_transaction(
    instances: tuple[RestWorld, RestWorld],
) -> None:
    """The request names no group. An instance records an end with the group if it serves the transaction."""
    here, there = instances
    ids = await park(6, here, there)
    for action in ("resume", "check"):
        started = await here.call("POST", "/v1/jobs", {"action": action, "ids": ids, "id": action, "reason": "mended"})
        assert started.status == 202, started
        assert (await until_ended(here, action))["finished"] == 6
    audited = [event for world in instances for event in world.memory.audit_trail.events]
    events = [event for event in audited if event.action in {"resume", "check_now"}]
    assert (len(events), {event.group for event in events}) == (12, {"shop"})


async def test_the_same_request_again_does_nothing_twice(instances: tuple[RestWorld, RestWorld]) -> None:
    """Either instance answers with the job; different content with the same id is refused."""
    here, there = instances
    await park(5, here, there)
    first = await here.call("POST", "/v1/jobs", job_request(id="once"))
    assert first.status == 202
    await until_ended(here, "once")
    for world in instances:
        again = await world.call("POST", "/v1/jobs", job_request(id="once"))
        assert (again.status, again.body["state"], again.body["accepted_at"]) == (
            200,
            "done",
            first.body["accepted_at"],
        )
        other = await world.call("POST", "/v1/jobs", job_request(id="once", action="rollback"))
        assert (other.status, other.error_code) == (409, "job_id_reused")
    assert len(await ids_in_state(here, "prepared")) == 5


async def test_a_job_that_is_gone_goes_on_when_it_is_sent_again(world: RestWorld) -> None:
    """Its instance forgot it, as after a restart: finished transactions no longer match."""
    await park(3, world)
    await world.call("POST", "/v1/jobs", job_request(id="lost", most=2))
    assert (await until_ended(world, "lost"))["results"] == {"done": 2}
    world.coordinator.jobs._jobs._jobs.clear()
    gone = await world.call("GET", "/v1/jobs/lost")
    assert (gone.status, gone.error_code) == (404, "unknown_job")
    assert (await world.call("POST", "/v1/jobs", job_request(id="lost", most=2))).status == 202
    assert (await until_ended(world, "lost"))["results"] == {"done": 1}
    assert await ids_in_state(world, "parked") == []


async def test_each_item_has_its_own_result(world: RestWorld) -> None:
    """An id with another outcome, an unknown id, an id that already has the state; and pages of items."""
    await world.prepared(id="open")
    await world.prepared(id="gone")
    await world.end("gone", "rollback")
    await world.prepared(id="there")
    await world.end("there", "commit")
    ids = ["open", "gone", "there", "never", "open"]
    body = {"action": "commit", "ids": ids, "reason": "by hand", "id": "mixed"}
    answer = await world.call("POST", "/v1/jobs", body)
    assert (answer.status, answer.body["ids"], answer.body["filter"]) == (202, 5, None)
    done = await until_ended(world, "mixed")
    assert (done["state"], done["results"]) == ("done", {"done": 1, "failed": 2, "unchanged": 1})
    answers = {item["id"]: (item["result"], item["state"], item["error_code"]) for item in done["items"]}
    assert answers == {
        "open": ("done", "committed", None),
        "gone": ("failed", "rolled_back", "already_ended"),
        "there": ("unchanged", "committed", None),
        "never": ("failed", None, "unknown_transaction"),
    }
    failed = await world.call("GET", "/v1/jobs/mixed?result=failed&limit=1")
    assert ([item["id"] for item in failed.body["items"]], failed.body["next"]) == (["gone"], 3)
    rest = await world.call("GET", "/v1/jobs/mixed?result=failed&limit=1&cursor=3")
    assert ([item["id"] for item in rest.body["items"]], rest.body["next"]) == (["never"], None)


async def test_a_stopped_job_leaves_the_rest_as_it_is(instances: tuple[RestWorld, RestWorld]) -> None:
    """It is stopped through the other instance; items without a result are waiting."""
    here, there = instances
    await park(8, here, there)
    assert (await here.call("POST", "/v1/jobs", job_request(id="slow", rate=0.1))).status == 202
    async with asyncio.timeout(GENEROUS_S):
        while (await here.call("GET", "/v1/jobs/slow")).body["found"] is None:  # noqa: ASYNC110 - there is no event to wait for
            await asyncio.sleep(0.005)
    stopping = await there.call("DELETE", "/v1/jobs/slow")
    assert (stopping.status, stopping.body["state"] in {"stopping", "stopped"}) == (202, True)
    done = await until_ended(there, "slow")
    assert done["state"] == "stopped"
    assert done["finished"] < 8
    waiting = [item for item in done["items"] if item["result"] == "waiting"]
    assert len(waiting) == 8 - done["finished"]
    assert len(await ids_in_state(here, "parked")) == len(waiting)
    assert (await here.call("DELETE", "/v1/jobs/slow")).body["state"] == "stopped"


async def test_a_check_is_done_when_the_group_is_asked(world: RestWorld) -> None:
    await world.prepared(id="t1")
    answer = await world.call("POST", "/v1/jobs", job_request(id="ask", action="check", filter={}))
    assert answer.status == 202
    assert (await until_ended(world, "ask"))["results"] == {"done": 1}
    async with asyncio.timeout(GENEROUS_S):
        while [request.id for request in world.memory.caller.requests] != ["t1"]:  # noqa: ASYNC110 - there is no event to wait for
            await asyncio.sleep(0.005)


async def test_what_cannot_be_done_now_is_tried_again(world: RestWorld) -> None:
    """A missing topic fails its item at once; a lost lane does not."""
    await world.prepared({"topic": "coupons", "value": "v"}, id="bad")
    world.memory.delete_topic("coupons")
    await world.prepared(id="good")
    world.memory.faults.lose_next_batch(written=False)
    await world.call("POST", "/v1/jobs", job_request(id="some", action="commit", filter={}))
    done = await until_ended(world, "some")
    assert done["results"] == {"done": 1, "failed": 1}
    assert {item["id"]: item["error_code"] for item in done["items"]} == {"bad": "topic_unavailable", "good": None}


async def test_too_many_jobs_are_refused(world: RestWorld, monkeypatch: pytest.MonkeyPatch) -> None:
    """Jobs that have ended make room."""
    monkeypatch.setattr(jobs, "MAX_JOBS", 12)
    await park(20, world)
    for number in range(10):
        assert (await world.call("POST", "/v1/jobs", job_request(id=f"j{number}", rate=0.1))).status == 202
    refused = await world.call("POST", "/v1/jobs", job_request(id="one-more"))
    assert (refused.status, refused.error_code) == (429, "overloaded")
    waiting = await world.call("DELETE", "/v1/jobs/j9")
    assert (waiting.body["state"], waiting.body["started_at"]) == ("stopped", None)
    for number in range(10):
        await world.call("DELETE", f"/v1/jobs/j{number}")
        await until_ended(world, f"j{number}")
    for number in range(5):
        assert (await world.call("POST", "/v1/jobs", job_request(id=f"k{number}", filter={"id": "none"}))).status == 202
        assert (await until_ended(world, f"k{number}"))["state"] == "done"
    assert len((await world.call("GET", "/v1/jobs")).body["jobs"]) == 12


async def test_a_job_that_waits_and_is_stopped_makes_room(world: RestWorld) -> None:
    """It ends at once, although the jobs before it still run."""
    await park(20, world)
    for number in range(10):
        assert (await world.call("POST", "/v1/jobs", job_request(id=f"j{number}", rate=0.1))).status == 202
    stopped = await world.call("DELETE", "/v1/jobs/j9")
    assert (stopped.status, stopped.body["state"]) == (202, "stopped")
    assert stopped.body["finished_at"] is not None
    assert (await world.call("POST", "/v1/jobs", job_request(id="one-more"))).status == 202
    assert len(world.coordinator.jobs._jobs._tasks) == 10


async def test_no_more_ids_are_acted_on_than_was_said(world: RestWorld) -> None:
    ids = [await world.prepared(id=f"t{number}") for number in range(3)]
    body = {"action": "commit", "ids": [ids[0], *ids], "reason": "by hand", "most": 2, "id": "two"}
    assert (await world.call("POST", "/v1/jobs", body)).status == 202
    done = await until_ended(world, "two")
    assert (done["results"], done["found"], done["more"]) == ({"done": 2}, 3, True)
    assert await ids_in_state(world, "prepared") == ids[2:]


@pytest.mark.parametrize(
    "action,state", [("check", "prepared"), ("commit", "prepared"), ("rollback", "parked"), ("resume", "parked")]
)
async def test_another_transaction_that_has_the_id_by_now_is_left_as_it_is(
    instances: tuple[RestWorld, RestWorld], monkeypatch: pytest.MonkeyPatch, action: str, state: str
) -> None:
    """Its client has reused the id since the job's filter matched it; the item has a result of its own."""
    here, there = instances
    if state == "parked":
        ids = await park(4, here, there)
    else:
        assert (await here.call("PUT", "/v1/groups/shop", SOON)).status == 201
        ids = [await here.prepared(id=f"t{number:03}") for number in range(4)]
    before = here.memory.clock.now_ms() - 3_600_000

    async def find(*_: object) -> FindResult:
        return FindResult(count=4, places=tuple((before, name) for name in ids))

    for world in instances:
        monkeypatch.setattr(world.coordinator.jobs._jobs, "_find", find)
    assert (await here.call("POST", "/v1/jobs", job_request(id="late", action=action))).status == 202
    done = await until_ended(there, "late")
    assert (done["state"], done["results"]) == ("done", {"replaced": 4})
    items = (await here.call("GET", "/v1/jobs/late?result=replaced")).body["items"]
    assert [(one["id"], one["error_code"], one["state"]) for one in items] == [
        (name, "id_replaced", state) for name in ids
    ]
    assert await ids_in_state(there, state) == ids


async def test_results_of_many_jobs_are_bounded_though_all_were_accepted_before(
    world: RestWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(jobs, "MAX_ITEMS", 5)
    await park(3, world)
    body = {"action": "commit", "ids": ["a", "b", "c"], "reason": "by hand", "rate": 200}
    for number in range(4):
        assert (await world.call("POST", "/v1/jobs", {**body, "id": f"j{number}"})).status == 202
    await eventually(
        lambda: world.call("GET", "/v1/jobs"), lambda listed: [one["state"] for one in listed.body["jobs"]] == ["done"]
    )


async def test_a_job_is_not_begun_again_while_it_may_run_elsewhere(instances: tuple[RestWorld, RestWorld]) -> None:
    """An instance that may have it does not answer."""
    here, there = instances
    here.memory.log.instances.pop(_url(there))
    for number in range(4):
        answer = await here.call("POST", "/v1/jobs", job_request(id=f"j{number}"))
        assert (answer.status, answer.error_code) == (503, "shard_unavailable")
    assert (await here.call("GET", "/v1/jobs")).body["jobs"] == []


async def test_a_group_takes_no_job_id_of_an_operator_or_of_another_group() -> None:
    """It starts jobs under the ids first. Everybody's own is accepted all the same, shown, repeated and stopped."""
    async with guarded() as both:
        name = own_id(0, "nightly")
        slow = {
            "action": "check",
            "ids": [f"none-{number}" for number in range(9)],
            "reason": "r",
            "rate": 0.1,
            "id": name,
        }
        for caller, rate in (("other", 0.1), ("shop", 0.2), ("operator", 0.3)):
            started = await both.call(caller, "POST", "/v1/jobs", {**slow, "rate": rate})
            assert started.status == 202, started
        for caller, rate in (("other", 0.1), ("shop", 0.2), ("operator", 0.3)):
            for at in (both.here, both.there):
                assert (await both.call_at(at, caller, "GET", f"/v1/jobs/{name}")).body["rate"] == rate
                assert (await both.call_at(at, caller, "POST", "/v1/jobs", {**slow, "rate": rate})).status == 200
                reused = await both.call_at(at, caller, "POST", "/v1/jobs", {**slow, "rate": 0.4})
                assert (reused.status, reused.error_code) == (409, "job_id_reused")
        for caller, count in (("other", 1), ("shop", 1), ("operator", 3)):
            assert len((await both.call(caller, "GET", "/v1/jobs")).body["jobs"]) == count
        stopped = await both.call("other", "DELETE", f"/v1/jobs/{name}")
        assert (stopped.status, stopped.body["rate"]) == (202, 0.1)
        states = {job["rate"]: job["state"] for job in (await both.call("operator", "GET", "/v1/jobs")).body["jobs"]}
        assert (states[0.2], states[0.3]) == ("running", "running")


async def test_an_operator_shows_and_stops_a_groups_job_by_its_id() -> None:
    """Those that run come first, if several groups use the id."""
    async with guarded() as both:
        name = own_id(0, "nightly")
        slow = {"action": "check", "ids": ["none-1", "none-2"], "reason": "r", "rate": 0.1, "id": name}
        for caller in ("other", "shop"):
            assert (await both.call(caller, "POST", "/v1/jobs", slow)).status == 202
        for _ in range(2):
            assert (await both.call("operator", "DELETE", f"/v1/jobs/{name}")).status == 202
            async with asyncio.timeout(GENEROUS_S):
                while (await both.call("operator", "GET", f"/v1/jobs/{name}")).body["state"] == "stopping":  # noqa: ASYNC110 - there is no event to wait for
                    await asyncio.sleep(0.005)
        jobs = (await both.call("operator", "GET", "/v1/jobs")).body["jobs"]
        assert {job["state"] for job in jobs} == {"stopped"}


async def test_a_group_does_not_learn_which_instance_runs_its_job() -> None:
    async with guarded() as both:
        name = own_id(0, "j")
        job = {"action": "check", "ids": ["none"], "reason": "r", "id": name}
        started = await both.call("shop", "POST", "/v1/jobs", job)
        shown = await both.call("shop", "GET", f"/v1/jobs/{name}")
        listed = await both.call("shop", "GET", "/v1/jobs")
        assert [one["instance"] for one in (started.body, shown.body, *listed.body["jobs"])] == [None] * 3
        assert (await both.call("operator", "GET", f"/v1/jobs/{name}")).body["instance"] is not None
        both.here.memory.log.instances.clear()
        for caller, is_told in (("shop", False), ("operator", True)):
            answer = await both.call(caller, "GET", f"/v1/jobs/{own_id(1, 'gone')}")
            assert (answer.status, answer.error_code) == (503, "shard_unavailable")
            assert any(hint.url in str(answer.body) for hint in both.here.memory.log.owners.values()) == is_told


async def test_groups_leave_places_and_results_to_operators() -> None:
    """However many jobs their keys start, and however slow they are."""
    async with guarded() as both:
        ids = [own_id(0, f"j{number}") for number in range(8)]
        slow = {"action": "check", "ids": [f"none-{number}" for number in range(9)], "reason": "r", "rate": 0.1}
        operators = {**slow, "rate": 200}
        first = await both.call("operator", "POST", "/v1/jobs", {**operators, "id": ids[0]})
        assert first.status == 202
        answers = [await both.call("shop", "POST", "/v1/jobs", {**slow, "id": name}) for name in ids[1:5]]
        assert [answer.status for answer in answers] == [202, 202, 429, 429]
        assert (await both.call("other", "POST", "/v1/jobs", {**slow, "id": ids[5]})).status == 202
        assert (await both.call("operator", "POST", "/v1/jobs", {**operators, "id": ids[6]})).status == 202
        async with asyncio.timeout(60):  # the group's own take 80 s
            while (await both.call("operator", "GET", f"/v1/jobs/{ids[6]}")).body["state"] != "done":  # noqa: ASYNC110 - there is no event to wait for
                await asyncio.sleep(0.005)
        for name in ids[1:3]:
            assert (await both.call("shop", "DELETE", f"/v1/jobs/{name}")).status == 202
        quick = {**slow, "ids": ["none"], "rate": 200}
        for number in range(60):
            name = own_id(0, f"q{number}")
            while (await both.call("shop", "POST", "/v1/jobs", {**quick, "id": name})).status == 429:  # noqa: ASYNC110 - there is no event to wait for
                await asyncio.sleep(0.005)
        assert (await both.call("operator", "GET", f"/v1/jobs/{ids[0]}")).body["state"] == "done"


@pytest.mark.parametrize(
    "body,field",
    [
        ({"action": "resume", "filter": {}}, "reason"),
        ({"action": "resume", "filter": {}, "reason": ""}, "reason"),
        ({"action": "resume", "filter": {}, "reason": "é" * 600}, "reason"),
        ({"action": "resume", "reason": "r"}, "filter"),
        ({"action": "resume", "filter": {}, "ids": ["a"], "reason": "r"}, "filter"),
        ({"action": "resume", "ids": [], "reason": "r"}, "ids"),
        ({"action": "resume", "filter": {"state": "prepared"}, "reason": "r"}, "filter.state"),
        ({"action": "commit", "filter": {"state": "committed"}, "reason": "r"}, "filter.state"),
        ({"action": "park", "filter": {}, "reason": "r"}, "action"),
        ({"action": "resume", "filter": {}, "reason": "r", "rate": 0}, "rate"),
        ({"action": "resume", "filter": {}, "reason": "r", "rate": 501}, "rate"),
        ({"action": "resume", "filter": {}, "reason": "r", "rate": 0.09}, "rate"),
        ({"action": "resume", "filter": {}, "reason": "r", "most": 0}, "most"),
        ({"action": "resume", "filter": {"cause": "check"}, "reason": "r"}, "filter.cause"),
        ({"action": "resume", "filter": {}, "reason": "r", "id": "a/b"}, "id"),
    ],
)
async def test_a_wrong_field_is_named(world: RestWorld, body: dict[str, Any], field: str) -> None:
    answer: Answer = await world.call("POST", "/v1/jobs", body)
    assert answer.status == 422
    assert field in answer.fields


async def test_an_instance_that_cannot_be_asked_is_named(instances: tuple[RestWorld, RestWorld]) -> None:
    """The list names it, and a job that may be there is not reported as unknown."""
    here, there = instances
    here.memory.log.instances.pop(next(hint.url for hint in here.memory.log.owners.values() if hint.url != _url(here)))
    listed = await here.call("GET", "/v1/jobs")
    assert [one["instance"] for one in listed.body["away"]] == [_url(there)]
    answer = await here.call("GET", "/v1/jobs/some")
    assert (answer.status, answer.error_code) == (503, "shard_unavailable")


def _url(world: RestWorld) -> str:
    return world.memory.owners._url
