"""The audit of a run is held against the checker, use by use of an id."""

from datetime import UTC, datetime

import pytest

from checker.cases import CLOCKS_APART_MS, Case
from checker.history import LIFE
from checker.records import Op
from tests.chaos.audits import Row, agreement

BEGAN = 1_700_000_000_000
AGAIN = 180_000


def used_twice() -> dict[str, Case]:
    names = {"mine": 0, f"mine{LIFE}1": AGAIN}
    return {
        name: Case(id=name, asked_at=at, ops=[Op(shard=0, offset=at, id="mine", kind="COMMITTED", cause="producer")])
        for name, at in names.items()
    }


def row(verdict: str, *, prepared_at: int, life: int = 0) -> Row:
    at = datetime.fromtimestamp((BEGAN + prepared_at) / 1000, UTC)
    return {"id": "mine", "life": life, "verdict": verdict, "prepared_at": at, "evidence": None}


def differences(*rows: Row) -> int:
    return len(agreement(rows, used_twice(), (), emptied=frozenset(), began=BEGAN).differences)


def test_each_use_of_an_id_has_its_verdict() -> None:
    """Two rows, one of each use; a clock may be behind by as much as the audit is told."""
    behind = AGAIN - CLOCKS_APART_MS
    assert differences(row("committed_ok", prepared_at=0), row("committed_ok", prepared_at=behind, life=1)) == 0


@pytest.mark.parametrize("verdict", ["contradicted", "doubled", "rolled_back_ok"])
def test_two_uses_that_are_taken_for_one_are_a_difference(verdict: str) -> None:
    """Also where a clock was wrong, by less than the audit is told."""
    assert differences(row(verdict, prepared_at=AGAIN - CLOCKS_APART_MS)) == 1


def test_a_clock_that_was_an_hour_behind_when_an_id_was_used_again_proves_nothing() -> None:
    """By its times the second use came first: no audit of the topics can tell which outcome is of which use."""
    assert differences(row("contradicted", prepared_at=AGAIN - 3_600_000)) == 0
