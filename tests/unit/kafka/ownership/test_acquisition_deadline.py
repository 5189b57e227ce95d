"""An acquisition may continue while its reader makes progress."""

import time
from collections.abc import Iterator

import pytest

from halfway.kafka.clients.config import KafkaConfig
from halfway.kafka.clients.reader import Reader
from halfway.kafka.ownership.former_owners import AcquireError, AcquisitionDeadline

LONG_S = 1_000.0
"""Longer than any test takes."""


@pytest.fixture
def reader() -> Iterator[Reader]:
    """Return a reader that reads nothing; the tests set when it moved."""
    servers = {"bootstrap.servers": "127.0.0.1:1"}
    reader = Reader(KafkaConfig(properties=servers, max_prepare_bytes=1_000))
    yield reader
    reader.close()


def deadline_of(reader: Reader, *, until: float, stall_s: float = LONG_S, wanted: bool = True) -> AcquisitionDeadline:
    return AcquisitionDeadline(until=until, stall_s=stall_s, reader=reader, cancelled=lambda: not wanted)


def test_the_deadline_is_the_one_given_until_reading_leads_beyond_it(reader: Reader) -> None:
    """It never comes closer, and is extended by reading."""
    given = deadline_of(reader, until=100, stall_s=30)
    assert given.deadline == 100
    reader.moved_at = 60
    assert given.deadline == 100
    reader.moved_at = 80
    assert given.deadline == 110


def test_past_the_deadline_it_goes_on_only_while_reading_moves(reader: Reader) -> None:
    """The error names the step."""
    over = deadline_of(reader, until=time.monotonic())
    with pytest.raises(AcquireError, match=r"^a step: out of time"):
        over.check("a step")
    reader.moved_at = time.monotonic()
    over.check("a step")
    reader.moved_at -= LONG_S
    with pytest.raises(AcquireError, match=r"^a step: out of time"):
        over.check("a step")


def test_reading_is_stalled_when_it_has_stood_still_for_too_long(reader: Reader) -> None:
    """A waiter that has just started gets all of the time."""
    given, now = deadline_of(reader, until=0), time.monotonic()
    long_ago = now - 2 * LONG_S
    assert given.is_stalled(since=long_ago)
    assert not given.is_stalled(since=now)
    reader.moved_at = now
    assert not given.is_stalled(since=long_ago)


def test_what_is_no_longer_wanted_ends_at_once(reader: Reader) -> None:
    """Regardless of the time left."""
    unwanted = deadline_of(reader, until=time.monotonic() + LONG_S, wanted=False)
    for check in (unwanted.check, unwanted.check_wanted):
        with pytest.raises(AcquireError, match=r"^a step: the shard is no longer wanted"):
            check("a step")
