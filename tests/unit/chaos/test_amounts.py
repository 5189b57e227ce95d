"""How many faults a chaos run of a length is to have."""

import pytest

from tests.chaos.__main__ import SHORT_HORIZON_S, Shares, faults_for, horizon_for, split
from tests.chaos.coordinator_faults import AWAY
from tests.chaos.faults import BROKER_FAULTS, COORDINATOR_FAULTS, FULL_STOP, KINDS, TOPIC_FAULTS, possible_kinds


def test_a_run_of_a_hundred_thousand_has_thirty_faults_of_coordinators_ten_of_each_other_and_a_full_stop() -> None:
    """Without a word about faults."""
    shares = split(faults_for(100_000))
    assert shares.coordinators >= 30
    assert shares.brokers >= 10
    assert shares.topics >= 10
    assert shares.full_stops >= 1


@pytest.mark.parametrize("faults", [8, 19, 60])
def test_all_faults_that_were_asked_for_are_shared_out(faults: int) -> None:
    """Most of them are of coordinators."""
    shares = split(faults)
    assert shares.coordinators + shares.brokers + shares.topics == faults
    assert shares.coordinators > shares.brokers == shares.topics > 0


@pytest.mark.parametrize(
    "kinds, wanted",
    [
        (COORDINATOR_FAULTS, Shares(coordinators=60, brokers=0, topics=0, full_stops=0)),
        (BROKER_FAULTS, Shares(coordinators=0, brokers=60, topics=0, full_stops=1)),
        (TOPIC_FAULTS, Shares(coordinators=0, brokers=0, topics=60, full_stops=0)),
        ([*COORDINATOR_FAULTS, *TOPIC_FAULTS], Shares(coordinators=40, brokers=0, topics=20, full_stops=0)),
        ([FULL_STOP], Shares(coordinators=0, brokers=0, topics=0, full_stops=1)),
    ],
)
def test_no_fault_is_waited_for_that_is_not_played(kinds: list[str], wanted: Shares) -> None:
    """Where only some kinds are wanted."""
    assert split(60, list(kinds)) == wanted


def test_an_absence_for_a_whole_horizon_is_played_where_the_horizon_is_short() -> None:
    """By default with odd seeds, and with any seed if it was asked for."""
    assert possible_kinds(horizon_for(1)) == set(KINDS)
    assert possible_kinds(horizon_for(2)) == set(KINDS) - {AWAY}
    assert horizon_for(2, [AWAY]) == SHORT_HORIZON_S
