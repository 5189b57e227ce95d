"""Whatever order local transactions, checks, crashes and repeats take, database and verdicts agree."""

import os
import random
from collections.abc import Callable
from pathlib import Path

import pytest

from halfway.client.barrier.table import BarrierTable, Statement, Steps
from tests.barrier import story
from tests.barrier.story import Database, mariadb, play_all, postgresql, sqlite
from tests.support.databases.servers import Server

STORIES = int(os.environ.get("HALFWAY_TEST_BARRIER_STORIES", "24"))
SEED = int(os.environ.get("HALFWAY_TEST_BARRIER_SEED", "") or random.randrange(10**9))
SIDE_BY_SIDE = 1 if STORIES == 1 else 8 if STORIES < 1000 else 24
"""A check waits up to half a second for a lock."""
LEVELS = ["READ COMMITTED", "REPEATABLE READ", "SERIALIZABLE"]

pytestmark = [pytest.mark.xdist_group("databases"), pytest.mark.timeout(max(600, STORIES * 2))]


def play(make: Callable[[int], Database]) -> None:
    """Play the stories; a failure names its seed, which `make barrier STORIES=1 SEED=…` repeats."""
    verdicts = play_all([make(number) for number in range(SIDE_BY_SIDE)], SEED, STORIES)
    if STORIES >= 200:  # else there may be none of one kind
        assert min(verdicts.values()) > 0, verdicts


@pytest.mark.parametrize("broken", ["insert", "take_place"])
def test_a_barrier_that_writes_no_row_is_found_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, broken: str
) -> None:
    def nothing(_table: BarrierTable, _transaction_id: str) -> Steps[bool]:
        yield Statement("SELECT 1")
        return True

    monkeypatch.setattr(BarrierTable, broken, nothing)
    monkeypatch.setattr(story, "DECIDED_WITHIN_S", 5.0)  # with nothing beside it, a barrier decides at once or never
    with pytest.raises(AssertionError, match=r"seed \d+: .* local transactions committed"):
        play_all([sqlite(tmp_path, "DEFERRED", "WAL")], SEED, 200)


@pytest.mark.parametrize("isolation", LEVELS)
def test_postgresql(postgresql_server: Server, isolation: str) -> None:
    play(lambda _: postgresql(postgresql_server, isolation))


@pytest.mark.parametrize("isolation", ["READ UNCOMMITTED", *LEVELS])
def test_mariadb(mariadb_server: Server, isolation: str) -> None:
    play(lambda _: mariadb(mariadb_server, isolation))


@pytest.mark.parametrize("journal", ["WAL", "DELETE"])
@pytest.mark.parametrize("begin", ["DEFERRED", "IMMEDIATE"])
def test_sqlite(tmp_path: Path, begin: str, journal: str) -> None:
    def make(number: int) -> Database:
        (tmp_path / str(number)).mkdir()
        return sqlite(tmp_path / str(number), begin, journal)

    play(make)
