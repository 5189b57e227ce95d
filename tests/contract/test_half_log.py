"""The port `HalfLog`: prepares, and payloads read back."""

import asyncio

import pytest

from halfway.protocol.errors import KafkaUnavailableError, MessageTooLargeError, RetryableError
from halfway.protocol.records import Message
from tests.support.contract.backend import Backend, new_id
from tests.support.contract.instance import Instance, half_of
from tests.support.replies import appended

pytestmark = pytest.mark.asyncio(loop_scope="module")

AWKWARD = (
    Message(topic="a", key=None, value=None),
    Message(topic="a", key=b"", value=b""),
    Message(topic="b", key=b"\x00\xff", value=bytes(range(256)), partition=2),
    Message(topic="b", key="ключ".encode(), value=b"v", headers=(("h", b"1"), ("h", b"2"), ("ø", None), ("", b""))),
)


async def test_what_was_appended_is_read_back_as_it_was(instance: Instance) -> None:
    """Null, empty and binary keys and values, repeated and empty headers, partitions."""
    half = half_of(new_id(), AWKWARD)
    offset = await appended(instance.half_log, 1, half, deadline=instance.deadline())
    assert await instance.half_log.read_half(1, offset, half.id, deadline=instance.deadline()) == half


async def test_an_appended_record_stands_in_its_shard_with_its_headers(instance: Instance, backend: Backend) -> None:
    half = half_of(new_id())
    offset = await appended(instance.half_log, 1, half, deadline=instance.deadline())
    [stored] = await backend.stored("half", 1, half.id)
    assert (stored.offset, stored.value) == (offset, half)
    assert stored.headers == {
        "halfway-kind": b"half",
        "halfway-group": b"shop",
        "halfway-state": b"prepared",
        "halfway-prepared-at": str(half.prepared_at).encode(),
    }
    assert await backend.stored("half", 0, half.id) == []


async def test_many_at_once_each_get_an_offset_of_their_own(instance: Instance) -> None:
    halves = [half_of(new_id(str(number)), (Message(topic="a", value=b"%d" % number),)) for number in range(100)]
    deadline = instance.deadline()
    offsets = await asyncio.gather(*(appended(instance.half_log, 0, half, deadline=deadline) for half in halves))
    assert len(set(offsets)) == 100
    read = [
        instance.half_log.read_half(0, offset, half.id, deadline=deadline)
        for offset, half in zip(offsets, halves, strict=True)
    ]
    assert await asyncio.gather(*read) == halves


async def test_the_key_at_an_offset_is_verified(instance: Instance) -> None:
    """If compaction or a mistake has put another record there, its payload must not be used."""
    half = half_of(new_id())
    offset = await appended(instance.half_log, 0, half, deadline=instance.deadline())
    with pytest.raises(KafkaUnavailableError):
        await instance.half_log.read_half(0, offset, new_id(), deadline=instance.deadline(5))


async def test_nothing_is_read_where_nothing_stands(instance: Instance) -> None:
    end = await instance.half_log.half_end(0, deadline=instance.deadline())
    with pytest.raises(KafkaUnavailableError):
        await instance.half_log.read_half(0, end + 1000, new_id(), deadline=instance.deadline(1))


async def test_a_tombstone_is_not_read_back(instance: Instance) -> None:
    half = half_of(new_id())
    await instance.prepare(0, half)
    written = await instance.write(instance.commit_of(0, half))
    assert written.half is not None
    with pytest.raises(KafkaUnavailableError):
        await instance.half_log.read_half(0, written.half, half.id, deadline=instance.deadline(5))


async def test_a_parked_record_is_read_back(instance: Instance) -> None:
    half = half_of(new_id(), AWKWARD)
    await instance.prepare(1, half)
    written = await instance.park(1, half, reason="no verdict", checks=15)
    assert written.parked is not None
    parked = await instance.half_log.read_parked(1, written.parked, half.id, deadline=instance.deadline())
    assert (parked.reason, parked.checks, parked.half.messages) == ("no verdict", 0, AWKWARD)
    with pytest.raises(KafkaUnavailableError):
        await instance.half_log.read_parked(1, written.parked, new_id(), deadline=instance.deadline(5))


async def test_the_end_lies_behind_the_last_record(instance: Instance) -> None:
    before = await instance.half_log.half_end(0, deadline=instance.deadline())
    offset = await appended(instance.half_log, 0, half_of(new_id()), deadline=instance.deadline())
    after = await instance.half_log.half_end(0, deadline=instance.deadline())
    assert before <= offset < after


async def test_what_is_too_large_is_refused_and_not_stored(instance: Instance, backend: Backend) -> None:
    half = half_of(new_id(), (Message(topic="a", value=b"x" * 1_500_000),))
    with pytest.raises(MessageTooLargeError):
        await appended(instance.half_log, 0, half, deadline=instance.deadline())
    assert await backend.stored("half", 0, half.id) == []


async def test_past_its_deadline_nothing_is_stored(instance: Instance, backend: Backend) -> None:
    half = half_of(new_id())
    with pytest.raises(RetryableError):
        await appended(instance.half_log, 0, half, deadline=instance.deadline(-1))
    assert await backend.stored("half", 0, half.id) == []


async def test_a_read_past_its_deadline_fails(instance: Instance) -> None:
    half = half_of(new_id())
    offset = await appended(instance.half_log, 0, half, deadline=instance.deadline())
    with pytest.raises(KafkaUnavailableError):
        await instance.half_log.read_half(0, offset, half.id, deadline=instance.deadline(-1))
    with pytest.raises(KafkaUnavailableError):
        await instance.half_log.half_end(0, deadline=instance.deadline(-1))
