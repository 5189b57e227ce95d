"""The ports `CursorStore`, `GroupStore` and `Topics`."""

import msgspec
import pytest

from halfway.protocol.errors import KafkaUnavailableError
from halfway.protocol.records import CheckMode, Group, OnExhausted, PolicyOverrides
from tests.support.contract.backend import Backend, new_id
from tests.support.contract.groups import put, remove
from tests.support.contract.instance import Instance, facts

pytestmark = pytest.mark.asyncio(loop_scope="module")

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
)
PLAIN = msgspec.structs.replace(WHOLE, mode=CheckMode.PULL, urls=(), topics=(), policy=PolicyOverrides())


def named(group: Group) -> Group:
    return msgspec.structs.replace(group, name=new_id("group"))


@pytest.mark.parametrize("group", [WHOLE, PLAIN], ids=["whole", "plain"])
async def test_a_group_is_there_as_soon_as_put_returns(instance: Instance, group: Group) -> None:
    group = named(group)
    assert instance.groups.get(group.name) is None
    await put(instance.groups, group, deadline=instance.deadline())
    assert instance.groups.get(group.name) == group
    assert group in instance.groups.all()


async def test_the_last_put_of_a_group_stands(instance: Instance) -> None:
    group = named(WHOLE)
    changed = msgspec.structs.replace(group, topics=("other",), updated_at=1_760_000_000_009)
    await put(instance.groups, group, deadline=instance.deadline())
    await put(instance.groups, changed, deadline=instance.deadline())
    assert instance.groups.get(group.name) == changed
    assert sum(one.name == group.name for one in instance.groups.all()) == 1


async def test_groups_are_listed_by_name(instance: Instance) -> None:
    for _ in range(3):
        await put(instance.groups, named(PLAIN), deadline=instance.deadline())
    names = [group.name for group in instance.groups.all()]
    assert names == sorted(names)
    assert len(names) >= 3


async def test_a_deleted_group_is_gone(instance: Instance) -> None:
    group = named(WHOLE)
    await put(instance.groups, group, deadline=instance.deadline())
    await remove(instance.groups, group.name, deadline=instance.deadline())
    assert instance.groups.get(group.name) is None
    assert group.name not in {one.name for one in instance.groups.all()}


async def test_a_put_past_its_deadline_fails(instance: Instance) -> None:
    with pytest.raises(KafkaUnavailableError):
        await put(instance.groups, named(WHOLE), deadline=instance.deadline(-1))


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
