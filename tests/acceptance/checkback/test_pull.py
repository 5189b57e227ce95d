"""Checks for producers without an endpoint: fetched by long poll, leased for a time."""

import asyncio
import time

from halfway.protocol.records import OpKind
from tests.support.coordinator.rest_client import Json, Rest, moment_ms
from tests.support.coordinator.topics import Cluster, InternalTopics

SOON = {"first_check_after_s": 0.2, "check_interval_s": 0.2, "max_interval_s": 0.2, "max_checks": 1000}
LONG_S = 30


async def test_a_waiting_poll_is_answered_when_a_check_is_due(
    rest: Rest, cluster: Cluster, internal: InternalTopics, group: str, topic: str
) -> None:
    """Not before; and the end with the `check_id` has the cause `check`."""
    (await rest.put_group(group, topics=[topic], policy={**SOON, "first_check_after_s": 1})).expect(201)
    poll = asyncio.create_task(rest.lease(group, wait_s=LONG_S))
    sent: Json = {"topic": topic, "key": "k", "value": "v", "headers": [], "partition": None}
    prepared = (await rest.prepare(group, [sent])).expect(201)

    (check,) = await poll

    assert time.time() * 1000 >= moment_ms(prepared["prepared_at"]) + 1000
    assert check["id"] == prepared["id"]
    assert check["group"] == group
    assert check["attempt"] == 1
    assert check["prepared_at"] == prepared["prepared_at"]
    assert check["messages"] == [sent]
    await rest.until_checked(prepared["id"], 1)
    ended = await rest.end(prepared["id"], "commit", check_id=check["check_id"])
    assert ended.expect(200)["changed"] is True
    assert await internal.kinds(prepared["id"]) == [(OpKind.CHECKED, "check"), (OpKind.COMMITTED, "check")]
    assert [record.value for record in await cluster.read(topic)] == [b"v"]
