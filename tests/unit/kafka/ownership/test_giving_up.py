"""When an instance that serves nothing leaves its shards to others."""

import time

import pytest

from halfway.kafka.ownership.giving_up import USELESS_S, Uselessness


def test_only_lasting_uselessness_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    """A shard that is served for a moment begins the time anew, and so does the decision itself."""
    now = 0.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    state = Uselessness()
    found = []
    for second in range(round(3.5 * USELESS_S)):
        now = float(second)
        if state.look(useless=second != USELESS_S - 1):
            found.append(second)
    assert found == [2 * USELESS_S, 3 * USELESS_S + 1]


def test_it_stays_away_longer_each_time_until_it_serves_a_shard() -> None:
    state = Uselessness()
    pauses = [state.take_pause() for _ in range(6)]
    assert pauses == sorted(pauses)
    assert pauses[-1] == pauses[-2] == 300
    state.served()
    assert state.take_pause() == pauses[0]
