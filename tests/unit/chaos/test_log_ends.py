"""How the chaos runs take the end of a log away."""

import random
import struct
from pathlib import Path

import pytest

from tests.chaos.log_ends import lose_end

PLAIN, DATA, MARKER, EMPTY = (0, 1), (0x10, 1), (0x30, 1), (0x10, 0)


def batch(base: int, kind: tuple[int, int], producer: int = 7) -> bytes:
    """Return a record batch of one offset; an empty one is what compaction leaves of a producer's last batch."""
    attributes, count = kind
    return struct.pack(">qiibihiqqqhii", base, 49, 0, 2, 0, attributes, 0, 0, 0, producer, 0, 0, count)


@pytest.mark.parametrize("seed", range(20))
def test_no_transaction_stays_open_and_the_files_of_what_is_lost_go(seed: int, tmp_path: Path) -> None:
    """Offset 2 to 5 are one transaction, which reaches into the second segment; the one of 8 is still open."""
    kinds = [PLAIN, EMPTY, DATA, PLAIN, DATA, MARKER, PLAIN, PLAIN, DATA]
    for first, end in ((0, 4), (4, 9)):
        name = tmp_path / f"{first:020}"
        name.with_suffix(".log").write_bytes(b"".join(batch(at, kinds[at]) for at in range(first, end)))
        name.with_suffix(".index").touch()
        name.with_suffix(".snapshot").touch()

    end = lose_end(tmp_path, random.Random(seed))

    assert end in (1, 2, 6, 7, 8)
    logs = sorted(tmp_path.glob("*.log"))
    assert b"".join(log.read_bytes() for log in logs) == b"".join(batch(at, kinds[at]) for at in range(end))
    assert {int(name.stem) for name in tmp_path.glob("*.snapshot")} == ({0, 4} if end > 4 else {0})
    assert not list(tmp_path.glob("*4.index"))
