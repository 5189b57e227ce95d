"""Suspects are kept apart, refused for a while if they are bad, and trusted again if they are good."""

from __future__ import annotations

import pytest
from confluent_kafka import KafkaError

from halfway.kafka.lane.quarantine import (
    FIRST_BACKOFF_S,
    FIRST_WATCH_S,
    FORGET_AFTER_S,
    MAX_BACKOFF_S,
    MAX_IDS,
    Blame,
    Quarantine,
    Route,
)
from halfway.kafka.lane.suspect_lane import RehearsalFailure
from halfway.protocol.errors import HalfwayError, MessageTooLargeError, NotAuthorisedError, TopicUnavailableError

GONE = Blame(refusal=TopicUnavailableError, topic="orders", detail="orders cannot be written")
LARGE = Blame(refusal=MessageTooLargeError, topic="orders", detail="too large")


@pytest.fixture
def quarantine() -> Quarantine:
    return Quarantine()


def test_topics_and_ids_of_a_failed_batch_are_suspects(quarantine: Quarantine) -> None:
    """By topic, for any id; by id, for any topic."""
    quarantine.suspect(["orders"], ["a"], 0)
    assert quarantine
    assert quarantine.route("b", {"points": 10, "orders": 10}, 0) is Route.SUSPECT
    assert quarantine.route("a", {"points": 10}, 0) is Route.SUSPECT
    assert quarantine.route("b", {"points": 10}, 0) is Route.LANE


def test_a_bad_topic_is_refused_twice_as_long_each_time(quarantine: Quarantine) -> None:
    """The back-off doubles up to its limit; afterwards the topic is tried again, as a suspect."""
    now, wait = 0.0, FIRST_BACKOFF_S
    for _ in range(12):
        error = quarantine.blame_topic(GONE, now)
        assert isinstance(error, TopicUnavailableError)
        assert error.fields["topic"] == "orders"
        assert error.retry_after_s == pytest.approx(wait)
        refused = quarantine.route("any", {"orders": 10}, now + wait * 0.99)
        assert isinstance(refused, TopicUnavailableError)
        assert quarantine.route("any", {"orders": 10}, now + wait) is Route.SUSPECT
        assert quarantine.route("any", {"points": 10}, now) is Route.LANE
        now, wait = now + wait, min(MAX_BACKOFF_S, wait * 2)
    assert wait == MAX_BACKOFF_S


def test_a_bad_id_is_refused_while_others_to_its_topic_are_not(quarantine: Quarantine) -> None:
    quarantine.suspect(["orders"], ["a", "b"], 0)
    quarantine.blame_id("a", LARGE, 0)
    quarantine.clear_topic("orders", 10, 0)
    assert isinstance(quarantine.route("a", {"orders": 10}, 0.5), MessageTooLargeError)
    assert quarantine.route("b", {"orders": 10}, 0.5) is Route.SUSPECT
    assert quarantine.route("c", {"orders": 10}, 0.5) is Route.LANE
    assert quarantine.route("a", {"orders": 10}, FIRST_BACKOFF_S) is Route.SUSPECT


def test_a_write_without_messages_is_not_held_up_by_what_a_message_is_blamed_for(quarantine: Quarantine) -> None:
    """A rollback goes to the lane while a commit of the same id is refused, for the topic or for the message."""
    quarantine.suspect(["orders"], ["a"], 0)
    quarantine.blame_topic(GONE, 0)
    quarantine.blame_id("a", LARGE, 0)
    assert isinstance(quarantine.route("a", {"orders": 10}, 0.5), MessageTooLargeError)
    assert quarantine.route("a", {}, 0.5) is Route.LANE


def test_a_write_without_messages_whose_records_are_blamed_is_refused(quarantine: Quarantine) -> None:
    """An internal record could not be written: every write of the id has the back-off."""
    blame = Blame(refusal=TopicUnavailableError, topic="_halfway.op", detail="not written", of_internal_records=True)
    quarantine.blame_id("a", blame, 0)
    assert isinstance(quarantine.route("a", {}, 0.5), TopicUnavailableError)
    assert quarantine.route("a", {}, FIRST_BACKOFF_S) is Route.SUSPECT


def test_a_write_without_messages_that_fails_all_the_same_is_kept_apart(quarantine: Quarantine) -> None:
    """Otherwise a rollback that cannot be written would end one incarnation with every try."""
    quarantine.blame_id("a", LARGE, 0)
    quarantine.suspect([], ["a"], 0.1)
    assert quarantine.route("a", {}, 0.2) is Route.SUSPECT
    quarantine.isolate(["a"], 0.3)
    assert quarantine.route("a", {}, 0.4) is Route.ALONE


def test_what_proved_good_is_trusted_again(quarantine: Quarantine) -> None:
    quarantine.suspect(["orders"], ["a"], 0)
    quarantine.clear_topic("orders", 10, 0)
    quarantine.clear_topic("unknown", 10, 0)
    quarantine.clear_ids(["a", "unknown"])
    assert not quarantine
    assert quarantine.route("a", {"orders": 10}, 0) is Route.LANE


def test_suspecting_again_keeps_what_is_known(quarantine: Quarantine) -> None:
    """A failed batch with a refused topic does not open the topic again."""
    quarantine.blame_topic(GONE, 0)
    quarantine.suspect(["orders"], [], 0.1)
    assert isinstance(quarantine.route("a", {"orders": 10}, 0.2), TopicUnavailableError)


def test_a_good_topic_that_refused_a_message_is_watched_for_messages_of_that_size(quarantine: Quarantine) -> None:
    """Smaller ones go to the lane; others are tried separately until one of that size is written or time has passed."""
    quarantine.suspect(["orders"], ["a"], 0)
    quarantine.watch("orders", 500, 0)
    assert quarantine.route("b", {"orders": 499}, 1) is Route.LANE
    assert quarantine.route("b", {"orders": 500}, 1) is Route.SUSPECT
    quarantine.watch("orders", 400, 1)
    quarantine.clear_topic("orders", 399, 1)
    assert quarantine.route("b", {"orders": 400}, FIRST_WATCH_S + 2) is Route.SUSPECT
    assert quarantine.route("b", {"orders": 400}, 2 * FIRST_WATCH_S + 1) is Route.LANE
    quarantine.watch("orders", 400, 2)
    quarantine.clear_topic("orders", 400, 2)
    assert quarantine.route("b", {"orders": 400}, 2) is Route.LANE


def test_a_topic_that_refused_a_message_for_another_reason_is_watched_for_all(quarantine: Quarantine) -> None:
    """A write in between does not end it: the next bad message looks the same."""
    quarantine.watch("orders", 0, 0)
    quarantine.clear_topic("orders", 1_000, 1)
    assert quarantine.route("b", {"orders": 0}, FIRST_WATCH_S / 2) is Route.SUSPECT
    assert quarantine.route("b", {"orders": 0}, FIRST_WATCH_S) is Route.LANE


def test_suspects_are_bounded_in_number_and_in_time(quarantine: Quarantine) -> None:
    """The oldest suspects are forgotten first."""
    quarantine.suspect(["orders"], [f"id-{number}" for number in range(MAX_IDS + 5)], 0)
    assert quarantine.route("id-4", {}, 0) is Route.LANE
    assert quarantine.route("id-5", {}, 0) is Route.SUSPECT
    quarantine.suspect([], ["new"], FORGET_AFTER_S + 1)
    assert quarantine.route("id-5", {}, 0) is Route.LANE
    assert quarantine.route("any", {"orders": 10}, 0) is Route.LANE
    assert quarantine.route("new", {}, 0) is Route.SUSPECT


def test_a_suspect_that_is_bad_again_keeps_no_other_one(quarantine: Quarantine) -> None:
    """It was the first, and is refused still: those that came after it, and that nobody has tried since, are old."""
    quarantine.suspect([], ["bad", "old"], 0)
    quarantine.blame_id("bad", LARGE, FORGET_AFTER_S)
    quarantine.suspect([], ["new"], FORGET_AFTER_S + 1)
    assert quarantine.route("old", {}, FORGET_AFTER_S + 1) is Route.LANE
    assert isinstance(quarantine.route("bad", {"orders": 10}, FORGET_AFTER_S), MessageTooLargeError)


def shown(quarantine: Quarantine, now: float) -> dict[str, tuple[object, ...]]:
    """Return the state of each topic and id with its end (in s) and reason, at a wall time of `now` + 1000 s."""
    return {
        entry.id or entry.topic or "": (
            entry.state,
            entry.until and entry.until / 1000 - 1000,
            entry.min_bytes,
            entry.error_code,
        )
        for entry in quarantine.shown(now, now + 1000, 100)
    }


def test_what_is_kept_apart_is_shown_with_how_and_why(quarantine: Quarantine) -> None:
    quarantine.suspect(["orders", "points"], ["a", "b", "c"], 0)
    assert shown(quarantine, 1) == dict.fromkeys(["orders", "points", "a", "b", "c"], ("suspected", None, None, None))
    quarantine.blame_topic(GONE, 1)
    quarantine.blame_id("a", LARGE, 1)
    quarantine.isolate(["b"], 1)
    quarantine.watch("points", 500, 1)
    quarantine.clear_ids(["c"])
    assert shown(quarantine, 1.5) == {
        "orders": ("refused", 1 + FIRST_BACKOFF_S, None, "topic_unavailable"),
        "points": ("watched", 1 + FIRST_WATCH_S, 500, None),
        "a": ("refused", 1 + FIRST_BACKOFF_S, None, "message_too_large"),
        "b": ("alone", None, None, None),
    }
    later = shown(quarantine, 2 + FIRST_BACKOFF_S + FIRST_WATCH_S)
    assert later["orders"] == ("suspected", None, None, "topic_unavailable")
    assert "points" not in later
    first = next(entry for entry in quarantine.shown(3, 1003, 9) if entry.topic == "orders")
    assert (first.topic, first.id, first.since, first.detail) == ("orders", None, 1_001_000, GONE.detail)


def test_only_the_latest_are_shown_and_times_stay_as_they_were(quarantine: Quarantine) -> None:
    """Times do not change without a change of state, unless the wall clock is adjusted."""
    for number in range(10):
        quarantine.suspect([], [f"id-{number}"], number)
    first = quarantine.shown(10, 1010, 3)
    assert [entry.id for entry in first] == ["id-9", "id-8", "id-7"]
    assert quarantine.shown(11, 1011.4, 3) == first
    assert [entry.since for entry in quarantine.shown(12, 2012, 1)] == [2_009_000]


@pytest.mark.parametrize(
    "code,kind,said",
    [
        (KafkaError.INVALID_RECORD, TopicUnavailableError, "compacted"),
        (KafkaError.MSG_SIZE_TOO_LARGE, MessageTooLargeError, "max.message.bytes"),
        (KafkaError.TOPIC_AUTHORIZATION_FAILED, NotAuthorisedError, "WRITE"),
        (None, TopicUnavailableError, "scripted"),
    ],
)
def test_each_cause_is_named_with_its_topic(code: int | None, kind: type[HalfwayError], said: str) -> None:
    """A topic that became compacted refuses a message without a key, and Kafka does not say why."""
    error = RehearsalFailure("orders", code, "scripted").blame().error(1)
    assert type(error) is kind
    assert said in error.detail
    assert "orders" in error.detail
