"""Groups do not hold each other up."""

import asyncio

from tests.acceptance.coordinator_process import NewCoordinator
from tests.acceptance.endpoints import Endpoints
from tests.acceptance.rest_client import Connect, Json, message
from tests.acceptance.waiting import until_true

HUNG_GROUPS = 20
HUNG_TRANSACTIONS = 5
HEALTHY_TRANSACTIONS = 20
HANG_S = 120
"""How long halfway would wait for an answer: far longer than this test may take."""
SOON = {"first_check_after_s": 0.2, "check_interval_s": 0.2, "max_interval_s": 0.2, "max_checks": 1000}


async def test_twenty_groups_with_hung_endpoints_do_not_delay_the_checks_of_a_healthy_one(
    new_coordinator: NewCoordinator, connect: Connect, endpoints: Endpoints, group: str, topic: str
) -> None:
    """The healthy group's checks are sent and its transactions resolved while every check of the others hangs.

    What is asserted is an order and not a time: no hung check is over when the last of the healthy group is resolved.
    """
    coordinator = new_coordinator({"HALFWAY_CHECK_TIMEOUT_S": str(HANG_S), "HALFWAY_CHECK_CONCURRENCY": "4"})
    coordinator.start()
    rest = connect(coordinator)
    release = asyncio.Event()

    async def hang(_: Json) -> str:
        await release.wait()
        return "rollback"

    hung_endpoints = [await endpoints.check(hang) for _ in range(HUNG_GROUPS)]
    hung = []
    for number, hung_endpoint in enumerate(hung_endpoints):
        name = f"{group}-{number}"
        (await rest.put_group(name, topics=[topic], urls=[hung_endpoint.url], policy=SOON)).expect(201)
        hung += [await rest.prepared(name, [message(topic)]) for _ in range(HUNG_TRANSACTIONS)]
    await until_true(
        lambda: all(hung_endpoint.waiting == 4 for hung_endpoint in hung_endpoints), what="every group hangs"
    )
    healthy_endpoint = await endpoints.check("rollback")
    (await rest.put_group(group, topics=[topic], urls=[healthy_endpoint.url], policy=SOON)).expect(201)

    healthy = [await rest.prepared(group, [message(topic)]) for _ in range(HEALTHY_TRANSACTIONS)]
    for transaction in healthy:
        shown = await rest.until(transaction, "rolled_back")
        assert (shown["cause"], shown["checks"]) == ("check", 1)

    assert all(hung_endpoint.waiting == 4 for hung_endpoint in hung_endpoints), "the others still hang"
    assert all(len(hung_endpoint.asked) == 4 for hung_endpoint in hung_endpoints), "and take no more places than theirs"
    release.set()
    for transaction in hung:
        await rest.until(transaction, "rolled_back")
