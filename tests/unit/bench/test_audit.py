"""The audit: what the load wrote down against what was read, by the checker's rules."""

from collections.abc import Sequence
from pathlib import Path

import pytest

from bench.audit import Audit, Journal, history
from bench.plan import GROUP
from checker.content import content_of
from checker.judge import judge
from checker.records import AnyRecord, Half, Op, Real

TOPIC = "t"
CONTENTS = [content_of(TOPIC, b"k0", b"v0"), content_of(TOPIC, b"k1", b"v1")]


def half(name: str, number: int) -> list[AnyRecord]:
    return [Half(shard=0, offset=0, id=name, contents=(CONTENTS[number],), group=GROUP)]


def ended(name: str, number: int, kind: str = "COMMITTED") -> list[AnyRecord]:
    one = CONTENTS[number]
    mark = ((one.topic, one.key, one.value),)
    return [
        Op(shard=0, offset=0, id=name, kind=kind, cause="producer", group=GROUP, messages=mark),
        Half(shard=0, offset=1, id=name),
    ]


def real(name: str, number: int, offset: int = 0) -> list[AnyRecord]:
    return [Real(shard=0, offset=offset, id=name, content=CONTENTS[number], number=1, total=1)]


def committed(name: str, number: int) -> list[AnyRecord]:
    return [*half(name, number), *ended(name, number), *real(name, number)]


def write(path: Path) -> None:
    """One of each: a and b confirmed, u not, m without an answer."""
    with path.open("wb") as file:
        journal = Journal(file)
        journal.committed([(0, b"a"), (1, b"b")])
        journal.unconfirmed([(1, b"u")])
        journal.unanswered([0], brought=b"m")


STANDS = [*committed("a", 0), *committed("b", 1)]
LEFT = [*half("u", 1), *ended("u", 1, "ROLLED_BACK")]


def test_what_stands_as_it_was_acknowledged_is_clean(tmp_path: Path) -> None:
    """What was not confirmed may stand or not; of what was not answered there may be nothing."""
    write(tmp_path / "journal")
    found = audit(tmp_path, [*STANDS, *committed("u", 1)])
    assert found.clean, found
    assert found.transactions == 3
    assert audit(tmp_path, [*STANDS, *committed("u", 1), *committed("u", 1)]).doubled == 1


def audit(directory: Path, records: Sequence[AnyRecord]) -> Audit:
    return Audit.of(judge(history([directory / "journal"], TOPIC, CONTENTS), records))


@pytest.mark.parametrize(
    "records, name",
    [
        pytest.param([*STANDS[:-1], *committed("u", 1)], "missing", id="a message is not there"),
        pytest.param([*committed("a", 0), *committed("u", 1)], "missing", id="nothing is there"),
        pytest.param([*STANDS, *real("b", 1, 7), *committed("u", 1)], "doubled", id="a message is there twice"),
        pytest.param([*STANDS, *committed("u", 1), *real("x", 1)], "extra", id="a message of nothing that was sent"),
        pytest.param([*STANDS, *committed("u", 1), *real("", 1)], "extra", id="a message that is not halfway's"),
        pytest.param([*STANDS, *committed("u", 1), *half("x", 1)], "extra", id="a refused prepare is kept"),
        pytest.param([*STANDS, *half("u", 1)], "stuck", id="one has no outcome"),
        pytest.param([*STANDS, *committed("u", 1), *half("m", 0)], "stuck", id="an unanswered one is left"),
        pytest.param([*STANDS, *LEFT], "contradicted", id="rolled back by nobody"),
        pytest.param([*committed("a", 1), *committed("b", 1), *committed("u", 1)], "missing", id="other bytes"),
    ],
)
def test_each_wrong_is_found(tmp_path: Path, records: Sequence[AnyRecord], name: str) -> None:
    write(tmp_path / "journal")
    found = audit(tmp_path, records)
    assert getattr(found, name), found
    assert not found.clean
    assert found.first
