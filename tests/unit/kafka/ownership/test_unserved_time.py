"""How long a shard was unserved."""

import pytest

from halfway.kafka.ownership.incarnation import UnservedTime


@pytest.fixture
def at(monkeypatch: pytest.MonkeyPatch) -> dict[str, float]:
    """Return a clock that the test sets."""
    clock = {"now": 1000.0}
    monkeypatch.setattr("halfway.kafka.ownership.incarnation.time.time", lambda: clock["now"])
    return clock


def test_it_counts_from_the_assignment_or_from_an_earlier_release(at: dict[str, float]) -> None:
    unserved = UnservedTime()
    at["now"] = 1010.0
    unserved.begin([1, 2, 3])
    at["now"] = 1012.0
    unserved.begin([1])
    assert unserved.end(1, None) == 2.0
    assert unserved.end(2, 1_004_000) == 8.0
    assert unserved.end(3, 1_011_000) == 2.0
    assert unserved.end(1, None) == 0.0


def test_a_release_from_before_the_start_tells_nothing(at: dict[str, float]) -> None:
    """No instance may have run since then. A clock that is ahead does not make the time negative."""
    unserved = UnservedTime()
    at["now"] = 1003.0
    unserved.begin([1, 2])
    at["now"] = 1004.0
    assert unserved.end(1, 900_000) == 1.0
    at["now"] = 1001.0
    assert unserved.end(2, None) == 0.0


def test_a_shard_that_goes_to_another_is_forgotten(at: dict[str, float]) -> None:
    unserved = UnservedTime()
    unserved.begin([1])
    unserved.forget([1])
    at["now"] = 1060.0
    unserved.begin([1])
    assert unserved.end(1, None) == 0.0
