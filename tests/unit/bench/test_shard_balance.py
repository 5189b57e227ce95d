"""The share of each shard within a second is read from the ids of a load."""

from pathlib import Path
from uuid import UUID

import pytest

from bench.audit.journal import Journal
from bench.audit.shard_balance import shard_shares
from halfway.domain.ids import server_id

START_MS = 1_764_000_000_000


def made_at(shard: int, at_ms: int) -> bytes:
    """Return an id that a server made at a time for a shard."""
    return server_id(shard, UUID(int=at_ms << 80 | 0x7 << 76 | 0x8 << 60)).encode()


def journal_of(path: Path, counts: list[list[int]]) -> Path:
    """Write a journal with so many commits for each shard in each second."""
    with path.open("wb") as file:
        journal = Journal(file)
        for second, by_shard in enumerate(counts):
            for shard, count in enumerate(by_shard):
                journal.committed([(0, made_at(shard, START_MS + 1000 * second + number)) for number in range(count)])
        journal.unconfirmed([(0, made_at(0, START_MS + 1500))])
        journal.unanswered([0])
    return path


@pytest.mark.parametrize(
    "counts, shares",
    [
        ([[9, 0], [5, 5], [0, 9]], (1.0, 1.0)),
        ([[1, 1], [5, 5], [6, 2], [1, 1]], (0.5, 1.5)),
        ([[1, 1], [4, 0], [1, 1]], (0.0, 2.0)),
    ],
)
def test_shares_are_of_whole_seconds(tmp_path: Path, counts: list[list[int]], shares: tuple[float, float]) -> None:
    assert shard_shares(journal_of(tmp_path / "journal", counts), 2) == shares


def test_without_a_whole_second_there_is_no_share(tmp_path: Path) -> None:
    assert shard_shares(journal_of(tmp_path / "journal", [[4, 4], [4, 4]]), 2) is None
