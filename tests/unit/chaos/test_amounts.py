"""How many faults a chaos run of a length is to have."""

import pytest

from tests.chaos.__main__ import faults_for, split
from tests.chaos.faults import BROKER_FAULTS, COORDINATOR_FAULTS, FULL_STOP


def test_a_run_of_a_hundred_thousand_has_thirty_faults_of_coordinators_ten_of_brokers_and_a_full_stop() -> None:
    """Without a word about faults."""
    coordinators, brokers, full_stops = split(faults_for(100_000))
    assert coordinators >= 30
    assert brokers >= 10
    assert full_stops >= 1


@pytest.mark.parametrize("faults", [8, 20, 60])
def test_all_faults_that_were_asked_for_are_shared_out(faults: int) -> None:
    """Most of them are of coordinators."""
    coordinators, brokers, _ = split(faults)
    assert coordinators + brokers == faults
    assert coordinators > brokers > 0


@pytest.mark.parametrize(
    "kinds, wanted",
    [(COORDINATOR_FAULTS, (60, 0, 0)), (BROKER_FAULTS, (0, 60, 1)), ([FULL_STOP], (0, 0, 1))],
)
def test_no_fault_is_waited_for_that_is_not_played(kinds: list[str], wanted: tuple[int, int, int]) -> None:
    """Where only some kinds are wanted."""
    assert split(60, list(kinds)) == wanted
