"""The Python client survives a kill and restart of the coordinator."""

import asyncio

from halfway.client import Halfway, Message
from tests.support.coordinator.process import NewCoordinator
from tests.support.coordinator.topics import Cluster

GENEROUS_S = 300.0


async def test_what_was_begun_before_the_kill_is_ended_after_it(
    new_coordinator: NewCoordinator, cluster: Cluster, group: str, topic: str
) -> None:
    """A commit waits until the coordinator is back, and so does a prepare in the meantime."""
    coordinator = new_coordinator()
    coordinator.start()

    async def begin_again() -> None:
        await asyncio.to_thread(coordinator.start)

    def message(value: str) -> Message:
        return Message(topic=topic, key="42", value=value)

    async with Halfway(coordinator.url, group, prepare_timeout_s=GENEROUS_S, end_timeout_s=GENEROUS_S) as client:
        await client.register(topics=[topic])
        async with client.transaction([message("before")]) as transaction:
            coordinator.kill()
            starting = asyncio.create_task(begin_again())
        await starting
        assert (await client.show(transaction.id))["state"] == "committed"
        coordinator.kill()
        starting = asyncio.create_task(begin_again())
        async with client.transaction([message("meanwhile")]):
            pass
        await starting
    assert [record.value for record in await cluster.read(topic)] == [b"before", b"meanwhile"]
