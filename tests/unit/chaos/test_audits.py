"""The audit of a run is held against the checker, transaction by transaction."""

import pytest

from checker.cases import Case
from checker.records import Op
from tests.chaos.audits import Row, agreement


def committed() -> dict[str, Case]:
    marker = Op(shard=0, offset=1, id="mine", kind="COMMITTED", cause="producer")
    return {"mine": Case(id="mine", asked_at=0, ops=[marker])}


def differences(*verdicts: str, cases: dict[str, Case]) -> int:
    rows: list[Row] = [{"id": "mine", "verdict": verdict, "evidence": None} for verdict in verdicts]
    return len(agreement(rows, cases, (), emptied=frozenset()).differences)


def test_the_same_outcome_agrees_and_so_does_a_verdict_that_proves_nothing() -> None:
    assert differences("committed_ok", cases=committed()) == 0
    assert differences("expired_unknown", cases=committed()) == 0


@pytest.mark.parametrize("verdict", ["contradicted", "doubled", "rolled_back_ok", "lost"])
def test_another_verdict_is_a_difference(verdict: str) -> None:
    """Also if it is one of two about the id."""
    assert differences(verdict, cases=committed()) == 1
    assert differences("committed_ok", verdict, cases=committed()) == 1


def test_what_only_one_of_them_knows_is_a_difference() -> None:
    assert differences(cases=committed()) == 1
    assert differences("committed_ok", cases={}) == 1


def test_one_that_kafka_and_its_owner_have_lost_at_once_proves_nothing() -> None:
    cases = committed()
    cases["mine"].lost_in_memory = True
    assert differences("contradicted", cases=cases) == 0
