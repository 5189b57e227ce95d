"""The history of a transaction from a real broker, also after a restart and the horizon."""

from typing import Any

from tests.support.coordinator.endpoints import CheckEndpoint
from tests.support.coordinator.process import NewCoordinator
from tests.support.coordinator.rest_client import QUIET, Connect, Json, Rest, message
from tests.support.coordinator.topics import Cluster
from tests.support.ids import new_id
from tests.support.waiting import eventually

HASTY = {"first_check_after_s": 0.1, "check_interval_s": 0.1, "max_interval_s": 0.1, "max_checks": 2}


async def history(rest: Rest, name: str) -> Json:
    return (await rest.call("GET", f"/transactions/{name}/history")).expect(200)


def events_shown(shown: Json, *names: str) -> list[tuple[Any, ...]]:
    return [tuple(event[name] for name in ("event", *names)) for event in shown["events"]]


async def places_in(cluster: Cluster, name: str, *topics: str) -> set[tuple[str, int, int]]:
    """Return the places of a transaction's messages, as a consumer sees them."""
    return {
        (record.topic, record.partition, record.offset)
        for record in await cluster.read(*topics)
        if record.transaction_id == name
    }


async def test_a_parked_one_is_resumed_in_bulk_and_its_whole_history_told(
    new_coordinator: NewCoordinator, connect: Connect, cluster: Cluster, endpoint: CheckEndpoint, group: str
) -> None:
    """Before and after a kill, and when the outcome is forgotten."""
    first, second = await cluster.make_topic(), await cluster.make_topic()
    coordinator = new_coordinator().start()
    rest = connect(coordinator)
    (await rest.put_group(group, topics=[first, second], urls=[endpoint.url], policy=HASTY)).expect(201)
    messages = [message(first, "a", key="k"), message(second, "b"), message(first, "c")]
    name = await rest.prepared(group, messages, as_id=new_id())
    await rest.until(name, "parked")
    (await rest.put_group(group, topics=[first, second], urls=[endpoint.url], policy=QUIET)).expect(200)
    shown = await history(rest, name)
    assert events_shown(shown) == [("prepared",), ("check",), ("check",), ("parked",)]
    assert shown["missing"] == []
    assert [event["attempt"] for event in shown["events"] if event["event"] == "check"] == [1, 2]

    (await rest.call("POST", "/batch", {"resume": [{"id": name, "remark": "mended"}]})).expect(200)
    await rest.until(name, "prepared")
    (await rest.end(name, "commit", remark="by ann")).expect(200)
    await rest.until(name, "committed")

    async def with_places() -> Json:
        return await history(rest, name)

    shown = await eventually(with_places, lambda found: all(one["offset"] is not None for one in found["messages"]))
    assert events_shown(shown, "cause", "remark")[-2:] == [
        ("resumed", "operator", "mended"),
        ("committed", "producer", "by ann"),
    ]
    found = {(one["topic"], one["partition"], one["offset"]) for one in shown["messages"]}
    assert found == await places_in(cluster, name, first, second)
    assert (len(found), shown["messages_detail"]) == (3, None)

    coordinator.kill()
    coordinator.start()
    rest = connect(coordinator)
    after = await history(rest, name)
    assert events_shown(after, "cause") == events_shown(shown, "cause")
    assert {(one["topic"], one["partition"], one["offset"]) for one in after["messages"]} == found
    assert after["missing"] == []

    assert coordinator.stop() == 0
    coordinator.start(HALFWAY_OUTCOME_HORIZON_S="1")

    async def forgotten() -> int:
        return (await rest.get(name)).status

    assert await eventually(forgotten, lambda status: status == 410) == 410
    late = await history(rest, name)
    assert (late["state"], events_shown(late, "cause")) == ("committed", events_shown(shown, "cause"))
    assert {(one["topic"], one["partition"], one["offset"]) for one in late["messages"]} == found
