"""What is read while topics are written stands once in the dump, whatever fails, is cleaned or deleted meanwhile."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from confluent_kafka import KafkaException

from checker.content import content_of
from checker.records import AnyRecord, Half, Op, Parked, read_records
from tests.chaos.follower import Follower

HALF = Half(shard=0, offset=1, id="a", contents=(content_of("orders", None, b"v"),))
PARKED = Parked(shard=0, offset=1, id="a")
GIVEN_UP = Op(shard=0, offset=4, id="a", kind="PARKED", cause="policy", remark="no verdict after 2 checks")


class Log:
    """Gives what it is told to, and fails after it where it is told to."""

    def __init__(self) -> None:
        self.next: list[AnyRecord] = []
        self.fails = False
        self.begun_again: list[str] = []

    def read(self) -> Iterator[AnyRecord]:
        yield from self.next
        if self.fails:
            raise KafkaException
        self.next = []


@pytest.fixture
def log() -> Log:
    return Log()


@pytest.fixture
def follower(log: Log, tmp_path: Path) -> Follower:
    return Follower(log.read, tmp_path / "dump", log.begun_again.append, lambda *_: None)


def test_what_is_pending_and_parked_follows_the_records(log: Log, follower: Follower) -> None:
    """A tombstone takes it away; why a policy gave up is counted without its numbers."""
    log.next = [HALF]
    follower.look()
    assert set(follower.prepared) == {"a"}
    log.next = [GIVEN_UP, PARKED, Half(shard=0, offset=2, id="a")]
    follower.look()
    assert (follower.prepared, follower.parked) == ({}, {"a"})
    assert follower.reasons == {"no verdict after checks": 1}
    log.next = [Parked(shard=0, offset=3, id="a", tombstone=True)]
    follower.look()
    assert follower.parked == set()


def test_what_failed_in_the_middle_is_read_again_and_stands_once(log: Log, follower: Follower, tmp_path: Path) -> None:
    """All of it or nothing."""
    log.next, log.fails = [HALF], True
    with pytest.raises(KafkaException):
        follower.look()
    assert follower.records.total() == 0
    log.next, log.fails = [HALF, PARKED], False
    follower.look()
    assert list(read_records(tmp_path / "dump")) == [HALF, PARKED]


def test_a_topic_is_read_to_its_end_before_it_is_deleted_and_from_its_beginning_afterwards(
    log: Log, follower: Follower, tmp_path: Path
) -> None:
    """Also where the last reading fails: then the history says that the topic was deleted."""
    log.next = [HALF]
    with follower.away("orders"):
        assert list(read_records(tmp_path / "dump")) == [HALF]
        assert log.begun_again == []
    assert log.begun_again == ["orders"]
    log.fails = True
    with follower.away("orders"):
        pass
    assert (log.begun_again, follower.failures) == (["orders", "orders"], 1)
