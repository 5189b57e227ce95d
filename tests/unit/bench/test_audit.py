"""The audit: what was acknowledged against what was read."""

from collections import Counter
from pathlib import Path

import pytest

from bench.audit import Copies, Sent, Verdict, judge

SENT = Sent(committed=frozenset({b"a", b"b"}), unconfirmed=frozenset({b"u"}))


def read(*found: tuple[bytes | None, bytes | None]) -> Copies:
    return Counter(found)


@pytest.mark.parametrize(
    "copies, missing, doubled, extra",
    [
        pytest.param(read((b"a", b"1/1"), (b"b", b"1/1")), 0, 0, 0, id="all there"),
        pytest.param(read((b"a", b"1/1"), (b"b", b"1/1"), (b"u", b"1/1")), 0, 0, 0, id="an unconfirmed one stands"),
        pytest.param(read((b"a", b"1/1")), 1, 0, 0, id="one is not there"),
        pytest.param(read((b"a", b"1/1"), (b"b", b"1/1"), (b"b", b"1/1")), 0, 1, 0, id="one is there twice"),
        pytest.param(
            read((b"a", b"1/1"), (b"b", b"1/1"), (b"u", b"1/1"), (b"u", b"1/1")), 0, 1, 0, id="unconfirmed and twice"
        ),
        pytest.param(read((b"a", b"1/1"), (b"b", b"1/1"), (b"c", b"1/1")), 0, 0, 1, id="one was never sent"),
        pytest.param(read((b"a", b"1/1"), (b"b", b"2/2")), 1, 0, 1, id="not the message that it has"),
        pytest.param(read((b"a", b"1/1"), (b"b", b"1/1"), (None, None)), 0, 0, 1, id="not halfway's"),
        pytest.param(read(), 2, 0, 0, id="nothing there"),
    ],
)
def test_what_is_missing_doubled_or_extra_is_counted(copies: Copies, missing: int, doubled: int, extra: int) -> None:
    verdict = judge(SENT, copies)
    assert verdict == Verdict(read=copies.total(), missing=missing, doubled=doubled, extra=extra)
    assert verdict.clean == (missing + doubled + extra == 0)


def test_what_the_load_wrote_down_is_read(tmp_path: Path) -> None:
    path = tmp_path / "sent"
    path.write_bytes(b"+a\n?u\n+b\n")
    assert Sent.read(path) == SENT
