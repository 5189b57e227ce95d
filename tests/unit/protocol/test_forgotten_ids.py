"""Ids are found until their time, and few others are taken for them."""

import pytest

from halfway.protocol import outcomes as forgotten_ids
from halfway.protocol.outcomes import ForgottenIds

HORIZON_MS = 1000


def test_every_id_is_found_until_its_time() -> None:
    ids = ForgottenIds()
    for number in range(5000):
        ids.add(f"order-{number}", 10_000 + number, horizon_ms=HORIZON_MS)
    for number in range(5000):
        ids.expire(10_000 + number - 1)
        assert ids.may_have(f"order-{number}")
    ids.expire(20_000)
    assert not ids.may_have("order-0")


def test_few_others_are_taken_for_them() -> None:
    ids = ForgottenIds()
    for number in range(100_000):
        ids.add(f"order-{number}", 10_000, horizon_ms=HORIZON_MS)
    taken = sum(ids.may_have(f"other-{number}") for number in range(10_000))
    assert taken < 100


def test_filters_are_dropped_with_their_last_id_and_say_until_when_it_mattered() -> None:
    ids = ForgottenIds()
    for until in (10_000, 10_499, 10_500):
        ids.add(str(until), until, horizon_ms=HORIZON_MS)
    assert ids.expire(10_498) == 0
    assert ids.may_have("10000")
    assert ids.expire(10_499) == 10_499
    assert not ids.may_have("10000")
    assert ids.may_have("10500")
    assert ids.expire(20_000) == 10_500
    assert ids.expire(20_000) == 0


def test_the_number_of_filters_is_bounded_whatever_the_clock_does() -> None:
    ids = ForgottenIds()
    for until in (10_000, 10_600, 500, 10_700, 11_200, 9_000):
        ids.add(str(until), until, horizon_ms=HORIZON_MS)
        ids.expire(until - HORIZON_MS)
    assert len(ids._filters) <= 4


@pytest.mark.parametrize("dated_ahead", [1, 10_000])
def test_a_wrong_clock_does_not_make_a_filter_take_every_id(monkeypatch: pytest.MonkeyPatch, dated_ahead: int) -> None:
    """`dated_ahead` ends are dated ahead: those of a moment, or all that follow an acquisition by a clock ahead."""
    monkeypatch.setattr(forgotten_ids, "_BITS", 1 << 15)
    ids = ForgottenIds()
    for now in range(10_000):
        ids.expire(now)
        ids.add(f"order-{now}", 10_000_000 if now < dated_ahead else now + 1000, horizon_ms=1000)
    assert sum(ids.may_have(f"other-{number}") for number in range(1000)) < 100
