"""`IndexedHeap` and `OffsetOrder` against dictionaries that are sorted each time."""

from dataclasses import dataclass

from hypothesis import given
from hypothesis import strategies as st

from halfway.domain.indexes import IndexedHeap, OffsetOrder

KEYS = st.sampled_from("abcde")
steps = st.lists(
    st.one_of(
        st.tuples(st.just("put"), KEYS, st.integers(0, 9)),
        st.tuples(st.just("discard"), KEYS, st.just(0)),
        st.tuples(st.just("pop_up_to"), st.just(""), st.integers(0, 9)),
    ),
    max_size=80,
)


@given(steps)
def test_it_tells_the_lowest_of_what_stands_now(history: list[tuple[str, str, int]]) -> None:
    index, plain = IndexedHeap(), dict[str, int]()
    for action, key, number in history:
        if action == "put":
            index.put(key, number)
            plain[key] = number
        elif action == "discard":
            index.discard(key)
            plain.pop(key, None)
        else:
            popped = index.pop_up_to(number)
            lowest = min(((value, name) for name, value in plain.items()), default=None)
            assert popped == (lowest[1] if lowest is not None and lowest[0] <= number else None)
            plain.pop(popped or "", None)
        assert index.first() == min(((value, name) for name, value in plain.items()), default=None)
        assert len(index) == len(plain)
        assert [index.get(name) for name in "abcde"] == [plain.get(name) for name in "abcde"]
        assert [plain[name] for name in index.lowest(3)] == sorted(plain.values())[:3]
        assert len(index.lowest(1)) == min(1, len(plain))


@given(st.sets(KEYS), st.integers(0, 9), steps)
def test_what_was_put_all_at_once_is_told_like_what_was_put_one_by_one(
    keys: set[str], level: int, history: list[tuple[str, str, int]]
) -> None:
    index, plain = IndexedHeap(), dict.fromkeys(keys, level)
    index.put_all(sorted(keys), level)
    for action, key, number in history:
        if action == "put":
            index.put(key, number)
            plain[key] = number
        elif action == "discard":
            index.discard(key)
            plain.pop(key, None)
        else:
            popped = index.pop_up_to(number)
            assert (popped is None) == (min(plain.values(), default=10) > number)
            assert popped is None or plain.pop(popped) <= min([number, *plain.values()])
        first = index.first()
        assert (None if first is None else first[0]) == min(plain.values(), default=None)
        assert first is None or plain[first[1]] == first[0]
        assert {name: index.get(name) for name in plain} == plain
        assert len(index) == len(plain)


@dataclass
class Half:
    offset: int


@given(st.lists(st.tuples(KEYS, st.one_of(st.none(), st.integers(0, 40))), max_size=80))
def test_the_order_of_places_tells_what_stands_first_now(history: list[tuple[str, int | None]]) -> None:
    """Ids come, go and move, also to places before others; one place has one id at most, as in a log."""
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
    """Also where one id stays at the very beginning."""
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
    """What is put and taken away a hundred thousand times must not be kept."""
    index = IndexedHeap()
    for number in range(100_000):
        index.put(f"{number % 10}", number)
        if number % 3 == 0:
            index.discard(f"{number % 10}")
    assert len(index._heap) < 200
