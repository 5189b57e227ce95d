"""Records of other producers stop no audit, and change no verdict of another transaction."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

from halfway.kafka.records import codec
from halfway.pipeline import tables as runs
from halfway.pipeline.engines.duckdb import DuckEngine
from halfway.pipeline.engines.engine import SparkEngine
from halfway.pipeline.jobs import audit
from halfway.pipeline.sources.headers import UNREADABLE
from halfway.pipeline.tables import Folder, LocalFolder
from halfway.pipeline.transforms.verdict import ANOMALIES
from halfway.protocol.records import MessageDigest, Op, OpKind
from halfway.protocol.transactions import Cause
from tests.support.pipeline.archives import rows_in, verdicts_in
from tests.support.pipeline.audits import MESSAGES, OPTIONS, committed, found_in
from tests.support.pipeline.log_writer import Writer
from tests.support.pipeline.logs import HORIZON, START, Log, LogSource
from tests.support.pipeline.random_logs import Expected

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


def test_a_first_message_that_is_dated_in_the_future_hides_no_loss(engine: DuckEngine, tmp_path: Path) -> None:
    """Anybody can write one, and retention can make it the first that is there."""
    log = committed(40)
    dated = [record for record in log.records if record.topic == "orders"][20]
    dated.told_at += 1_000 * 24 * 3_600_000
    log.trim("orders", dated.offset)
    at = START + 3_600_000
    Writer(log).op("gone", OpKind.COMMITTED, MESSAGES, at, at)
    log.settle()
    audit.run(engine, LogSource(engine, log, at + HORIZON), LocalFolder(str(tmp_path)), OPTIONS)
    found = found_in(tmp_path)
    assert {key for key, verdict in found.items() if verdict in ANOMALIES} == {("gone", 0)}
    assert found["gone", 0] == "lost"


def test_no_number_that_somebody_writes_stops_an_audit(engine: DuckEngine, tmp_path: Path) -> None:
    """Avro does not bound numbers. An impossible one is an error, and all other transactions are judged."""
    log = committed(1)
    numbers = (-1, 1 << 40, (1 << 63) - 1, -(1 << 63), 1 << 64, 1 << 80, 0)
    for field in ("prepared_at", "at", "size", "checks"):
        for number in numbers:
            size = number if field == "size" else 1
            message = MessageDigest(topic="orders", key_hash=None, value_hash=None, size=size)
            told: dict[str, Any] = {"prepared_at": START, "at": START, "checks": 0, field: number}
            told.pop("size", None)
            name = f"{field}-{number}"
            op = Op(
                kind=OpKind.COMMITTED, id=name, group="g", half_offset=0, cause=Cause.PRODUCER, messages=(message,),
                **told,
            )  # fmt: skip
            Writer(log).raw_op(name, codec.encode_op(op), START + 60_000, "committed")
    log.settle()
    audit.run(engine, LogSource(engine, log, START + 3_600_000), LocalFolder(str(tmp_path)), OPTIONS)
    found = found_in(tmp_path)
    assert len(found) == 1 + 4 * len(numbers)
    assert found["id-0", 0] == "committed_ok"
    assert {verdict for (name, _), verdict in found.items() if name != "id-0"} == {"not_judged", "lost"}
    assert found[f"prepared_at-{(1 << 63) - 1}", 0] == found[f"size-{(1 << 63) - 1}", 0] == "not_judged"


def hostile() -> tuple[Log, Expected]:
    """Return a log of values that one engine could accept and another one reject, or fail at."""
    log = committed(1)
    writer = Writer(log)
    expected: Expected = {("id-0", 0): "committed_ok"}
    late = START + 3 * HORIZON
    # START by the rules of some languages. As it is none here, each is a message of another, later use.
    times = (f"{START}.0", "17e11", "1_700_000_000_000", f" {START}", f"{START:#x}", f"+{START}")
    for number, told in enumerate(times):
        name = f"time-{number}"
        writer.commit(name, MESSAGES, START + 10, START)
        writer.message(name, MESSAGES[0], "1/1", late, told)
        expected |= {(name, 0): "committed_ok", (name, 1): "leaked"}
    for number, place in enumerate(("1/1\n", " 1/1", "1/1/1", "+1/1", "01/1", "1/")):
        writer.message(f"place-{number}", MESSAGES[0], place, START, START)
        writer.op(f"place-{number}", OpKind.COMMITTED, MESSAGES, START, START)
        expected[f"place-{number}", 0] = "leaked"
    for number, time in enumerate((-1, (1 << 63) - 1, 1 << 80)):
        op = Op(
            kind=OpKind.COMMITTED, id=f"op-{number}", group="g", half_offset=0, cause=Cause.PRODUCER, prepared_at=time,
            at=START, messages=(),
        )  # fmt: skip
        writer.raw_op(op.id, codec.encode_op(op), START, "committed")
        expected[op.id, 0] = "not_judged"
    # Kafka takes -1 for no timestamp.
    log.write("orders", b"k", b"v", START, [("halfway-transaction-id", "undated")])
    log.records[-1].told_at = -1
    expected["undated", 0] = "leaked"
    of_nobody: list[tuple[str, str | bytes | None]] = [("halfway-transaction-id", b"\xff\xfe")]
    log.write("orders", b"k", b"v", START, of_nobody)
    log.write("orders", b"k", b"v", START, [("halfway-transaction-id", "unlike"), ("halfway-prefix", b"\xff")])
    expected["unlike", 0] = "leaked"
    log.settle()
    return log, expected


def test_duckdb_takes_nothing_for_what_it_is_not(engine: DuckEngine, tmp_path: Path) -> None:
    """As Spark, for records that anyone can write."""
    log, expected = hostile()
    audit.run(engine, LogSource(engine, log, START + 3_600_000), LocalFolder(str(tmp_path)), OPTIONS)
    assert found_in(tmp_path) == expected


def test_spark_takes_nothing_for_what_it_is_not(spark: "SparkSession", tmp_path: Path) -> None:
    """As DuckDB, for records that anyone can write."""
    log, expected = hostile()
    engine = SparkEngine(spark)
    audit.run(engine, LogSource(engine, log, START + 3_600_000), Folder(spark, str(tmp_path)), OPTIONS)
    engine.close()
    assert found_in(tmp_path) == expected


def test_a_first_message_that_nobody_committed_proves_nothing(engine: DuckEngine, tmp_path: Path) -> None:
    """Anyone can write one with halfway's headers and any time. It does not show since when a topic is complete.

    A service that passes headers on to what it writes makes such messages by the thousand.
    """
    log = committed(40)
    first = [record for record in log.records if record.topic == "orders"][20]
    forged = Writer(log)
    forged.message("rogue", MESSAGES[0], "1/1", first.at - 1, START)
    log.records[-1].told_at = START - 1_000 * HORIZON
    # A copy of a committed message has at least the time of its commit.
    forged.message("id-19", MESSAGES[0], "1/1", first.at - 2, START + 19 * 60_000)
    log.records[-1].told_at = START - 1_000 * HORIZON
    log.settle()
    log.trim("orders", first.offset - 2)
    audit.run(engine, LogSource(engine, log, START + 3_600_000), LocalFolder(str(tmp_path)), OPTIONS)
    found = found_in(tmp_path)
    assert {key for key, verdict in found.items() if verdict in ANOMALIES} == {("rogue", 0)}


def test_evidence_is_bounded_however_many_messages_somebody_forges(engine: DuckEngine, tmp_path: Path) -> None:
    """One row holds what is shown of a transaction: millions of forged messages would not fit into it."""
    log = committed(1)
    writer = Writer(log)
    for number in (1, 9_999, 10_000, 10_001, 999_999_999):
        writer.message("rogue", MESSAGES[0], f"{number}/999999999", START, START)
    log.settle()
    audit.run(engine, LogSource(engine, log, START + HORIZON), LocalFolder(str(tmp_path)), OPTIONS)
    _, row = verdicts_in(tmp_path)
    assert (row["verdict"], row["found"]) == ("leaked", 5)
    assert [each["slot"] for each in row["evidence"]] == [1, 9_999, 10_000]


def test_a_message_whose_headers_nobody_can_read_is_put_into_quarantine(engine: DuckEngine, tmp_path: Path) -> None:
    """Its headers can have a transaction's id. A forged mark of such a record hides nothing."""
    log = committed(1)
    unreadable: tuple[str, str | bytes | None] = (UNREADABLE, None)
    log.write("orders", b"k", b"v", START, [unreadable])
    log.write("orders", b"k", b"v", START, [("halfway-transaction-id", "rogue"), unreadable])
    log.settle()
    audit.run(engine, LogSource(engine, log, START + HORIZON), LocalFolder(str(tmp_path)), OPTIONS)
    assert found_in(tmp_path) == {("id-0", 0): "committed_ok", ("rogue", 0): "leaked"}
    (wrong,) = rows_in(tmp_path, runs.QUARANTINE)
    assert (wrong["topic"], wrong["error"]) == ("orders", "the name of a header is not UTF-8")
