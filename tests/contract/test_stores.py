"""The ports `CursorStore`, `GroupStore` and `Topics`."""

import msgspec
import pytest

from halfway.domain.errors import KafkaUnavailableError
from halfway.domain.policy import OnExhausted, PolicyOverrides
from halfway.domain.records import CheckMode, Group
from halfway.service.ports import Cursors
from tests.contract.instance import Backend, Instance, facts, half_of, new_id, running

WHOLE = Group(
    name="",
    mode=CheckMode.PUSH,
    urls=("http://orders:9000/check", "http://orders-2:9000/check"),
    topics=("orders", "points"),
    policy=PolicyOverrides(
        first_check_after_s=0.5,
        check_interval_s=1.5,
        max_interval_s=60,
        max_checks=3,
        max_age_s=3600,
        on_exhausted=OnExhausted.ROLLBACK,
    ),
    created_at=1_760_000_000_000,
    updated_at=1_760_000_000_001,
    key_hashes=(b"\x00" * 16,),
)
PLAIN = msgspec.structs.replace(WHOLE, mode=CheckMode.PULL, urls=(), topics=(), policy=PolicyOverrides(), key_hashes=())


def named(group: Group) -> Group:
    return msgspec.structs.replace(group, name=new_id("group"))


@pytest.mark.parametrize("group", [WHOLE, PLAIN], ids=["whole", "plain"])
async def test_a_group_is_there_as_soon_as_put_returns(instance: Instance, group: Group) -> None:
    group = named(group)
    assert instance.groups.get(group.name) is None
    await instance.groups.put(group, deadline=instance.deadline())
    assert instance.groups.get(group.name) == group
    assert group in instance.groups.all()


async def test_the_last_put_of_a_group_stands(instance: Instance) -> None:
    group = named(WHOLE)
    changed = msgspec.structs.replace(group, topics=("other",), updated_at=1_760_000_000_009)
    await instance.groups.put(group, deadline=instance.deadline())
    await instance.groups.put(changed, deadline=instance.deadline())
    assert instance.groups.get(group.name) == changed
    assert sum(one.name == group.name for one in instance.groups.all()) == 1


async def test_groups_are_listed_by_name(instance: Instance) -> None:
    for _ in range(3):
        await instance.groups.put(named(PLAIN), deadline=instance.deadline())
    names = [group.name for group in instance.groups.all()]
    assert names == sorted(names)
    assert len(names) >= 3


async def test_a_deleted_group_is_gone(instance: Instance) -> None:
    group = named(WHOLE)
    await instance.groups.put(group, deadline=instance.deadline())
    await instance.groups.delete(group.name, deadline=instance.deadline())
    assert instance.groups.get(group.name) is None
    assert group.name not in {one.name for one in instance.groups.all()}


async def test_groups_outlive_an_instance(backend: Backend) -> None:
    kept, deleted = named(WHOLE), named(PLAIN)
    async with running(backend) as first:
        for group in (kept, deleted):
            await first.groups.put(group, deadline=first.deadline())
        await first.groups.delete(deleted.name, deadline=first.deadline())
    async with running(backend) as second:
        assert second.groups.get(kept.name) == kept
        assert second.groups.get(deleted.name) is None


async def test_a_put_past_its_deadline_fails(instance: Instance) -> None:
    with pytest.raises(KafkaUnavailableError):
        await instance.groups.put(named(WHOLE), deadline=instance.deadline(-1))


async def test_topics_are_described(instance: Instance, backend: Backend) -> None:
    plain = await backend.create_topic("plain", 5)
    compacted = await backend.create_topic("compacted", 1, compacted=True)
    missing = new_id("missing")
    described = await instance.topics.describe([plain, missing, compacted], deadline=instance.deadline())
    assert described == {plain: facts(5), missing: None, compacted: facts(1, compacted=True)}


async def test_describing_a_topic_does_not_create_it(instance: Instance) -> None:
    missing = new_id("missing")
    for _ in range(2):
        assert await instance.topics.describe([missing], deadline=instance.deadline()) == {missing: None}


async def test_nothing_is_asked_about_no_topic(instance: Instance) -> None:
    assert await instance.topics.describe([], deadline=instance.deadline()) == {}


async def test_a_description_past_its_deadline_fails(instance: Instance, backend: Backend) -> None:
    topic = await backend.create_topic("there")
    with pytest.raises(KafkaUnavailableError):
        await instance.topics.describe([topic], deadline=instance.deadline(-1))


async def test_recovery_begins_at_the_cursors(backend: Backend) -> None:
    """What stands before the half cursor is not read: a pending half there is not found."""
    before, after = half_of(new_id("before")), half_of(new_id("after"))
    async with running(backend) as first:
        await first.half_log.append(0, before, deadline=first.deadline())
        offset = await first.half_log.append(0, after, deadline=first.deadline())
        await first.tailed(0)
        await first.cursors.commit({0: Cursors(half=offset, op=0)})
    async with running(backend) as second:
        assert second.states[0].find(after.id) is not None
        assert second.states[0].find(before.id) is None
        await second.cursors.commit({0: Cursors(half=0, op=0)})
    async with running(backend) as third:
        assert third.states[0].find(before.id) is not None


async def test_the_cursors_of_a_shard_that_had_nothing_to_do_never_go_back(backend: Backend) -> None:
    half = half_of(new_id())
    async with running(backend) as first:
        await first.prepare(1, half)
        await first.write(first.commit_of(1, half))
        cursors = await committed_cursors(first, 1)
    for _ in range(2):
        async with running(backend) as later:
            now = await committed_cursors(later, 1)
            assert now.half >= cursors.half
            assert now.op >= cursors.op
            cursors = now


async def committed_cursors(instance: Instance, shard: int) -> Cursors:
    """Commit the cursors as a scan does."""
    await instance.tailed(shard)
    state = instance.states[shard]
    cursors = Cursors(half=state.half_cursor, op=state.op_cursor)
    await instance.cursors.commit({shard: cursors})
    return cursors
