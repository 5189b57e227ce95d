"""`OffsetIndex` against a dictionary that is sorted each time."""

from hypothesis import given
from hypothesis import strategies as st

from halfway.domain.offsets import OffsetIndex

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
    index, plain = OffsetIndex(), dict[str, int]()
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


def test_it_does_not_grow_with_changes() -> None:
    """What is put and taken away a hundred thousand times must not be kept."""
    index = OffsetIndex()
    for number in range(100_000):
        index.put(f"{number % 10}", number)
        if number % 3 == 0:
            index.discard(f"{number % 10}")
    assert len(index._heap) < 200
