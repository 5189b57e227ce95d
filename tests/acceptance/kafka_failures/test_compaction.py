"""Kafka's log cleaner has removed all that it may: pending, parked and recently ended transactions are still right."""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager

from confluent_kafka.admin import (  # type: ignore[attr-defined]  # they are there
    AdminClient,
    AlterConfigOpType,
    ConfigEntry,
    ConfigResource,
    ResourceType,
)

from halfway.kafka.records.codec import BARRIER_KEY
from tests.support.coordinator.by_hand import set_offsets
from tests.support.coordinator.endpoints import CheckEndpoint
from tests.support.coordinator.process import CoordinatorProcess, NewCoordinator
from tests.support.coordinator.rest_client import QUIET, Connect, Json, Rest, message
from tests.support.coordinator.topics import Cluster, InternalTopics
from tests.support.ids import new_id
from tests.support.waiting import eventually

SEGMENT_MS = 500
SETTINGS = {
    "HALFWAY_SHARDS": "1",
    # Payloads are read by offset.
    "HALFWAY_PAYLOAD_CACHE_BYTES": "1",
}
# More than halfway allows during operation: no record is protected by its age.
QUICK_CLEANER = {"log.cleaner.backoff.ms": "100"}
EAGER = {"min.compaction.lag.ms": "0", "min.cleanable.dirty.ratio": "0.0"}
CLEANED_WITHIN_S = 300.0


@asynccontextmanager
async def changed_config(
    cluster: Cluster, resources: Mapping[ConfigResource, Mapping[str, str]], *, back: Mapping[str, str]
) -> AsyncIterator[None]:
    """Set configuration; at the end restore `back`, and remove what `back` does not have."""
    await alter(cluster, resources)
    try:
        yield
    finally:
        await alter(
            cluster, {resource: {name: back.get(name) for name in entries} for resource, entries in resources.items()}
        )


async def alter(cluster: Cluster, resources: Mapping[ConfigResource, Mapping[str, str | None]]) -> None:
    asked = [
        ConfigResource(
            resource.restype,
            resource.name,
            incremental_configs=[
                ConfigEntry(name, value, incremental_operation=AlterConfigOpType.SET)
                if value is not None
                else ConfigEntry(name, None, incremental_operation=AlterConfigOpType.DELETE)
                for name, value in entries.items()
            ],
        )
        for resource, entries in resources.items()
    ]
    admin = AdminClient({"bootstrap.servers": cluster.bootstrap_servers})
    for done in admin.incremental_alter_configs(asked).values():
        await asyncio.to_thread(done.result, 60)


async def compact(cluster: Cluster, coordinator: CoordinatorProcess) -> None:
    """Let the log cleaner remove every record that a later one of its key replaces, and return when it has."""
    topics = [coordinator.topic(kind) for kind in ("half", "op", "parked", "owners")]
    lag = (await cluster.config(topics[0]))["min.compaction.lag.ms"]
    assert lag is not None
    settings: dict[ConfigResource, Mapping[str, str]] = {
        ConfigResource(ResourceType.TOPIC, topic): EAGER for topic in topics
    }

    for broker in await cluster.brokers():
        settings[ConfigResource(ResourceType.BROKER, broker)] = QUICK_CLEANER

    async def several_of_one_id() -> dict[str, int]:
        # The last records of owners and barriers may be in the last segment, which is never cleaned.
        records = [record for record in await cluster.read(*topics[:3]) if record.key != BARRIER_KEY]
        counts = Counter((record.topic, record.partition, record.key) for record in records)
        return {f"{place}": count for place, count in counts.items() if count > 1}

    async with changed_config(cluster, settings, back={"min.compaction.lag.ms": lag}):
        await eventually(several_of_one_id, lambda left: not left, within_s=CLEANED_WITHIN_S)


async def shorten_segments(cluster: Cluster, coordinator: CoordinatorProcess) -> None:
    """An operator may choose shorter segments than halfway."""
    for kind in ("half", "op", "parked", "owners"):
        await cluster.set_config(coordinator.topic(kind), "segment.ms", str(SEGMENT_MS))


async def roll_segments(coordinator: CoordinatorProcess) -> None:
    """Restart after the time of a segment, which appends to every partition."""
    await asyncio.sleep(SEGMENT_MS / 1000 * 2)
    assert coordinator.stop() == 0
    coordinator.start()
    assert coordinator.stop() == 0


class Seeding:
    """Transactions in every state, each under a name that says its expected state."""

    def __init__(self, rest: Rest, group: str, topic: str, url: str) -> None:
        self._rest, self._group, self._topic, self._url = rest, group, topic, url
        self.ids: dict[str, list[str]] = {}

    async def all(self) -> dict[str, list[str]]:
        rest, parking = self._rest, f"{self._group}.parking"
        await self._register(self._group, QUIET)
        await self._register(parking, {"first_check_after_s": 0.05, "max_age_s": 0.1})
        for name, count in (("committed", 8), ("rolled_back", 4), ("prepared", 4), ("checked", 2)):
            await self._prepare(self._group, name, count)
        for name, count in (("parked", 3), ("resumed", 2), ("parked_once", 2)):
            await self._prepare(parking, name, count)
            for transaction in self.ids[name]:
                await rest.until(transaction, "parked")
        await self._register(parking, QUIET)
        for transaction in self.ids["resumed"]:
            (await rest.resume(transaction)).expect(200)
        for transaction in (*self.ids["committed"], *self.ids["parked_once"]):
            await rest.commit(transaction)
        for transaction in self.ids["rolled_back"]:
            await rest.rollback(transaction)
        for transaction in self.ids["checked"]:
            for times in (1, 2):
                (await rest.check(transaction)).expect(202)
                await rest.until_checked(transaction, times)
        return self.ids

    async def _register(self, group: str, policy: Mapping[str, object]) -> None:
        (await self._rest.put_group(group, topics=[self._topic], urls=[self._url], policy=policy)).expect(200, 201)

    async def _prepare(self, group: str, name: str, count: int) -> None:
        self.ids[name] = [
            await self._rest.prepared(group, [message(self._topic, f"{name}-{n}")], as_id=new_id())
            for n in range(count)
        ]


STATES = {"checked": "prepared", "resumed": "prepared", "parked_once": "committed"}
# Fields that only the running instance knows, or that depend on the current time.
PASSING = {"next_check_at", "last_error"}


async def all_shown(rest: Rest, ids: Mapping[str, list[str]]) -> dict[str, Json]:
    """Return every transaction as shown, and assert the state that its name says."""
    shown: dict[str, Json] = {}
    for name, transactions in ids.items():
        for transaction in transactions:
            told = await rest.show(transaction)
            assert told["state"] == STATES.get(name, name), (name, told)
            shown[transaction] = {key: value for key, value in told.items() if key not in PASSING}
    assert {one["id"] for one in (await rest.page(limit=1000))["transactions"]} == set(shown)
    return shown


async def test_after_compaction_everything_is_as_it_was(
    new_coordinator: NewCoordinator, connect: Connect, cluster: Cluster, endpoint: CheckEndpoint, topic: str, group: str
) -> None:
    """Pending with payload and checks, parked, resumed, and outcomes: from the cursors, and without cursors."""
    coordinator = new_coordinator(SETTINGS).start()
    await shorten_segments(cluster, coordinator)
    rest, internal = connect(coordinator), InternalTopics(cluster, coordinator.prefix)
    ids = await Seeding(rest, group, topic, endpoint.url).all()
    assert None not in await internal.halves(ids["prepared"][0])
    assert len(await internal.halves(ids["committed"][0])) == 2
    assert len(await internal.ops(ids["checked"][0])) == 2
    assert len(await internal.parked(ids["resumed"][0])) == 2

    before = await all_shown(rest, ids)

    await roll_segments(coordinator)
    await compact(cluster, coordinator)

    for name in ("committed", "rolled_back", "parked", "parked_once"):
        for transaction in ids[name]:
            assert [half for half in await internal.halves(transaction) if half is not None] == [], name
    assert len(await internal.ops(ids["checked"][0])) == 1
    assert [one for one in await internal.parked(ids["resumed"][0]) if one is not None] == []

    coordinator.start()
    assert await all_shown(rest, ids) == before
    coordinator.kill()
    await set_offsets(cluster, coordinator.topic("cursors"), {(coordinator.topic("half"), 0): 0})
    coordinator.start()
    assert await all_shown(rest, ids) == before

    for transaction in ids["committed"]:
        (await rest.end(transaction, "rollback")).refused(409, "already_ended")
    for transaction in ids["rolled_back"]:
        (await rest.end(transaction, "commit")).refused(409, "already_ended")
    for name in ("prepared", "checked", "resumed", "parked"):
        for transaction in ids[name]:
            assert (await rest.commit(transaction))["changed"] is True
    once = Counter(record.transaction_id for record in await cluster.read(topic))
    assert once == Counter(id_ for name, all_ids in ids.items() if name != "rolled_back" for id_ in all_ids)
