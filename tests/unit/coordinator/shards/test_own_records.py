"""The tail need not decode records that this instance has written and applied."""

import pytest

from halfway.coordinator.shards.shard import Shard
from halfway.protocol.records import Half, Message, fingerprint
from halfway.protocol.shard import ShardState


def half(name: str) -> Half:
    messages = (Message(topic="t", value=b"v"),)
    return Half(
        id=name, group="g", messages=messages, prepared_at=1, since=1, fingerprint=fingerprint("g", messages, None)
    )


def test_an_own_record_is_passed_once_at_its_offset_under_its_key() -> None:
    """Even if its transaction has changed since; also a tombstone of the lane."""
    shard = Shard(0, ShardState(0))
    shard.apply_own_half(5, "a", half("a"))
    shard.apply_own_half(6, "a", None)
    assert shard.state.unresolved_count == 0
    assert [shard.has_applied(offset, b"a") for offset in (4, 5, 6, 7)] == [False, True, True, False]
    assert not shard.has_applied(5, b"a")


def test_a_record_of_another_id_at_such_an_offset_is_read() -> None:
    """A truncated log assigns an offset twice."""
    shard = Shard(0, ShardState(0))
    shard.apply_own_half(5, "a", half("a"))
    assert not shard.has_applied(5, b"b")
    shard.apply_own_half(6, "a", half("a"))
    assert not shard.has_applied(6, None)


def test_what_the_tail_never_passes_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Records behind the tail are not kept; if the tail is far behind, it reads the rest."""
    monkeypatch.setattr("halfway.coordinator.shards.shard._MAX_OWN", 3)
    shard = Shard(0, ShardState(0))
    for offset in range(4):
        shard.apply_own_half(offset, "a", half("a"))
    assert not shard.has_applied(3, b"a")
    assert shard.has_applied(2, b"a")
    shard.advance(5)
    shard.apply_own_half(4, "a", half("a"))
    assert not shard.has_applied(4, b"a")


def test_what_the_tail_read_before_it_was_applied_is_not_kept() -> None:
    shard = Shard(0, ShardState(0))
    assert not shard.has_applied(5, b"a")
    shard.apply_own_half(5, "a", half("a"))
    shard.forget_own(5)
    assert not shard.has_applied(5, b"a")
