"""`Agenda`, `IndexedHeap` and `OffsetOrder` against dictionaries that are sorted at every call."""

from dataclasses import dataclass

from hypothesis import given
from hypothesis import strategies as st

from halfway.protocol.entries import Agenda, IndexedHeap, OffsetOrder

KEYS = st.sampled_from("abcde")
_STEP_MS = 400  # a few in a second
changes = st.one_of(
    st.tuples(st.just("put"), KEYS, st.integers(0, 9)),
    st.tuples(st.just("discard"), KEYS, st.just(0)),
)
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
class Half:
    offset: int


@given(st.lists(st.tuples(KEYS, st.one_of(st.none(), st.integers(0, 40))), max_size=80))
def test_the_order_of_places_tells_what_stands_first_now(history: list[tuple[str, int | None]]) -> None:
    """Ids are added, removed and moved, also to lower offsets. An offset has at most one id, as in a log."""
    standing: dict[str, Half] = {}
    order = OffsetOrder(standing)
    for key, place in history:
        if place is None:
            standing.pop(key, None)
        elif all(half.offset != place for half in standing.values()):
            standing[key] = Half(place)
            order.note(key, place)
        expected = sorted((half.offset, name) for name, half in standing.items())
        assert order.first() == (expected[0] if expected else None)
        assert order.lowest(3) == [name for _, name in expected[:3]]


def test_the_order_of_places_does_not_grow_with_what_has_gone() -> None:
    """Also if one id stays at the lowest offset."""
    standing = {"old": Half(0)}
    order = OffsetOrder(standing)
    order.note("old", 0)
    for number in range(1, 10_000):
        standing[f"{number}"] = Half(number)
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
