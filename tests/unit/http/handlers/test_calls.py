"""Each call answers as docs/api.md says."""

from collections.abc import Sequence
from typing import Any

import pytest

from halfway.coordinator.ports import Appended
from halfway.protocol.errors import OutcomeUnknownError
from halfway.protocol.records import Half
from halfway.protocol.transactions import Outcome
from tests.support.ids import named_id
from tests.support.rest.client import SHOP, RestWorld
from tests.support.surroundings import verdict
from tests.unit.http.conftest import NewWorld

ORDER = {"topic": "orders", "value": "v"}


async def test_an_id_in_capitals_is_the_same_id_and_a_group_in_capitals_another(world: RestWorld) -> None:
    """Also in the filter of a list."""
    own, loud = named_id("one"), named_id("one").upper()
    made = await world.call("POST", "/v1/transactions", {"group": "shop", "id": loud, "messages": [ORDER]})
    assert (made.status, made.body["id"]) == (201, own)
    listed = await world.call("GET", f"/v1/transactions?id={loud}")
    assert [one["id"] for one in listed.body["transactions"]] == [own]
    assert (await world.call("GET", f"/v1/transactions/{loud}")).body["id"] == own
    await world.call("PUT", f"/v1/groups/{loud}", SHOP)
    assert (await world.call("GET", f"/v1/groups/{loud}")).body["group"] == loud
    assert (await world.call("GET", f"/v1/groups/{own}")).status == 404


class TestGroups:
    async def test_a_new_group_is_201_with_its_location_and_its_policy_in_force(self, new_world: NewWorld) -> None:
        world = await new_world()
        answer = await world.call("PUT", "/v1/groups/shop", {**SHOP, "policy": {"max_checks": 3}})
        assert answer.status == 201
        assert answer.headers["Location"] == "/v1/groups/shop"
        assert answer.body["group"] == "shop"
        assert answer.body["check"] == {"mode": "push", "urls": ["http://shop:9000/check"]}
        assert answer.body["topics"] == ["orders", "coupons"]
        assert answer.body["policy"] == {
            "first_check_after_s": 6.0,
            "check_interval_s": 30.0,
            "max_interval_s": 300.0,
            "max_checks": 3,
            "max_age_s": 43200.0,
            "on_exhausted": "park",
        }
        assert answer.body["created_at"] == answer.body["updated_at"]
        assert answer.body["created_at"].endswith("Z")

    @pytest.mark.parametrize("check", [{"mode": "pull"}, {"urls": ["http://shop:9000/check"]}], ids=["pull", "push"])
    async def test_the_parts_of_a_group_that_was_shown_can_be_put_again(
        self, world: RestWorld, check: dict[str, Any]
    ) -> None:
        await world.call("PUT", "/v1/groups/shop", {"check": check, "topics": ["orders"]})
        shown = (await world.call("GET", "/v1/groups/shop")).body
        parts = {name: shown[name] for name in ("check", "topics", "policy")}
        again = await world.call("PUT", "/v1/groups/shop", parts)
        assert again.status == 200
        assert {name: again.body[name] for name in parts} == parts

    async def test_a_service_that_starts_takes_nothing_away_from_its_group(self, world: RestWorld) -> None:
        """An old process of a rolling deployment names fewer topics; an operator has changed URLs and policy."""
        operators = {"check": {"urls": ["http://shop-2:9000/check"]}, "policy": {"max_checks": 3, "max_age_s": 600}}
        before = await world.call("PUT", "/v1/groups/shop", {**SHOP, **operators})
        world.memory.clock.advance(1)
        again = await world.call("PATCH", "/v1/groups/shop", {"topics": ["orders"]})
        assert (again.status, again.body) == (200, before.body)
        more = {"topics": ["points", "orders"], "check": {"mode": "pull"}, "policy": {"max_checks": 5}}
        added = await world.call("PATCH", "/v1/groups/shop", more)
        assert added.body["topics"] == ["orders", "coupons", "points"]
        assert added.body["check"] == {"mode": "pull", "urls": []}
        assert added.body["policy"] == {**before.body["policy"], "max_checks": 5}
        assert added.body["updated_at"] != before.body["updated_at"]

    async def test_a_service_registers_a_new_group(self, world: RestWorld) -> None:
        """Without `check` it fetches its checks."""
        new = await world.call("PATCH", "/v1/groups/bank", {"topics": ["orders"]})
        assert (new.status, new.headers["Location"]) == (201, "/v1/groups/bank")
        put = await world.call("PUT", "/v1/groups/bank", {"check": {"mode": "pull"}, "topics": ["orders"]})
        changing = ("created_at", "updated_at")
        assert {**put.body, **dict.fromkeys(changing)} == {**new.body, **dict.fromkeys(changing)}

    async def test_additions_end_at_as_many_topics_as_a_group_may_have(self, world: RestWorld) -> None:
        many = [f"topic-{number}" for number in range(1000)]
        refused = await world.call("PATCH", "/v1/groups/shop", {"topics": many})
        assert (refused.status, refused.body["errors"][0]["field"]) == (422, "topics")
        assert "1002 topics, at most 1000" in refused.body["detail"]

    async def test_groups_are_listed_by_name_and_deleted(self, world: RestWorld) -> None:
        await world.call("PUT", "/v1/groups/bank", SHOP)
        listed = await world.call("GET", "/v1/groups")
        assert [group["group"] for group in listed.body["groups"]] == ["bank", "shop"]
        gone = await world.call("DELETE", "/v1/groups/bank")
        assert (gone.status, gone.body) == (204, None)
        again = await world.call("GET", "/v1/groups/bank")
        assert (again.status, again.error_code) == (404, "unknown_group")
        assert again.body["group"] == "bank"

    async def test_a_group_with_pending_transactions_is_not_deleted(self, world: RestWorld) -> None:
        await world.prepared()
        answer = await world.call("DELETE", "/v1/groups/shop")
        assert (answer.status, answer.error_code) == (409, "group_in_use")
        assert (answer.body["pending"], answer.body["parked"]) == (1, 0)


class TestPrepareAndEnd:
    async def test_a_prepare_is_201_with_its_location(self, world: RestWorld) -> None:
        answer = await world.prepare()
        assert answer.status == 201
        assert set(answer.body) == {"id", "state", "group", "prepared_at", "next_check_at"}
        assert answer.headers["Location"] == f"/v1/transactions/{answer.body['id']}"
        assert answer.body["state"] == "prepared"
        assert answer.body["prepared_at"] < answer.body["next_check_at"]

    async def test_commit_is_answered_with_changed_and_again_without(self, world: RestWorld) -> None:
        transaction = await world.prepared()
        first = await world.end(transaction, "commit", remark="paid")
        assert (first.status, first.body) == (200, {"id": transaction, "state": "committed", "changed": True})
        second = await world.end(transaction, "commit")
        assert (second.status, second.body) == (200, {"id": transaction, "state": "committed", "changed": False})
        opposite = await world.end(transaction, "rollback")
        assert (opposite.status, opposite.error_code, opposite.body["state"]) == (409, "already_ended", "committed")
        shown = await world.show(transaction)
        assert shown.body["state"] == "committed"
        assert shown.body["messages"] is None
        assert shown.body["topics"] == ["orders"]
        assert (shown.body["cause"], shown.body["remark"]) == ("producer", "paid")
        assert len(world.memory.records("orders")) == 1

    @pytest.mark.parametrize("cause", ["operator", "producer"])
    async def test_the_cause_header_stands_in_the_outcome(self, world: RestWorld, cause: str) -> None:
        transaction = await world.prepared()
        path = f"/v1/transactions/{transaction}/end"
        await world.call("POST", path, {"outcome": "rollback"}, headers={"Halfway-Cause": cause})
        assert (await world.show(transaction)).body["cause"] == cause

    async def test_another_cause_is_refused_by_name(self, world: RestWorld) -> None:
        path = f"/v1/transactions/{await world.prepared()}/end"
        answer = await world.call("POST", path, {"outcome": "rollback"}, headers={"Halfway-Cause": "policy"})
        assert (answer.status, list(answer.fields)) == (422, ["Halfway-Cause"])

    async def test_an_ambiguous_prepare_is_503_with_its_id_and_retry_after(
        self, world: RestWorld, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def lose_outcome(_: int, halves: Sequence[tuple[Half, Any]], appended: Appended[Any], **__: object) -> None:
            appended([(token, OutcomeUnknownError("not known", id=half.id)) for half, token in halves])

        monkeypatch.setattr(world.memory.half_log, "append", lose_outcome)
        answer = await world.prepare(id=named_id("order-7"))
        assert (answer.status, answer.error_code, answer.body["id"]) == (503, "outcome_unknown", named_id("order-7"))
        assert int(answer.headers["Retry-After"]) >= 1


class TestLooking:
    async def test_lists_are_filtered_and_paged(self, world: RestWorld) -> None:
        made = [await world.prepared({"topic": "orders", "key": f"k{n}", "value": "v"}) for n in range(5)]
        await world.prepared({"topic": "coupons", "key": "k1", "value": "v"})
        found: list[str] = []
        cursor = ""
        while True:
            path = f"/v1/transactions?topic=orders&state=prepared&group=shop&limit=2{cursor}"
            page = (await world.call("GET", path)).body
            found += [transaction["id"] for transaction in page["transactions"]]
            assert all("messages" not in transaction for transaction in page["transactions"])
            if page["next"] is None:
                break
            cursor = f"&cursor={page['next']}"
        assert sorted(found) == sorted(made)
        by_key = (await world.call("GET", "/v1/transactions?key=k1&topic=orders")).body["transactions"]
        assert [transaction["id"] for transaction in by_key] == [made[1]]

    async def test_a_check_is_202_and_a_resume_of_a_prepared_one_changes_nothing(self, world: RestWorld) -> None:
        world.memory.caller.always(verdict(Outcome.UNKNOWN))
        transaction = await world.prepared()
        checked = await world.call("POST", f"/v1/transactions/{transaction}/check")
        assert (checked.status, checked.body["id"]) == (202, transaction)
        resumed = await world.call("POST", f"/v1/transactions/{transaction}/resume", {})
        assert (resumed.status, resumed.body["state"]) == (200, "prepared")
        await world.end(transaction, "rollback")
        for call in ("check", "resume"):
            late = await world.call("POST", f"/v1/transactions/{transaction}/{call}")
            assert (late.status, late.error_code) == (409, "already_ended")

    async def test_a_poll_of_an_unknown_group_is_404(self, world: RestWorld) -> None:
        answer = await world.call("GET", "/v1/groups/nobody/checks")
        assert (answer.status, answer.error_code) == (404, "unknown_group")
