"""Groups do not hold each other up."""

import asyncio
from collections import Counter

from tests.support.coordinator.endpoints import Endpoints
from tests.support.coordinator.process import NewCoordinator
from tests.support.coordinator.rest_client import Connect, Json, message
from tests.support.waiting import until_true

HUNG_GROUPS = 20
HUNG_TRANSACTIONS = 5
PLACES = 4
"""Checks of one group at the same time."""
HEALTHY_TRANSACTIONS = 20
HANG_S = 120
"""How long halfway would wait for an answer: far longer than this test may take."""
SOON = {"first_check_after_s": 0.2, "check_interval_s": 0.2, "max_interval_s": 0.2, "max_checks": 1000}


async def test_twenty_groups_with_hung_endpoints_do_not_delay_the_checks_of_a_healthy_one(
    new_coordinator: NewCoordinator, connect: Connect, endpoints: Endpoints, group: str, topic: str
) -> None:
    """The healthy group's checks are sent and its transactions resolved while every check of the other groups hangs.

    All groups are behind one ingress, which has very many hung checks. The test asserts an order, not a time: every
    hung check is still in flight when the last healthy transaction is resolved.
    """
    coordinator = new_coordinator(
        {"HALFWAY_CHECK_TIMEOUT_S": str(HANG_S), "HALFWAY_CHECK_CONCURRENCY": str(PLACES)}
    ).start()
    rest = connect(coordinator)
    release = asyncio.Event()

    async def hang(question: Json) -> str:
        if question["group"] != group:
            await release.wait()
        return "rollback"

    endpoint, hung = await endpoints.check(hang), []
    for number in range(HUNG_GROUPS):
        name = f"{group}-{number}"
        (await rest.put_group(name, topics=[topic], urls=[endpoint.url], policy=SOON)).expect(201)
        hung += [await rest.prepared(name, [message(topic)]) for _ in range(HUNG_TRANSACTIONS)]

    await until_true(lambda: endpoint.waiting == HUNG_GROUPS * PLACES, what="every group hangs")
    (await rest.put_group(group, topics=[topic], urls=[endpoint.url], policy=SOON)).expect(201)

    healthy = [await rest.prepared(group, [message(topic)]) for _ in range(HEALTHY_TRANSACTIONS)]
    for transaction in healthy:
        shown = await rest.until(transaction, "rolled_back")
        assert (shown["cause"], shown["checks"]) == ("check", 1)

    assert endpoint.waiting == HUNG_GROUPS * PLACES, "the others still hang"
    asked = Counter(asked.body["group"] for asked in endpoint.asked)
    assert max(asked[f"{group}-{number}"] for number in range(HUNG_GROUPS)) == PLACES, "and take no more places"
    release.set()
    for transaction in hung:
        await rest.until(transaction, "rolled_back")
