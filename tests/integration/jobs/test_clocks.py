"""Times that are wrong, or that records of one Kafka transaction show one after the other."""

from pathlib import Path

from halfway.pipeline.engines.duckdb import DuckEngine
from halfway.pipeline.jobs import audit
from halfway.pipeline.tables import LocalFolder
from halfway.protocol.records import Message
from tests.support.pipeline.audits import MESSAGES, OPTIONS, committed, found_in
from tests.support.pipeline.log_writer import Writer
from tests.support.pipeline.logs import HORIZON, START, Log, LogSource


def test_messages_that_are_older_than_the_topics_are_of_somebody_else(engine: DuckEngine, tmp_path: Path) -> None:
    """A new prefix finds the messages of the one before, which named none, in its real topics."""
    log = committed(3, since=START + 3_600_000)
    older = Writer(log)
    older.message("theirs", Message(topic="orders", key=b"k", value=b"v"), "1/1", START, START, prefix=None)
    older.lay_out(START + 3_000_000)
    log.settle()
    audit.run(engine, LogSource(engine, log, START + 7_200_000), LocalFolder(str(tmp_path)), OPTIONS)
    assert set(found_in(tmp_path).values()) == {"committed_ok"}


def test_a_clock_behind_the_creation_of_the_topics_loses_nothing(engine: DuckEngine, tmp_path: Path) -> None:
    """Messages say that they were prepared before there were topics, but ops name them."""
    log = Log()
    writer = Writer(log)
    writer.lay_out(START)
    log.ahead, prepared_at = -3_600_000, START - 3_000_000
    writer.half("behind", MESSAGES, START, prepared_at=prepared_at)
    writer.commit("behind", MESSAGES, START, prepared_at)
    writer.half("set-right", MESSAGES, START, prepared_at=prepared_at)
    log.ahead = 0
    writer.commit("set-right", MESSAGES, START, prepared_at)
    log.settle()
    audit.run(engine, LogSource(engine, log, START + 7_200_000), LocalFolder(str(tmp_path)), OPTIONS)
    assert found_in(tmp_path) == {("behind", 0): "committed_ok", ("set-right", 0): "committed_ok"}


def test_a_clock_that_is_set_back_before_a_commit_loses_nothing(engine: DuckEngine, tmp_path: Path) -> None:
    """The messages' own time lies hours before their prepare then: they are of its use all the same."""
    log = Log()
    writer = Writer(log)
    writer.half("mine", MESSAGES, START)
    log.ahead = -4 * HORIZON
    writer.commit("mine", MESSAGES, START + 10_000, START)
    log.settle()
    audit.run(engine, LogSource(engine, log, START + HORIZON), LocalFolder(str(tmp_path)), OPTIONS)
    assert found_in(tmp_path) == {("mine", 0): "committed_ok"}


def test_a_resume_that_half_has_not_shown_yet_is_pending(engine: DuckEngine, tmp_path: Path) -> None:
    """Its Kafka transaction shows in parked already, and in half not yet."""
    log = Log()
    writer = Writer(log)
    messages = [Message(topic="orders", key=b"k", value=b"v")]
    writer.half("resumed", messages, START)
    writer.park("resumed", messages, START + 10_000, START)
    writer.write_tombstone("parked", "resumed", START + 20_000, "prepared")
    writer.half("resumed", messages, START + 20_001, prepared_at=START)
    log.settle()
    source = LogSource(engine, log, START + 60_000, open_since=START + 20_000)
    audit.run(engine, source, LocalFolder(str(tmp_path)), OPTIONS)
    assert found_in(tmp_path) == {("resumed", 0): "pending"}
