"""When and how often halfway sends checks, and their results; each with the cause in its op marker."""

import asyncio

from halfway.embedded.broker import HOST, pick_port
from halfway.protocol.records import OpKind
from tests.support.coordinator.endpoints import CheckEndpoint, Endpoints
from tests.support.coordinator.rest_client import Json, Rest, message
from tests.support.coordinator.topics import Cluster, InternalTopics
from tests.support.waiting import eventually

SOON = {"first_check_after_s": 0.2, "check_interval_s": 0.2, "max_interval_s": 0.2, "max_checks": 1000}
TWICE = {**SOON, "max_checks": 2}


async def test_only_checks_that_were_sent_count(
    rest: Rest, endpoints: Endpoints, internal: InternalTopics, group: str, topic: str
) -> None:
    """Refused connections do not use up the checks: a service that comes back gets the first check."""
    port = pick_port()
    urls = [f"http://{HOST}:{port}/check"]
    (await rest.put_group(group, topics=[topic], urls=urls, policy=TWICE)).expect(201)
    transaction = await rest.prepared(group, [message(topic)])
    attempted: set[str] = set()
    while len(attempted) < 5:
        shown = await eventually(
            lambda: rest.show(transaction), lambda shown: shown["last_check_at"] not in {None, *attempted}
        )
        attempted.add(shown["last_check_at"])
        assert "refused" in shown["last_error"]
    shown = await rest.show(transaction)
    assert (shown["state"], shown["checks"]) == ("prepared", 0)
    assert await internal.kinds(transaction) == []

    endpoint = await endpoints.check("unknown", port=port)

    await rest.until(transaction, "parked")
    assert [asked.attempt for asked in endpoint.asked_about(transaction)] == [1, 2]
    assert await internal.kinds(transaction) == [
        (OpKind.CHECKED, "check"),
        (OpKind.CHECKED, "check"),
        (OpKind.PARKED, "policy"),
    ]


async def test_an_end_that_overtakes_a_check_wins(
    rest: Rest, endpoint: CheckEndpoint, cluster: Cluster, internal: InternalTopics, group: str, topic: str
) -> None:
    """A later verdict is dropped."""
    (await rest.put_group(group, topics=[topic], urls=[endpoint.url], policy=SOON)).expect(201)
    release = asyncio.Event()

    async def late(_: Json) -> str:
        await release.wait()
        return "commit"

    endpoint.answer(late)
    transaction = await rest.prepared(group, [message(topic)])
    await endpoint.until_asked(about=transaction)

    await rest.rollback(transaction)
    release.set()

    control = await rest.prepared(group, [message(topic, "control")])
    await rest.until(control, "committed")
    assert (await rest.show(transaction))["state"] == "rolled_back"
    assert await internal.kinds(transaction) == [(OpKind.ROLLED_BACK, "producer")]
    assert [record.value for record in await cluster.read(topic)] == [b"control"]
