"""Late first prepares: the producer of a paused instance delivers one after the end, or before one of other content."""

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass

import msgspec
from confluent_kafka import Producer

from halfway.kafka.records.codec import KIND_HALF, encode_half, record_headers
from halfway.protocol.ids import shard_of
from halfway.protocol.records import Half, Message, fingerprint
from tests.support.coordinator.by_hand import append_half
from tests.support.coordinator.endpoints import CheckEndpoint
from tests.support.coordinator.process import CoordinatorProcess, NewCoordinator
from tests.support.coordinator.rest_client import QUIET, Connect, Rest, message
from tests.support.coordinator.topics import Cluster, InternalTopics, Record
from tests.support.ids import new_id
from tests.support.waiting import eventually

SHARDS = 2
ACKNOWLEDGED = 5


@dataclass(frozen=True, kw_only=True)
class Lives:
    """One transaction in each state, by name, and the first halves."""

    ids: Mapping[str, str]
    halves: Mapping[str, Half]
    states: Mapping[str, str]


async def lived(rest: Rest, internal: InternalTopics, endpoint: CheckEndpoint, topic: str, group: str) -> Lives:
    """Bring a transaction into each state; the rolled back and parked ones have a verdict of the group."""
    quiet, hasty = group, f"{group}.hasty"
    (await rest.put_group(quiet, topics=[topic], urls=[endpoint.url], policy=QUIET)).expect(201)
    once = {"first_check_after_s": 0.1, "max_checks": 1, "check_interval_s": 0.1, "max_interval_s": 0.1}
    (await rest.put_group(hasty, topics=[topic], urls=[endpoint.url], policy=once)).expect(201)
    names = ("committed", "rolled_back", "prepared", "again")
    ids = {name: await rest.prepared(quiet, [message(topic, name, key=name)]) for name in names}
    ids["parked"] = await rest.prepared(hasty, [message(topic, "parked", key="parked")])
    ids["own"] = await rest.prepared(quiet, [message(topic, "own", key="own")], as_id=new_id())
    halves = {name: half for name, id_ in ids.items() if (half := (await internal.halves(id_))[0]) is not None}
    await rest.commit(ids["committed"])
    await rest.commit(ids["own"])
    await rest.rollback(ids["rolled_back"])
    await rest.until(ids["parked"], "parked")
    states = {"committed": "committed", "own": "committed", "rolled_back": "rolled_back", "parked": "parked"}
    return Lives(ids=ids, halves=halves, states={**states, "prepared": "prepared", "again": "prepared"})


async def repeat_all(cluster: Cluster, coordinator: CoordinatorProcess, lives: Lives) -> dict[str, int]:
    """Append each half again, that of `prepared` with other content; return the offsets."""
    offsets = {}
    for name, half in lives.halves.items():
        shard = shard_of(half.id, SHARDS)
        assert shard is not None
        late = with_other_content(half) if name == "prepared" else half
        if name != "again":
            # Due at once, so that a check of a wrongly restored transaction would be sent at once.
            late = msgspec.structs.replace(late, check_after_ms=1)
        offsets[name] = (await append_half(cluster, coordinator.topic("half"), shard, late)).offset
    return offsets


def with_other_content(half: Half) -> Half:
    messages = (Message(topic=half.messages[0].topic, key=b"other", value=b"other"),)
    return msgspec.structs.replace(half, messages=messages, fingerprint=fingerprint(half.group, messages, None))


async def corrected(internal: InternalTopics, lives: Lives, offsets: Mapping[str, int]) -> None:
    """Wait until the last record of each id in half is the expected one."""

    async def last() -> dict[str, Record]:
        return {(record.key or b"").decode(): record for record in await internal.records("half")}

    def right(last: Mapping[str, Record]) -> bool:
        ended = [last[lives.ids[name]] for name in lives.ids if name not in ("prepared", "again")]
        return (
            all(record.value is None for record in ended) and last[lives.ids["prepared"]].offset > offsets["prepared"]
        )

    await eventually(last, right)
    kept = [half for half in await internal.halves(lives.ids["prepared"]) if half is not None][-1]
    assert kept.messages == lives.halves["prepared"].messages, "the first content is written again"


async def shown_as_before(rest: Rest, lives: Lives) -> None:
    for name, transaction in lives.ids.items():
        shown = await rest.show(transaction)
        assert shown["state"] == lives.states[name], name
        if name in ("prepared", "again"):
            assert [one["value"] for one in shown["messages"]] == [name]
    listed = await rest.page(state="prepared")
    assert {one["id"] for one in listed["transactions"]} == {lives.ids["prepared"], lives.ids["again"]}
    listed = await rest.page(state="parked")
    assert [one["id"] for one in listed["transactions"]] == [lives.ids["parked"]]


async def resolved_once(rest: Rest, cluster: Cluster, internal: InternalTopics, topic: str, lives: Lives) -> None:
    """Ended transactions accept no other end; the others end now; each message and outcome is stored once."""
    (await rest.end(lives.ids["committed"], "rollback")).refused(409, "already_ended")
    (await rest.end(lives.ids["rolled_back"], "commit")).refused(409, "already_ended")
    assert (await rest.commit(lives.ids["own"]))["changed"] is False
    for name in ("prepared", "again", "parked"):
        assert (await rest.commit(lives.ids[name]))["changed"] is True
    values = sorted((record.value or b"").decode() for record in await cluster.read(topic))
    assert values == ["again", "committed", "own", "parked", "prepared"]
    for transaction in lives.ids.values():
        assert len([kind for kind, _ in await internal.kinds(transaction) if kind.final]) == 1


async def test_a_late_duplicate_never_comes_to_life(
    new_coordinator: NewCoordinator, connect: Connect, cluster: Cluster, endpoint: CheckEndpoint, topic: str, group: str
) -> None:
    """After commit, after rollback, while pending or parked: during operation, across a kill, and while it is down."""
    coordinator = new_coordinator({"HALFWAY_SHARDS": str(SHARDS)}).start()
    rest, internal = connect(coordinator), InternalTopics(cluster, coordinator.prefix)
    lives = await lived(rest, internal, endpoint, topic, group)
    asked = len(endpoint.asked)

    offsets = await repeat_all(cluster, coordinator, lives)
    await corrected(internal, lives, offsets)
    await shown_as_before(rest, lives)

    await repeat_all(cluster, coordinator, lives)
    coordinator.kill()
    offsets = await repeat_all(cluster, coordinator, lives)
    coordinator.start()
    await corrected(internal, lives, offsets)
    await shown_as_before(rest, lives)

    assert len(endpoint.asked) == asked, "nobody is asked about a duplicate"
    await resolved_once(rest, cluster, internal, topic, lives)
    assert coordinator.stop() == 0
    coordinator.start()
    assert {name: (await rest.show(id_))["state"] for name, id_ in lives.ids.items()} == {
        **lives.states,
        **dict.fromkeys(("prepared", "again", "parked"), "committed"),
    }


async def test_what_was_acknowledged_is_delivered_although_other_content_arrived_late_just_before_it(
    new_coordinator: NewCoordinator, connect: Connect, cluster: Cluster, topic: str, group: str
) -> None:
    """Also if the instance dies before it corrects the log: its tail has not read the late half when it answers."""
    coordinator = new_coordinator({"HALFWAY_SHARDS": str(SHARDS)}).start()
    rest, acknowledged = connect(coordinator), list[str]()
    (await rest.put_group(group, topics=[topic], policy=QUIET)).expect(201)
    former_owner = Producer({"bootstrap.servers": cluster.bootstrap_servers, "linger.ms": 0})
    while len(acknowledged) < ACKNOWLEDGED:  # the tail reads a late half in time or not, as threads take turns
        id_ = new_id()
        if await is_acknowledged(rest, coordinator, former_owner, topic, group, id_):
            acknowledged.append(id_)
    coordinator.kill()
    coordinator.start()
    for id_ in acknowledged:
        await rest.end(id_, "commit", retry=True)
    assert {record.value for record in await cluster.read(topic)} == {b"acknowledged"}


async def is_acknowledged(
    rest: Rest, coordinator: CoordinatorProcess, former_owner: Producer, topic: str, group: str, as_id: str
) -> bool:
    """Prepare an id just after a former owner has written a half with other content for it."""
    shard = shard_of(as_id, SHARDS)
    assert shard is not None
    messages = (Message(topic=topic, key=b"k", value=b"late"),)
    late = Half(
        id=as_id, group=group, messages=messages, prepared_at=1, since=1, fingerprint=fingerprint(group, messages, None)
    )
    headers = record_headers(KIND_HALF, group, "prepared")
    former_owner.produce(coordinator.topic("half"), encode_half(late), as_id.encode(), shard, headers=headers)
    assert await asyncio.to_thread(former_owner.flush, 60) == 0
    return (await rest.prepare(group, [message(topic, "acknowledged", key="k")], as_id=as_id)).status == 201
