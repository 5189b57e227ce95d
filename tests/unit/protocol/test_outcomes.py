"""The packed outcomes and the indexes against plain dicts; what a shard takes of memory."""

import gc
import sys
import tracemalloc
from dataclasses import dataclass
from types import FunctionType, ModuleType
from typing import TypeVar
from uuid import UUID

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from halfway.protocol.entries import Agenda, Ended, IndexedHeap, MessageIndex, OffsetOrder
from halfway.protocol.outcomes import Outcomes
from halfway.protocol.records import Half, Message, MessageDigest, Op, OpKind, fingerprint
from halfway.protocol.shard import ShardState
from halfway.protocol.transactions import Cause, State
from tests.support.domain.shard_records import op

MADE = "0199a000-0000-7000-8000-0000000000"
IDS = ("order-1", "order-2", "ø", "", f"{MADE}01", f"{MADE}02", f"4-{MADE}01", f"33-{MADE}01", MADE)


offsets = st.one_of(st.integers(0, 9), st.just(2**62))
endings = st.builds(
    Ended,
    id=st.sampled_from(IDS),
    state=st.sampled_from([State.COMMITTED, State.ROLLED_BACK]),
    group=st.sampled_from(["shop", "lager ü"]),
    cause=st.sampled_from(Cause),
    at=st.integers(0, 2**60),
    prepared_at=st.integers(0, 2**60),
    checks=st.integers(0, 2**32 - 1),
    half_offset=st.integers(-1, 2**62),
    fingerprint=st.binary(max_size=16),
    index=st.lists(
        st.tuples(st.sampled_from(["a", "b"]), st.none() | st.binary(min_size=8, max_size=8)), max_size=3
    ).map(MessageIndex.of),
    remark=st.one_of(st.none(), st.text(max_size=20), st.just("long " * 20_000)),
    tombstone=st.none() | offsets,
)


def op_of(ended: Ended) -> Op:
    """Return the op marker of an outcome."""
    return Op(
        kind=OpKind.COMMITTED if ended.state is State.COMMITTED else OpKind.ROLLED_BACK,
        id=ended.id,
        group=ended.group,
        half_offset=ended.half_offset,
        cause=ended.cause,
        prepared_at=ended.prepared_at,
        at=ended.at,
        fingerprint=ended.fingerprint,
        checks=ended.checks,
        remark=ended.remark,
        messages=tuple(
            MessageDigest(topic=topic, key_hash=key and key * 2, value_hash=None, size=0) for topic, key in ended.index
        ),
    )


@dataclass(frozen=True)
class Discard:
    id: str


@dataclass(frozen=True)
class NoteTombstone:
    id: str
    tombstone: int


steps = st.lists(
    st.one_of(
        endings, st.builds(Discard, st.sampled_from(IDS)), st.builds(NoteTombstone, st.sampled_from(IDS), offsets)
    ),
    max_size=40,
)


@given(steps, st.integers(1, 8))
def test_they_hold_what_a_dict_holds(history: list[Ended | Discard | NoteTombstone], pack_at: int) -> None:
    outcomes, model = Outcomes(pack_at), dict[str, Ended]()
    for step in history:
        before = model.get(step.id)
        if isinstance(step, Discard):
            outcomes.discard(step.id)
            model.pop(step.id, None)
        elif isinstance(step, NoteTombstone):
            assert outcomes.note_tombstone(step.id, step.tombstone) == (before is not None)
            if before is not None:
                model[step.id] = replaced(before, max(step.tombstone, before.tombstone or 0))
        elif before is None:
            outcomes.put(op_of(step), step.tombstone)
            model[step.id] = step
        assert_equal(outcomes, model)


def replaced(ended: Ended, tombstone: int) -> Ended:
    fields = {name: getattr(ended, name) for name in ended.__struct_fields__}
    return Ended(**fields | {"tombstone": tombstone})


def assert_equal(outcomes: Outcomes, model: dict[str, Ended]) -> None:
    assert list(outcomes) == list(model.values())
    assert list(outcomes.ages()) == [(ended.id, ended.at, ended.tombstone) for ended in model.values()]
    assert len(outcomes) == len(model)
    for name in IDS:
        ended = model.get(name)
        assert outcomes.get(name) == ended
        assert outcomes.positions(name) == (None if ended is None else (ended.half_offset, ended.tombstone))


def ended(number: int) -> Ended:
    return Ended(
        id=f"order-{number}",
        state=State.COMMITTED,
        group=f"group-{number % 100}",
        cause=Cause.PRODUCER,
        at=number,
        prepared_at=0,
        checks=0,
        half_offset=number,
        fingerprint=b"f" * 16,
        index=MessageIndex.of([("orders", b"k" * 8)]),
        remark=None,
    )


@pytest.mark.parametrize("stays", [None, 0, 777], ids=["none stays", "the oldest stays", "one stays"])
def test_many_that_come_and_go(stays: int | None) -> None:
    """Over many blocks and splits of the index, with an outcome that outlives all others."""
    outcomes, count, kept = Outcomes(), 20_000, 3_000
    for number in range(count):
        outcomes.put(op_of(ended(number)), None)
        if number >= kept and number - kept != stays:
            outcomes.discard(f"order-{number - kept}")
    left = [] if stays is None else [stays]
    numbers = [*left, *range(count - kept, count)]
    assert [outcome.at for outcome in outcomes] == numbers
    assert all(outcomes.get(f"order-{number}") == ended(number) for number in numbers)
    assert all(outcomes.get(f"order-{number}") is None for number in range(count - kept) if number != stays)


def test_going_through_them_while_others_come_and_go_shows_what_stays_once() -> None:
    outcomes = Outcomes()
    for number in range(5_000):
        outcomes.put(op_of(ended(number)), None)
    shown: list[int] = []
    for outcome in outcomes:
        shown.append(outcome.at)
        gone = 4_999 - 2 * len(shown)
        if gone > 2_500:
            outcomes.discard(f"order-{gone}")
        outcomes.put(op_of(ended(5_000 + len(shown))), None)
        if len(shown) > 20_000:
            break
    assert len(shown) == len(set(shown))
    assert {*range(2_500), *range(2_500, 5_000, 2)} <= set(shown)


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


KEYS = st.sampled_from("abcde")
_STEP_MS = 400  # a few in a second
changes = st.one_of(st.tuples(st.just("put"), KEYS, st.integers(0, 9)), st.tuples(st.just("discard"), KEYS, st.just(0)))
plans = st.one_of(
    changes,
    st.tuples(st.just("pop_up_to"), st.just(""), st.integers(0, 9)),
    st.tuples(st.just("gone"), KEYS, st.just(0)),
)


@given(st.lists(changes, max_size=80))
def test_it_tells_the_lowest_of_what_stands_now(history: list[tuple[str, str, int]]) -> None:
    index, plain = IndexedHeap(), dict[str, int]()
    for action, key, number in history:
        if action == "put":
            index.put(key, number)
            plain[key] = number
        else:
            index.discard(key)
            plain.pop(key, None)
        assert index.first() == min(((value, name) for name, value in plain.items()), default=None)
        assert [index.get(name) for name in "abcde"] == [plain.get(name) for name in "abcde"]


@dataclass
class Entry:
    look_at: int | None = None


@given(st.sets(KEYS), st.lists(plans, max_size=80))
def test_the_agenda_takes_what_comes_first(keys: set[str], history: list[tuple[str, str, int]]) -> None:
    """The initial entries have the time 0. An entry may be removed, and added again without a time."""
    entries = {key: Entry() for key in sorted(keys)}
    agenda, plain = Agenda(entries), dict.fromkeys(keys, 0)
    for action, key, number in history:
        if action == "put":
            entries.setdefault(key, Entry())
            agenda.put(key, number * _STEP_MS)
            plain[key] = number * _STEP_MS
        elif action == "discard":
            agenda.discard(key)
            plain.pop(key, None)
        elif action == "gone":
            entries.pop(key, None)
            agenda.put(key, 0)
            plain.pop(key, None)
        else:
            limit = number * _STEP_MS
            popped = agenda.pop_up_to(limit)
            assert (popped is None) == (min(plain.values(), default=limit + 1) > limit)
            assert popped is None or plain.pop(popped) <= min([limit, *plain.values()])
        assert {name: entry.look_at for name, entry in entries.items() if entry.look_at is not None} == plain


def test_the_agenda_does_not_grow_with_what_has_gone() -> None:
    """Nor with entries that are put again and again."""
    entries = {"old": Entry()}
    agenda = Agenda(entries)
    for number in range(1, 10_000):
        entries[f"{number}"] = Entry()
        agenda.put(f"{number}", number)
        agenda.put("old", number)
        del entries[f"{number}"]
        assert len(agenda._heap) + sum(map(len, agenda._later.values())) < 200
    assert agenda.pop_up_to(10_000) == "old"
    assert agenda.pop_up_to(10_000) is None


@dataclass
class Standing:
    offset: int


@given(st.lists(st.tuples(KEYS, st.one_of(st.none(), st.integers(0, 40))), max_size=80))
def test_the_order_of_places_tells_what_stands_first_now(history: list[tuple[str, int | None]]) -> None:
    """Ids are added, removed and moved, also to lower offsets. An offset has at most one id, as in a log."""
    standing: dict[str, Standing] = {}
    order = OffsetOrder(standing)
    for key, place in history:
        if place is None:
            standing.pop(key, None)
        elif all(half.offset != place for half in standing.values()):
            standing[key] = Standing(place)
            order.note(key, place)
        expected = sorted((half.offset, name) for name, half in standing.items())
        assert order.first() == (expected[0] if expected else None)
        assert order.lowest(3) == [name for _, name in expected[:3]]


def test_the_order_of_places_does_not_grow_with_what_has_gone() -> None:
    """Also if one id stays at the lowest offset."""
    standing = {"old": Standing(0)}
    order = OffsetOrder(standing)
    order.note("old", 0)
    for number in range(1, 10_000):
        standing[f"{number}"] = Standing(number)
        order.note(f"{number}", number)
        del standing[f"{number}"]
    assert order.first() == (0, "old")
    assert len(order._ids) < 200


def test_it_does_not_grow_with_changes() -> None:
    """An entry that is added and removed a hundred thousand times takes no memory."""
    index = IndexedHeap()
    for number in range(100_000):
        index.put(f"{number % 10}", number)
        if number % 3 == 0:
            index.discard(f"{number % 10}")
    assert len(index._heap) < 200
