"""The memory of a shard for pending and for ended transactions."""

import gc
import sys
import tracemalloc
from types import FunctionType, ModuleType
from typing import TypeVar
from uuid import UUID

import msgspec
import pytest

from halfway.protocol.records import Half, Message, MessageDigest, Op, OpKind, fingerprint
from halfway.protocol.shard import ShardState
from tests.support.domain.shard_records import op

T = TypeVar("T")


def decoded(record: T, kind: type[T]) -> T:
    return msgspec.msgpack.decode(msgspec.msgpack.encode(record), type=kind)


FIRST_UUID = 0x0199A0000000_7000_8000_000000000000


def typical_half(number: int) -> Half:
    messages = tuple(
        Message(topic=topic, key=f"order-{number}".encode(), value=b"x" * 300, headers=(("trace", b"t" * 32),))
        for topic in ("coupon", "shipping", "points")
    )
    made = str(UUID(int=FIRST_UUID + number))
    return Half(
        id=made,
        group="orders",
        messages=messages,
        prepared_at=1_760_000_000_000 + number,
        since=1_760_000_000_000 + number,
        fingerprint=fingerprint("orders", messages, None),
    )


def ended_of(half: Half) -> Op:
    return msgspec.structs.replace(
        op(OpKind.COMMITTED, half.id, at=half.prepared_at + 250),
        group=half.group,
        prepared_at=half.prepared_at,
        messages=tuple(MessageDigest.of(message) for message in half.messages),
    )


def test_a_pending_transaction_costs_at_most_1_kib_beside_its_payload(state: ShardState) -> None:
    """With three messages and a check in op, on average over 2,500 transactions."""
    count, half = 2_500, None
    gc.collect()
    tracemalloc.start()
    try:
        before, _ = tracemalloc.get_traced_memory()
        for number in range(count):
            # Records share no objects, because each was decoded separately.
            half = decoded(typical_half(number), Half)
            state.apply_half(number, half.id, half)
            state.apply_op(number, decoded(op(OpKind.CHECKED, half.id, checks=1, at=1_760_000_009_999), Op))
        half = None
        gc.collect()
        after, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert state.counts == (count, 0, 0)
    assert (after - before) / count <= 1024


def bytes_of(root: object) -> int:
    """Return the size of everything that is reachable from an object, without code."""
    seen: dict[int, object] = {}
    found = [root]
    while found:
        one = found.pop()
        if id(one) not in seen and not isinstance(one, type | ModuleType | FunctionType):
            seen[id(one)] = one
            found += gc.get_referents(one)
    return sum(sys.getsizeof(one) for one in seen.values())


@pytest.mark.parametrize("name", [None, "order-{:012}"], ids=["an id of the server", "an id of the client"])
def test_an_outcome_costs_at_most_150_bytes(name: str | None) -> None:
    """With three messages of one key, on average over 25,000 transactions. Forgotten outcomes take almost nothing."""
    count, state, half = 25_000, ShardState(3), typical_half(0)
    end = ended_of(half)
    for number in range(count):
        made = str(UUID(int=FIRST_UUID + number)) if name is None else name.format(number)
        content = number.to_bytes(16, "big")
        state.apply_op(number, msgspec.structs.replace(end, id=made, half_offset=2 * number, fingerprint=content))
        state.apply_half(2 * number + 1, made, None)
    assert state.counts == (0, 0, count)
    assert bytes_of(state) / count <= 150
    state.half_tail = 2 * count
    assert state.forget(2_000_000_000_000) == count
    assert bytes_of(state) / count <= 30
