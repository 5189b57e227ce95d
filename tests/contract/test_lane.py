"""The port `Lane`: one resolution is atomic."""

import asyncio

import pytest

from halfway.coordinator import changes
from halfway.protocol.errors import NotWrittenError, TopicUnavailableError
from halfway.protocol.ids import partition_for_key
from halfway.protocol.records import Half, Message, MessageDigest, Op, OpKind, Origin, Parked
from halfway.protocol.transactions import Cause, State
from tests.support.contract.backend import Backend, new_id
from tests.support.contract.instance import Instance, half_of
from tests.support.domain.states import state_of

pytestmark = pytest.mark.asyncio(loop_scope="module")


async def test_a_commit_writes_messages_marker_and_tombstone(instance: Instance, backend: Backend) -> None:
    orders, points = await backend.create_topic("orders"), await backend.create_topic("points")
    own = (("trace", b"1"), ("trace", b"2"), ("null", None))
    half = half_of(
        new_id(),
        (Message(topic=orders, key=b"o-1", value=b"paid", headers=own), Message(topic=points, key=b"c-1", value=b"+5")),
    )
    started = backend.now_ms()
    offset = await instance.prepare(1, half)
    written = await instance.write(instance.commit_of(1, half, remark="paid"))

    ours = (("halfway-transaction-id", half.id.encode()), ("halfway-prepared-at", b"%d" % half.prepared_at))
    [order] = await backend.records(orders)
    assert (order.key, order.value) == (b"o-1", b"paid")
    assert order.headers[:3] == own
    prefix = ("halfway-prefix", dict(order.headers)["halfway-prefix"])
    assert set(order.headers[3:]) == {*ours, ("halfway-message", b"1/2"), prefix}
    assert order.timestamp >= started, "the time of the commit"
    [point] = await backend.records(points)
    assert set(point.headers) == {*ours, ("halfway-message", b"2/2"), prefix}

    [op] = await backend.stored("op", 1, half.id)
    assert op.offset == written.op
    assert isinstance(op.value, Op)
    assert (op.value.kind, op.value.half_offset, op.value.remark) == (OpKind.COMMITTED, offset, "paid")
    assert (op.value.fingerprint, op.value.prepared_at) == (half.fingerprint, half.prepared_at)
    assert op.value.messages == tuple(MessageDigest.of(message) for message in half.messages)
    assert op.headers == {"halfway-kind": b"op", "halfway-group": b"shop", "halfway-state": b"committed"}
    first, tombstone = await backend.stored("half", 1, half.id)
    assert (first.offset, first.value) == (offset, half)
    assert (tombstone.offset, tombstone.value) == (written.half, None)
    assert tombstone.headers == {"halfway-kind": b"half", "halfway-group": b"shop", "halfway-state": b"committed"}
    assert written.parked is None


async def test_a_rollback_writes_no_message(instance: Instance, backend: Backend) -> None:
    orders = await backend.create_topic("orders")
    half = half_of(new_id(), (Message(topic=orders, value=b"never"),))
    await instance.prepare(0, half)
    entry = instance.entry(0, half.id)
    written = await instance.write(changes.rolled_back(0, entry, half, instance.told(cause=Cause.CHECK, checks=2)))
    assert await backend.records(orders) == []
    [op] = await backend.stored("op", 0, half.id)
    assert isinstance(op.value, Op)
    assert (op.value.kind, op.value.cause, op.value.checks) == (OpKind.ROLLED_BACK, Cause.CHECK, 2)
    assert [stored.offset for stored in await backend.stored("half", 0, half.id)][1:] == [written.half]


async def test_a_note_writes_an_op_alone(instance: Instance, backend: Backend) -> None:
    half = half_of(new_id())
    await instance.prepare(0, half)
    told = instance.told(cause=Cause.CHECK, checks=1, checked_at=backend.now_ms(), remark="ask later")
    written = await instance.write(changes.noted(0, instance.pending(0, half.id), told, OpKind.CHECKED))
    assert (written.half, written.parked) == (None, None)
    [op] = await backend.stored("op", 0, half.id)
    assert isinstance(op.value, Op)
    assert (op.value.checks, op.value.checked_at, op.value.remark) == (1, told.checked_at, "ask later")
    assert op.headers["halfway-state"] == b"prepared"
    assert len(await backend.stored("half", 0, half.id)) == 1


async def test_park_resume_and_the_end_of_a_parked_one(instance: Instance, backend: Backend) -> None:
    orders = await backend.create_topic("orders")
    half = half_of(new_id(), (Message(topic=orders, value=b"late"),))
    await instance.prepare(0, half)
    parked = await instance.park(0, half, reason="no verdict after 15 checks")
    assert None not in (parked.half, parked.op, parked.parked)
    assert state_of(instance.states[0], half.id) is State.PARKED

    resumed = await instance.resume(0, half)
    assert None not in (resumed.half, resumed.op, resumed.parked)
    assert state_of(instance.states[0], half.id) is State.PREPARED
    await instance.park(0, half, reason="again")
    await instance.write(instance.commit_of(0, half, cause=Cause.OPERATOR))
    assert state_of(instance.states[0], half.id) is State.COMMITTED

    kinds = [stored.value.kind for stored in await backend.stored("op", 0, half.id) if isinstance(stored.value, Op)]
    assert kinds == [OpKind.PARKED, OpKind.RESUMED, OpKind.PARKED, OpKind.COMMITTED]
    halves = [stored.value for stored in await backend.stored("half", 0, half.id)]
    assert [value.origin if isinstance(value, Half) else None for value in halves] == [
        Origin.PREPARE,
        None,
        Origin.LANE,
        None,
    ]
    parks = [stored.value for stored in await backend.stored("parked", 0, half.id)]
    assert [value.reason if isinstance(value, Parked) else None for value in parks] == [
        "no verdict after 15 checks",
        None,
        "again",
        None,
    ]
    assert [seen.value for seen in await backend.records(orders)] == [b"late"]


async def test_messages_go_where_a_java_client_puts_them(instance: Instance, backend: Backend) -> None:
    topic = await backend.create_topic("keys", 5)
    keys = [b"21", b"foobar", b"a-little-bit-long-string", b"", b"\x00\xff", b"abc"]
    messages = [Message(topic=topic, key=key, value=b"by key") for key in keys]
    messages += [Message(topic=topic, key=b"abc", value=b"fixed", partition=number) for number in range(5)]
    messages.append(Message(topic=topic, key=None, value=b"anywhere"))
    half = half_of(new_id(), messages)
    await instance.prepare(0, half)
    await instance.write(instance.commit_of(0, half))
    seen = await backend.records(topic)
    by_key = {record.key: record.partition for record in seen if record.value == b"by key"}
    assert by_key == {key: partition_for_key(key, 5) for key in keys}
    assert sorted(record.partition for record in seen if record.value == b"fixed") == [0, 1, 2, 3, 4]
    assert [record.key for record in seen if record.value == b"anywhere"] == [None]


async def test_null_empty_and_binary_values_arrive_as_sent(instance: Instance, backend: Backend) -> None:
    topic = await backend.create_topic("values", 1)
    values = [None, b"", b"\x00", bytes(range(256)), "zażółć".encode()]
    half = half_of(new_id(), (Message(topic=topic, key=b"k", value=value) for value in values))
    await instance.prepare(1, half)
    await instance.write(instance.commit_of(1, half))
    assert [record.value for record in await backend.records(topic)] == values


async def test_keyed_messages_keep_the_order_of_their_ends(instance: Instance, backend: Backend) -> None:
    topic = await backend.create_topic("ordered")
    halves = [half_of(new_id(), (Message(topic=topic, key=b"one key", value=b"%d" % number),)) for number in range(60)]
    for half in halves:
        await instance.prepare(0, half)
    waiting = []
    for number, half in enumerate(halves):
        waiting.append(asyncio.ensure_future(instance.write(instance.commit_of(0, half))))
        if number % 7 == 0:
            await asyncio.sleep(0.002)
    await asyncio.gather(*waiting)
    assert [record.value for record in await backend.records(topic)] == [b"%d" % number for number in range(60)]


async def test_many_ends_over_all_shards_stand_once_each(instance: Instance, backend: Backend) -> None:
    topic = await backend.create_topic("many")
    halves = [half_of(new_id(), (Message(topic=topic, value=b"%d" % number),)) for number in range(200)]
    for number, half in enumerate(halves):
        await instance.prepare(number % 2, half)
    commits = [instance.commit_of(number % 2, half) for number, half in enumerate(halves)]
    await asyncio.gather(*(instance.write(commit) for commit in commits))
    values = sorted(int(record.value or b"") for record in await backend.records(topic))
    assert values == list(range(200))


async def test_past_its_deadline_nothing_is_written(instance: Instance, backend: Backend) -> None:
    topic = await backend.create_topic("late")
    half = half_of(new_id(), (Message(topic=topic, value=b"late"),))
    await instance.prepare(0, half)
    with pytest.raises(NotWrittenError):
        await instance.write(instance.commit_of(0, half, deadline=instance.deadline(-1)))
    assert await backend.records(topic) == []
    assert await backend.stored("op", 0, half.id) == []


async def test_what_is_no_longer_current_is_not_written(instance: Instance, backend: Backend) -> None:
    topic = await backend.create_topic("stale")
    stale, good = (half_of(new_id(), (Message(topic=topic, value=b"v"),)) for _ in range(2))
    for half in (stale, good):
        await instance.prepare(0, half)
    instance.listener.not_current.add(stale.id)
    results = await asyncio.gather(
        *(instance.write(instance.commit_of(0, half)) for half in (stale, good)), return_exceptions=True
    )
    assert isinstance(results[0], NotWrittenError)
    assert not isinstance(results[1], BaseException)
    assert len(await backend.records(topic)) == 1
    assert await backend.stored("op", 0, stale.id) == []


async def test_a_missing_topic_holds_up_nobody_else(instance: Instance, backend: Backend) -> None:
    """Its transaction stays pending; the others of the same batch are committed."""
    topic = await backend.create_topic("there")
    failing = half_of(
        new_id(), (Message(topic=topic, value=b"half"), Message(topic=new_id("not-there"), value=b"half"))
    )
    good = [half_of(new_id(), (Message(topic=topic, value=b"good"),)) for _ in range(5)]
    for half in (failing, *good):
        await instance.prepare(0, half)
    before = len(instance.listener.events)
    results = await asyncio.gather(
        *(instance.write(instance.commit_of(0, half)) for half in (failing, *good)), return_exceptions=True
    )
    assert isinstance(results[0], TopicUnavailableError)
    assert [result for result in results[1:] if isinstance(result, BaseException)] == []
    assert [record.value for record in await backend.records(topic)] == [b"good"] * 5
    assert state_of(instance.states[0], failing.id) is State.PREPARED
    assert await backend.stored("op", 0, failing.id) == []
    assert len(instance.listener.events) == before, "the incarnation goes on"
