"""Records and offsets that halfway did not write, in each of its topics and its group: logged, counted, skipped."""

import asyncio
from collections.abc import Mapping, Sequence
from functools import partial
from operator import eq

from halfway.kafka.records import codec
from halfway.kafka.records.codec import BARRIER_KEY, LAYOUT_KEY
from halfway.protocol.ids import shard_of
from halfway.protocol.records import Barrier, Owner
from tests.support.brokers.header_names import append_with_header_name
from tests.support.coordinator.by_hand import Keyed, Place, append_all, set_offsets, skipped, total
from tests.support.coordinator.process import CoordinatorProcess, NewCoordinator
from tests.support.coordinator.rest_client import QUIET, Connect, Rest, message
from tests.support.coordinator.topics import Cluster, InternalTopics, Record
from tests.support.ids import new_id
from tests.support.waiting import eventually

SHARDS = 2
PARKING = {"first_check_after_s": 0.05, "max_age_s": 0.1}
UNKNOWN_SCHEMA = b"\xc3\x01" + b"\x07" * 8 + b"body"


def corrupted_values(value: bytes) -> list[bytes | None]:
    """Return values that are not valid records of halfway, some of them made from a valid one."""
    another_kind = codec.encode_barrier(Barrier(incarnation="x", at=1))
    damaged = [value[:-3], value[:10], value + b"\x00"]
    return [b"\x00garbage", b"", b'{"id": "x"}', UNKNOWN_SCHEMA, *damaged, another_kind, None]


# A broker accepts no record without a key in a compacted topic.
WRONG_KEYS = (b"", b"\xff\xfe", b"no/id", b"x" * 5_000, b"another-id")


async def prepare_in_each_state(rest: Rest, group: str, topic: str) -> dict[str, str]:
    """Make transactions in each state, and return their ids by name."""
    (await rest.put_group(group, topics=[topic], policy=QUIET)).expect(201)
    (await rest.put_group(f"{group}.parking", topics=[topic], policy=PARKING)).expect(201)
    names = ("committed", "rolled_back", "prepared")
    ids = {name: await rest.prepared(group, [message(topic, name)]) for name in names}
    ids["own"] = await rest.prepared(group, [message(topic, "own")], as_id=new_id())
    ids["parked"] = await rest.prepared(f"{group}.parking", [message(topic, "parked")])
    await rest.commit(ids["committed"])
    await rest.rollback(ids["rolled_back"])
    await rest.until(ids["parked"], "parked")
    return ids


class Vandal:
    """Writes to every internal topic, also under the keys of live records, and records the offsets."""

    def __init__(self, cluster: Cluster, coordinator: CoordinatorProcess) -> None:
        self._cluster = cluster
        self._topic = coordinator.topic
        self._internal = InternalTopics(cluster, coordinator.prefix)
        self.places: dict[str, set[Place]] = {}
        """The places of the records, by the kind of the topic."""

    async def write_foreign_records(self) -> None:
        for kind in ("half", "op", "parked"):
            records = [record for record in await self._internal.records(kind) if record.key != BARRIER_KEY]
            value = next(record.value for record in records if record.value is not None)
            keys = {record.key for record in records if record.key is not None}
            for shard in range(SHARDS):
                own = {key for key in keys if shard_of(key.decode(), SHARDS) == shard} | {unused_id(shard)}
                await self._write(kind, shard, [(key, bad) for key in own for bad in corrupted_values(value)])
                await self._write_with_header_name(kind, shard, [(key, bad) for key in own for bad in (b"x", None)])
                await self._write_with_header_name(kind, shard, [(BARRIER_KEY, b"garbage"), (BARRIER_KEY, None)])
                others = [*WRONG_KEYS, unused_id(1 - shard), *(keys - own)]
                await self._write(kind, shard, [pair for key in others for pair in ((key, value), (key, None))])
                await self._write(kind, shard, [(BARRIER_KEY, b"garbage"), (BARRIER_KEY, None)])
        await self._write_to_groups()
        await self._write_to_owners()

    async def _write_to_groups(self) -> None:
        records = await self._internal.records("groups")
        key, value = records[0].key, records[0].value or b""
        await self._write("groups", 0, [(key, bad) for bad in corrupted_values(value)])
        await self._write("groups", 0, [pair for key in WRONG_KEYS for pair in ((key, value), (key, None))])
        await self._write_with_header_name("groups", 0, [(key, None)])

    async def _write_to_owners(self) -> None:
        value = codec.encode_owner(Owner(shard=0, incarnation="x", lane_ids=(), url="", acquired_at=1))
        for shard in range(SHARDS):
            await self._write("owners", shard, [(b"%d" % shard, bad) for bad in corrupted_values(value)])
            await self._write("owners", shard, [pair for key in WRONG_KEYS for pair in ((key, value), (key, None))])
            await self._write_with_header_name("owners", shard, [(b"%d" % shard, None)])
        await self._write("owners", 1, [(b"1", value)])
        await self._write("owners", 0, [(LAYOUT_KEY, b"garbage")])

    async def _write(self, kind: str, partition: int, records: Sequence[Keyed]) -> None:
        written = await append_all(self._cluster, self._topic(kind), partition, records)
        self.places.setdefault(kind, set()).update(written)

    async def _write_with_header_name(self, kind: str, partition: int, records: Sequence[Keyed]) -> None:
        """Write records with a header whose name is not text."""
        topic, servers = self._topic(kind), self._cluster.bootstrap_servers
        offsets = await asyncio.to_thread(append_with_header_name, servers, topic, partition, records)
        written = {Place(topic=topic, partition=partition, offset=offset) for offset in offsets}
        self.places.setdefault(kind, set()).update(written)


def unused_id(shard: int) -> bytes:
    """Return an unused id that belongs to a shard."""
    return next(name.encode() for name in map("stranger-{}".format, range(99)) if shard_of(name, SHARDS) == shard)


async def assert_unharmed(rest: Rest, ids: Mapping[str, str]) -> None:
    for name, transaction in ids.items():
        shown = await rest.show(transaction)
        assert shown["state"] == ("prepared" if name == "own" else name)
        if shown["state"] in ("prepared", "parked"):
            assert [one["value"] for one in shown["messages"]] == [name]
    for state, names in {"prepared": {"prepared", "own"}, "parked": {"parked"}}.items():
        listed = {one["id"] for one in (await rest.page(state=state))["transactions"]}
        assert listed == {ids[name] for name in names}


async def assert_serves(rest: Rest, cluster: Cluster, group: str, topic: str, value: str) -> None:
    assert (await rest.commit(await rest.prepared(group, [message(topic, value)])))["state"] == "committed"
    assert value.encode() in {record.value for record in await cluster.read(topic)}


async def test_foreign_records_in_each_internal_topic_do_no_harm(
    new_coordinator: NewCoordinator, connect: Connect, cluster: Cluster, topic: str, group: str
) -> None:
    """Each is logged with topic, partition and offset, and counted; nothing is lost, and none has an effect."""
    coordinator = new_coordinator({"HALFWAY_SHARDS": str(SHARDS)}).start()
    rest, vandal = connect(coordinator), Vandal(cluster, coordinator)
    ids = await prepare_in_each_state(rest, group, topic)

    await vandal.write_foreign_records()

    for kind in ("half", "groups", "owners"):  # the others are only read at a start
        await eventually(
            partial(total, rest, "halfway_skipped_records_total", topic=coordinator.topic(kind)),
            partial(eq, len(vandal.places[kind]) - (kind == "owners")),  # the layout is read at a start
        )
        assert len(vandal.places[kind] - set(skipped(coordinator))) == (kind == "owners")
    await assert_serves(rest, cluster, group, topic, "while it runs")
    await assert_unharmed(rest, ids)

    coordinator.kill()
    since = len(coordinator.log)
    coordinator.start()

    told = set(skipped(coordinator, since))
    for kind, places in vandal.places.items():
        if kind != "half":  # half is only read from the cursor on
            assert {place for place in told if place.topic == coordinator.topic(kind)} == places, kind
            assert await total(rest, "halfway_skipped_records_total", topic=coordinator.topic(kind)) >= len(places)
    assert told <= set().union(*vandal.places.values())
    await assert_unharmed(rest, ids)
    await assert_serves(rest, cluster, group, topic, "after a restart")


async def test_what_is_foreign_never_stays_last_under_the_id_of_a_transaction(
    new_coordinator: NewCoordinator, connect: Connect, cluster: Cluster, topic: str, group: str
) -> None:
    """Compaction keeps the last record of a key: the half is written again, or its tombstone if it has ended."""
    coordinator = new_coordinator({"HALFWAY_SHARDS": str(SHARDS)}).start()
    rest, internal = connect(coordinator), InternalTopics(cluster, coordinator.prefix)
    ids = await prepare_in_each_state(rest, group, topic)

    async def last() -> dict[str, Record]:
        return {(record.key or b"").decode(): record for record in await internal.records("half")}

    async def overwrite(value: bytes | None) -> dict[str, int]:
        places = {}
        for name in ids.values():
            shard = shard_of(name, SHARDS) or 0
            [place] = await append_all(cluster, coordinator.topic("half"), shard, [(name.encode(), value)])
            places[name] = place.offset
        return places

    async def restored(over: Mapping[str, int]) -> dict[str, Record]:
        return await eventually(last, lambda found: all(found[name].offset > over[name] for name in ids.values()))

    await restored(await overwrite(None))
    coordinator.kill()
    over = await overwrite(b"garbage")
    coordinator.start()
    found = await restored(over)

    for name, transaction in ids.items():
        value = found[transaction].value
        assert (value is not None) == (name in ("prepared", "own")), name
        if value is not None:
            assert codec.decode_half(value).messages[0].value == name.encode()
    await assert_unharmed(rest, ids)


async def test_cursors_that_somebody_else_has_set_hide_nothing(
    new_coordinator: NewCoordinator, connect: Connect, cluster: Cluster, topic: str, group: str
) -> None:
    """Set to the end and past it: pending transactions are known after a restart; the reset is logged and counted."""
    coordinator = new_coordinator({"HALFWAY_SHARDS": str(SHARDS)}).start()
    rest = connect(coordinator)
    ids = await prepare_in_each_state(rest, group, topic)
    for beyond in (0, 1_000_000):
        assert coordinator.stop() == 0
        ends = cluster.ends([coordinator.topic("half"), coordinator.topic("op")])
        await set_offsets(cluster, coordinator.topic("cursors"), {place: end + beyond for place, end in ends.items()})
        coordinator.start()
        await assert_unharmed(rest, ids)
        counted = await total(rest, "halfway_skipped_records_total", topic=coordinator.topic("cursors"))
        assert counted == SHARDS
        assert '"cursors_skipped"' in coordinator.log
