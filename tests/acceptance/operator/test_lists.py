"""Lists show pending, parked and recently ended transactions."""

import pytest

from tests.support.coordinator.endpoints import CheckEndpoint
from tests.support.coordinator.rest_client import Json, Rest, message, moment_ms

HASTY = {"first_check_after_s": 0.1, "check_interval_s": 0.1, "max_interval_s": 0.1, "max_checks": 1}


def ids(page: Json) -> list[str]:
    return [one["id"] for one in page["transactions"]]


@pytest.fixture
async def one_of_each(rest: Rest, endpoint: CheckEndpoint, group: str, topic: str) -> dict[str, str]:
    """Return the ids of one transaction in each state."""
    (await rest.put_group(group, topics=[topic], urls=[endpoint.url], policy=HASTY)).expect(201)
    made = {
        state: await rest.prepared(group, [message(topic, "secret", key=state)], check_after_s=after_s)
        for state, after_s in (("prepared", 3600), ("parked", 0.1), ("committed", 3600), ("rolled_back", 3600))
    }
    await rest.commit(made["committed"])
    (await rest.end(made["rolled_back"], "rollback", remark="no stock")).expect(200)
    await rest.until(made["parked"], "parked")
    return made


async def test_each_state_can_be_listed(rest: Rest, group: str, one_of_each: dict[str, str]) -> None:
    """By state; all transactions without a state."""
    for state, transaction in one_of_each.items():
        page = await rest.page(group=group, state=state)
        assert ids(page) == [transaction]
        assert page["transactions"][0]["state"] == state
        assert page["next"] is None
    assert sorted(ids(await rest.page(group=group))) == sorted(one_of_each.values())


async def test_a_list_shows_no_payload_and_an_ended_one_has_none(
    rest: Rest, group: str, topic: str, one_of_each: dict[str, str]
) -> None:
    """Its data is kept for the outcome horizon, its payload while it is pending or parked."""
    for one in (await rest.page(group=group))["transactions"]:
        assert "secret" not in str(one)
        assert one["topics"] == [topic]
    for state in ("prepared", "parked"):
        assert (await rest.show(one_of_each[state]))["messages"][0]["value"] == "secret"
    committed = await rest.show(one_of_each["committed"])
    rolled_back = await rest.show(one_of_each["rolled_back"])
    for shown in (committed, rolled_back):
        assert "secret" not in str(shown)
        assert shown["cause"] == "producer"
        assert moment_ms(shown["ended_at"]) >= moment_ms(shown["prepared_at"])
    assert rolled_back["remark"] == "no stock"
