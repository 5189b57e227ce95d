"""Suspects are kept apart, refused for a while when found bad, and trusted again when they prove good."""

from __future__ import annotations

import pytest

from halfway.domain.errors import MessageTooLargeError, TopicUnavailableError
from halfway.kafka.quarantine import FIRST_BACKOFF_S, FORGET_AFTER_S, MAX_BACKOFF_S, MAX_IDS, Blame, Quarantine, Route

GONE = Blame(refusal=TopicUnavailableError, topic="orders", detail="orders cannot be written")
LARGE = Blame(refusal=MessageTooLargeError, topic="orders", detail="too large")


@pytest.fixture
def quarantine() -> Quarantine:
    return Quarantine()


def test_without_suspects_everything_goes_to_the_lane(quarantine: Quarantine) -> None:
    assert not quarantine
    assert quarantine.route("a", ["orders"], 0) is Route.LANE


def test_topics_and_ids_of_a_failed_batch_are_suspects(quarantine: Quarantine) -> None:
    """By topic, whatever the id; by id, whatever the topic."""
    quarantine.suspect(["orders"], ["a"], 0)
    assert quarantine
    assert quarantine.route("b", ["points", "orders"], 0) is Route.SUSPECT
    assert quarantine.route("a", ["points"], 0) is Route.SUSPECT
    assert quarantine.route("b", ["points"], 0) is Route.LANE


def test_a_bad_topic_is_refused_twice_as_long_each_time(quarantine: Quarantine) -> None:
    """The back-off doubles up to its limit; when it is over the topic is tried again, as a suspect."""
    now, wait = 0.0, FIRST_BACKOFF_S
    for _ in range(12):
        error = quarantine.blame_topic(GONE, now)
        assert isinstance(error, TopicUnavailableError)
        assert error.fields["topic"] == "orders"
        assert error.retry_after_s == pytest.approx(wait)
        refused = quarantine.route("any", ["orders"], now + wait * 0.99)
        assert isinstance(refused, TopicUnavailableError)
        assert quarantine.route("any", ["orders"], now + wait) is Route.SUSPECT
        assert quarantine.route("any", ["points"], now) is Route.LANE
        now, wait = now + wait, min(MAX_BACKOFF_S, wait * 2)
    assert wait == MAX_BACKOFF_S


def test_a_bad_id_is_refused_while_others_to_its_topic_are_not(quarantine: Quarantine) -> None:
    quarantine.suspect(["orders"], ["a", "b"], 0)
    quarantine.blame_id("a", LARGE, 0)
    quarantine.clear_topics(["orders"])
    assert isinstance(quarantine.route("a", ["orders"], 0.5), MessageTooLargeError)
    assert quarantine.route("b", ["orders"], 0.5) is Route.SUSPECT
    assert quarantine.route("c", ["orders"], 0.5) is Route.LANE
    assert quarantine.route("a", ["orders"], FIRST_BACKOFF_S) is Route.SUSPECT


def test_what_proved_good_is_trusted_again(quarantine: Quarantine) -> None:
    quarantine.suspect(["orders"], ["a"], 0)
    quarantine.clear_topics(["orders", "unknown"])
    quarantine.clear_ids(["a", "unknown"])
    assert not quarantine
    assert quarantine.route("a", ["orders"], 0) is Route.LANE


def test_ids_that_failed_together_are_tried_one_by_one(quarantine: Quarantine) -> None:
    quarantine.suspect([], ["a", "b"], 0)
    quarantine.isolate(["a"], 0)
    assert quarantine.route("a", [], 0) is Route.ALONE
    assert quarantine.route("b", [], 0) is Route.SUSPECT


def test_suspecting_again_keeps_what_is_known(quarantine: Quarantine) -> None:
    """A failed batch around a topic that is refused does not open it again."""
    quarantine.blame_topic(GONE, 0)
    quarantine.suspect(["orders"], [], 0.1)
    assert isinstance(quarantine.route("a", ["orders"], 0.2), TopicUnavailableError)


def test_suspects_are_bounded_in_number_and_in_time(quarantine: Quarantine) -> None:
    """The oldest are forgotten first."""
    quarantine.suspect(["orders"], [f"id-{number}" for number in range(MAX_IDS + 5)], 0)
    assert quarantine.route("id-4", [], 0) is Route.LANE
    assert quarantine.route("id-5", [], 0) is Route.SUSPECT
    quarantine.suspect([], ["new"], FORGET_AFTER_S + 1)
    assert quarantine.route("id-5", [], 0) is Route.LANE
    assert quarantine.route("any", ["orders"], 0) is Route.LANE
    assert quarantine.route("new", [], 0) is Route.SUSPECT
