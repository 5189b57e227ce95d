"""What Kafka has removed proves nothing, whenever it was removed."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from halfway.pipeline.engines.duckdb import DuckEngine
from halfway.pipeline.jobs import audit
from halfway.pipeline.sources.pinned import WHOLE, Rows
from halfway.pipeline.tables import LocalFolder
from halfway.protocol.records import Message, OpKind
from tests.support.pipeline.audits import OPTIONS, committed, continued, counts_in, found_in
from tests.support.pipeline.log_writer import Writer
from tests.support.pipeline.logs import HORIZON, PREFIX, START, LogSource


def test_what_retention_takes_while_it_is_read_is_not_lost(engine: DuckEngine, tmp_path: Path) -> None:
    """A partition that is trimmed between the pin and the reading's end proves nothing about what stood before."""
    log = committed(40)
    log.kept_ms = 60_000
    source = LogSource(engine, log, START + 3_600_000)
    log.trim("orders", 5)
    # The first part has been read by now, and the rest of what goes has not.
    for record in log.records:
        record.gone = record.topic == "orders" and 10 <= record.offset < 30
    reopen = source.reopened

    def later() -> LogSource:
        log.trim("orders", 30)
        return reopen()

    source.reopened = later  # type: ignore[method-assign]
    audit.run(engine, source, LocalFolder(str(tmp_path)), OPTIONS)
    assert set(found_in(tmp_path).values()) == {"committed_ok", "expired_unknown"}


def test_what_is_removed_before_it_is_settled_is_not_lost(engine: DuckEngine, tmp_path: Path) -> None:
    """An open Kafka transaction holds back what was committed behind it, and all of it goes just before it is read."""
    log = committed(4)
    at = START + HORIZON
    source = LogSource(engine, log, at)
    pin, unsettled = source.pin, source.unsettled

    def held_back(topics: Sequence[str]) -> None:
        source._committed_until = START + 150_000 if "orders" in topics else at
        pin(topics)

    def late(topics: Sequence[str], rows: Rows = WHOLE) -> Any:
        if "orders" in topics:
            log.trim("orders", 4)
        return unsettled(topics, rows)

    source.pin = held_back  # type: ignore[method-assign]
    source.unsettled = late  # type: ignore[method-assign]
    audit.run(engine, source, LocalFolder(str(tmp_path)), OPTIONS)
    assert set(found_in(tmp_path).values()) == {"committed_ok", "unproved"}


def test_what_retention_takes_between_two_runs_is_not_lost(tmp_path: Path) -> None:
    """No run has read it; what was read before needs no proof."""
    log, folder = committed(40), LocalFolder(str(tmp_path))
    log.kept_ms = 60_000
    continued(log, START + 10 * 60_000, folder)
    log.trim("orders", 30)
    continued(log, START + 3_600_000, folder)
    assert counts_in(tmp_path) == {"committed_ok": 20, "expired_unknown": 20}


def test_a_topic_that_was_emptied_is_not_lost(engine: DuckEngine, tmp_path: Path) -> None:
    """Manually, or by a retention that was short for a while. The present retention proves nothing about that time."""
    log = committed(4)
    log.kept_ms = 1000 * HORIZON
    log.trim("orders", 4)
    audit.run(engine, LogSource(engine, log, START + HORIZON), LocalFolder(str(tmp_path)), OPTIONS)
    assert set(found_in(tmp_path).values()) == {"unproved"}
    assert json.loads((tmp_path / audit.SUMMARY).read_text())["provable_since"] == {"orders": START + HORIZON}


def test_an_audit_proves_losses_since_an_earlier_one_into_the_same_folder(engine: DuckEngine, tmp_path: Path) -> None:
    """The earlier one saw where the log ended: it has lost nothing from there on, and no message has to be there."""
    log = committed(4)
    log.trim("orders", 4)
    audit.run(engine, LogSource(engine, log, START + HORIZON), LocalFolder(str(tmp_path)), OPTIONS)
    at = START + 2 * HORIZON
    lost = Message(topic="orders", key=b"k", value=b"v")
    writer = Writer(log)
    writer.half("lost", [lost], at)
    writer.op("lost", OpKind.COMMITTED, [lost], at, at)
    writer.write_tombstone("half", "lost", at, "committed")
    log.settle()
    source = LogSource(engine, log, START + 3 * HORIZON)
    summary = audit.run(engine, source, LocalFolder(str(tmp_path)), OPTIONS)
    assert found_in(tmp_path) == {("lost", 0): "lost", **{(f"id-{number}", 0): "unproved" for number in range(4)}}
    assert summary.provable_since == {"orders": START + HORIZON}


def test_a_topic_that_was_not_there_yet_is_not_lost(engine: DuckEngine, tmp_path: Path) -> None:
    """One that is made while the others are read, or that a broker has not heard of yet, is there when all is read."""
    log = committed(4)
    log.missing = frozenset(["orders"])
    source = LogSource(engine, log, START + HORIZON)
    reopen = source.reopened

    def later() -> LogSource:
        log.missing = frozenset()
        return reopen()

    source.reopened = later  # type: ignore[method-assign]
    audit.run(engine, source, LocalFolder(str(tmp_path)), OPTIONS)
    assert set(found_in(tmp_path).values()) == {"expired_unknown"}


def test_a_topic_that_is_made_again_while_it_is_read_is_not_lost(engine: DuckEngine, tmp_path: Path) -> None:
    """Nothing of what was written to the one before was there to be read."""
    log = committed(4)
    source = LogSource(engine, log, START + HORIZON)
    reopen, committed_of = source.reopened, source.committed

    def later() -> LogSource:
        log.made["orders"] = 1
        return reopen()

    def none_of_it(topics: Sequence[str], rows: Rows = WHOLE) -> Any:
        return committed_of([name for name in topics if name != "orders"], rows)

    source.reopened = later  # type: ignore[method-assign]
    source.committed = none_of_it  # type: ignore[method-assign]
    audit.run(engine, source, LocalFolder(str(tmp_path)), OPTIONS)
    assert set(found_in(tmp_path).values()) == {"expired_unknown"}


def test_an_outcome_that_a_later_use_has_compacted_away_makes_no_leak(engine: DuckEngine, tmp_path: Path) -> None:
    """An audit that repeats an earlier one finds a later op."""
    log = committed(2)
    writer = Writer(log)
    again = START + 3 * HORIZON
    writer.commit("id-0", [Message(topic="orders", key=b"k", value=b"v")], again, again)
    log.settle()
    log.compact(PREFIX + "op", again + 1)
    audit.run(engine, LogSource(engine, log, START + HORIZON), LocalFolder(str(tmp_path)), OPTIONS)
    assert found_in(tmp_path) == {("id-0", 0): "expired_unknown", ("id-1", 0): "committed_ok"}
